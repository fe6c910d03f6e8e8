"""How long each backend takes to its first usable output: what the ladder keeps in reserve for the rungs below."""

from __future__ import annotations

from policies.core.clock import Clock
from policies.rules.quantiles import SlidingQuantiles

#: A p95 is worked out at most this often for a backend; between, the last one serves.
_KEEP_S = 1.0


class FirstOutputs:
    """Sliding quantiles of the time to first output, by backend name."""

    __slots__ = ("_clock", "_p95", "_seen")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seen: dict[str, SlidingQuantiles] = {}
        self._p95: dict[str, tuple[float, float | None]] = {}

    def add(self, backend: str, seconds: float, now: float) -> None:
        quantiles = self._seen.get(backend)
        if quantiles is None:
            quantiles = self._seen[backend] = SlidingQuantiles()
        quantiles.add(seconds, now)

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
