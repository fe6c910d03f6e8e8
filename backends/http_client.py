"""A pool of connections to one backend: the whole of an HTTP client that calls of backends need, and no more.

It POSTs. It follows no redirects, keeps no cookies, uses no proxies of the environment and knows no other origin than
its own. Connections are not counted here: who calls counts, and refuses rather than queues.
"""

from __future__ import annotations

import asyncio
import errno
import ssl
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from yarl import URL

from backends.http_connection import Connection, Response, Unanswered
from policies.core.clock import Clock

#: An aborted connection is gone in the loop's next turn; nothing may hang on one that is not.
_CLOSE_S = 1.0


@dataclass(frozen=True, slots=True)
class Origin:
    """Where connections go. `tls` None = plain TCP."""

    host: str
    port: int
    tls: ssl.SSLContext | None = None

    @classmethod
    def of(cls, url: URL, tls: ssl.SSLContext | None = None) -> Origin:
        """The origin of an http or https URL; https without `tls` gets the machine's trusted authorities."""
        if url.scheme not in ("http", "https") or not url.raw_host or not url.port:
            raise ValueError(f"{url.scheme!r} is no scheme of a backend; write http://HOST:PORT/PATH or https://...")
        if url.scheme == "http":
            return cls(url.raw_host, url.port)
        return cls(url.raw_host, url.port, tls or default_tls())


def default_tls() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.set_alpn_protocols(("http/1.1",))
    return context


def post_head(url: URL, headers: Mapping[str, str]) -> str:
    """The part of a request's head that never changes: request line, Host and `headers`. More lines may follow.

    Raises ValueError for what would break the head apart.
    """
    if url.raw_host is None:
        raise ValueError("a request needs an absolute URL")
    host = f"[{url.raw_host}]" if ":" in url.raw_host else url.raw_host.rstrip(".")
    if not url.is_default_port():
        host = f"{host}:{url.port}"
    return f"POST {url.raw_path_qs} HTTP/1.1\r\n{header_lines({'host': host, **headers})}"


def header_lines(headers: Mapping[str, str]) -> str:
    """`name: value` lines. Raises ValueError when a value would begin a line of its own."""
    lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    if lines.count("\n") != len(headers) or lines.count("\r") != len(headers) or "\0" in lines:
        raise ValueError("a header holds a line break or a null character")
    return lines


class HttpPool:
    """Connections to one origin, opened when needed and kept for `keepalive_s` after an answer. Last used, first taken."""

    __slots__ = ("_clock", "_closed", "_connect_s", "_empty", "_idle", "_keepalive_s", "_open", "_origin", "_timer")

    def __init__(self, origin: Origin, clock: Clock, *, connect_s: float, keepalive_s: float) -> None:
        self._origin = origin
        self._clock = clock
        #: For name look-up, TCP and TLS together.
        self._connect_s = connect_s
        self._keepalive_s = keepalive_s
        self._idle: deque[Connection] = deque()
        self._open: set[Connection] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._empty: asyncio.Future[None] | None = None

    async def send(self, head: bytes, body: bytes) -> Response:
        """The head of the answer to one request. Raises OSError (no connection, or Unanswered) or NotHttp.

        A server may close an idle connection just as we write to it. Then, and only then, the request goes out again,
        on a connection of its own.
        """
        connection = self._take()
        if connection is not None:
            try:
                return await connection.exchange(head, body)
            except Unanswered as error:
                if error.heard:
                    raise
        connection = await self._connect()
        return await connection.exchange(head, body)

    async def aclose(self) -> None:
        """Close every connection at once; returns when all are gone. Calls under way fail."""
        self._closed = True
        self._idle.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for connection in tuple(self._open):
            connection.drop()
        if self._open:
            self._empty = self._empty or asyncio.get_running_loop().create_future()
            await asyncio.wait((self._empty,), timeout=_CLOSE_S)

    # ---------------------------------------------------------------------------------------------- told by connections

    def free(self, connection: Connection) -> None:
        connection.idle_since = self._clock.now()
        self._idle.append(connection)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._keepalive_s, self._sweep)

    def lost(self, connection: Connection) -> None:
        self._open.discard(connection)
        if self._empty is not None and not self._open and not self._empty.done():
            self._empty.set_result(None)

    # -------------------------------------------------------------------------------------------------------------------

    def _take(self) -> Connection | None:
        idle = self._idle
        if not idle:
            return None
        oldest = self._clock.now() - self._keepalive_s
        while idle:
            connection = idle.pop()
            if connection.idle_since > oldest and connection.usable:
                return connection
            connection.drop()
        return None

    def _sweep(self) -> None:
        """Close what was idle for too long; those that came first wait in front."""
        idle = self._idle
        now = self._clock.now()
        while idle and (idle[0].idle_since <= now - self._keepalive_s or not idle[0].usable):
            idle.popleft().drop()
        self._timer = None
        if idle:
            left_s = idle[0].idle_since + self._keepalive_s - now
            self._timer = asyncio.get_running_loop().call_later(left_s, self._sweep)

    async def _connect(self) -> Connection:
        if self._closed:
            raise ConnectionAbortedError(errno.ECONNABORTED, "the backend is being closed")
        loop = asyncio.get_running_loop()
        origin = self._origin
        try:
            async with asyncio.timeout(self._connect_s):
                _, connection = await loop.create_connection(
                    lambda: Connection(loop, self),
                    origin.host,
                    origin.port,
                    ssl=origin.tls,
                    server_hostname=origin.host.rstrip(".") if origin.tls is not None else None,
                )
        except TimeoutError as error:
            raise TimeoutError(errno.ETIMEDOUT, f"no connection within {self._connect_s * 1000:.0f} ms") from error
        except UnicodeError as error:
            raise OSError(errno.EINVAL, "the name of its host cannot be looked up") from error
        if self._closed:
            connection.drop()
            raise ConnectionAbortedError(errno.ECONNABORTED, "the backend is being closed")
        if connection.usable:
            # Not before: of a connection whose making is cancelled, the loop may never say that it was lost.
            self._open.add(connection)
        return connection

    def __repr__(self) -> str:
        return f"HttpPool({self._origin.host}:{self._origin.port}, {len(self._open)} open, {len(self._idle)} idle)"
