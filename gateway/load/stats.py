"""Small statistics of lists, and a plot of one line."""

from __future__ import annotations

import math
from collections.abc import Sequence

_BARS = "▁▂▃▄▅▆▇█"
_ASCII_BARS = "_.-~=+*#"


def median(values: Sequence[float]) -> float:
    """The middle value, or the mean of the two in the middle. Raises ValueError without values."""
    if not values:
        raise ValueError("no value to take the median of")
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def percentile(values: Sequence[float], percent: float) -> float:
    """Nearest rank: the least value with at least `percent` of all values at or below it."""
    if not values:
        raise ValueError("no value to take a percentile of")
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def sparkline(values: Sequence[float | None], width: int = 60, ascii_only: bool = False) -> str:
    """The values as bars of 8 heights, from 0 to the highest; None is a gap. Longer series show the peak of each group."""
    if not values:
        return ""
    group = -(-len(values) // width)
    peaks: list[float | None] = []
    for start in range(0, len(values), group):
        present = [value for value in values[start : start + group] if value is not None]
        peaks.append(max(present) if present else None)
    top = max((peak for peak in peaks if peak is not None), default=0.0)
    bars = _ASCII_BARS if ascii_only else _BARS
    return "".join(" " if peak is None else bars[round(peak / top * 7) if top > 0 else 0] for peak in peaks)
