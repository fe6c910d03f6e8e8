"""A committed stream to a client: server-sent events, exactly one `[DONE]`, and one error event when it is cut."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

import msgspec
import structlog
from aiohttp import web
from aiohttp.http import StreamWriter

from backends.api import Chunk, ChunkKind
from gateway import error_table
from gateway.edge.answer_headers import answer_headers
from gateway.edge.openai_codec import openai_error
from gateway.exchange import Record, Reply
from policies.core.errors import GatewayError

if TYPE_CHECKING:
    from gateway.edge.http_server import HttpEdge

_log = structlog.get_logger("gateway.edge")
_DONE = b"data: [DONE]\n\n"


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _UsageChunk(msgspec.Struct):
    usage: _Usage | None = None


_usage_decoder = msgspec.json.Decoder(_UsageChunk)


class _Client:
    """The client's side of one stream. Writing waits for it: a slow one bounds memory.

    Only a client that has fallen behind costs a timer: it may hold the backend's stream until `ends_at`. (One that takes
    nothing at all is cut off earlier, by the connection itself.)
    """

    __slots__ = ("_clock", "_http", "_protocol", "_writer", "ends_at")

    def __init__(self, http: web.BaseRequest, writer: StreamWriter, edge: HttpEdge, total_s: float) -> None:
        self._http = http
        self._writer = writer
        self._protocol = http.protocol
        self._clock = edge.clock
        #: Monotonic seconds; None once the backend is done and nobody's time is taken any more.
        self.ends_at: float | None = edge.clock.now() + total_s

    @property
    def gone(self) -> bool:
        transport = self._protocol.transport
        return transport is None or transport.is_closing()

    async def write(self, data: bytes) -> None:
        """Raises ConnectionResetError when the client is gone, or has not kept up until `ends_at`."""
        await self._writer.write(data, drain=False)
        if self._protocol.writing_paused:
            await self._room()

    async def end(self) -> None:
        self._writer.set_eof()
        if self._protocol.writing_paused:
            await self._room()

    async def _room(self) -> None:
        """Wait until the client has taken most of what was written."""
        try:
            async with asyncio.timeout(None if self.ends_at is None else self.ends_at - self._clock.now()):
                await self._protocol._drain_helper()  # noqa: SLF001  aiohttp has no public name for it
        except TimeoutError:
            self.drop()
            raise ConnectionResetError("the client did not keep up with the stream") from None
        except ConnectionError as error:
            raise ConnectionResetError("the client is gone") from error

    def drop(self) -> None:
        """Close the connection at once; what was not sent is lost."""
        transport = self._protocol.transport
        if transport is not None:
            transport.abort()


async def send_stream(
    http: web.BaseRequest, reply: Reply, include_usage: bool, edge: HttpEdge, total_s: float
) -> web.StreamResponse:
    """Write the held chunks, then the rest as they come.

    total_s
        How long the client may hold the backend's stream by reading slowly.

    Raises ConnectionResetError when the client is gone. From the first byte on it raises nothing else: whatever goes
    wrong is told within the stream.
    """
    record = reply.record
    headers = answer_headers(record, edge.clock)
    headers["Content-Type"] = "text/event-stream; charset=utf-8"
    headers["Cache-Control"] = "no-cache"
    headers["X-Accel-Buffering"] = "no"
    response = web.StreamResponse(headers=headers)
    if edge.ends_connection(http):
        response.force_close()
    try:
        first = b"".join(_events(reply.held, record, include_usage)) + (b"" if reply.rest else _DONE)
        client = _Client(http, cast(StreamWriter, await response.prepare(http)), edge, total_s)
        try:
            await client.write(first)
            record.first_s = edge.clock.now() - record.started
            if reply.rest is not None:
                # Time spent on the rest is the model's and the client's.
                await _send_rest(client, reply, include_usage, edge)
            else:
                edge.complete(record, 200, "degraded" if record.degraded else "full")
            await client.end()
            await response.write_eof()
        except ConnectionError:
            raise
        except Exception as error:
            _log.exception("a defect in the gateway: please report it", request_id=record.request_id)
            # An answer has begun: a second one must not be written into it.
            client.drop()
            raise ConnectionResetError("an answer that has begun cannot be finished") from error
        return response
    finally:
        await _close(reply)


async def _send_rest(client: _Client, reply: Reply, include_usage: bool, edge: HttpEdge) -> None:
    record = reply.record
    began = edge.clock.now()
    assert reply.rest is not None
    last = _DONE
    outcome, reason = ("degraded" if record.degraded else "full"), ""
    try:
        async for chunk in reply.rest:
            for event in _events((chunk,), record, include_usage):
                await client.write(event)
    except Exception as error:
        if isinstance(error, ConnectionError) and client.gone:
            raise ConnectionResetError("the client is gone") from error
        told = error if isinstance(error, GatewayError) else GatewayError("internal error")
        if told is not error:
            _log.exception("a defect in the gateway: please report it", request_id=record.request_id)
        outcome, reason = "cut", told.code
        last = b"data: " + openai_error(told, error_table.row(told).type) + b"\n\n" + _DONE
    record.waited_s += edge.clock.now() - began
    edge.complete(record, 200, outcome, reason)
    client.ends_at = None
    await client.write(last)


async def _close(reply: Reply) -> None:
    """Give back what the stream holds, whatever became of it."""
    close = getattr(reply.rest, "aclose", None)
    if close is None:
        return
    try:
        await close()
    except Exception:
        _log.exception("a stream failed while it was being closed", request_id=reply.record.request_id)


def _events(chunks: list[Chunk] | tuple[Chunk], record: Record, include_usage: bool) -> list[bytes]:
    events = []
    for chunk in chunks:
        if chunk.kind is ChunkKind.USAGE:
            _note_usage(chunk.data, record)
            if not include_usage:
                continue
        events.append(b"data: " + chunk.data + b"\n\n")
    return events


def _note_usage(data: bytes, record: Record) -> None:
    """Usage that cannot be read is unknown: the stream is as good as without it."""
    try:
        usage = _usage_decoder.decode(data).usage
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return
    if usage is not None:
        record.prompt_tokens, record.completion_tokens = usage.prompt_tokens or 0, usage.completion_tokens or 0
