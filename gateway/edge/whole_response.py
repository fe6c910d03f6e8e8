"""A whole answer, written to the connection in one piece.

aiohttp's Response goes through header dictionaries, a stream writer and two coroutines a layer; for a cached answer that is
the larger part of its cost. Ours is for the plain case only: HTTP/1.1, status 200, a body of known length. Everything else
(errors, HEAD, HTTP/1.0, streams) takes aiohttp's own way.
"""

from __future__ import annotations

from email.utils import formatdate

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from policies.core.clock import Clock


class DateHeader:
    """The `Date` header's value, worked out once a second."""

    __slots__ = ("_clock", "_second", "_text")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._second = -1
        self._text = ""

    def text(self) -> str:
        second = int(self._clock.wall())
        if second != self._second:
            self._second, self._text = second, formatdate(second, usegmt=True)
        return self._text


class WholeResponse(web.StreamResponse):
    """Status 200 with `body`. Header names and values come from configuration and from us: none holds a line end."""

    def __init__(self, headers: dict[str, str], body: bytes, date: str) -> None:
        super().__init__()
        lines = [f"{name}: {value}\r\n" for name, value in headers.items()]
        self._head = f"HTTP/1.1 200 OK\r\n{''.join(lines)}Content-Length: {len(body)}\r\nDate: {date}\r\n"
        self._whole_body = body

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        """Called by aiohttp's server; nothing is sent yet."""
        self._req = request
        if self._keep_alive is None:
            # Else it was told to be the last answer of its connection.
            self._keep_alive = request.keep_alive
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        """Send everything, and wait where the client does not take it: it may have sent many requests at once.

        Raises ConnectionResetError when the client is gone, as aiohttp expects.
        """
        protocol = self._req.protocol if self._req is not None else None
        transport = protocol.transport if protocol is not None else None
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client is gone")
        end = "\r\n" if self._keep_alive else "Connection: close\r\n\r\n"
        transport.write((self._head + end).encode() + self._whole_body)
        if protocol is not None and protocol.writing_paused:
            await protocol._drain_helper()  # noqa: SLF001  aiohttp has no public name for it


def fits(http: web.BaseRequest) -> bool:
    """May a 200 for this request be a WholeResponse?"""
    return http.version == (1, 1) and http.method == "POST"
