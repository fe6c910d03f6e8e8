"""The HTTP side of the load generator: sends one request and says what came back. Waits for nobody but the server."""

from __future__ import annotations

import errno
import ipaddress
from dataclasses import dataclass
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

import aiohttp
from yarl import URL

from gateway.load.mix import Shot
from gateway.load.outcome import DEGRADED_HEADER, Seen, error_code, is_quota, rung_of
from gateway.load.sse import StreamReader
from policies.core.clock import Clock

#: Running out of these is the generator's own limit, not the server's failure.
_OWN_LIMITS = frozenset({errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM})
#: Shorter than the keep-alive of common servers, so that a connection is not closed by the server as we write.
_KEEPALIVE_S = 10.0
#: An answer larger than this is counted as failed instead of being held in memory.
MAX_ANSWER_BYTES = 64 * 1024 * 1024


class OwnLimitReached(Exception):
    """The request could not be sent because this machine ran out of sockets, ports or memory."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back. Moments are on the clock's `now`; `first_at` = first content of a stream."""

    seen: Seen
    ended_at: float
    first_at: float | None = None
    #: Content chunks of a stream: about the number of tokens.
    chunks: int = 0


class LoadClient:
    """One connection pool without a limit: a slow server meets more connections, never a hidden queue.

    `timeout_s` bounds one request from the moment it is sent; a timeout is a failed request.
    """

    def __init__(self, base_url: str, clock: Clock, timeout_s: float = 60.0) -> None:
        self._base = base_url.rstrip("/")
        self._clock = clock
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._urls: dict[str, URL] = {}
        self._headers: dict[str, dict[str, str]] = {}
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(limit=0, limit_per_host=0, keepalive_timeout=_KEEPALIVE_S)
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=self._timeout, cookie_jar=aiohttp.DummyCookieJar(), trust_env=False
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def send(self, shot: Shot, key: str = "") -> Reply:
        """Send now and take the whole answer. Every failure of the server or the network is a Reply.

        Raises OwnLimitReached when this machine could not send.
        """
        session = self._session
        assert session is not None, "use `async with LoadClient(...)`"
        try:
            async with session.post(
                self._url(shot.path), data=shot.body, headers=self._headers_for(key), allow_redirects=False
            ) as response:
                if shot.stream and response.status == 200:
                    return await self._stream(response)
                return await self._whole(response)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
            if isinstance(cause, OSError) and cause.errno in _OWN_LIMITS:
                raise OwnLimitReached(cause.strerror) from error
            return Reply(Seen(0, "none", error=type(error).__name__), self._clock.now())

    async def _whole(self, response: aiohttp.ClientResponse) -> Reply:
        headers, status = response.headers, response.status
        rung, degraded = rung_of(headers), DEGRADED_HEADER in headers
        body, error = b"", ""
        try:
            async for data in response.content.iter_any():
                body += data
                if len(body) > MAX_ANSWER_BYTES:
                    error = "answer_too_large"
                    response.close()
                    break
        except (aiohttp.ClientError, TimeoutError, OSError) as broken:
            error = type(broken).__name__
        complete = bool(body) and not error
        if status >= 400:
            error = error or error_code(body) or f"status_{status}"
        elif not complete:
            error = error or "empty_answer"
        quota = status == 429 and is_quota(headers, error)
        return Reply(Seen(status, rung, degraded, complete, quota=quota, error=error), self._clock.now())

    async def _stream(self, response: aiohttp.ClientResponse) -> Reply:
        headers, clock = response.headers, self._clock
        reader, first_at, error = StreamReader(), None, ""
        try:
            async for data in response.content.iter_any():
                if reader.feed(data) and first_at is None:
                    first_at = clock.now()
        except (aiohttp.ClientError, TimeoutError, OSError) as broken:
            error = type(broken).__name__
        complete = reader.complete and not error
        seen = Seen(
            response.status,
            rung_of(headers),
            DEGRADED_HEADER in headers,
            complete,
            committed=reader.committed,
            error=error or reader.why_incomplete(),
        )
        return Reply(seen, clock.now(), first_at, reader.chunks)

    def _url(self, path: str) -> URL:
        url = self._urls.get(path)
        if url is None:
            if len(self._urls) >= 1000:
                self._urls.clear()
            url = self._urls[path] = URL(self._base + path)
        return url

    def _headers_for(self, key: str) -> dict[str, str]:
        headers = self._headers.get(key)
        if headers is None:
            headers = self._headers[key] = {"Content-Type": "application/json"}
            if key:
                headers["Authorization"] = f"Bearer {key}"
        return headers


def check_target(url: str, allow_remote: bool) -> bool:
    """Is the target another machine? Raises ValueError for a bad URL, or a remote one that was not allowed."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} is no http:// or https:// URL with a host, such as http://127.0.0.1:8080")
    if parts.query or parts.fragment:
        raise ValueError(f"{url!r} must be a base URL, without query or fragment")
    host = parts.hostname
    try:
        local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = host == "localhost" or host.endswith(".localhost")
    if not local and not allow_remote:
        raise ValueError(f"{host} is not this machine; --allow-remote permits it, for a service that you may load")
    return not local
