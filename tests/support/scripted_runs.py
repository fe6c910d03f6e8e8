"""A model for tests of the batcher: it runs when the test says so, and takes time on the test's clock."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import onnxruntime as ort

from policies.core.clock import FakeClock


class HeldExecutor(concurrent.futures.Executor):
    """Keeps what is submitted until `step`, which runs it at once, on the loop's own thread."""

    def __init__(self) -> None:
        self.jobs: deque[Callable[[], Any]] = deque()

    def submit(self, fn: Callable[[], Any], /, *args: Any, **kwargs: Any) -> concurrent.futures.Future[Any]:
        self.jobs.append(fn)
        return concurrent.futures.Future()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        while wait and self.jobs:
            self.jobs.popleft()()

    async def step(self) -> None:
        """End the run that began first, and let everybody hear of it."""
        self.jobs.popleft()()
        await turns()

    async def run_all(self) -> None:
        while self.jobs:
            await self.step()


async def turns(count: int = 6) -> None:
    """Let everything happen that does not wait for time or for a run."""
    for _ in range(count):
        await asyncio.sleep(0)


class ScriptedRunner:
    """Answers each row with itself. A row `"bad"` fails its run; a run that was told to stop fails as ONNX Runtime's does."""

    def __init__(self, clock: FakeClock, seconds: float = 0.01) -> None:
        self.clock = clock
        self.seconds = seconds
        self.runs: list[list[Any]] = []

    def pack(self, rows: Sequence[Any]) -> list[Any]:
        self.clock.advance(0.001)
        return list(rows)

    def run(self, options: ort.RunOptions, packed: list[Any]) -> list[Any]:
        self.runs.append(packed)
        if options.terminate:
            raise RuntimeError("Exiting due to terminate flag being set to true.")
        self.clock.advance(self.seconds)
        for row in packed:
            if isinstance(row, BaseException):
                raise row
        if "bad" in packed:
            raise IndexError("indices element out of data bounds\nstack")
        return packed
