"""The end of a listener: whoever asked in time is answered. Over real sockets, on either event loop."""

import asyncio
import os
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from gateway.control.sockets import bind_sockets, close_groups
from gateway.listening import CannotListen
from tests.support.edge_server import Stream, ToldHandler, content
from tests.support.listening import HeldHandler, Load, Stage, request_bytes, staged
from tests.support.raw_upstream import LOOPS, run_on
from tests.support.waiting import until

Run = Callable[[Callable[[Stage], Coroutine[Any, Any, None]]], None]


@pytest.fixture(params=list(LOOPS))
def run(request: pytest.FixtureRequest) -> Run:
    return lambda work: run_on(request.param, staged(work))


def test_one_of_two_on_the_same_socket_leaves_under_load() -> None:
    """On the loop that the gateway runs on: asyncio's own may forget a connection that it is just accepting."""

    async def work(stage: Stage) -> None:
        (group,) = bind_sockets("127.0.0.1", 0, 1)
        old = await stage.serving(HeldHandler("old"), group)
        load = Load(old.port)
        clients = [asyncio.create_task(load.client(each)) for each in (1, 1, 5, 1_000_000, 1_000_000, 1_000_000)]
        await until(lambda: load.served.get('"old"', 0) > 200, within_s=10.0)
        await stage.serving(HeldHandler("new"), group)
        began = asyncio.get_running_loop().time()
        assert await old.leave(lame_duck_s=0.1, limit_s=10.0, idle_s=5.0) == 0
        # Each client was told with its next answer: nobody had to wait for the idle limit.
        assert asyncio.get_running_loop().time() - began < 2.0
        before = load.served.get('"new"', 0)
        await until(lambda: load.served.get('"new"', 0) > before + 100, within_s=10.0)
        load.stop = True
        await asyncio.gather(*clients)
        assert load.failures == []
        assert set(load.served) == {'"old"', '"new"'}
        close_groups([group])

    run_on("uvloop", staged(work))


def test_what_waits_in_the_accept_queue_is_served_and_then_nobody_is_let_in(run: Run) -> None:
    async def work(stage: Stage) -> None:
        serving = await stage.serving(HeldHandler("here"))
        clients = []
        # Without giving the loop a chance to accept.
        for _ in range(40):
            client = socket.create_connection(("127.0.0.1", serving.port))
            client.sendall(request_bytes())
            clients.append(client)
        serving.readiness.draining = True
        serving.listener.stop_listening()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", serving.port))
        assert await serving.listener.drain(5.0, 1.0) == 0
        for client in clients:
            client.setblocking(False)
            got = client.recv(10_000)
            assert got.startswith(b"HTTP/1.1 200 OK\r\n")
            assert b"Connection: close\r\n" in got
            client.close()

    run(work)


@pytest.mark.parametrize(
    "request_",
    [
        request_bytes(),
        request_bytes(stream=True),
        request_bytes("GET", "/readyz"),
        request_bytes("GET", "/livez"),
        request_bytes("GET", "/v1/models"),
        request_bytes("GET", "/v2/health/ready"),
        request_bytes("POST", "/nothing"),
        request_bytes("GET", "/v1/chat/completions"),
        request_bytes("POST").replace(b'"messages"', b'"massages"'),
    ],
)
def test_every_answer_of_a_draining_listener_is_the_last_of_its_connection(request_: bytes) -> None:
    async def work(stage: Stage) -> None:
        handler = ToldHandler(Stream(content(b"x"))) if b'"stream"' in request_ else HeldHandler("here")
        serving = await stage.serving(handler)
        kept = await stage.connect(serving.port)
        before = await kept.ask(request_)
        assert not before.closes
        serving.readiness.draining = True
        for connection in (kept, await stage.connect(serving.port)):
            answer = await connection.ask(request_)
            ready = b"/readyz" in request_ or b"/v2/health" in request_
            assert answer.status == (503 if ready else before.status)
            assert answer.closes
            assert await connection.ended()

    run_on("uvloop", staged(work))


def test_requests_sent_at_once_are_all_answered_and_the_last_one_says_close(run: Run) -> None:
    async def work(stage: Stage) -> None:
        handler = HeldHandler("here")
        serving = await stage.serving(handler)
        connection = await stage.connect(serving.port)
        handler.gate.clear()
        connection.writer.write(request_bytes() * 3)
        await until(lambda: handler.handled == 1)
        leaving = asyncio.create_task(serving.leave(lame_duck_s=5.0, limit_s=5.0, idle_s=5.0))
        await until(lambda: serving.readiness.draining)
        handler.gate.set()
        answers = [await connection.answer() for _ in range(3)]
        assert [answer.status for answer in answers] == [200, 200, 200]
        assert [answer.closes for answer in answers] == [False, False, True]
        assert await connection.ended()
        assert await leaving == 0

    run(work)


def test_a_client_that_always_has_another_request_waiting_does_not_keep_it_from_ending(run: Run) -> None:
    async def work(stage: Stage) -> None:
        serving = await stage.serving(HeldHandler("here"))
        connection = await stage.connect(serving.port)
        connection.writer.write(request_bytes() * 4)

        async def ask_on() -> int:
            count = 0
            while not (await connection.answer()).closes:
                count += 1
                connection.writer.write(request_bytes())
            return count

        asking = asyncio.create_task(ask_on())
        await until(lambda: serving.handler.handled > 10)
        assert await serving.leave(lame_duck_s=0.0, limit_s=5.0, idle_s=5.0) == 0
        assert await asking > 5

    run(work)


def test_an_idle_connection_is_closed_after_the_idle_limit_and_not_before(run: Run) -> None:
    async def work(stage: Stage) -> None:
        serving = await stage.serving(HeldHandler("here"))
        used, unused = await stage.connect(serving.port), await stage.connect(serving.port)
        assert not (await used.ask()).closes
        loop = asyncio.get_running_loop()
        began = loop.time()
        assert await serving.leave(lame_duck_s=5.0, limit_s=5.0, idle_s=0.2) == 0
        assert 0.19 < loop.time() - began < 1.0
        assert await used.ended()
        assert await unused.ended()

    run(work)


def test_an_idle_connection_that_is_used_in_time_is_served(run: Run) -> None:
    async def work(stage: Stage) -> None:
        serving = await stage.serving(HeldHandler("here"))
        connection = await stage.connect(serving.port)
        await connection.ask()
        leaving = asyncio.create_task(serving.leave(lame_duck_s=5.0, limit_s=10.0, idle_s=5.0))
        with pytest.raises(ConnectionRefusedError):
            await eventually_refused(serving.port)
        answer = await connection.ask()
        assert (answer.status, answer.closes) == (200, True)
        async with asyncio.timeout(1.0):
            assert await leaving == 0

    run(work)


async def eventually_refused(port: int) -> None:
    while True:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.close()
        await asyncio.sleep(0)


def test_a_request_of_which_a_part_is_here_is_waited_for(run: Run) -> None:
    async def work(stage: Stage) -> None:
        serving = await stage.serving(HeldHandler("here"))
        begun, idle = await stage.connect(serving.port), await stage.connect(serving.port)
        await begun.ask()
        begun.writer.write(request_bytes()[:10])
        await begun.writer.drain()
        leaving = asyncio.create_task(serving.leave(lame_duck_s=5.0, limit_s=10.0, idle_s=0.1))
        assert await idle.ended()
        begun.writer.write(request_bytes()[10:])
        answer = await begun.answer()
        assert (answer.status, answer.closes) == (200, True)
        assert await leaving == 0

    run(work)


def test_a_request_that_comes_at_the_moment_of_closing_is_served(run: Run) -> None:
    """It is in the socket, but the loop has not looked: the idle limit is over first."""

    async def work(stage: Stage) -> None:
        serving = await stage.serving(HeldHandler("here"))
        connection = await stage.connect(serving.port)
        await connection.ask()
        loop = asyncio.get_running_loop()
        leaving = asyncio.create_task(serving.leave(lame_duck_s=0.0, limit_s=5.0, idle_s=0.1))
        with pytest.raises(ConnectionRefusedError):
            await eventually_refused(serving.port)
        fd = connection.writer.get_extra_info("socket").fileno()
        # Both timers come due while the loop is kept busy, and run one after the other: it does not look in between.
        loop.call_later(0.02, os.write, fd, request_bytes())
        ends_at = loop.time() + 0.2
        while loop.time() < ends_at:
            pass
        answer = await connection.answer()
        assert (answer.status, answer.closes) == (200, True)
        assert await leaving == 0

    run(work)


def test_nothing_under_way_ends_at_once(run: Run) -> None:
    async def work(stage: Stage) -> None:
        serving = await stage.serving(HeldHandler("here"))
        async with asyncio.timeout(0.2):
            assert await serving.leave(lame_duck_s=10.0, limit_s=10.0, idle_s=10.0) == 0

    run(work)


def test_lame_duck_ends_at_its_limit_and_what_is_under_way_goes_on(run: Run) -> None:
    async def work(stage: Stage) -> None:
        handler = HeldHandler("here")
        serving = await stage.serving(handler)
        handler.gate.clear()
        held = [await stage.connect(serving.port) for _ in range(3)]
        asking = [asyncio.create_task(connection.ask()) for connection in held]
        await until(lambda: serving.listener.in_flight == 3)
        leaving = asyncio.create_task(serving.leave(lame_duck_s=0.2, limit_s=10.0, idle_s=0.1))
        await until(lambda: serving.readiness.draining)
        late = await stage.connect(serving.port)
        assert (await late.ask(request_bytes("GET", "/readyz"))).status == 503
        with pytest.raises(ConnectionRefusedError):
            await eventually_refused(serving.port)
        assert serving.listener.in_flight == 3
        handler.gate.set()
        assert [answer.closes for answer in await asyncio.gather(*asking)] == [True] * 3
        assert await leaving == 0

    run(work)


def test_what_is_under_way_at_the_limit_is_counted(run: Run) -> None:
    async def work(stage: Stage) -> None:
        handler = HeldHandler("here")
        serving = await stage.serving(handler)
        handler.gate.clear()
        connection = await stage.connect(serving.port)
        asking = asyncio.create_task(connection.ask())
        await until(lambda: serving.listener.in_flight == 1)
        assert await serving.leave(lame_duck_s=0.05, limit_s=0.05, idle_s=5.0) == 1
        handler.gate.set()
        assert (await asking).closes

    run(work)


def test_hurry_ends_both_at_once(run: Run) -> None:
    async def work(stage: Stage) -> None:
        handler = HeldHandler("here")
        serving = await stage.serving(handler)
        handler.gate.clear()
        connection = await stage.connect(serving.port)
        connection.writer.write(request_bytes())
        await until(lambda: serving.listener.in_flight == 1)
        leaving = asyncio.create_task(serving.leave(lame_duck_s=60.0, limit_s=60.0, idle_s=60.0))
        await until(lambda: serving.readiness.draining)
        serving.listener.hurry()
        async with asyncio.timeout(0.5):
            assert await leaving == 1
        handler.gate.set()

    run(work)


def test_a_neighbours_socket_is_adopted_and_given_back(run: Run) -> None:
    async def work(stage: Stage) -> None:
        (own,), (theirs,) = bind_sockets("127.0.0.1", 0, 1), bind_sockets("127.0.0.1", 0, 1)
        port = theirs[0].getsockname()[1]
        here = await stage.serving(HeldHandler("here"), own)
        waiting = await stage.connect(port)
        asking = asyncio.create_task(waiting.ask())
        await here.listener.adopt("neighbour", theirs)
        await here.listener.adopt("neighbour", theirs)
        assert (await asking).body == b'"here"'
        here.listener.release("neighbour")
        here.listener.release("neighbour")
        # What was accepted is served on; what comes now waits for its owner.
        assert (await waiting.ask()).body == b'"here"'
        waits = await stage.connect(port)
        asking = asyncio.create_task(waits.ask())
        own_asked = await stage.connect(here.port)
        assert (await own_asked.ask()).body == b'"here"'
        assert not asking.done()
        there = await stage.serving(HeldHandler("there"), theirs)
        assert (await asking).body == b'"there"'
        assert await here.leave(lame_duck_s=0.0, limit_s=5.0, idle_s=0.1) == 0
        with pytest.raises(CannotListen, match="on its way out"):
            await here.listener.adopt("neighbour", theirs)
        await there.listener.close()
        # They stayed ours all the time.
        assert all(sock.fileno() >= 0 for sock in own + theirs)
        close_groups([own, theirs])

    run(work)


def test_a_neighbour_that_is_back_before_it_is_adopted_keeps_its_socket(run: Run) -> None:
    async def work(stage: Stage) -> None:
        here = await stage.serving(HeldHandler("here"))
        (theirs,) = bind_sockets("127.0.0.1", 0, 1)
        adopting = asyncio.create_task(here.listener.adopt("neighbour", theirs))
        await asyncio.sleep(0)
        here.listener.release("neighbour")
        await adopting
        with socket.create_connection(theirs[0].getsockname()):
            for _ in range(10):
                await asyncio.sleep(0.001)
            # Still in the queue.
            theirs[0].accept()[0].close()
        close_groups([theirs])

    run(work)
