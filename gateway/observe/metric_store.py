"""Counters, gauges and histograms cheap enough for every request, in a form that can be sent, merged and exposed.

prometheus-client keeps one object and one lock for each label set; here a sample is one dictionary entry, so that counting
a request costs about a microsecond. Exposition is prometheus-client's (`exposition.py`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import Any, Literal

import msgspec

Labels = tuple[str, ...]
#: How the values of several workers become one: added, the largest, or one sample a worker.
Merge = Literal["sum", "max", "per-worker"]

#: Seconds; from a tenth of a millisecond (a cached answer) to a minute (a long generation).
DURATION_BUCKETS_S = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip


class Sample(msgspec.Struct, frozen=True):
    """`value`: [number] for counters and gauges; bucket counts (not cumulative) and then the sum for histograms."""

    labels: Labels
    value: list[float]


class Family(msgspec.Struct, frozen=True):
    """One metric of one worker, as it travels through the hub."""

    name: str
    help: str
    kind: Literal["counter", "gauge", "histogram"]
    label_names: Labels
    merge: Merge
    samples: list[Sample]
    buckets: tuple[float, ...] = ()


class Counter:
    """A number that only grows, for each label set."""

    __slots__ = ("_help", "_label_names", "_name", "values")

    def __init__(self, name: str, help_: str, label_names: Labels = ()) -> None:
        self._name, self._help, self._label_names = name, help_, label_names
        self.values: dict[Labels, float] = {}

    def inc(self, labels: Labels = (), by: float = 1.0) -> None:
        self.values[labels] = self.values.get(labels, 0.0) + by

    def family(self) -> Family:
        samples = [Sample(labels, [value]) for labels, value in self.values.items()]
        return Family(self._name, self._help, "counter", self._label_names, "sum", samples)


class Gauge:
    """A number that moves. `merge` says what it means for several workers."""

    __slots__ = ("_help", "_label_names", "_merge", "_name", "values")

    def __init__(self, name: str, help_: str, label_names: Labels = (), merge: Merge = "sum") -> None:
        self._name, self._help, self._label_names, self._merge = name, help_, label_names, merge
        self.values: dict[Labels, float] = {}

    def set(self, value: float, labels: Labels = ()) -> None:
        self.values[labels] = value

    def family(self) -> Family:
        samples = [Sample(labels, [value]) for labels, value in self.values.items()]
        return Family(self._name, self._help, "gauge", self._label_names, self._merge, samples)


class Histogram:
    """Durations in fixed buckets, for each label set."""

    __slots__ = ("_buckets", "_help", "_label_names", "_name", "values")

    def __init__(
        self, name: str, help_: str, label_names: Labels = (), buckets: tuple[float, ...] = DURATION_BUCKETS_S
    ) -> None:
        self._name, self._help, self._label_names, self._buckets = name, help_, label_names, buckets
        self.values: dict[Labels, list[float]] = {}

    def observe(self, value: float, labels: Labels = ()) -> None:
        counts = self.values.get(labels)
        if counts is None:
            # One more bucket for +Inf, and the sum behind it.
            counts = self.values[labels] = [0.0] * (len(self._buckets) + 2)
        counts[bisect_left(self._buckets, value)] += 1
        counts[-1] += value

    def family(self) -> Family:
        samples = [Sample(labels, list(counts)) for labels, counts in self.values.items()]
        return Family(self._name, self._help, "histogram", self._label_names, "sum", samples, self._buckets)


class Metrics:
    """All metrics of one process. `sources` add families that are read only when asked for."""

    def __init__(self) -> None:
        self._own: list[Counter | Gauge | Histogram] = []
        self._sources: list[Callable[[], Iterable[Family]]] = []

    def counter(self, name: str, help_: str, label_names: Labels = ()) -> Counter:
        metric = Counter(name, help_, label_names)
        self._own.append(metric)
        return metric

    def gauge(self, name: str, help_: str, label_names: Labels = (), merge: Merge = "sum") -> Gauge:
        metric = Gauge(name, help_, label_names, merge)
        self._own.append(metric)
        return metric

    def histogram(self, name: str, help_: str, label_names: Labels = ()) -> Histogram:
        metric = Histogram(name, help_, label_names)
        self._own.append(metric)
        return metric

    def source(self, families: Callable[[], Iterable[Family]]) -> None:
        self._sources.append(families)

    def families(self) -> list[Family]:
        return [metric.family() for metric in self._own] + [f for source in self._sources for f in source()]

    def plain(self) -> list[Any]:
        """The same as plain values, as they travel through the hub."""
        plain: list[Any] = msgspec.to_builtins(self.families())
        return plain


#: Figures of a `stats()` that move both ways; all others only grow.
_MOVING = frozenset({"entries", "bytes", "in_flight", "available", "l2_waiting", "l2_available"})


def stats_families(values: dict[str, float], prefix: str, help_: str) -> list[Family]:
    """A part's own `stats()` as metrics named `prefix_key`: counters, or gauges for what moves both ways."""
    return [
        Family(
            f"{prefix}_{key}",
            f"{help_}: {key.replace('_', ' ')}",
            "gauge" if key in _MOVING else "counter",
            (),
            "sum",
            [Sample((), [float(value)])],
        )
        for key, value in values.items()
    ]
