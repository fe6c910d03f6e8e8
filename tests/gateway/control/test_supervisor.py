"""What the supervisor does by itself: when to replace the processes, and under which configuration."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import structlog
from msgspec.structs import replace

from gateway.app import build_supervisor
from gateway.config import load_config
from gateway.config_sections import Config
from gateway.control.crew import Restarted
from gateway.control.hub import InProcessHub, WorkerPort
from policies.core.clock import SystemClock
from tests.support.gateway import chat_policy, environment, write_config, write_policies
from tests.support.waiting import until


class RestartingCrew:
    """Of a crew, the rolling restart: each one takes until a test says that it is done."""

    def __init__(self) -> None:
        self.begun = 0
        self.refuses = False
        self.configs: list[Config] = []
        self.hub = InProcessHub()
        self.error: Exception | None = None
        self._go = asyncio.Semaphore(0)

    async def restart(self, config) -> Restarted:
        self.begun += 1
        self.configs.append(config)
        if self.error is not None:
            raise self.error
        await self._go.acquire()
        return Restarted(["worker-1 was not replaced"], taken_up=False) if self.refuses else Restarted([])

    def done(self) -> None:
        self._go.release()

    def hurry(self) -> None: ...


class Rig:
    def __init__(self, folder: Path) -> None:
        config = load_config(write_config(folder, "http://127.0.0.1:9"), environment(folder))
        self.reads = 0

        self.config = config

        def reread():
            self.reads += 1
            return self.config

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
    under_way = set(rig.supervisor._tasks)
    rig.supervisor._on_signal()
    rig.supervisor._on_hang_up()
    assert rig.supervisor._tasks == under_way
    rig.crew.done()
    assert await waiting == []
    assert await behind == ["nothing was restarted: the gateway is stopping"]
    assert rig.crew.begun == 1


async def test_the_end_of_the_gateway_gives_up_a_restart(rig):
    """Also one that somebody asked for over the admin API, who would be waited for."""
    asking = asyncio.create_task(rig.supervisor.restart_workers())
    await until(lambda: rig.crew.begun == 1)
    for task in rig.supervisor._tasks:
        task.cancel()
    assert await asking == ["the rolling restart was given up: the gateway is stopping"]


async def test_a_restart_that_fails_is_told_and_does_not_end_the_next_one(rig):
    rig.crew.error = RuntimeError("a defect")
    with structlog.testing.capture_logs() as logs:
        rig.supervisor._on_hang_up()
        await until(lambda: not rig.supervisor._tasks)
    assert [line["event"] for line in logs if line["log_level"] == "error"] == ["rolling_restart_failed"]
    rig.crew.error = None
    rig.crew.done()
    assert await rig.supervisor.restart_workers() == []


async def test_policies_that_were_held_back_do_not_pass_for_being_in_force(rig, tmp_path):
    port = WorkerPort("worker-1")
    refusing = True

    async def prepare(_payload):
        if refusing:
            raise ValueError("not here")

    async def done(_payload):
        return None

    port.commands |= {"policies.prepare": prepare, "policies.commit": done, "policies.notices": done}
    rig.crew.hub.attach(port)
    assert (await rig.supervisor.reload_policies())["workers_behind"] == {}
    write_policies(tmp_path / "policies", chat_policy(version=4))
    for _ in range(2):
        told = await rig.supervisor.reload_policies()
        assert told["workers_behind"] == {"worker-1": "ValueError: not here"}
    refusing = False
    assert (await rig.supervisor.reload_policies())["workers_behind"] == {}
    standing = {policy.policy: policy.version for policy in rig.supervisor._agreement.standing.policies}
    assert standing["support"] == 4


async def test_a_configuration_that_nobody_can_be_started_with_is_not_kept(rig, tmp_path):
    """What a crashed worker is started with, and what policies are judged by, is what the others have."""
    supervisor, before = rig.supervisor, rig.config
    policies, standing = supervisor._policies, supervisor._agreement.standing
    rig.config = replace(before, drain_s=1.0)
    write_policies(tmp_path / "policies", chat_policy(version=4))
    rig.crew.refuses = True
    rig.crew.done()
    assert await supervisor.restart_workers() == ["worker-1 was not replaced"]
    assert [config.drain_s for config in rig.crew.configs] == [1.0]
    assert (supervisor._policies, supervisor._config.drain_s) == (policies, before.drain_s)
    # The edited policies are taken up in the usual way, under the configuration that holds.
    now = supervisor._agreement.standing
    assert now.generation in (standing.generation, standing.generation + 1)
    rig.crew.refuses = False
    rig.crew.done()
    assert await supervisor.restart_workers() == []
    assert supervisor._config.drain_s == 1.0
    assert "support@4" in [f"{policy.policy}@{policy.version}" for policy in supervisor._agreement.standing.policies]
