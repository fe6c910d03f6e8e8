"""Quantiles of recent durations, in bounded memory: logarithmic buckets in a ring of sub-windows.

Buckets grow by 4 %, so a quantile is within 2 % of the true one (the geometric middle of its bucket is reported), as in
DDSketch (Masson, Rim, Lee 2019). The window slides in tenths: the oldest sub-window is dropped whole.
"""

from __future__ import annotations

import math

_GROWTH = math.log(1.04)
_SMALLEST_S = 1e-5
_BUCKETS = 420  # 1e-5 s * 1.04 ** 420 = 142 s


class SlidingQuantiles:
    """Durations seen in the last `window_s` seconds. Synchronous; takes `now` (monotonic seconds)."""

    __slots__ = ("_counts", "_epoch", "_sub_s", "_subs")

    def __init__(self, window_s: float = 60.0, subs: int = 10) -> None:
        self._sub_s = window_s / subs
        self._subs = subs
        self._counts: list[dict[int, int]] = [{} for _ in range(subs)]
        self._epoch = 0

    def _turn_to(self, now: float) -> dict[int, int]:
        epoch = int(now / self._sub_s)
        if epoch > self._epoch:
            for passed in range(max(self._epoch + 1, epoch - self._subs + 1), epoch + 1):
                self._counts[passed % self._subs] = {}
            self._epoch = epoch
        return self._counts[self._epoch % self._subs]

    def add(self, seconds: float, now: float) -> None:
        current = self._turn_to(now)
        bucket = 0 if seconds <= _SMALLEST_S else min(_BUCKETS, int(math.log(seconds / _SMALLEST_S) / _GROWTH))
        current[bucket] = current.get(bucket, 0) + 1

    def count(self, now: float) -> int:
        self._turn_to(now)
        return sum(sum(sub.values()) for sub in self._counts)

    def quantile(self, q: float, now: float) -> float | None:
        """The q-quantile in seconds, or None when nothing was seen in the window."""
        self._turn_to(now)
        merged: dict[int, int] = {}
        for sub in self._counts:
            for bucket, count in sub.items():
                merged[bucket] = merged.get(bucket, 0) + count
        total = sum(merged.values())
        if total == 0:
            return None
        rank = q * (total - 1)
        seen = 0
        for bucket in sorted(merged):
            seen += merged[bucket]
            if seen > rank:
                return _SMALLEST_S * math.exp((bucket + 0.5) * _GROWTH)
        raise AssertionError("the counts add up to the total")
