"""Families of all workers merged into one Prometheus exposition."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from gateway.observe.metric_store import Family, Labels, Sample


def merge(by_worker: Mapping[str, Iterable[Family]]) -> list[Family]:
    """One family a name. Counters and histograms are added; gauges as they declare."""
    merged: dict[str, tuple[Family, dict[Labels, list[float]]]] = {}
    for worker, families in by_worker.items():
        for family in families:
            _, samples = merged.setdefault(family.name, (family, {}))
            for sample in family.samples:
                labels = (worker, *sample.labels) if family.merge == "per-worker" else sample.labels
                before = samples.get(labels)
                samples[labels] = _combine(family, before, sample.value)
    return [
        Family(
            family.name,
            family.help,
            family.kind,
            ("worker", *family.label_names) if family.merge == "per-worker" else family.label_names,
            family.merge,
            [Sample(labels, value) for labels, value in samples.items()],
            family.buckets,
        )
        for family, samples in merged.values()
    ]


def _combine(family: Family, before: Sequence[float] | None, value: Sequence[float]) -> list[float]:
    if before is None:
        return list(value)
    if family.merge == "max":
        return [max(a, b) for a, b in zip(before, value, strict=True)]
    return [a + b for a, b in zip(before, value, strict=True)]


class _Families(Collector):
    def __init__(self, families: list[Family]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        for family in self._families:
            yield _metric(family)


def _metric(family: Family) -> Metric:
    labels = list(family.label_names)
    if family.kind == "histogram":
        histogram = HistogramMetricFamily(family.name, family.help, labels=labels)
        for sample in family.samples:
            total, buckets = 0.0, []
            for bound, count in zip((*family.buckets, float("inf")), sample.value, strict=False):
                total += count
                buckets.append(("+Inf" if bound == float("inf") else repr(bound), total))
            histogram.add_metric(list(sample.labels), buckets=buckets, sum_value=sample.value[-1])
        return histogram
    kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
    metric = kind(family.name, family.help, labels=labels)
    for sample in family.samples:
        metric.add_metric(list(sample.labels), sample.value[0])
    return metric


def exposition(families: list[Family]) -> bytes:
    """Prometheus text format 0.0.4."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(families))
    return generate_latest(registry)
