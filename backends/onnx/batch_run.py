"""What goes through a batcher: a call with its caller's side, a run on its way, and what the thread does with it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import onnxruntime as ort

from backends.api import Priority
from backends.onnx.batching import Call, Row
from policies.core.clock import Clock
from policies.core.deadline import Deadline


class Runner(Protocol):
    """What a batcher runs, on its threads."""

    def pack(self, rows: Sequence[Any]) -> Any:
        """The model's input from rows: what it takes to get them to the device."""
        ...

    def run(self, options: ort.RunOptions, packed: Any) -> Any:
        """One result for each row, in something with a length. `options` goes to each `session.run`. May raise anything; one bad row may fail all."""
        ...


class Answered(NamedTuple):
    """Results in the order of the rows, and where the time went (seconds; runs of one call added up)."""

    results: list[Any]
    queue_s: float
    to_device_s: float
    compute_s: float
    #: When the last run was over, on the batcher's clock.
    at: float


class Asked(Call):
    """A call with its caller's side."""

    __slots__ = ("compute_s", "deadline", "future", "left", "pack_s", "probe", "results", "rows", "runs")

    def __init__(
        self,
        rows: Sequence[Any],
        lengths: Sequence[int],
        priority: Priority,
        deadline: Deadline,
        arrived: float,
        size_bytes: int,
    ) -> None:
        super().__init__(lengths, priority, arrived, deadline.at, size_bytes)
        self.rows = rows
        self.deadline = deadline
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.results: list[Any] = [None] * len(rows)
        self.left = len(rows)
        self.runs: list[Run] = []
        self.pack_s = self.compute_s = 0.0
        self.probe = False


class Run:
    """A run on its way."""

    __slots__ = ("expected_s", "longest", "options", "rows", "started", "stopped")

    def __init__(self, rows: list[Row], longest: int, expected_s: float, started: float) -> None:
        self.rows = rows
        self.longest = longest
        self.expected_s = expected_s
        self.started = started
        self.options = ort.RunOptions()
        self.stopped = False


class Outcome(NamedTuple):
    results: Sequence[Any]
    error: BaseException | None
    pack_s: float = 0.0
    compute_s: float = 0.0


def execute(runner: Runner, options: ort.RunOptions, rows: Sequence[Any], clock: Clock) -> Outcome:
    """On a thread. Never raises: whatever goes wrong is told to those who wait."""
    try:
        began = clock.now()
        packed = runner.pack(rows)
        ready = clock.now()
        results = runner.run(options, packed)
        if len(results) != len(rows):
            raise ValueError(f"{len(rows)} rows went in and {len(results)} came out")
        return Outcome(results, None, ready - began, clock.now() - ready)
    except BaseException as error:
        return Outcome((), error)
