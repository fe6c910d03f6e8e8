"""Counting what happens where graphs are split. Light to import, since it outlives the models that it counts for."""

from __future__ import annotations


class CutCounts:
    """What happened at each cut since the start: (model, cut, what) -> how often.

    `hits` and `misses` count look-ups (of rows, where rows are kept), `runs` runs of the segment and `rows` the rows in them.
    """

    def __init__(self) -> None:
        self.values: dict[tuple[str, str, str], int] = {}

    def add(self, model: str, cut: str, what: str, by: int = 1) -> None:
        key = (model, cut, what)
        self.values[key] = self.values.get(key, 0) + by
