"""A place for a process: filled again when it empties, handed over, given up by the silent."""

from __future__ import annotations

import asyncio
import signal

import pytest

from gateway.control.hub_server import HubServer, Member
from gateway.control.restarts import SETTLED_S, RestartRule
from gateway.control.seat import KILL_SILENT_S, START_S, Child, Seat, SeatHooks
from policies.core.clock import FakeClock
from tests.support.processes import FakeProcess
from tests.support.waiting import until


class Rig:
    """A seat, the processes it launched, and what its crew was told."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.hub = HubServer(self.clock, "1.2")
        self.processes: list[FakeProcess] = []
        self.told: list[str] = []
        self.refuse_launch = False
        hooks = SeatHooks(
            self._join,
            lambda _seat, child: self.told.append(f"ready {child.name}"),
            lambda _seat: self.told.append("down"),
            lambda child: self.told.append(f"gone {child.name}"),
        )
        self.seat = Seat("worker-1", self._launch, hooks, RestartRule(lambda: 0.5), self.clock)

    async def _launch(self, name: str) -> FakeProcess:
        if self.refuse_launch:
            raise OSError(12, "Cannot allocate memory")
        self.processes.append(FakeProcess(name))
        return self.processes[-1]

    async def _join(self, child: Child) -> None:
        self.told.append(f"join {child.name}")

    def come_up(self, child: Child) -> None:
        """The process says hello, offers itself, and is ready."""
        child.member = Member(self.hub, self.clock)
        child.member.name = child.name
        child.member.offered.set()
        child.connected.set()
        child.ready.set()

    async def serving(self) -> Child:
        child = await self.seat.start()
        self.come_up(child)
        await until(lambda: f"ready {child.name}" in self.told)
        return child

    async def close(self) -> None:
        self.seat.begin_stop()
        for process in self.processes:
            process.end(0)
        await self.seat.stopped(1.0)


@pytest.fixture
async def rig():
    rig = Rig()
    yield rig
    await rig.close()


async def test_a_process_that_ends_is_replaced_at_once_the_first_time(rig):
    child = await rig.serving()
    assert rig.seat.status()["state"] == "serving"
    rig.processes[0].end(-9)
    await until(lambda: len(rig.processes) == 2)
    assert rig.processes[1].name == "worker-1.2"
    assert rig.told[-2:] == [f"gone {child.name}", "down"]
    assert rig.seat.status()["state"] == "starting"
    assert "SIGKILL" in rig.seat.status()["reason"]


async def test_the_second_short_life_waits(rig):
    await rig.serving()
    rig.processes[0].end()
    await until(lambda: len(rig.processes) == 2)
    rig.processes[1].end()
    await until(lambda: rig.seat.current is None)
    assert rig.seat.status()["again_in_s"] == 0.5
    assert len(rig.processes) == 2
    rig.clock.advance(0.5)
    await until(lambda: len(rig.processes) == 3)


async def test_a_crash_loop_is_told_and_does_not_end_the_tries(rig):
    await rig.seat.start()
    for count in range(1, 8):
        rig.processes[-1].end()
        await until(lambda: rig.seat.current is None or len(rig.processes) > count)
        rig.clock.advance(31.0)
        await until(lambda: len(rig.processes) == count + 1)
    assert rig.seat.status()["crash_loop"]
    assert rig.seat.status()["ended"] == 7


async def test_a_crash_loop_is_over_once_a_process_has_lived_for_long(rig):
    await rig.seat.start()
    for count in range(1, 6):
        rig.processes[-1].end()
        await until(lambda: rig.seat.current is None or len(rig.processes) > count)
        rig.clock.advance(31.0)
        await until(lambda: len(rig.processes) == count + 1)
    rig.come_up(rig.seat.current)
    rig.seat.look()
    assert rig.seat.status()["crash_loop"]
    rig.clock.advance(SETTLED_S)
    rig.seat.current.member.heard_at = rig.clock.now()
    rig.seat.look()
    assert not rig.seat.status()["crash_loop"]
    assert rig.seat.status()["ended"] == 5


async def test_an_end_by_a_signal_without_a_name_is_an_end_too(rig):
    await rig.serving()
    rig.processes[0].end(-40)
    await until(lambda: len(rig.processes) == 2)
    assert rig.seat.status()["reason"] == "it ended (killed by signal 40)"


async def test_what_cannot_be_launched_is_tried_again(rig):
    await rig.serving()
    rig.refuse_launch = True
    rig.processes[0].end()
    await until(lambda: "cannot be started" in rig.seat.reason)
    assert "Cannot allocate memory" in rig.seat.reason
    rig.refuse_launch = False
    rig.clock.advance(60.0)
    await until(lambda: len(rig.processes) == 2)


async def test_a_silent_process_counts_as_down_comes_back_or_is_killed(rig):
    child = await rig.serving()
    rig.clock.advance(2.0)
    rig.seat.look()
    rig.seat.look()
    assert rig.told.count("down") == 1
    assert rig.seat.status()["state"] == "stuck"
    child.member.heard_at = rig.clock.now()
    rig.seat.look()
    assert rig.told[-1] == f"ready {child.name}"
    assert rig.seat.status()["state"] == "serving"
    assert rig.processes[0].signals == []
    rig.clock.advance(KILL_SILENT_S + 0.1)
    rig.seat.look()
    assert rig.processes[0].signals == [signal.SIGKILL]
    await until(lambda: len(rig.processes) == 2)


async def test_a_successor_that_is_silent_before_it_is_ready_is_given_up(rig):
    first = await rig.serving()
    succeeding = asyncio.create_task(rig.seat.succeed())
    await until(lambda: len(rig.processes) == 2)
    candidate = rig.seat._candidate
    rig.come_up(candidate)
    candidate.ready.clear()
    rig.clock.advance(START_S + 1.0)
    first.member.heard_at = rig.clock.now()
    rig.seat.look()
    with pytest.raises(RuntimeError, match="SIGKILL"):
        await succeeding
    assert rig.seat.current is first
    assert rig.processes[0].signals == []


async def test_a_process_that_cannot_join_is_killed(rig):
    await rig.seat.start()
    child = rig.seat.current

    async def refuse(_child):
        raise RuntimeError("policies.prepare: ValueError: no")

    rig.seat._hooks = SeatHooks(refuse, *[getattr(rig.seat._hooks, name) for name in ("ready", "down", "gone")])
    rig.come_up(child)
    await until(lambda: rig.processes[0].signals == [signal.SIGKILL])
    await until(lambda: len(rig.processes) == 2)


async def test_a_successor_takes_the_seat_when_it_is_ready(rig):
    first = await rig.serving()
    succeeding = asyncio.create_task(rig.seat.succeed())
    await until(lambda: len(rig.processes) == 2)
    assert rig.seat.current is first
    rig.come_up(rig.seat._candidate)
    assert await succeeding is first
    assert rig.seat.current.name == "worker-1.2"
    assert rig.seat.status()["leaving"] == ["worker-1"]
    rig.processes[0].end(0)
    assert await rig.seat.ended(first, 1.0)
    await until(lambda: rig.seat.leaving == [])
    assert rig.seat.status()["ended"] == 0
    assert len(rig.processes) == 2


async def test_a_successor_that_fails_changes_nothing(rig):
    first = await rig.serving()
    succeeding = asyncio.create_task(rig.seat.succeed())
    await until(lambda: len(rig.processes) == 2)
    rig.processes[1].end(3)
    with pytest.raises(RuntimeError, match=r"worker-1\.2 ended \(exit code 3\) before it was ready"):
        await succeeding
    assert rig.seat.current is first
    assert rig.seat.status()["state"] == "serving"


async def test_who_ends_while_its_successor_starts_leaves_the_seat_to_it(rig):
    await rig.serving()
    succeeding = asyncio.create_task(rig.seat.succeed())
    await until(lambda: len(rig.processes) == 2)
    rig.processes[0].end(-9)
    await until(lambda: rig.seat.current is None)
    rig.come_up(rig.seat._candidate)
    assert await succeeding is None
    assert rig.seat.current.name == "worker-1.2"
    assert len(rig.processes) == 2


async def test_stopping_launches_nothing_and_kills_who_does_not_end(rig):
    await rig.serving()
    rig.seat.begin_stop()
    assert rig.processes[0].signals == [signal.SIGTERM]
    await rig.seat.stopped(0.01)
    assert rig.processes[0].signals == [signal.SIGTERM, signal.SIGKILL]
    assert len(rig.processes) == 1


async def test_nobody_is_replaced_while_all_stop(rig):
    await rig.serving()
    rig.seat.begin_stop()
    with pytest.raises(RuntimeError, match="stopping"):
        await rig.seat.succeed()
    assert len(rig.processes) == 1


async def test_who_is_told_to_end_by_somebody_else_has_a_successor_at_once(rig):
    """It may take as long as its longest stream; until then nobody would serve in its place."""
    first = await rig.serving()
    rig.clock.advance(SETTLED_S)
    rig.seat.let_go(first)
    assert rig.seat.status()["leaving"] == ["worker-1"]
    await until(lambda: len(rig.processes) == 2)
    assert "signal" in rig.seat.status()["reason"]
    assert rig.told.count("down") == 1
    rig.come_up(rig.seat.current)
    await until(lambda: "ready worker-1.2" in rig.told)
    # Once is enough, and its end is no other one.
    rig.seat.let_go(first)
    rig.processes[0].end(0)
    await until(lambda: rig.seat.leaving == [])
    assert rig.seat.status()["ended"] == 1
    assert len(rig.processes) == 2


async def test_nobody_is_let_go_while_all_stop(rig):
    first = await rig.serving()
    rig.seat.begin_stop()
    rig.seat.let_go(first)
    assert rig.seat.current is first


async def test_who_leaves_and_stands_still_is_killed_in_the_end_and_once(rig):
    first = await rig.serving()
    rig.processes[0].deaf = True
    rig.seat.let_go(first)
    rig.clock.advance(START_S + 1.0)
    for _ in range(3):
        rig.seat.look()
    assert rig.processes[0].signals == [signal.SIGKILL]
    rig.processes[0].end(-9)
