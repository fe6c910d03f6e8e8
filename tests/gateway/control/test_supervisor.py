"""What the supervisor does by itself: when to replace the processes, and under which configuration."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gateway.app import build_supervisor
from gateway.config import load_config
from policies.core.clock import SystemClock
from tests.support.gateway import environment, write_config
from tests.support.waiting import until


class RestartingCrew:
    """Of a crew, the rolling restart: each one takes until a test says that it is done."""

    def __init__(self) -> None:
        self.begun = 0
        self._go = asyncio.Semaphore(0)

    async def restart(self, config) -> list[str]:
        self.begun += 1
        await self._go.acquire()
        return []

    def done(self) -> None:
        self._go.release()

    def hurry(self) -> None: ...


class Rig:
    def __init__(self, folder: Path) -> None:
        config = load_config(write_config(folder, "http://127.0.0.1:9"), environment(folder))
        self.reads = 0

        def reread():
            self.reads += 1
            return config

        self.supervisor = build_supervisor(config, SystemClock(), reread)
        self.crew = self.supervisor.crew = RestartingCrew()


@pytest.fixture
async def rig(tmp_path):
    return Rig(tmp_path)


async def test_hang_ups_during_a_rolling_restart_are_one_more_restart_together(rig):
    rig.supervisor._on_hang_up()
    await until(lambda: rig.crew.begun == 1)
    for _ in range(20):
        rig.supervisor._on_hang_up()
        # Each is a task of its own if it is anything.
        await asyncio.sleep(0)
    assert rig.reads == 1
    rig.crew.done()
    await until(lambda: rig.crew.begun == 2)
    # What the file says when it is its turn, not when the signal came.
    assert rig.reads == 2
    rig.crew.done()
    await until(lambda: not rig.supervisor._tasks)
    assert rig.crew.begun == 2
    rig.supervisor._on_hang_up()
    await until(lambda: rig.crew.begun == 3)
    rig.crew.done()
    await until(lambda: not rig.supervisor._tasks)


async def test_nothing_is_replaced_once_the_gateway_stops(rig):
    waiting = asyncio.create_task(rig.supervisor.restart_workers())
    await until(lambda: rig.crew.begun == 1)
    behind = asyncio.create_task(rig.supervisor.restart_workers())
    await asyncio.sleep(0)
    rig.supervisor._on_signal()
    rig.supervisor._on_hang_up()
    assert not rig.supervisor._tasks
    rig.crew.done()
    assert await waiting == []
    assert await behind == ["nothing was restarted: the gateway is stopping"]
    assert rig.crew.begun == 1
