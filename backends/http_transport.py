"""HTTP to a remote backend: one pool of connections, and every way it can fail put into the project's own errors.

What goes out: the body, our own credential, content negotiation and the time left. Nothing of the client's headers can go
out, because a request carries none. Redirects are not followed, cookies not kept, proxies of the environment not used.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime

from aiohttp import ClientPayloadError
from aiohttp.http_exceptions import BadHttpMessage, ContentLengthError, TransferEncodingError
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from backends.http_client import HttpPool, Origin, header_lines, post_head
from backends.http_connection import NotHttp, Response
from policies.core.clock import Clock
from policies.core.deadline import Deadline
from policies.core.errors import (
    BackendError,
    ClientFault,
    ConnectFailed,
    ContextTooLong,
    LimitReached,
    MalformedAnswer,
    TruncatedAnswer,
    UpstreamMisconfigured,
    UpstreamStatus,
)

_MAX_ERROR_BYTES = 1 << 20
#: After the last event of a stream the end of the HTTP body normally follows within one packet.
_LINGER_S = 0.5
#: How the library says that a body ended before its end.
_CUT = (ContentLengthError, TransferEncodingError)
#: This process, or its machine, has run out of something.
_OURS = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL))
_MISCONFIGURED = (401, 402, 403, 404)
_OWN_DOING = (408, 425, 429)
#: How services say that a prompt is too long: OpenAI and its likes, vLLM, llama.cpp.
_TOO_LONG = (b"context_length_exceeded", b"maximum context length", b"exceed_context_size")


@dataclass(frozen=True, slots=True)
class HttpOptions:
    """Where a remote backend is and how it is reached. `base_url` has no path beyond a prefix such as `/v1`."""

    base_url: str
    #: Our own bearer token; empty = none is sent. Never shown.
    credential: str = field(default="", repr=False)
    #: Name look-up, TCP and TLS together.
    connect_s: float = 0.25
    #: Shorter than what common servers use (5 s and up), so that we close an idle connection before they do.
    keepalive_s: float = 4.0
    #: Calls in flight; one more is refused at once, never queued.
    max_connections: int = 1024
    max_body_bytes: int = 64 << 20
    #: Kept of the time left, for our own way back to the client.
    margin_s: float = 0.02


class HttpTransport:
    """POSTs to one backend. Connections are opened on first use, inside the running loop."""

    __slots__ = (
        "_clock",
        "_headers",
        "_in_flight",
        "_lingering",
        "_margin_s",
        "_max_body_bytes",
        "_max_connections",
        "_options",
        "_origin",
        "_pool",
        "name",
    )

    def __init__(self, name: str, options: HttpOptions, clock: Clock) -> None:
        self.name = name
        self._options = options
        self._clock = clock
        self._margin_s = options.margin_s
        self._max_body_bytes = options.max_body_bytes
        self._max_connections = options.max_connections
        self._in_flight = 0
        self._lingering: set[Response] = set()
        self._origin = Origin.of(URL(options.base_url))
        self._pool: HttpPool | None = None
        self._headers = {"accept-encoding": "identity", "user-agent": "hybrid-routing-gateway"}
        if options.credential:
            self._headers["authorization"] = f"Bearer {options.credential}"

    @property
    def in_flight(self) -> int:
        """Calls whose connection is in use now."""
        return self._in_flight

    def target(self, path: str, headers: Mapping[str, str]) -> str:
        """What calls of `path` with these headers have in common; made once, it is the first argument of a call."""
        return post_head(URL(self._options.base_url.rstrip("/") + path), {**self._headers, **headers})

    def enter(self) -> None:
        """Count a call in. Raises LimitReached. Every `enter` is followed by one `leave`."""
        if self._in_flight >= self._max_connections:
            raise LimitReached(f"{self._in_flight} connections to {self.name!r} are in use", retry_after_s=1.0)
        self._in_flight += 1

    def leave(self) -> None:
        self._in_flight -= 1

    async def exchange(
        self, target: str, headers: Mapping[str, str], body: bytes, deadline: Deadline
    ) -> tuple[CIMultiDictProxy[str], bytes]:
        """One whole call: the headers and the body of a 2xx answer. Raises BackendError or DeadlineExceeded."""
        self.enter()
        try:
            async with deadline.timeout():
                response = await self.send(target, headers, body, deadline)
                try:
                    return response.headers, await self.read(response, self._max_body_bytes)
                except BaseException:
                    response.close()
                    raise
        finally:
            self._in_flight -= 1

    async def send(self, target: str, headers: Mapping[str, str], body: bytes, deadline: Deadline) -> Response:
        """The head of a 2xx answer; its body is still to be read. Any other status is raised as its error.

        `headers` are those of this call alone; the time left is added.
        """
        left_ms = max(int((deadline.remaining() - self._margin_s) * 1000), 1)
        extra = header_lines(headers) if headers else ""
        head = f"{target}{extra}x-request-timeout-ms: {left_ms}\r\ncontent-length: {len(body)}\r\n\r\n"
        try:
            response = await (self._pool or self._open()).send(head.encode(), body)
        except NotHttp as error:
            raise MalformedAnswer(self._say("did not answer in HTTP", error), self.name) from error
        except OSError as error:
            if error.errno in _OURS:
                # Says nothing about the backend, and its breaker is everybody's.
                what = f"this process cannot open a connection ({error.strerror}); raise its limits"
                raise LimitReached(what, retry_after_s=1.0) from error
            raise ConnectFailed(self._say("could not be reached", error), self.name) from error
        if 200 <= response.status < 300:
            return response
        try:
            failure = await self._status_error(response)
        except BaseException:
            response.close()
            raise
        raise failure

    async def read(self, response: Response, limit_bytes: int) -> bytes:
        """The whole body, decompressed. Raises TruncatedAnswer when cut, MalformedAnswer when too large or garbled."""
        content = response.content
        try:
            if content.is_eof():
                # Nearly every answer: all of it came with its head.
                data = content.read_nowait()
                if len(data) <= limit_bytes:
                    return data
            else:
                pieces: list[bytes] = []
                size = 0
                while size <= limit_bytes:
                    data = await content.readany()
                    if not data and content.at_eof():
                        return b"".join(pieces)
                    pieces.append(data)
                    size += len(data)
        except (ClientPayloadError, OSError) as error:
            raise self.cut(error) from error
        response.close()
        raise MalformedAnswer(f"the answer of {self.name!r} is larger than {limit_bytes} bytes", self.name)

    def cut(self, error: Exception) -> BackendError:
        """What a failure while reading a body means."""
        cause = error.__cause__
        if isinstance(cause, BadHttpMessage) and not isinstance(cause, _CUT):
            return MalformedAnswer(self._say("sent a body that cannot be read", cause), self.name)
        return TruncatedAnswer(self._say("closed the connection before its answer was complete", error), self.name)

    def linger(self, response: Response) -> None:
        """An answer is complete but its body not ended: let it end, so that its connection can serve again; not for long."""
        self._lingering.add(response)
        asyncio.get_running_loop().call_later(_LINGER_S, self._end_linger, response)

    def _end_linger(self, response: Response) -> None:
        self._lingering.discard(response)
        response.close()

    async def aclose(self) -> None:
        for response in tuple(self._lingering):
            self._end_linger(response)
        if self._pool is not None:
            pool, self._pool = self._pool, None
            await pool.aclose()

    def _open(self) -> HttpPool:
        options = self._options
        self._pool = HttpPool(self._origin, self._clock, connect_s=options.connect_s, keepalive_s=options.keepalive_s)
        return self._pool

    async def _status_error(self, response: Response) -> BackendError:
        status = response.status
        if 400 <= status < 500 and status not in _MISCONFIGURED and status not in _OWN_DOING:
            body = await self.read(response, _MAX_ERROR_BYTES)
            content_type = response.headers.get("content-type", "application/json")
            if status == 400 and any(words in body for words in _TOO_LONG):
                return ContextTooLong(status, body, content_type, self.name)
            return ClientFault(status, body, content_type, self.name)
        # Nobody needs this body. When it is here already the connection can serve again; else it is closed at once, so
        # that bodies that never end neither hold connections nor time.
        if not response.content.is_eof():
            response.close()
        if status in _MISCONFIGURED:
            return UpstreamMisconfigured(status, self.name)
        return UpstreamStatus(status, self.name, retry_after(response.headers, self._clock.wall()))

    def _say(self, what: str, error: Exception) -> str:
        detail = getattr(error, "strerror", None) or type(error).__name__
        return f"the backend {self.name!r} {what} ({detail})"

    def __repr__(self) -> str:
        return f"HttpTransport({self.name!r}, {self._in_flight}/{self._max_connections} in flight)"


def retry_after(headers: CIMultiDictProxy[str] | CIMultiDict[str], wall: float) -> float | None:
    """Seconds of `Retry-After` (RFC 9110 section 10.2.3: seconds or a date), or of `retry-after-ms`; None when absent or
    unreadable. A moment in the past is 0."""
    try:
        if (milliseconds := headers.get("retry-after-ms")) is not None:
            seconds = float(milliseconds) / 1000
        elif (value := headers.get("retry-after")) is None:
            return None
        elif value.strip()[:1].isdigit():
            seconds = float(value)
        else:
            seconds = parsedate_to_datetime(value).timestamp() - wall
    except (ValueError, OverflowError):
        return None
    return max(0.0, seconds) if seconds < float("inf") else None
