"""A model's batcher as metrics."""

from __future__ import annotations

from typing import Literal

from backends.onnx.batch_stats import BatcherStats
from gateway.observe.metric_store import Family, Merge, Sample

_COUNTED = {
    "batches": "Runs of the model.",
    "rows": "Rows in its runs.",
    "refused": "Calls that were not admitted: they would have been late, or the queue was full.",
    "missed": "Admitted calls whose deadline came first.",
    "cancelled": "Calls whose caller left.",
    "stopped": "Runs that were told to end early.",
    "failed_runs": "Runs that failed.",
}
_NOW: dict[str, tuple[str, Merge]] = {
    "efficiency": ("Rows of a run on average, of those that it may hold.", "max"),
    "padded_share": ("Share of the computed tokens that is padding.", "max"),
    "waiting_rows": ("Rows that wait for a run.", "sum"),
    "safety": ("How much of the predicted room is used: it shrinks when deadlines are missed.", "max"),
}


def batch_families(model: str, stats: BatcherStats) -> list[Family]:
    """One sample each, labelled with the model."""

    def family(key: str, help_: str, kind: Literal["counter", "gauge"], merge: Merge) -> Family:
        name = f"gateway_batch_{key}" if key != "batches" else "gateway_batches"
        return Family(name, help_, kind, ("model",), merge, [Sample((model,), [float(getattr(stats, key))])])

    counted = [family(key, help_, "counter", "sum") for key, help_ in _COUNTED.items()]
    return counted + [family(key, help_, "gauge", merge) for key, (help_, merge) in _NOW.items()]
