"""How long a run takes, learnt from the runs themselves, and how far such a prediction is trusted. Pure.

    seconds = slowness * (c0 + c1 * rows * longest + c2 * rows * longest^2)     (rows padded to the longest; nothing below 0)

Two things are learnt. `slowness`, fast: whatever else the machine does now slows every shape alike, and must not be taken for
the cost of one of them. The coefficients, slowly: least squares of the relative error of runs divided by the slowness of their
time, beside the measurement at load, which keeps its weight for shapes that no run has had lately. A run that is far off counts as
`_FAR` times off for the slowness and as `_OFF` times for the coefficients, so they follow the middle of the runs rather than
their worst: a process that takes the core for a moment hits short runs hardest.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

#: What a run counts for when the next one is added.
_KEPT = 0.985
#: What each measurement of the load counts for, beside up to 1 / (1 - _KEPT) = 67 runs.
_LOAD_WEIGHT = 10.0
#: How fast `slowness` follows: a run's part in it.
_FOLLOW = 0.1
_FAR = 3.0
_OFF = 1.4
#: Runs between two solutions.
_REFIT_EVERY = 8
#: Runs that the spread is taken from.
_SPREAD_OF = 200
_MOST_SPREAD = 5.0
#: Before there are runs to tell.
_FIRST_SPREAD = 1.25

_Three = tuple[float, float, float]


class Measured(NamedTuple):
    """One run: rows, tokens of its longest row, seconds."""

    rows: int
    longest: int
    seconds: float


class LatencyModel:
    """Of one loaded variant. `measured`: runs at load, of at least one shape; the more unlike, the better."""

    def __init__(self, measured: Sequence[Measured]) -> None:
        if not measured:
            raise ValueError("a latency model starts from at least one measured run")
        load = _Squares()
        for rows, longest, seconds in measured:
            load.add(_relative(rows, longest, max(seconds, 1e-7)), 1.0, _LOAD_WEIGHT)
        self._load, self._runs = load, _Squares()
        #: Logarithm of the slowness.
        self._slow = 0.0
        self._shape = load.solved()
        #: The coefficients, times the slowness.
        self.c0, self.c1, self.c2 = self._shape
        self._ratios: deque[float] = deque(maxlen=_SPREAD_OF)
        self._since_fit = 0
        worst = max(m.seconds / self.expected(m.rows, m.longest) for m in measured)
        self.spread = min(max(_FIRST_SPREAD, worst), _MOST_SPREAD)

    def expected(self, rows: int, longest: int) -> float:
        """Seconds, as an average."""
        return self.c0 + rows * longest * (self.c1 + self.c2 * longest)

    def p99(self, rows: int, longest: int) -> float:
        """Seconds that 99 of 100 runs keep to."""
        return self.spread * (self.c0 + rows * longest * (self.c1 + self.c2 * longest))

    def padding(self, rows: int, length: int, longest: int) -> float:
        """Seconds that padding `rows` rows of `length` to `longest` costs."""
        return rows * (longest - length) * (self.c1 + self.c2 * (longest + length))

    def observe(self, rows: int, longest: int, seconds: float) -> None:
        """A run has taken `seconds`."""
        ratio = seconds / self.expected(rows, longest)
        self._ratios.append(ratio)
        c0, c1, c2 = self._shape
        usual = c0 + rows * longest * (c1 + c2 * longest)
        self._runs.forget(_KEPT)
        self._runs.add(_relative(rows, longest, usual), min(max(ratio, 1 / _OFF), _OFF), 1.0)
        self._slow += _FOLLOW * math.log(min(max(ratio, 1 / _FAR), _FAR))
        self._since_fit += 1
        if self._since_fit >= _REFIT_EVERY:
            self._refit()
        slowness = math.exp(self._slow)
        self.c0, self.c1, self.c2 = (slowness * c for c in self._shape)

    def _refit(self) -> None:
        self._since_fit = 0
        self._shape = self._load.plus(self._runs).solved()
        ordered = sorted(self._ratios)
        if len(ordered) >= _SPREAD_OF // 4:
            # The spread of few runs is not known yet.
            self.spread = min(max(ordered[math.ceil(0.99 * len(ordered)) - 1], 1.0), _MOST_SPREAD)


class Safety:
    """Which part of the time left a run may be planned to take: less after misses, slowly more again (AIMD)."""

    __slots__ = ("_clean", "factor")

    #: A miss multiplies by this; so many clean runs in a row, by that.
    _DOWN, _CLEAN_RUNS, _UP, _LEAST = 0.7, 100, 1.05, 0.3

    def __init__(self) -> None:
        self.factor = 1.0
        self._clean = 0

    def run_over(self, missed: bool) -> None:
        """A run has ended; `missed`: since the last one an admitted call has not had its answer in time."""
        if missed:
            self.factor, self._clean = max(self.factor * self._DOWN, self._LEAST), 0
            return
        self._clean += 1
        if self._clean >= self._CLEAN_RUNS:
            self.factor, self._clean = min(self.factor * self._UP, 1.0), 0


def _relative(rows: int, longest: int, seconds: float) -> _Three:
    """What the coefficients are multiplied with to give their prediction as a part of `seconds`."""
    tokens = rows * longest
    return 1.0 / seconds, tokens / seconds, tokens * longest / seconds


class _Squares:
    """Sums for least squares in three unknowns. Plain floats: arrays this small cost more than they save."""

    __slots__ = ("a", "b")

    def __init__(self) -> None:
        #: Upper triangle: 00 01 02 11 12 22.
        self.a = [0.0] * 6
        self.b = [0.0] * 3

    def add(self, u: _Three, target: float, weight: float) -> None:
        """One equation: u . c = target."""
        x, y, z = u
        a, b = self.a, self.b
        a[0] += weight * x * x
        a[1] += weight * x * y
        a[2] += weight * x * z
        a[3] += weight * y * y
        a[4] += weight * y * z
        a[5] += weight * z * z
        b[0] += weight * target * x
        b[1] += weight * target * y
        b[2] += weight * target * z

    def forget(self, kept: float) -> None:
        self.a = [kept * one for one in self.a]
        self.b = [kept * one for one in self.b]

    def plus(self, other: _Squares) -> _Squares:
        both = _Squares()
        both.a = [one + more for one, more in zip(self.a, other.a, strict=True)]
        both.b = [one + more for one, more in zip(self.b, other.b, strict=True)]
        return both

    def solved(self) -> _Three:
        """argmin c'Ac - 2b'c over c >= 0, and never all of it 0: three unknowns, so every set of non-zero ones is tried."""
        a00, a01, a02, a11, a12, a22 = self.a
        scale = (math.sqrt(a00), math.sqrt(a11), math.sqrt(a22))
        a = [[a00, a01, a02], [a01, a11, a12], [a02, a12, a22]]
        a = [[a[i][j] / (scale[i] * scale[j]) + (1e-7 if i == j else 0.0) for j in range(3)] for i in range(3)]
        b = [self.b[i] / scale[i] for i in range(3)]
        best, least = [0.0] * 3, math.inf
        for chosen in ((0, 1, 2), (0, 1), (0, 2), (1, 2), (0,), (1,), (2,)):
            c = _eliminated([[a[i][j] for j in chosen] for i in chosen], [b[i] for i in chosen])
            # At a stationary point c'Ac = b'c.
            loss = -sum(value * b[i] for value, i in zip(c, chosen, strict=True))
            if min(c) >= 0 and loss < least:
                best, least = [0.0] * 3, loss
                for value, i in zip(c, chosen, strict=True):
                    best[i] = value
                if len(chosen) == 3:
                    break  # nothing is negative: no smaller set fits better
        # Never nothing: quotients are taken of these.
        return max(best[0] / scale[0], 1e-7), max(best[1] / scale[1], 1e-10), best[2] / scale[2]


def _eliminated(a: list[list[float]], b: list[float]) -> list[float]:
    """c of ac = b, `a` symmetric and positive definite (so no pivot is 0). Changes both."""
    size = len(b)
    for i in range(size):
        for j in range(i + 1, size):
            part = a[j][i] / a[i][i]
            b[j] -= part * b[i]
            for k in range(i, size):
                a[j][k] -= part * a[i][k]
    c = [0.0] * size
    for i in reversed(range(size)):
        c[i] = (b[i] - sum(a[i][k] * c[k] for k in range(i + 1, size))) / a[i][i]
    return c
