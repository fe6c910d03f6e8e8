"""When may a process that ended by itself be started again?

    it ended after ...                      the next one starts
    living for a minute or longer           at once: whatever it was, it was not the start
    less, for the n-th time in a row        after 0, 0.5, 1, 2, 4 ... at most 30 s, each a fifth more or less

From the fifth short life in a row on it is a crash loop: that is reported, and the tries go on.
"""

from __future__ import annotations

from collections.abc import Callable

SETTLED_S = 60.0
FIRST_WAIT_S = 0.5
MOST_WAIT_S = 30.0
JITTER = 0.2
LOOP = 5


class RestartRule:
    """The ends of one process's lives. `random` gives 0..1."""

    __slots__ = ("_random", "in_a_row", "total")

    def __init__(self, random: Callable[[], float]) -> None:
        self._random = random
        #: Short lives since the last long one, and ends in all.
        self.in_a_row = 0
        self.total = 0

    def ended(self, lived_s: float) -> float:
        """Note an end; returns the seconds to wait before the next start."""
        self.total += 1
        if lived_s >= SETTLED_S:
            self.in_a_row = 0
            return 0.0
        self.in_a_row += 1
        if self.in_a_row == 1:
            return 0.0
        wait = min(FIRST_WAIT_S * 2.0 ** min(self.in_a_row - 2, 16), MOST_WAIT_S)
        return wait * (1.0 + JITTER * (2.0 * self._random() - 1.0))

    def settled(self) -> None:
        """The process that lives now has lived for SETTLED_S: its predecessors' trouble is over."""
        self.in_a_row = 0

    @property
    def looping(self) -> bool:
        return self.in_a_row >= LOOP
