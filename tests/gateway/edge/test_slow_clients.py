"""Clients that do not read what they asked for: they cost a bounded amount of memory, and nobody's place for long."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import structlog

from backends.api import ChatRequest, StreamLimits
from gateway.edge.http_server import EdgeLimits
from gateway.exchange import Exchange, Reply
from tests.support.edge_server import Stream, ToldHandler, content, edge_here, whole
from tests.support.gateway_client import Client, open_raw, question
from tests.support.waiting import until

CHAT = "/v1/chat/completions"


def _told(logs: list[Any], event: str) -> list[Any]:
    return [line for line in logs if line["event"] == event]


async def test_requests_sent_at_once_and_never_read_do_not_fill_the_memory() -> None:
    handler = ToldHandler(whole(b'"' + b"x" * 100_000 + b'"'))
    body = json.dumps(question("hello")).encode()
    request = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (CHAT.encode(), len(body)) + body
    with structlog.testing.capture_logs() as logs:
        async with edge_here(handler, EdgeLimits(write_stall_s=0.3)) as url:
            host, port = url.removeprefix("http://").split(":")
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(request * 2_000)
            (line,) = await until(lambda: _told(logs, "client_stalled"), within_s=5.0)
            assert line["unsent_bytes"] < 300_000
            assert handler.handled < 500
            writer.close()


async def test_requests_sent_at_once_are_all_answered_to_a_client_that_reads() -> None:
    handler = ToldHandler(whole(b'"' + b"x" * 100_000 + b'"'))
    body = json.dumps(question("hello")).encode()
    request = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (CHAT.encode(), len(body)) + body
    async with edge_here(handler, EdgeLimits()) as url:
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(request * 300)
        async with asyncio.timeout(5.0):
            for _ in range(300):
                assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
                await reader.readexactly(100_002)
        writer.close()


async def test_a_stream_that_nobody_reads_gives_its_place_back_after_the_stall_limit() -> None:
    stream = Stream(content(b"x" * 30_000), endless=True)
    handler = ToldHandler(stream)
    async with edge_here(handler, EdgeLimits(write_stall_s=0.2)) as url:
        _, writer = await open_raw(url, CHAT, question("hello", stream=True))
        await until(lambda: stream.open == 1)
        await until(lambda: handler.records)
        assert stream.open == 0
        (record,) = handler.records
        assert (record.outcome, record.status) == ("client_closed", 499)
        writer.close()


def _limited(stream: Stream, total_s: float) -> Callable[[Exchange], Reply]:
    def answer(exchange: Exchange) -> Reply:
        assert isinstance(exchange.request, ChatRequest)
        exchange.request.limits = StreamLimits(total_s=total_s)
        return stream(exchange)

    return answer


async def test_a_stream_that_is_read_too_slowly_ends_with_its_total_limit() -> None:
    stream = Stream(content(b"x" * 30_000), endless=True)
    handler = ToldHandler(_limited(stream, 0.3))
    async with edge_here(handler, EdgeLimits(write_stall_s=60.0)) as url:
        _, writer = await open_raw(url, CHAT, question("hello", stream=True))
        await until(lambda: handler.records)
        assert stream.open == 0
        assert handler.records[0].outcome == "client_closed"
        writer.close()


async def test_a_client_that_reads_late_but_in_time_gets_all_of_its_stream() -> None:
    """More than the connection holds is waiting; then it is read, and the stream goes on to its end."""
    stream = Stream(*[content(b"x" * 30_000)] * 700)
    handler = ToldHandler(stream)
    async with edge_here(handler, EdgeLimits(write_stall_s=30.0)) as url:
        client = Client(url, url)
        try:
            async with client.streaming("hello") as events:
                await until(lambda: stream.given > 20)
                rest = await events.rest()
        finally:
            await client.aclose()
        assert len(rest) == 702
        assert rest[-1] == "[DONE]"
        await until(lambda: handler.records)
        assert handler.records[0].outcome == "full"


async def test_a_large_answer_that_is_read_slowly_is_not_cut() -> None:
    """Twice the stall limit goes by, but something is taken all the time."""
    size = 24_000_000
    handler = ToldHandler(whole(b"x" * size))
    async with edge_here(handler, EdgeLimits(write_stall_s=0.25)) as url:
        reader, writer = await open_raw(url, CHAT, question("hello"))
        loop = asyncio.get_running_loop()
        began, taken = loop.time(), 0
        await reader.readuntil(b"\r\n\r\n")
        while loop.time() - began < 0.6:
            taken += len(await reader.read(1 << 18))
            await asyncio.sleep(0.02)
        async with asyncio.timeout(5.0):
            while taken < size:
                piece = await reader.read(1 << 20)
                assert piece, taken
                taken += len(piece)
        writer.close()
