"""How long each backend takes to its first usable output: what the ladder keeps in reserve for the rungs below."""

from __future__ import annotations

from policies.core.clock import Clock
from policies.core.events import Attempted, Handlers
from policies.rules.quantiles import SlidingQuantiles

#: A p95 is worked out at most this often for a backend; between, the last one serves.
_KEEP_S = 1.0


class FirstOutputs:
    """Sliding quantiles of the time to first output, by backend name."""

    __slots__ = ("_clock", "_p95", "_seen", "handlers")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seen: dict[str, SlidingQuantiles] = {}
        self._p95: dict[str, tuple[float, float | None]] = {}
        # One event a real call: whoever joins a flight would make the backend look faster than it is.
        self.handlers: Handlers = {Attempted: self._on_attempted}

    def _on_attempted(self, event: Attempted) -> None:
        if event.outcome == "ok":
            quantiles = self._seen.get(event.backend)
            if quantiles is None:
                quantiles = self._seen[event.backend] = SlidingQuantiles()
            quantiles.add(event.first_s, self._clock.now())

    def p95(self, backend: str) -> float | None:
        """Seconds, or None when the backend has not answered in the last minute."""
        now = self._clock.now()
        kept = self._p95.get(backend)
        if kept is not None and now - kept[0] < _KEEP_S:
            return kept[1]
        quantiles = self._seen.get(backend)
        value = quantiles.quantile(0.95, now) if quantiles is not None else None
        self._p95[backend] = (now, value)
        return value
