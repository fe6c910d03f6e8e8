"""A steady load of which every request is accounted for: what comes of it while a gateway's processes are replaced or end.

Requests are written to plain sockets, so that what is counted is what happened on the wire: no client library tries again
by itself, and a connection that the server closed between two requests is told from one that it closed on a request.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self
from urllib.parse import urlsplit

from policies.core.clock import Clock

#: A request without an answer by then has failed.
PATIENCE_S = 15.0
#: A client that was refused does not try again at once.
_AGAIN_S = 0.05


class BrokenAnswer(Exception):
    """The connection ended, or was nonsense, before the answer was whole."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer. `head` is in lower case."""

    status: int
    head: str
    body: bytes

    @property
    def closes(self) -> bool:
        return "\r\nconnection: close\r\n" in self.head

    def rung(self) -> str:
        return _header(self.head, "x-gateway-rung")


def request(base_url: str, path: str, body: bytes, *, close: bool = False) -> bytes:
    """The bytes of a POST."""
    head = f"POST {path} HTTP/1.1\r\nhost: {urlsplit(base_url).netloc}\r\ncontent-type: application/json\r\n"
    return (
        f"{head}{'connection: close' + chr(13) + chr(10) if close else ''}content-length: {len(body)}\r\n\r\n".encode()
        + body
    )


class Wire:
    """One connection. Raises OSError when it cannot be made, BrokenAnswer when an answer is not whole."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, base_url: str) -> Self:
        parts = urlsplit(base_url)
        return cls(*await asyncio.open_connection(parts.hostname, parts.port))

    @property
    def ended(self) -> bool:
        """Has the server closed it?"""
        return self._reader.at_eof() or self._reader.exception() is not None or self._writer.is_closing()

    async def ask(self, raw: bytes) -> Answer:
        try:
            self._writer.write(raw)
            head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
            if "\r\ntransfer-encoding: chunked\r\n" in head:
                body = await self._chunks()
            else:
                body = await self._reader.readexactly(int(_header(head, "content-length") or 0))
            return Answer(int(head.split(" ", 2)[1]), head, body)
        except (asyncio.IncompleteReadError, OSError, ValueError) as error:
            raise BrokenAnswer(_in_words(error)) from error

    async def _chunks(self) -> bytes:
        body = bytearray()
        while size := int(await self._reader.readuntil(b"\r\n"), 16):
            body += (await self._reader.readexactly(size + 2))[:-2]
        await self._reader.readexactly(2)
        return bytes(body)

    def close(self) -> None:
        self._writer.transport.abort()


def _in_words(error: Exception) -> str:
    if isinstance(error, asyncio.IncompleteReadError):
        return "closed in mid-answer" if error.partial else "closed without an answer"
    return type(error).__name__


def _header(head: str, name: str) -> str:
    _, found, rest = head.partition(f"\r\n{name}: ")
    return rest.partition("\r\n")[0] if found else ""


@dataclass(frozen=True, slots=True)
class Kind:
    """`count` clients of a kind. `body` gives the next request's body; a `stream` must end with [DONE]. With `new`, each
    request has a connection of its own; else a client keeps its connection as long as the server does."""

    name: str
    count: int
    path: str
    body: Callable[[int], bytes]
    pause_s: float
    new: bool = False
    stream: bool = False


class SteadyLoad:
    """`async with SteadyLoad(...) as load:`; afterwards each request has been answered or is in `failed`.

    A closed loop: each client sends its next request `pause_s` after the last answer.
    """

    def __init__(self, base_url: str, kinds: tuple[Kind, ...], clock: Clock) -> None:
        self._url = base_url
        self._kinds = kinds
        self._clock = clock
        self._sent = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False
        #: The server has been told to end: a refused connection is the end of a client then, and no failure.
        self.may_end = False
        self.answered: Counter[str] = Counter()
        #: By kind of client and what was seen.
        self.failed: Counter[str] = Counter()
        #: Connections refused while that was to be expected.
        self.refused = 0
        self.slowest_s = 0.0

    async def __aenter__(self) -> Self:
        self._tasks = [
            asyncio.create_task(self._client(kind), name=f"steady-{kind.name}")
            for kind in self._kinds
            for _ in range(kind.count)
        ]
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            await self.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def stop(self) -> None:
        """Send nothing more; returns when all that was sent has been answered or has failed. Raises what a client did not expect."""
        self._stopping = True
        await asyncio.gather(*self._tasks)

    @property
    def requests(self) -> int:
        return self.answered.total() + self.failed.total()

    async def _client(self, kind: Kind) -> None:
        wire: Wire | None = None
        try:
            while not self._stopping:
                if wire is not None and wire.ended:
                    # Between two requests a server may close.
                    _close(wire)
                    wire = None
                self._sent += 1
                raw = request(self._url, kind.path, kind.body(self._sent), close=kind.new)
                began, pause_s = self._clock.now(), kind.pause_s
                try:
                    async with asyncio.timeout(PATIENCE_S):
                        wire = wire or await Wire.open(self._url)
                        answer = await wire.ask(raw)
                except ConnectionRefusedError:
                    if self.may_end:
                        self.refused += 1
                        return
                    self._fail(kind, "refused")
                    pause_s = max(pause_s, _AGAIN_S)
                except (BrokenAnswer, TimeoutError, OSError) as error:
                    self._fail(kind, str(error) or type(error).__name__)
                    _close(wire)
                    wire = None
                else:
                    self._judge(kind, answer)
                    if answer.closes or kind.new:
                        _close(wire)
                        wire = None
                self.slowest_s = max(self.slowest_s, self._clock.now() - began)
                await self._clock.sleep(pause_s)
        finally:
            _close(wire)

    def _judge(self, kind: Kind, answer: Answer) -> None:
        if answer.status != 200:
            self._fail(kind, f"status {answer.status}")
        elif kind.stream and b"data: [DONE]" not in answer.body:
            self._fail(kind, "a stream without its end")
        else:
            self.answered[kind.name] += 1

    def _fail(self, kind: Kind, what: str) -> None:
        self.failed[f"{kind.name}: {what}"] += 1


def _close(wire: Wire | None) -> None:
    """Close it, if there is one."""
    if wire is not None:
        wire.close()
