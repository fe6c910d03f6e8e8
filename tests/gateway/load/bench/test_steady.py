"""The steady load: nothing that was sent is lost from the count."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from gateway.load.bench.slow_upstream import SlowUpstream
from gateway.load.bench.steady import BrokenAnswer, Kind, SteadyLoad, Wire, request
from policies.core.clock import SystemClock
from tests.support.load_target import CUT_STREAM, STREAM, Answer, LoadTarget
from tests.support.waiting import until

GOOD = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
Talk = Callable[[int, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def kind(count: int = 1, *, new: bool = False, stream: bool = False) -> Kind:
    return Kind("k", count, "/x", lambda number: b"%d" % number, pause_s=0.0, new=new, stream=stream)


def load_on(url: str, *kinds: Kind) -> SteadyLoad:
    return SteadyLoad(url, kinds or (kind(),), SystemClock())


@asynccontextmanager
async def server(talk: Talk) -> AsyncIterator[tuple[str, asyncio.Server]]:
    """`talk` gets the number of the connection, and a connection on which one request has been read."""
    count = 0

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal count
        count += 1
        try:
            await reader.readuntil(b"\r\n\r\n")
            await talk(count, reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    made = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{made.sockets[0].getsockname()[1]}", made
    finally:
        made.close()
        await made.wait_closed()


async def test_answers_are_counted_and_connections_kept():
    async with LoadTarget() as target, load_on(target.url, kind(2)) as load:
        await until(lambda: load.answered["k"] > 20, 5.0)
    assert not load.failed
    # To the last one: what was under way at the end has been waited for.
    assert load.requests == target.requests == len(set(target.bodies)) > 20
    assert 0 < load.slowest_s < 5


@pytest.mark.parametrize(
    ("answer", "as_stream", "seen"),
    [
        (Answer(503), False, "k: status 503"),
        (Answer(pieces=STREAM), True, ""),
        (Answer(pieces=STREAM[:-1]), True, "k: a stream without its end"),
        (Answer(pieces=CUT_STREAM, abort=True), True, "k: closed"),
    ],
)
async def test_what_is_no_whole_answer_has_failed(answer, as_stream, seen):
    async with LoadTarget(lambda _: answer) as target, load_on(target.url, kind(stream=as_stream)) as load:
        await until(lambda: load.requests >= 3, 5.0)
    assert bool(seen) == bool(load.failed) != bool(load.answered)
    assert all(cause.startswith(seen) for cause in load.failed)


async def test_a_connection_that_ends_on_a_request_is_a_failure_and_between_two_it_is_none():
    async def talk(number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if number == 1:
            writer.write(GOOD)
            await writer.drain()
            return
        if number == 2:
            return
        while True:
            writer.write(GOOD)
            await reader.readuntil(b"\r\n\r\n")

    patient = Kind("k", 1, "/x", lambda _: b"", pause_s=0.05)
    async with server(talk) as (url, _), load_on(url, patient) as load:
        await until(lambda: load.answered["k"] >= 3, 5.0)
    assert dict(load.failed) == {"k: closed without an answer": 1}


async def test_each_request_of_the_new_ones_has_its_own_connection():
    numbers: list[int] = []

    async def talk(number: int, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        numbers.append(number)
        writer.write(GOOD)
        await writer.drain()

    async with server(talk) as (url, _), load_on(url, kind(new=True)) as load:
        await until(lambda: load.answered["k"] >= 3, 5.0)
    assert not load.failed and len(numbers) == load.requests


async def test_a_refused_connection_is_a_failure_until_the_end_was_asked_for():
    async with LoadTarget() as target:
        url = target.url
    async with load_on(url) as load:
        await until(lambda: load.failed["k: refused"] >= 1, 5.0)
        load.may_end = True
        await until(lambda: load.refused == 1, 5.0)
        failed = load.failed["k: refused"]
    assert (load.refused, load.failed["k: refused"], load.answered["k"]) == (1, failed, 0)


async def test_the_slow_upstream_answers_whole_and_in_pieces():
    async with SlowUpstream(SystemClock(), 0.05) as slow:
        wire = await Wire.open(slow.url)
        whole = await wire.ask(request(slow.url, "/v1/chat/completions", b"{}"))
        stream = await wire.ask(request(slow.url, "/v1/chat/completions", b'{"stream":true}'))
        assert whole.status == stream.status == 200
        assert b"hello there" in whole.body and stream.body.count(b"word ") == 10
        assert stream.body.endswith(b"data: [DONE]\n\n")
        assert not wire.ended
    await until(lambda: wire.ended, 5.0)
    with pytest.raises(BrokenAnswer):
        await wire.ask(request(slow.url, "/", b""))
    wire.close()
