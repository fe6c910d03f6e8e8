"""What a batcher has done: for metrics, `doctor` and benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from backends.onnx.batching import BatchLimits
from backends.onnx.latency import LatencyModel


class BatcherStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counts since the model was loaded, and how it is now.

    `efficiency`: rows of a run on average, of those that it may hold (0..1). `padded_share`: tokens computed that are padding
    (0..1). `cancelled`: callers who left; `missed`: deadlines of admitted calls; `refused`: calls not admitted; `stopped`: runs
    told to end early. Coefficients are those of `latency`.
    """

    batches: int
    rows: int
    efficiency: float
    padded_share: float
    refused: int
    missed: int
    cancelled: int
    stopped: int
    failed_runs: int
    waiting_rows: int
    running: int
    instances: int
    safety: float
    spread: float
    c0: float
    c1: float
    c2: float


@dataclass(slots=True)
class Counts:
    """What is counted as it happens."""

    batches: int = 0
    rows: int = 0
    tokens: int = 0
    computed_tokens: int = 0
    refused: int = 0
    missed: int = 0
    cancelled: int = 0
    stopped: int = 0
    failed_runs: int = 0

    def run_over(self, lengths: Sequence[int], longest: int) -> None:
        self.batches += 1
        self.rows += len(lengths)
        self.tokens += sum(lengths)
        self.computed_tokens += len(lengths) * longest

    def stats(
        self,
        *,
        limits: BatchLimits,
        model: LatencyModel,
        safety: float,
        waiting_rows: int,
        running: int,
        instances: int,
    ) -> BatcherStats:
        return BatcherStats(
            batches=self.batches,
            rows=self.rows,
            efficiency=self.rows / (self.batches * limits.rows) if self.batches else 0.0,
            padded_share=1 - self.tokens / self.computed_tokens if self.computed_tokens else 0.0,
            refused=self.refused,
            missed=self.missed,
            cancelled=self.cancelled,
            stopped=self.stopped,
            failed_runs=self.failed_runs,
            waiting_rows=waiting_rows,
            running=running,
            instances=instances,
            safety=safety,
            spread=model.spread,
            c0=model.c0,
            c1=model.c1,
            c2=model.c2,
        )
