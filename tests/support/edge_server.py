"""The HTTP edge on a real socket, over a handler that answers what a test tells it to."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from backends.api import BackendInfo, ChatAnswer, Chunk, ChunkKind
from gateway.control.sockets import bind_sockets, close_groups
from gateway.edge.http_server import EdgeLimits, HttpEdge
from gateway.edge.listener import Listener
from gateway.exchange import Exchange, Record, Reply
from gateway.readiness import Readiness
from policies.core.clock import SystemClock


class ToldHandler:
    """`answer(exchange)` gives the reply; `records` are those of finished requests, in order."""

    def __init__(self, answer: Callable[[Exchange], Reply]) -> None:
        self._answer = answer
        self.handled = 0
        self.records: list[Record] = []

    async def handle(self, exchange: Exchange) -> Reply:
        self.handled += 1
        return self._answer(exchange)

    def completed(self, record: Record) -> None:
        self.records.append(record)

    def models(self, authorization: str | None) -> list[tuple[str, str]]:
        return []

    def describe(self, model: str, authorization: str | None) -> BackendInfo | None:
        return None


@asynccontextmanager
async def edge_here(handler: ToldHandler, limits: EdgeLimits) -> AsyncIterator[str]:
    """The URL of an edge with these limits."""
    edge = HttpEdge(handler, Readiness(), SystemClock(), limits, "basic")
    listener = Listener(edge, limits)
    groups = bind_sockets("127.0.0.1", 0, 1)
    port = await listener.start(groups[0])
    close_groups(groups)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await listener.close()


def whole(text: bytes) -> Callable[[Exchange], Reply]:
    """Every request gets this body."""
    return lambda exchange: Reply(exchange.record, answer=ChatAnswer(text, "told", "stop"))


class Stream:
    """A committed stream of `chunks`, without end when `endless`; `open` until it has ended or was closed."""

    def __init__(self, *chunks: Chunk | Exception, endless: bool = False) -> None:
        self._chunks = chunks
        self._endless = endless
        self.open = 0
        self.given = 0

    def __call__(self, exchange: Exchange) -> Reply:
        return Reply(exchange.record, held=[content(b"first")], rest=self._rest())

    async def _rest(self) -> AsyncIterator[Chunk]:
        self.open += 1
        try:
            while True:
                for chunk in self._chunks:
                    if isinstance(chunk, Exception):
                        raise chunk
                    self.given += 1
                    yield chunk
                if not self._endless:
                    return
        finally:
            self.open -= 1


def content(text: bytes) -> Chunk:
    return Chunk(b'{"choices":[{"delta":{"content":"%s"}}]}' % text, ChunkKind.CONTENT)
