"""A listening HTTP server round an edge, with a drain that knows what is in flight."""

from __future__ import annotations

import asyncio
from typing import Any

import structlog
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from gateway.edge.http_server import EdgeLimits, HttpEdge
from gateway.edge.openai_codec import openai_error
from gateway.observe.quiet import Quiet
from policies.core.errors import InvalidRequest

_log = structlog.get_logger("gateway.edge")
#: What aiohttp raises for bytes that a client sent.
_CLIENTS_BYTES = (web.RequestPayloadError, HttpProcessingError)


class _Protocol(web.RequestHandler):
    """aiohttp's connection, but what is not HTTP is refused in our words: its own answer repeats bytes of the request,
    which may hold a credential.

    A request's head must arrive in time, counted from the connection or, for a later request, from the first piece of it
    that is seen waiting; between requests aiohttp's keep-alive limit holds. A client that takes nothing of what was
    written for it is cut off, which cancels its request.
    """

    def __init__(self, server: _Server, limits: EdgeLimits, quiet: Quiet, **options: Any) -> None:
        super().__init__(server, **options)
        self._limits = limits
        self._quiet = quiet
        self._head_timer: asyncio.TimerHandle | None = None
        self._requests_at_head = 0
        self._stall_timer: asyncio.TimerHandle | None = None
        self._unsent = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if len(self._manager.connections if self._manager is not None else ()) > self._limits.connections:
            self.force_close()
        else:
            self._expect_head()

    def connection_lost(self, exc: BaseException | None) -> None:
        for timer in (self._head_timer, self._stall_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._head_timer is None:
            waiter = self._waiter
            # Still waiting for a request after bytes came: they are a part of its head. (Some clients send line ends
            # behind a body; these are nobody's head.)
            if waiter is not None and not waiter.done() and data.strip():
                self._expect_head()

    def _expect_head(self) -> None:
        self._requests_at_head = self._request_count
        self._head_timer = self._loop.call_later(self._limits.header_time_s, self._check_head)

    def _check_head(self) -> None:
        self._head_timer = None
        if self._request_count == self._requests_at_head:
            self.force_close()

    def pause_writing(self) -> None:
        super().pause_writing()
        # Kept here, for aiohttp forgets it when it closes a connection, and closing waits for what is unsent.
        transport = self.transport
        if transport is not None:
            self._unsent = transport.get_write_buffer_size()
            self._stall_timer = self._loop.call_later(self._limits.write_stall_s, self._check_stall, transport)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _check_stall(self, transport: asyncio.WriteTransport) -> None:
        """Slow is not stalled: a large answer may take long, if only something is taken all the time."""
        unsent = transport.get_write_buffer_size()
        if unsent < self._unsent:
            self._unsent = unsent
            self._stall_timer = self._loop.call_later(self._limits.write_stall_s, self._check_stall, transport)
            return
        self._stall_timer = None
        more = self._quiet.admit("client_stalled")
        if more is not None:
            _log.info("client_stalled", unsent_bytes=unsent, after_s=self._limits.write_stall_s, **more)
        transport.abort()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if isinstance(exc, ConnectionError):
            raise ConnectionError("the client is gone") from exc
        if status >= 500:
            self._defect(exc)
        else:
            self._refused(status, exc)
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun; it cannot become an error")
        text = "a defect in the gateway" if status >= 500 else "the request is not valid HTTP, or its head is too large"
        body = openai_error(InvalidRequest(f"Refused: {text}.", code="bad_http"), "invalid_request_error")
        response = web.Response(status=status, body=body, content_type="application/json")
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Called by aiohttp outside of a request, also for a body that turns out to be broken while it is skipped."""
        error = kw.get("exc_info")
        if isinstance(error, _CLIENTS_BYTES):
            self._refused(400, error)
        else:
            self._defect(error if isinstance(error, BaseException) else None)

    def _refused(self, status: int, error: BaseException | None) -> None:
        reason = type(error).__name__ if error is not None else ""
        more = self._quiet.admit(("connection_refused", status, reason))
        if more is not None:
            _log.info("connection_refused", status=status, reason=reason, **more)

    def _defect(self, error: BaseException | None) -> None:
        more = self._quiet.admit(("defect", type(error)))
        if more is not None:
            _log.error("a defect in the gateway: please report it", exc_info=error or True, **more)


class _Server(web.Server):
    """aiohttp's server with our connection."""

    def __init__(self, handler: Any, limits: EdgeLimits, quiet: Quiet, **options: Any) -> None:
        super().__init__(handler, **options)
        self._limits = limits
        self._quiet = quiet

    def __call__(self) -> web.RequestHandler:
        return _Protocol(self, self._limits, self._quiet, loop=self._loop, **self._kwargs)


class Listener:
    """One port. `drain` refuses new connections and waits for what is under way."""

    def __init__(self, edge: HttpEdge, limits: EdgeLimits) -> None:
        self._edge = edge
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._listening: asyncio.Server | None = None
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._server = _Server(
            self._handle,
            limits,
            Quiet(edge.clock),
            request_factory=self._make_request,
            handler_cancellation=True,  # a client that leaves cancels its request
            access_log=None,
            max_line_size=limits.header_bytes,
            max_field_size=limits.header_bytes,
            max_headers=limits.headers,
            keepalive_timeout=75.0,
        )

    @property
    def in_flight(self) -> int:
        return self._in_flight

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port (of use when 0 was asked for). Raises OSError."""
        self._listening = await self._loop.create_server(self._server, host, port, backlog=1024, reuse_address=True)
        bound: int = self._listening.sockets[0].getsockname()[1]
        return bound

    def _make_request(
        self, message: Any, payload: Any, protocol: Any, writer: Any, task: asyncio.Task[None]
    ) -> web.BaseRequest:
        return web.BaseRequest(
            message, payload, protocol, writer, task, self._loop, client_max_size=self._limits.body_bytes
        )

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        self._in_flight += 1
        try:
            return await self._edge(request)
        finally:
            self._in_flight -= 1
            if self._in_flight == 0:
                self._idle.set()

    async def drain(self, limit_s: float) -> int:
        """Let requests finish for `limit_s`, then stop listening; returns how many were still under way then.

        Until the last one is done the port stays open, so that `/readyz` can say 503; the edge refuses new work meanwhile.
        """
        if self._in_flight:
            self._idle.clear()
            try:
                async with asyncio.timeout(limit_s):
                    await self._idle.wait()
            except TimeoutError:
                return self._in_flight
            finally:
                self._stop_listening()
        self._stop_listening()
        return 0

    def hurry(self) -> None:
        """Let a drain end now; what is under way is cut."""
        self._idle.set()

    def _stop_listening(self) -> None:
        if self._listening is not None:
            self._listening.close()
        self._server.pre_shutdown()

    async def close(self) -> None:
        """Cut what is left."""
        if self._listening is not None:
            self._listening.close()
        await self._server.shutdown(1.0)
