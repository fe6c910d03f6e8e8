"""Calls and latency models for tests of batching."""

from __future__ import annotations

from collections.abc import Sequence

from backends.api import Priority
from backends.onnx.batching import BatchLimits, Call, WaitingRoom
from backends.onnx.latency import LatencyModel, Measured, Safety

START_S, TOKEN_S = 0.0004, 0.0001
_SHAPES = ((1, 4), (1, 16), (4, 16), (16, 16), (1, 128), (1, 256))


def model(slower: float = 1.0) -> LatencyModel:
    """Of a model whose runs take START_S + TOKEN_S a token."""
    return LatencyModel([Measured(r, n, slower * (START_S + TOKEN_S * r * n)) for r, n in _SHAPES])


def room(limits: BatchLimits | None = None, slower: float = 1.0) -> WaitingRoom:
    return WaitingRoom(limits or BatchLimits(), model(slower), Safety())


def call(
    lengths: Sequence[int] | int = 16,
    priority: Priority = Priority.NORMAL,
    *,
    arrived: float = 0.0,
    due: float = 30.0,
    size_bytes: int = 100,
) -> Call:
    lengths = [lengths] if isinstance(lengths, int) else lengths
    return Call(lengths, priority, arrived, due, size_bytes)
