"""Processes that do what a test says: what a crew starts, without starting any."""

from __future__ import annotations

import asyncio
import itertools
import signal


class FakeProcess:
    """Implements `gateway.control.seat.Process`."""

    pids = itertools.count(1000)

    def __init__(self, name: str) -> None:
        self.name = name
        self.pid = next(self.pids)
        self.signals: list[int] = []
        #: Does it take its time to end even when it is killed?
        self.deaf = False
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)

    def send_signal(self, number: int) -> None:
        if self._ended.done():
            raise ProcessLookupError
        self.signals.append(number)
        if number == signal.SIGKILL and not self.deaf:
            self.end(-number)

    def end(self, code: int = 1) -> None:
        if not self._ended.done():
            self._ended.set_result(code)
