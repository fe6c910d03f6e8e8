"""A listener of the edge with its sockets, and clients that count what fails."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from gateway.control.sockets import bind_sockets, close_groups
from gateway.edge.http_server import EdgeLimits, HttpEdge
from gateway.edge.listener import Listener
from gateway.exchange import Exchange, Reply
from gateway.readiness import Readiness
from policies.core.clock import SystemClock
from tests.support.edge_server import ToldHandler, whole
from tests.support.gateway_client import question

PATH = "/v1/chat/completions"


class HeldHandler(ToldHandler):
    """Answers `name`; requests wait while `gate` is shut."""

    def __init__(self, name: str) -> None:
        super().__init__(whole(json.dumps(name).encode()))
        self.gate = asyncio.Event()
        self.gate.set()

    async def handle(self, exchange: Exchange) -> Reply:
        self.handled += 1
        await self.gate.wait()
        return self._answer(exchange)


class Serving:
    """One listener."""

    def __init__(self, handler: ToldHandler) -> None:
        self.handler = handler
        self.readiness = Readiness()
        self.listener = Listener(
            HttpEdge(handler, self.readiness, SystemClock(), EdgeLimits(), "basic"),
            EdgeLimits(),
        )
        self.port = 0

    async def leave(self, *, lame_duck_s: float, limit_s: float, idle_s: float) -> int:
        """What a worker does to stop."""
        self.readiness.draining = True
        await self.listener.lame_duck(lame_duck_s)
        return await self.listener.drain(limit_s, idle_s)


def request_bytes(method: str = "POST", path: str = PATH, *, stream: bool = False) -> bytes:
    body = json.dumps(question("hello", **({"stream": True} if stream else {}))).encode() if method == "POST" else b""
    return f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def closes(self) -> bool:
        return self.headers.get("connection", "").lower() == "close"


class Connection:
    """A client's connection, used for one request after the other."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def ask(self, request: bytes | None = None) -> Answer:
        self.writer.write(request or request_bytes())
        return await self.answer()

    async def answer(self) -> Answer:
        async with asyncio.timeout(5.0):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
            first, *lines = head.split("\r\n")
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines if line)}
            if "content-length" in headers:
                body = await self.reader.readexactly(int(headers["content-length"]))
            else:
                body = await self.reader.readuntil(b"\r\n0\r\n\r\n")
        return Answer(int(first.split()[1]), headers, body)

    async def ended(self) -> bool:
        """Did the server close, with nothing more to say?"""
        async with asyncio.timeout(5.0):
            return await self.reader.read() == b""

    def close(self) -> None:
        self.writer.close()


class Stage:
    """Listeners and clients of one test."""

    def __init__(self) -> None:
        self._listeners: list[Listener] = []
        self._connections: list[Connection] = []

    async def serving(self, handler: ToldHandler, sockets: Sequence[socket.socket] | None = None) -> Serving:
        """On sockets of its own when none are given."""
        serving = Serving(handler)
        groups = bind_sockets("127.0.0.1", 0, 1) if sockets is None else []
        serving.port = await serving.listener.start(sockets or groups[0])
        close_groups(groups)
        self._listeners.append(serving.listener)
        return serving

    async def connect(self, port: int) -> Connection:
        connection = Connection(*await asyncio.open_connection("127.0.0.1", port))
        self._connections.append(connection)
        return connection

    async def aclose(self) -> None:
        for connection in self._connections:
            connection.close()
        for listener in self._listeners:
            await listener.close()
        for connection in self._connections:
            with suppress(ConnectionError):
                await connection.writer.wait_closed()


async def staged(work: Callable[[Stage], Awaitable[None]]) -> None:
    stage = Stage()
    try:
        await work(stage)
    finally:
        await stage.aclose()


@dataclass
class Load:
    """Clients that ask without a pause until `stop`; they keep a connection for `each` requests, or until told to close."""

    port: int
    served: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    stop: bool = False

    async def client(self, each: int) -> None:
        while not self.stop:
            try:
                connection = Connection(*await asyncio.open_connection("127.0.0.1", self.port))
                try:
                    for _ in range(each):
                        answer = await connection.ask()
                        name = answer.body.decode() if answer.status == 200 else str(answer.status)
                        self.served[name] = self.served.get(name, 0) + 1
                        if answer.closes or self.stop:
                            break
                finally:
                    connection.close()
            except (OSError, EOFError, TimeoutError) as error:
                self.failures.append(repr(error))
