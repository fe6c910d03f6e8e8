"""One client's connection: aiohttp's, with limits of ours, errors in our words, and an end that drops no request."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import structlog
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from gateway.edge.openai_codec import openai_error
from gateway.observe.quiet import Quiet
from policies.core.errors import InvalidRequest

if TYPE_CHECKING:
    from gateway.edge.http_server import EdgeLimits

_log = structlog.get_logger("gateway.edge")
#: What aiohttp raises for bytes that a client sent.
_CLIENTS_BYTES = (web.RequestPayloadError, HttpProcessingError)


class Connection(web.RequestHandler):
    """aiohttp's connection, but what is not HTTP is refused in our words: its own answer repeats bytes of the request,
    which may hold a credential.

    A request's head must arrive in time, counted from the connection or, for a later request, from the first piece of it
    that is seen waiting; between requests aiohttp's keep-alive limit holds. A client that takes nothing of what was
    written for it is cut off, which cancels its request.
    """

    def __init__(self, server: web.Server, limits: EdgeLimits, quiet: Quiet, **options: Any) -> None:
        super().__init__(server, **options)
        self._limits = limits
        self._quiet = quiet
        self._head_timer: asyncio.TimerHandle | None = None
        self._requests_at_head = 0
        #: `_request_count` when a part of the next request's head had come; the count moves on when the head is whole.
        self._head_begun_at = -1
        self._stall_timer: asyncio.TimerHandle | None = None
        self._unsent = 0
        #: While draining: the number of the last request that is answered.
        self._ends_with: int | None = None

    @property
    def task(self) -> asyncio.Task[None] | None:
        """What answers the requests of this connection."""
        return self._task_handler

    @property
    def idle_since(self) -> float | None:
        """Loop time of the last answer, or of the connection; None while a request, or a part of one, is here."""
        waiter = self._waiter
        if waiter is None or waiter.done() or self._head_begun_at == self._request_count:
            return None
        return self._next_keepalive_close_time - self._keepalive_timeout

    @property
    def under_way(self) -> bool:
        """Is a request being answered, or an answer still being sent?"""
        transport = self.transport
        return self._request_in_progress or (transport is not None and transport.get_write_buffer_size() > 0)

    def is_last_answer(self) -> bool:
        """While draining: is the answer to the present request the last one here? What was sent together with it, or
        before the first time that this is asked, is answered first; what comes later is not."""
        if self._ends_with is None:
            self._ends_with = self._request_count
        return self._request_count - len(self._messages) >= self._ends_with

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
        waiter = self._waiter
        # Still waiting for a request after bytes came: they are a part of its head. (Some clients send line ends
        # behind a body; these are nobody's head.)
        if waiter is not None and not waiter.done() and data.strip():
            self._head_begun_at = self._request_count
            if self._head_timer is None:
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
