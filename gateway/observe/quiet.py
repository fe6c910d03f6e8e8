"""Lines of the same kind, now and then: what happens a thousand times a second must not write a thousand lines."""

from __future__ import annotations

from collections.abc import Hashable

from policies.core.clock import Clock

EVERY_S = 10.0
#: Kinds hold names that others choose; beyond this many, it starts anew.
MOST_KINDS = 1_024


class Quiet:
    """Lets a kind of line through at most once in `every_s` seconds, and counts those that it holds back.

    `fields = quiet.admit(kind)`: None = write nothing; else the fields to add to the line: `suppressed`, how many lines of
    this kind were held back since the last one, where there were any.
    """

    __slots__ = ("_clock", "_every_s", "_kinds")

    def __init__(self, clock: Clock, every_s: float = EVERY_S) -> None:
        self._clock = clock
        self._every_s = every_s
        #: Kind -> [when a line may be written again, lines held back].
        self._kinds: dict[Hashable, list[float]] = {}

    def admit(self, kind: Hashable) -> dict[str, int] | None:
        now = self._clock.now()
        known = self._kinds.get(kind)
        if known is None:
            if len(self._kinds) >= MOST_KINDS:
                self._kinds.clear()
            self._kinds[kind] = [now + self._every_s, 0]
            return {}
        if now < known[0]:
            known[1] += 1
            return None
        held_back = int(known[1])
        known[0], known[1] = now + self._every_s, 0
        return {"suppressed": held_back} if held_back else {}
