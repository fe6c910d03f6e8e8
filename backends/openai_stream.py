"""The chunks of one streaming answer of an OpenAI-compatible backend, in batches as they arrive."""

from __future__ import annotations

import asyncio

from aiohttp import ClientPayloadError

from backends.api import Chunk, ChunkKind
from backends.http_connection import Response
from backends.http_transport import HttpTransport
from backends.openai_wire import ChunkKinds
from backends.sse import SseReader
from policies.core.errors import BackendError, IdleTimeout, MalformedAnswer, TotalTimeout, TruncatedAnswer

#: Chunks that are not yet an answer are held back until there is one; more than this is no stream of an answer.
_MAX_BEFORE_CONTENT_BYTES = 64 << 10


class ChunkStream:
    """Reads one response. `batch` returns what has arrived, [] at a good end, and raises at a bad one, after everything
    good before it has been returned. `skipped` counts events that were no JSON chunk: they are left out."""

    __slots__ = ("_content", "_done", "_failure", "_kinds", "_response", "_seen", "_sse", "_transport", "skipped")

    def __init__(self, transport: HttpTransport, response: Response, choices: int) -> None:
        self._transport = transport
        self._response = response
        self._content = response.content
        self._sse = SseReader()
        self._kinds = ChunkKinds(choices)
        self._done = False
        self._seen = False
        self._failure: BackendError | None = None
        self.skipped = 0

    async def first(self) -> list[Chunk]:
        """Everything up to and with the first content (or the finish of an empty answer)."""
        held: list[Chunk] = []
        size = 0
        while True:
            batch = await self.batch()
            held += batch
            if not batch or any(chunk.kind is not ChunkKind.META for chunk in batch):
                return held
            size += sum(len(chunk.data) for chunk in batch)
            if size > _MAX_BEFORE_CONTENT_BYTES:
                raise MalformedAnswer(f"more than {_MAX_BEFORE_CONTENT_BYTES} bytes of the stream hold no content")

    async def next(self, idle_s: float, total_s: float) -> list[Chunk]:
        """The next batch, within `idle_s` and what is left of `total_s`. Raises IdleTimeout or TotalTimeout."""
        if total_s <= 0:
            raise TotalTimeout("the stream ran past its total limit", self._transport.name)
        # A timer that fails the read costs less than a cancelling timeout, and cannot fire while the consumer works.
        timer = asyncio.get_running_loop().call_later(min(idle_s, total_s), self._expire, idle_s < total_s)
        try:
            return await self.batch()
        finally:
            timer.cancel()

    async def batch(self) -> list[Chunk]:
        while not self._done and self._failure is None:
            try:
                data = await self._content.readany()
            except (ClientPayloadError, OSError) as error:
                self._end(self._transport.cut(error))
                break
            if data:
                events = self._sse.feed(data)
            elif self._content.at_eof():
                events = self._sse.flush()
            else:
                continue
            chunks = self._read(events)
            if not data and not self._done:
                self._end(None)
            if chunks:
                return chunks
        if self._failure is not None:
            raise self._failure
        return []

    def close(self) -> None:
        """Close the connection at once, unless the answer is complete: then it may serve again."""
        if not self._done:
            self._response.close()
        elif not self._content.is_eof():
            self._transport.linger(self._response)

    def _read(self, events: list[bytes]) -> list[Chunk]:
        chunks: list[Chunk] = []
        for event in events:
            if event == b"[DONE]":
                self._end(None)
                break
            try:
                chunk = self._kinds.read(event)
            except MalformedAnswer:
                self.skipped += 1
                continue
            except BackendError as error:
                error.backend = self._transport.name
                self._failure = error
                break
            self._seen = True
            chunks.append(chunk)
        return chunks

    def _end(self, cut: BackendError | None) -> None:
        """The input is over. With every finish_reason seen the answer is complete, however the connection ended."""
        if self._kinds.finished:
            self._done = True
        elif cut is not None:
            self._failure = cut
        elif not self._seen:
            self._failure = MalformedAnswer("the backend's stream held no chunk", self._transport.name)
        else:
            self._failure = TruncatedAnswer("the backend's stream ended without a finish_reason", self._transport.name)

    def _expire(self, idle: bool) -> None:
        name = self._transport.name
        error: BackendError
        if idle:
            error = IdleTimeout(f"the backend {name!r} sent nothing for longer than the idle limit", name)
        else:
            error = TotalTimeout("the stream ran past its total limit", name)
        self._content.set_exception(error)
