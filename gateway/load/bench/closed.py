"""A closed loop in Python, for machines without wrk: as many workers as connections, each sending without a pause.

Python is slower than what it measures here; the processor shares say so, and ratios made of it rarely count.
"""

from __future__ import annotations

import asyncio
import os

from gateway.load.bench.bare import CHAT_PATH
from gateway.load.bench.generator import Measured, body
from gateway.load.bench.processes import Server, Stage, cpu_of
from gateway.load.client import LoadClient
from gateway.load.mix import Shot
from gateway.load.outcome import ANSWERED, classify
from gateway.load.stats import percentile


class ClosedLoop:
    """The fallback generator, inside this process."""

    name = "python"

    def __init__(self, stage: Stage, upstream: Server, model: str) -> None:
        self._stage = stage
        self._upstream = upstream
        self._model = model
        self._sent = 0

    async def measure(self, server: Server, base_url: str, connections: int, seconds: float, unique: bool) -> Measured:
        clock = self._stage.clock
        begin, cpu_0, load_0 = clock.now(), server.cpu_s(), cpu_of(os.getpid()) + self._upstream.cpu_s()
        latencies: list[float] = []
        failed = 0

        async def worker(client: LoadClient) -> None:
            nonlocal failed
            while (now := clock.now()) < begin + seconds:
                self._sent += 1
                reply = await client.send(Shot(CHAT_PATH, body(self._model, self._sent if unique else None)))
                latencies.append(reply.ended_at - now)
                failed += classify(reply.seen) not in ANSWERED

        async with LoadClient(base_url, clock) as client:
            await asyncio.gather(*(worker(client) for _ in range(connections)))
        span = clock.now() - begin
        load_s = cpu_of(os.getpid()) + self._upstream.cpu_s() - load_0
        p50, p99 = (percentile(latencies, percent) * 1000 for percent in (50, 99))
        busy = (server.cpu_s() - cpu_0) / span
        return Measured(server.name, connections, len(latencies) / span, p50, p99, failed, busy, load_s / span)
