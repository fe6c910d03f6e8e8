"""What a batcher runs for a text encoder, and the runs that its latency model starts from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from backends.onnx.latency import LatencyModel, Measured
from backends.onnx.tokens import padded
from policies.core.clock import Clock

#: Rows and tokens: short and long, one and several. About 700 tokens, each measured twice: .2 s on one core.
_SHAPES = ((1, 4), (1, 16), (4, 16), (16, 16), (1, 128), (1, 256))
#: The clock moves in steps; a run that is quicker than this is taken for this long.
_LEAST_S = 1e-6


class EncoderRunner:
    """Implements `batch_run.Runner` for a graph that gives one `embedding` a row. A row is a list of token ids."""

    def __init__(self, session: ort.InferenceSession) -> None:
        self._session = session

    def pack(self, rows: Sequence[Sequence[int]]) -> dict[str, NDArray[np.int64]]:
        return padded(rows)

    def run(self, options: ort.RunOptions, packed: Any) -> NDArray[np.float32]:
        """float32 [rows, dimensions]"""
        vectors: NDArray[np.float32] = self._session.run(["embedding"], packed, options)[0]
        return vectors


def measured_latency(runner: EncoderRunner, clock: Clock, *, token: int, longest: int) -> LatencyModel:
    """Runs of rows of `token` at a few shapes; blocks. The first run of a shape, which allocates, is not counted."""
    return LatencyModel(list(_runs(runner, clock, token, longest)))


def _runs(runner: EncoderRunner, clock: Clock, token: int, longest: int) -> Iterator[Measured]:
    for rows, length in _SHAPES:
        packed = runner.pack([[token] * min(length, longest)] * rows)
        seconds = []
        for _ in range(3):
            began = clock.now()
            runner.run(ort.RunOptions(), packed)
            seconds.append(max(clock.now() - began, _LEAST_S))
        # The quicker of two: what else happened on the machine is not the model's.
        yield Measured(rows, min(length, longest), min(seconds[1:]))
