"""HTTP to a remote backend: one aiohttp session, and every way it can fail put into the project's own errors.

What goes out: the body, our own credential, content negotiation and the time left. Nothing of the client's headers can go
out, because a request carries none. Redirects are not followed, cookies not kept, proxies of the environment not used.
"""

from __future__ import annotations

import asyncio
import io
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING

import aiohttp
from aiohttp.http_exceptions import ContentEncodingError
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

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

if TYPE_CHECKING:
    from aiohttp.client import ClientTimeout
    from aiohttp.client_middlewares import ClientHandlerType
    from aiohttp.connector import Connection
    from aiohttp.tracing import Trace

_MAX_ERROR_BYTES = 1 << 20
_LARGE_BODY_BYTES = 1 << 20
#: After the last event of a stream the end of the HTTP body normally follows within one packet.
_LINGER_S = 0.5
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


class _Request(aiohttp.ClientRequest):
    """Remembers whether it was written to a connection that had served before."""

    reused = False


class _Connector(aiohttp.TCPConnector):
    async def connect(
        self,
        req: aiohttp.ClientRequest,
        traces: list[Trace],
        timeout: ClientTimeout,  # noqa: ASYNC109  aiohttp's signature
    ) -> Connection:
        connection = await super().connect(req, traces, timeout)
        protocol = connection.protocol
        if isinstance(req, _Request) and protocol is not None:
            served = protocol.__dict__
            req.reused = "gateway_served" in served
            served["gateway_served"] = True
        return connection


async def _resend_once(request: aiohttp.ClientRequest, send: ClientHandlerType) -> aiohttp.ClientResponse:
    """A server may close an idle connection just as we write to it. Then, and only then, the request goes out again."""
    try:
        return await send(request)
    except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
        if isinstance(error, aiohttp.ClientConnectorError) or not getattr(request, "reused", False):
            raise
    return await send(request)


class HttpTransport:
    """POSTs to one backend. Connections are opened on first use, inside the running loop."""

    __slots__ = ("_clock", "_headers", "_in_flight", "_lingering", "_margin_s", "_options", "_session", "name")

    def __init__(self, name: str, options: HttpOptions, clock: Clock) -> None:
        self.name = name
        self._options = options
        self._clock = clock
        self._margin_s = options.margin_s
        self._in_flight = 0
        self._lingering: set[aiohttp.ClientResponse] = set()
        self._session: aiohttp.ClientSession | None = None
        self._headers = {"accept-encoding": "identity", "user-agent": "hybrid-routing-gateway"}
        if options.credential:
            self._headers["authorization"] = f"Bearer {options.credential}"

    @property
    def in_flight(self) -> int:
        """Calls whose connection is in use now."""
        return self._in_flight

    def url(self, path: str) -> URL:
        return URL(self._options.base_url.rstrip("/") + path)

    def enter(self) -> None:
        """Count a call in. Raises LimitReached. Every `enter` is followed by one `leave`."""
        if self._in_flight >= self._options.max_connections:
            raise LimitReached(f"{self._in_flight} connections to {self.name!r} are in use", retry_after_s=1.0)
        self._in_flight += 1

    def leave(self) -> None:
        self._in_flight -= 1

    async def exchange(
        self, url: URL, headers: dict[str, str], body: bytes, deadline: Deadline
    ) -> tuple[CIMultiDictProxy[str], bytes]:
        """One whole call: the headers and the body of a 2xx answer. Raises BackendError or DeadlineExceeded."""
        self.enter()
        try:
            async with deadline.timeout():
                response = await self.send(url, headers, body, deadline)
                try:
                    return response.headers, await self.read(response, self._options.max_body_bytes)
                except BaseException:
                    response.close()
                    raise
        finally:
            self._in_flight -= 1

    async def send(self, url: URL, headers: dict[str, str], body: bytes, deadline: Deadline) -> aiohttp.ClientResponse:
        """The head of a 2xx answer; its body is still to be read. Any other status is raised as its error.

        `headers` is changed: the time left is added.
        """
        left_ms = int((deadline.remaining() - self._margin_s) * 1000)
        headers["x-request-timeout-ms"] = str(max(left_ms, 1))
        session = self._session or self._open()
        try:
            # Large bytes as they are would be written in one piece, and aiohttp warns of that.
            data = aiohttp.BytesPayload(body) if len(body) <= _LARGE_BODY_BYTES else io.BytesIO(body)
            response = await session.post(url, data=data, headers=headers, allow_redirects=False)
        except aiohttp.ClientError as error:
            raise self._unsent(error) from error
        except OSError as error:
            raise ConnectFailed(self._say("could not be reached", error), self.name) from error
        if 200 <= response.status < 300:
            return response
        try:
            failure = await self._status_error(response)
        except BaseException:
            response.close()
            raise
        raise failure

    async def read(self, response: aiohttp.ClientResponse, limit_bytes: int) -> bytes:
        """The whole body, decompressed. Raises TruncatedAnswer when cut, MalformedAnswer when too large or garbled."""
        content = response.content
        try:
            data = await content.readany()
            if content.at_eof():
                return data
            pieces = [data]
            size = len(data)
            while size <= limit_bytes:
                data = await content.readany()
                if not data and content.at_eof():
                    return b"".join(pieces)
                pieces.append(data)
                size += len(data)
        except (aiohttp.ClientError, OSError) as error:
            raise self.cut(error) from error
        response.close()
        raise MalformedAnswer(f"the answer of {self.name!r} is larger than {limit_bytes} bytes", self.name)

    def cut(self, error: Exception) -> BackendError:
        """What a failure while reading a body means."""
        if isinstance(error.__cause__, ContentEncodingError):
            return MalformedAnswer(self._say("sent a body that cannot be decompressed", error), self.name)
        return TruncatedAnswer(self._say("closed the connection before its answer was complete", error), self.name)

    def linger(self, response: aiohttp.ClientResponse) -> None:
        """An answer is complete but its body not ended: let it end, so that its connection can serve again; not for long."""
        self._lingering.add(response)
        asyncio.get_running_loop().call_later(_LINGER_S, self._end_linger, response)

    def _end_linger(self, response: aiohttp.ClientResponse) -> None:
        self._lingering.discard(response)
        response.close()

    async def aclose(self) -> None:
        for response in tuple(self._lingering):
            self._end_linger(response)
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _open(self) -> aiohttp.ClientSession:
        options = self._options
        self._session = aiohttp.ClientSession(
            # 0 = no limit here: `enter` counts, because aiohttp would queue where we must refuse.
            connector=_Connector(limit=0, keepalive_timeout=options.keepalive_s),
            headers=self._headers,
            request_class=_Request,
            middlewares=(_resend_once,),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, connect=options.connect_s),
            trust_env=False,
        )
        return self._session

    async def _status_error(self, response: aiohttp.ClientResponse) -> BackendError:
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

    def _unsent(self, error: aiohttp.ClientError) -> BackendError:
        if isinstance(error, aiohttp.ClientResponseError):
            return MalformedAnswer(self._say("did not answer in HTTP", error), self.name)
        if isinstance(error, aiohttp.ClientPayloadError):
            return self.cut(error)
        return ConnectFailed(self._say("could not be reached", error), self.name)

    def _say(self, what: str, error: Exception) -> str:
        detail = getattr(error, "strerror", None) or type(error).__name__
        return f"the backend {self.name!r} {what} ({detail})"

    def __repr__(self) -> str:
        return f"HttpTransport({self.name!r}, {self._in_flight}/{self._options.max_connections} in flight)"


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
