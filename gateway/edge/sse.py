"""A committed stream to a client: server-sent events, exactly one `[DONE]`, and one error event when it is cut."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from backends.api import Chunk, ChunkKind
from gateway import error_table
from gateway.edge.answer_headers import answer_headers
from gateway.edge.openai_codec import openai_error
from gateway.exchange import Record, Reply
from policies.core.errors import GatewayError

if TYPE_CHECKING:
    from gateway.edge.http_server import HttpEdge

_DONE = b"data: [DONE]\n\n"


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _UsageChunk(msgspec.Struct):
    usage: _Usage | None = None


_usage_decoder = msgspec.json.Decoder(_UsageChunk)


async def send_stream(http: web.BaseRequest, reply: Reply, include_usage: bool, edge: HttpEdge) -> web.StreamResponse:
    """Write the held chunks, then the rest as they come. Writing waits for the client: a slow one bounds memory."""
    record = reply.record
    headers = answer_headers(record, edge.clock)
    headers["Content-Type"] = "text/event-stream; charset=utf-8"
    headers["Cache-Control"] = "no-cache"
    headers["X-Accel-Buffering"] = "no"
    response = web.StreamResponse(headers=headers)
    try:
        await response.prepare(http)
        await response.write(b"".join(_events(reply.held, record, include_usage)) + (b"" if reply.rest else _DONE))
        record.first_s = edge.clock.now() - record.started
        if reply.rest is not None:
            # Time spent on the rest is the model's and the client's.
            await _send_rest(response, reply, include_usage, edge)
            return response
        edge.complete(record, 200, "degraded" if record.degraded else "full")
        await response.write_eof()
        return response
    finally:
        close = getattr(reply.rest, "aclose", None)
        if close is not None:
            await close()


async def _send_rest(response: web.StreamResponse, reply: Reply, include_usage: bool, edge: HttpEdge) -> None:
    record = reply.record
    began = edge.clock.now()
    assert reply.rest is not None
    try:
        async for chunk in reply.rest:
            for event in _events([chunk], record, include_usage):
                await response.write(event)
    except GatewayError as error:
        record.waited_s += edge.clock.now() - began
        edge.complete(record, 200, "cut", error.code)
        await response.write(b"data: " + openai_error(error, error_table.row(error).type) + b"\n\n" + _DONE)
    else:
        record.waited_s += edge.clock.now() - began
        edge.complete(record, 200, "degraded" if record.degraded else "full")
        await response.write(_DONE)
    await response.write_eof()


def _events(chunks: list[Chunk], record: Record, include_usage: bool) -> list[bytes]:
    events = []
    for chunk in chunks:
        if chunk.kind is ChunkKind.USAGE:
            usage = _usage_decoder.decode(chunk.data).usage
            if usage is not None:
                record.prompt_tokens, record.completion_tokens = usage.prompt_tokens, usage.completion_tokens
            if not include_usage:
                continue
        events.append(b"data: " + chunk.data + b"\n\n")
    return events
