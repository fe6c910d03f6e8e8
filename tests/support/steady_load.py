"""A steady load from a few clients, each with a connection that it keeps: every request is accounted for."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp

from tests.support.gateway_client import EASY, JSON, question


class SteadyLoad:
    """`outcomes` counts answers by status, and failures by their exception's name."""

    def __init__(self, url: str, text: str = EASY, **fields: object) -> None:
        self._url = url
        self._text = text
        self._fields = fields
        self._numbers = itertools.count()
        self._running = True
        self.outcomes: Counter[str] = Counter()
        self.errors: list[str] = []
        self.served_by: Counter[str] = Counter()
        self.slowest_s = 0.0

    @property
    def answered(self) -> int:
        return self.outcomes["200"]

    @property
    def failed(self) -> dict[str, int]:
        return {name: count for name, count in self.outcomes.items() if name != "200"}

    async def client(self, pause_s: float) -> None:
        """One client; each request is another one, so that none is answered from the cache."""
        connector = aiohttp.TCPConnector(limit=1)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=20)) as session:
            while self._running:
                await self._one(session)
                await asyncio.sleep(pause_s)

    async def _one(self, session: aiohttp.ClientSession) -> None:
        body = question(f"{self._text} {next(self._numbers)}", **self._fields)
        began = asyncio.get_running_loop().time()
        try:
            async with session.post(f"{self._url}/v1/chat/completions", json=body, headers=JSON) as http:
                data = await http.read()
                self.outcomes[str(http.status)] += 1
                self.served_by[http.headers.get("x-gateway-rung", "")] += 1
                if http.status != 200:
                    self.errors.append(data.decode()[:300])
        except (aiohttp.ClientError, TimeoutError) as error:
            self.outcomes[type(error).__name__] += 1
            self.errors.append(str(error))
        self.slowest_s = max(self.slowest_s, asyncio.get_running_loop().time() - began)

    def stop(self) -> None:
        self._running = False


@asynccontextmanager
async def steady_load(url: str, clients: int = 8, pause_s: float = 0.01, text: str = EASY) -> AsyncIterator[SteadyLoad]:
    """Load while the block runs; afterwards every request has been answered or counted as failed."""
    load = SteadyLoad(url, text)
    tasks = [asyncio.create_task(load.client(pause_s)) for _ in range(clients)]
    try:
        yield load
    finally:
        load.stop()
        await asyncio.gather(*tasks)
