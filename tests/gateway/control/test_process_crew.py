"""A crew of several workers and a model host: its processes live in this loop, and speak to it over the real hub."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from typing import Any

import pytest
import structlog
from msgspec.structs import replace

from gateway.config import default_config
from gateway.config_sections import Config, Listen
from gateway.control.crew import Agreement
from gateway.control.facts import FactBoard
from gateway.control.hub import WorkerPort
from gateway.control.hub_client import HubClient, Who
from gateway.control.process_crew import MODEL_HOST, ProcessCrew
from gateway.control.seat import Child
from gateway.control.start import KeysInForce, Standing
from gateway.version import version
from policies.core.clock import FakeClock, SystemClock
from tests.support.processes import FakeProcess
from tests.support.waiting import until

CONFIG: Config = replace(default_config({"HOME": "/home/a"}), listen=Listen(port=0), workers=2)


class Told(FakeProcess):
    """A process that does what it is told, and remembers it: (command, payload)."""

    def __init__(self, name: str, crew: Crew) -> None:
        super().__init__(name)
        self.told: list[tuple[str, dict[str, Any]]] = []
        self.fails: set[str] = set()
        self.ends_when_told = True
        self._crew = crew
        self.client: HubClient | None = None
        self.starting = asyncio.create_task(self._start())

    async def _start(self) -> None:
        await self._crew.may_start.wait()
        self.client = HubClient(
            self._crew._folder / "hub.sock", Who(self.name, self.pid, version()), SystemClock(), lambda: True
        )
        self.start = await self.client.connect()
        port = self.port = WorkerPort(self.name)
        verbs = ["begin", "leave", "policies.prepare", "policies.commit", "policies.notices", "keys.swap"]
        if not self.name.startswith(MODEL_HOST):
            verbs += ["listen.adopt", "listen.release"]
        for verb in verbs:
            port.commands[verb] = self._action(verb, port)
        self.client.serve(port)

    def _action(self, verb: str, port: WorkerPort) -> Any:
        async def act(payload: dict[str, Any]) -> None:
            self.told.append((verb, payload))
            if verb in self.fails:
                raise RuntimeError(f"{verb} fails here")
            if verb == "begin":
                if self._crew.no_start and self.name.startswith(self._crew.no_start):
                    self.end(3)
                    return
                port.publish("beat", {"in_flight": 0, "generation": self.start["standing"]["generation"]})
                port.publish("ready", {})
            if verb == "leave":
                asyncio.get_running_loop().call_soon(self.end, 0)

        return act

    def end(self, code: int = 1) -> None:
        super().end(code)
        if self.client is not None and self.client._connection is not None:
            self.client._parent_alive = lambda: False
            self.client._connection.abort()

    def send_signal(self, number: int) -> None:
        super().send_signal(number)
        if number == signal.SIGTERM and self.ends_when_told:
            self.end(0)

    def named(self, verb: str) -> list[dict[str, Any]]:
        return [payload for told, payload in self.told if told == verb]


class Crew(ProcessCrew):
    """`no_start`: whoever is called so and begins ends at once. `may_start`: cleared, whoever is launched waits before its hello."""

    def __init__(self, config: Config, clock: FakeClock) -> None:
        super().__init__(config, clock, lambda: 0.5)
        self.clock = clock
        self.launched: list[Told] = []
        self.no_start = ""
        self.may_start = asyncio.Event()
        self.may_start.set()

    async def _launch(self, verb: str, name: str, more: Sequence[str] = (), fds: Sequence[int] = ()) -> Told:
        self.launched.append(Told(name, self))
        return self.launched[-1]

    def process(self, name: str) -> Told:
        return next(process for process in self.launched if process.name == name)

    def child(self, number: int) -> Child:
        child = self._workers[number].current
        assert child is not None
        return child

    async def begin(self) -> Crew:
        agreement = Agreement(Standing(1, [], [], KeysInForce(b"keys: []\n")))
        await self.start(agreement, FactBoard(self.hub))
        ready = asyncio.create_task(self.ready())
        await until(lambda: self.clock.advance(0.01) or ready.done(), 5.0)
        await ready
        return self

    def pass_time(self, seconds: float) -> None:
        """Everybody was heard all the time."""
        self.clock.advance(seconds)
        for member in self.hub.members:
            member.heard_at = self.clock.now()


@pytest.fixture
async def crew():
    crew = await Crew(CONFIG, FakeClock()).begin()
    yield crew
    await crew.stop()
    for process in crew.launched:
        process.starting.cancel()
        await asyncio.gather(process.starting, return_exceptions=True)
        if process.client is not None:
            await process.client.aclose()


async def test_who_comes_back_takes_the_connections_of_those_that_are_down(crew):
    """Both had ended, and only one is back: nobody else is there to accept for the other."""
    crew.may_start.clear()
    for name in ("worker-1", "worker-2"):
        crew.process(name).end(-9)
    await until(lambda: len(crew.launched) == 5)
    second = crew.process("worker-2.2")
    await until(lambda: crew._workers[0].current and crew._workers[0].current.pid == crew.process("worker-1.2").pid)
    crew.process("worker-1.2").starting.cancel()  # this one hangs
    crew.may_start.set()
    await until(lambda: second.named("listen.adopt"))
    assert second.named("listen.adopt") == [{"number": 0}]
    assert [verb for verb, _ in second.told].index("begin") < [verb for verb, _ in second.told].index("listen.adopt")


async def test_who_could_not_be_brought_up_to_date_is_tried_again(crew):
    """Its connection was lost, and keys changed meanwhile: that it has the right policies is not enough."""
    process, child = crew.process("worker-1"), crew.child(0)
    process.fails.add("keys.swap")
    child.member.connection.close()
    with structlog.testing.capture_logs() as logs:
        await until(lambda: any(line["event"] == "worker_behind" for line in logs))
    assert logs[-1]["error"] == "keys.swap: RuntimeError: keys.swap fails here"
    assert not child.member.joined
    process.fails.clear()
    before = crew.clock.now()
    await until(lambda: crew.pass_time(0.5) or child.member.joined)
    assert crew.clock.now() > before + 2.0, "later, and not in a hurry"
    assert process.named("keys.swap")[-1] == {"data": b"keys: []\n", "problem": ""}


async def test_workers_that_were_not_replaced_keep_the_host_they_are_connected_to(crew):
    first_host, first = crew.process(MODEL_HOST), crew.process("worker-1")

    crew.no_start = "worker-"
    (problem,), taken_up = await crew.restart(CONFIG)
    second_host = crew.launched[3]
    assert not taken_up
    # The host that was to be theirs goes again, and nothing points to it.
    assert second_host.signals == [signal.SIGTERM]
    assert crew._host.current.name == MODEL_HOST
    assert crew._models.path.endswith("models-1.sock")
    assert problem.startswith("worker-1 was not replaced, nor were those after it: worker-1.2 ended (exit code 3)")
    assert first_host.signals == first.signals == []
    # The next one that works takes it away.
    crew.no_start = ""
    assert await crew.restart(CONFIG) == ([], True)
    assert first_host.signals == [signal.SIGTERM]
    assert crew._host.leaving == []
    assert first.named("leave") == [{}]


async def test_who_cannot_be_told_to_leave_is_signalled(crew):
    first = crew.process("worker-1")
    await first.client.aclose()
    await until(lambda: not crew.child(0).member.connection.open)
    async with asyncio.timeout(5.0):
        assert await crew.restart(CONFIG) == ([], True)
    assert first.signals == [signal.SIGTERM]
    assert crew.child(0).name == "worker-1.2"


async def test_a_restart_ends_with_the_gateway(crew):
    crew.may_start.clear()
    restarting = asyncio.create_task(crew.restart(CONFIG))
    await until(lambda: len(crew.launched) == 4)
    async with asyncio.timeout(5.0):
        await crew.stop()
        problems, _ = await restarting
    assert len(crew.launched) == 4, "nobody is launched any more"
    assert "stopping" in problems[-1]


async def test_who_is_told_to_end_by_somebody_else_leaves_its_place(crew):
    first, host = crew.process("worker-1"), crew.process(MODEL_HOST)
    for process in (first, host):
        process.port.publish("leaving", {})
    await until(lambda: crew.pass_time(0.05) or crew._workers[0].leaving)
    assert [child.name for child in crew._workers[0].leaving] == ["worker-1"]
    await until(lambda: crew.pass_time(0.05) or crew.status()[1]["process"] == "worker-1.2")
    # Two hosts at one socket would be in each other's way.
    assert crew.status()[0]["process"] == MODEL_HOST
    first.end(0)


async def test_who_leaves_because_all_are_told_to_end_has_no_successor(crew):
    first = crew.process("worker-1")
    first.port.publish("leaving", {})
    await until(lambda: crew._tasks)
    await crew.stop()
    assert len(crew.launched) == 3


async def test_a_stop_does_not_wait_for_who_stands_still(crew):
    first = crew.process("worker-1")
    first.ends_when_told = False
    first.client._connection.transport.pause_reading()
    stopping = asyncio.create_task(crew.stop())
    await until(lambda: first.signals == [signal.SIGTERM])
    before = crew.clock.now()
    await until(lambda: crew.clock.advance(0.25) or stopping.done(), 5.0)
    await stopping
    assert first.signals == [signal.SIGTERM, signal.SIGKILL]
    assert crew.clock.now() - before < CONFIG.drain_s
