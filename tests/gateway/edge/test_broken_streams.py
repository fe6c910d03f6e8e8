"""Whatever goes wrong behind a stream that has begun: one head, one error event, one `[DONE]`, and one line in the log."""

import json

import pytest
import structlog

from backends.api import Chunk, ChunkKind
from gateway.edge.http_server import EdgeLimits
from gateway.exchange import Exchange, Reply
from policies.core.errors import IdleTimeout
from tests.support.edge_server import Stream, ToldHandler, content, edge_here
from tests.support.gateway_client import open_raw, question

BROKEN_USAGE = [
    b'{"choices":[],"usage":{"prompt_tokens":null,"completion_tokens":null}}',
    b'{"choices":[],"usage":{"prompt_tokens":"many"}}',
    b'{"choices":[],"usage":[1]}',
    b'{"choices":[],"usage":{"prompt_tokens":1e999}}',
    b'{"choices":[],"usage":',
    b'{"choices":[],"usage":"\xff"}',
]


async def _asked(handler: ToldHandler) -> list[bytes]:
    """The events of one stream, read from a raw connection: a second head in the body would be among them."""
    async with edge_here(handler, EdgeLimits()) as url:
        reader, writer = await open_raw(
            url, "/v1/chat/completions", question("hello", stream=True), "Connection: close\r\n"
        )
        answer = await reader.read()
        writer.close()
    assert answer.count(b"HTTP/1.1") == 1, answer
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK")
    assert body.endswith(b"\r\n0\r\n\r\n")
    # One HTTP chunk, of a line with its size and one with its data, may hold several events.
    pieces = b"".join(line for line in body.split(b"\r\n") if line.startswith(b"data: "))
    return pieces.removesuffix(b"\n\n").split(b"\n\n")


@pytest.mark.parametrize("usage", BROKEN_USAGE)
async def test_usage_that_cannot_be_read_is_unknown(usage: bytes) -> None:
    handler = ToldHandler(Stream(Chunk(usage, ChunkKind.USAGE), content(b"second")))
    events = await _asked(handler)
    assert [b"first" in event for event in events] == [True, False, False]
    assert events[-1] == b"data: [DONE]"
    (record,) = handler.records
    assert (record.outcome, record.prompt_tokens, record.completion_tokens) == ("full", 0, 0)


async def test_a_half_known_usage_is_half_noted() -> None:
    usage = b'{"choices":[],"usage":{"prompt_tokens":null,"completion_tokens":7}}'
    handler = ToldHandler(Stream(Chunk(usage, ChunkKind.USAGE)))
    await _asked(handler)
    assert (handler.records[0].prompt_tokens, handler.records[0].completion_tokens) == (0, 7)


async def test_usage_that_cannot_be_read_among_the_held_chunks() -> None:
    def answer(exchange: Exchange) -> Reply:
        return Reply(exchange.record, held=[Chunk(BROKEN_USAGE[0], ChunkKind.USAGE), content(b"first")])

    events = await _asked(ToldHandler(answer))
    assert len(events) == 2


@pytest.mark.parametrize(
    "error", [ValueError("prompt: secret"), KeyError("x"), ConnectionResetError("not the client's")]
)
async def test_a_defect_behind_a_stream_cuts_it(error: Exception) -> None:
    handler = ToldHandler(Stream(content(b"second"), error))
    with structlog.testing.capture_logs() as logs:
        events = await _asked(handler)
    assert len(events) == 4
    assert json.loads(events[2].removeprefix(b"data: "))["error"]["code"] == "internal_error"
    assert b"secret" not in events[2]
    assert events[3] == b"data: [DONE]"
    (record,) = handler.records
    assert (record.outcome, record.degraded, record.status) == ("cut", "internal_error", 200)
    assert [line["log_level"] for line in logs] == ["error"]


async def test_an_error_of_the_backend_is_no_defect() -> None:
    handler = ToldHandler(Stream(IdleTimeout("nothing came", "heavy")))
    with structlog.testing.capture_logs() as logs:
        events = await _asked(handler)
    assert json.loads(events[1].removeprefix(b"data: "))["error"]["code"] == "idle_timeout"
    assert (handler.records[0].outcome, logs) == ("cut", [])


class _Unclosable:
    """A stream that ends well, and fails when it is closed."""

    def __aiter__(self) -> "_Unclosable":
        return self

    async def __anext__(self) -> Chunk:
        raise StopAsyncIteration

    async def aclose(self) -> None:
        raise ValueError("cannot be closed")


async def test_a_stream_that_fails_while_it_is_closed_has_been_answered() -> None:
    handler = ToldHandler(lambda exchange: Reply(exchange.record, held=[content(b"first")], rest=_Unclosable()))
    with structlog.testing.capture_logs() as logs:
        events = await _asked(handler)
    assert len(events) == 2
    assert [record.outcome for record in handler.records] == ["full"]
    assert len(logs) == 1


class _BrokenBooks(ToldHandler):
    def completed(self, record: object) -> None:
        raise ValueError("the books cannot be closed")


async def test_what_breaks_outside_the_stream_never_writes_a_second_head() -> None:
    with structlog.testing.capture_logs():
        async with edge_here(_BrokenBooks(Stream(content(b"second"))), EdgeLimits()) as url:
            reader, writer = await open_raw(url, "/v1/chat/completions", question("hello", stream=True))
            try:
                answer = await reader.read()
            except ConnectionError:
                answer = b""
            writer.close()
    assert answer.count(b"HTTP/1.1") <= 1
