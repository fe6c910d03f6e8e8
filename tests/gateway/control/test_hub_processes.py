"""The hub between processes: a server and clients in one loop, over a real socket."""

from __future__ import annotations

import asyncio
import stat

import pytest
import structlog

from gateway.control.facts import ALL_TOPIC, FactBoard, HubSharedState
from gateway.control.hub import ANSWER_S, WorkerPort
from gateway.control.hub_client import CLOSE_S, RECONNECT_S, HubClient, NoSupervisor, Who
from gateway.control.hub_server import HubServer
from policies.core.clock import FakeClock, SystemClock
from tests.support.waiting import eventually, until

PIDS = {1: "worker-1", 2: "worker-2"}


class Rig:
    """A hub, and workers that join it."""

    def __init__(self, folder, clock) -> None:
        self.path = folder / "hub.sock"
        self.clock = clock
        self.server = HubServer(clock, "1.2")
        self.server.on_hello = lambda member: {"for": member.name} if PIDS.get(member.pid) == member.name else None
        self.parent_alive = True
        self.clients: list[HubClient] = []
        self.ports: list[WorkerPort] = []

    def client(self, pid: int, name: str | None = None, version: str = "1.2") -> HubClient:
        who = Who(name or PIDS[pid], pid, version)
        client = HubClient(self.path, who, self.clock, lambda: self.parent_alive)
        self.clients.append(client)
        return client

    async def worker(self, pid: int, prepare=lambda port: None) -> WorkerPort:
        client = self.client(pid)
        assert await client.connect() == {"for": PIDS[pid]}
        port = WorkerPort(PIDS[pid])

        async def name(payload):
            return {"i am": port.worker, **payload}

        port.queries["name"] = port.commands["name"] = name
        prepare(port)
        client.serve(port)
        self.ports.append(port)
        member = await until(
            lambda: next((m for m in self.server.members if m.pid == pid and m.offered.is_set()), None)
        )
        member.joined = True
        return port

    async def close(self) -> None:
        self.parent_alive = False
        for client in self.clients:
            await client.aclose()
        await self.server.aclose()


@pytest.fixture
async def rig(tmp_path):
    rig = Rig(tmp_path, SystemClock())
    await rig.server.listen(rig.path)
    yield rig
    await rig.close()


async def test_only_this_user_may_open_the_socket(rig):
    assert stat.S_IMODE(rig.path.stat().st_mode) == 0o600


async def test_every_worker_acknowledges(rig):
    await rig.worker(1)
    await rig.worker(2)
    acks = await rig.server.command("name", {"n": 1})
    assert [(ack.worker, ack.value, ack.error) for ack in acks] == [
        ("worker-1", {"i am": "worker-1", "n": 1}, ""),
        ("worker-2", {"i am": "worker-2", "n": 1}, ""),
    ]


async def test_an_action_that_fails_is_its_worker_s_acknowledgement(rig):
    def broken(port):
        async def fail(_payload):
            raise ValueError("it is broken here")

        port.commands["name"] = fail

    await rig.worker(1)
    await rig.worker(2, broken)
    good, bad = await rig.server.command("name", {})
    assert good.error == ""
    assert (bad.error, bad.reached, bad.refused) == ("ValueError: it is broken here", True, True)


async def test_who_does_not_offer_an_action_is_not_asked(rig):
    await rig.worker(1)
    await rig.worker(2, lambda port: port.queries.pop("name"))
    assert [ack.worker for ack in await rig.server.query("name", {})] == ["worker-1"]
    assert [ack.worker for ack in await rig.server.command("name", {})] == ["worker-1", "worker-2"]


async def test_who_is_not_there_is_named(rig):
    await rig.worker(1)
    rig.server.absent = lambda: {"worker-2": "it ended (killed by SIGKILL)"}
    acks = await rig.server.command("name", {})
    assert [(ack.worker, ack.error, ack.reached, ack.asked) for ack in acks] == [
        ("worker-1", "", True, True),
        ("worker-2", "it ended (killed by SIGKILL)", False, False),
    ]


async def test_who_ends_in_the_middle_of_an_answer_is_named(rig):
    def slow(port):
        async def wait(_payload):
            await asyncio.Event().wait()

        port.commands["name"] = wait

    await rig.worker(1)
    await rig.worker(2, slow)
    asking = asyncio.create_task(rig.server.command("name", {}))
    await until(lambda: rig.clients[1]._acting)
    rig.parent_alive = False
    await rig.clients[1].aclose()
    good, gone = await asking
    assert good.error == ""
    assert (gone.worker, gone.reached) == ("worker-2", False)
    assert "ended" in gone.error


async def test_who_has_been_silent_is_not_waited_for(tmp_path):
    clock = FakeClock()
    rig = Rig(tmp_path, clock)
    await rig.server.listen(rig.path)
    await rig.worker(1)
    clock.advance(2.0)
    (ack,) = await rig.server.command("name", {})
    assert not ack.reached
    assert "2.0 s" in ack.error
    # It was sent all the same, and the answer shows that somebody is there.
    await until(lambda: rig.server.members[0].silent_s() == 0.0)
    (ack,) = await rig.server.command("name", {})
    assert ack.error == ""
    await rig.close()


async def test_nobody_waits_for_ever(rig):
    def slow(port):
        async def wait(_payload):
            await asyncio.Event().wait()

        port.queries["name"] = wait

    await rig.worker(1, slow)
    ack = await rig.server.members[0].ask("query", "name", {}, limit_s=0.02)
    assert (ack.error, ack.reached, ack.asked) == ("no answer within 0.02 s", False, True)
    assert ANSWER_S <= 5.0


async def test_a_process_that_was_not_started_here_is_refused(rig):
    client = rig.client(99, "worker-1")
    with pytest.raises(NoSupervisor):
        await client.connect()
    assert rig.server.members == []


async def test_who_is_not_told_how_to_log_does_not_log(rig):
    """A connection that breaks before the start has come: what would be written is not in the operator's form."""
    client = rig.client(1)
    await client._open()
    with structlog.testing.capture_logs() as logs:
        client._connection.connection_lost(ConnectionResetError("it broke"))
        with pytest.raises(NoSupervisor, match="has ended"):
            await client._start
    assert logs == []


async def test_another_release_is_refused(rig):
    with structlog.testing.capture_logs() as logs, pytest.raises(NoSupervisor):
        await rig.client(1, version="1.3").connect()
    assert "'worker-1' is release 1.3, and this supervisor is 1.2" in logs[0]["reason"]
    assert rig.server.members == []


async def test_an_answer_that_cannot_be_sent_is_an_error(rig):
    def odd(port):
        async def answer(_payload):
            return {"value": object()}

        port.queries["name"] = answer

    await rig.worker(1, odd)
    (ack,) = await rig.server.query("name", {})
    assert "cannot be sent" in ack.error


async def test_what_is_published_is_heard_with_its_sender(rig):
    heard = []
    rig.server.subscribe(lambda *what: heard.append(what))
    port = await rig.worker(2)
    port.publish("beat", {"in_flight": 3})
    await until(lambda: heard)
    assert heard == [("worker-2", "beat", {"in_flight": 3})]


async def test_a_lost_connection_is_made_again_while_the_supervisor_lives(rig):
    port = await rig.worker(1)
    told = []
    port.on_connected.append(lambda: told.append("again"))
    rig.server.members[0].connection.close()
    await until(lambda: told)
    member = await until(lambda: next((m for m in rig.server.members if m.offered.is_set()), None))
    member.joined = True
    assert [ack.error for ack in await rig.server.command("name", {})] == [""]
    assert not rig.clients[0].orphaned.is_set()


async def test_an_answer_to_a_lost_connection_is_nobody_else_s(rig):
    """Numbers begin anew with each connection: what was asked on the one before must not answer what is asked now."""
    go = asyncio.Event()

    def slow(port):
        async def answer(payload):
            await go.wait()
            return payload

        port.queries["name"] = answer

    await rig.worker(1, slow)
    first = rig.server.members[0]
    asking = asyncio.create_task(first.ask("query", "name", {"n": 1}))
    await until(lambda: rig.clients[0]._acting)
    first.connection.close()
    assert not (await asking).reached
    again = await until(lambda: next((m for m in rig.server.members if m.offered.is_set()), None))
    asking = asyncio.create_task(again.ask("query", "name", {"n": 2}))
    await until(lambda: len(rig.clients[0]._acting) == 2)
    go.set()
    assert (await asking).value == {"n": 2}


async def test_who_is_refused_asks_again_after_a_pause_only(rig):
    client = rig.client(1)
    await client.connect()
    client.serve(WorkerPort("worker-1"))
    greeted = []
    rig.server.on_hello = greeted.append  # its None refuses
    rig.clock = FakeClock()
    client._clock = rig.clock
    rig.server.members[0].connection.close()
    for count in range(1, 4):
        await until(lambda: rig.clock._sleepers)
        assert len(greeted) == count - 1
        rig.clock.advance(RECONNECT_S)
        await until(lambda count=count: len(greeted) == count)


async def test_an_end_does_not_wait_for_a_supervisor_that_does_not_read(rig):
    port = await rig.worker(1)
    rig.server.members[0].connection.transport.pause_reading()
    port.publish("fact", {"much": "x" * (8 << 20)})
    async with asyncio.timeout(CLOSE_S + 2.0):
        await rig.clients[0].aclose()


async def test_without_a_supervisor_a_worker_is_an_orphan(rig):
    await rig.worker(1)
    rig.parent_alive = False
    await rig.server.aclose()
    await asyncio.wait_for(rig.clients[0].orphaned.wait(), 2.0)


async def test_a_supervisor_that_is_only_just_ending_is_noticed_too(rig):
    """Its connections close before it counts as gone."""
    await rig.worker(1)
    await rig.server.aclose()
    rig.path.unlink()
    await until(lambda: not rig.clients[0]._connection.open)
    await asyncio.sleep(0)
    rig.parent_alive = False
    await asyncio.wait_for(rig.clients[0].orphaned.wait(), 2.0)


async def test_facts_reach_the_others_and_end_with_their_teller(rig):
    board = FactBoard(rig.server)
    first = HubSharedState(await rig.worker(1), [])
    second = HubSharedState(await rig.worker(2), [])
    heard, own = [], []
    second.listen("breaker/heavy", lambda *what: heard.append(what))
    first.listen("breaker/heavy", lambda *what: own.append(what))
    first.tell("breaker/heavy", {"state": "open", "until": 12.5})
    first.tell("breaker/other", {"state": "open"})
    await until(lambda: heard)
    assert heard == [("worker-1", {"state": "open", "until": 12.5})]
    assert own == []
    # One that starts later is given what is known.
    third = HubSharedState(WorkerPort("worker-3"), board.known())
    late = []
    third.listen("breaker/heavy", lambda *what: late.append(what))
    assert late == heard
    board.gone("worker-1")
    await until(lambda: len(heard) == 2)
    assert heard[1] == ("worker-1", None)
    assert board.known() == []


async def test_facts_are_told_again_after_a_lost_connection(rig):
    board = FactBoard(rig.server)
    shared = HubSharedState(await rig.worker(1), [])
    shared.tell("breaker/heavy", {"state": "open"})
    await until(board.known)
    board.gone("worker-1")
    rig.server.members[0].connection.close()

    async def known():
        return board.known()

    assert await eventually(known) == [("worker-1", "breaker/heavy", {"state": "open"})]


async def test_who_may_have_missed_something_is_told_everything(rig):
    board = FactBoard(rig.server)
    first = HubSharedState(await rig.worker(1), [("worker-9", "breaker/heavy", {"state": "old"})])
    second = HubSharedState(await rig.worker(2), [])
    heard = []
    first.listen("breaker/heavy", lambda *what: heard.append(what))
    assert heard == [("worker-9", {"state": "old"})]
    member = next(member for member in rig.server.members if member.name == "worker-1")
    member.joined = False
    second.tell("breaker/heavy", {"state": "open"})
    await until(board.known)
    member.joined = True
    member.tell(ALL_TOPIC, board.told_by_others("worker-1"))
    await until(lambda: len(heard) == 3)
    assert heard[1:] == [("worker-9", None), ("worker-2", {"state": "open"})]
