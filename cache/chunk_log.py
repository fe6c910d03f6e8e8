"""The chunks of one stream in flight: appended once, read by several readers, each at its own pace, in bounded memory."""

from __future__ import annotations

import asyncio

from backends.api import Chunk, ChunkKind
from policies.core.errors import TruncatedAnswer

#: Up to this size the log keeps everything, so that a reader may still begin, and the answer be stored.
LIMIT_BYTES = 1 << 20
#: Chunks that all have read are forgotten this many at a time.
_TRIM = 64


class Cursor:
    """One reader's place: the number of the chunk it reads next, and the bytes it has read."""

    __slots__ = ("next", "read_bytes")

    def __init__(self) -> None:
        self.next = 0
        self.read_bytes = 0


class ChunkLog:
    """Within LIMIT_BYTES nothing is forgotten and the writer never waits. Beyond it the log is a window:

    - no reader may begin any more (`complete` is False);
    - the writer waits while the fastest reader is LIMIT_BYTES behind: a slow client bounds memory;
    - a reader that is so far behind the fastest that 2 * LIMIT_BYTES would have to be kept for it is let go, so that it
      slows nobody.
    """

    __slots__ = ("_base", "_chunks", "_forgotten_bytes", "_room", "_total_bytes", "finished", "readers")

    def __init__(self) -> None:
        self._chunks: list[Chunk] = []
        self._base = 0
        self._forgotten_bytes = 0
        self._total_bytes = 0
        self._room: asyncio.Future[None] | None = None
        self.readers: set[Cursor] = set()
        #: A FINISH chunk was seen: the answer is whole.
        self.finished = False

    @property
    def complete(self) -> bool:
        """Is everything since the first chunk still here?"""
        return self._total_bytes <= LIMIT_BYTES

    @property
    def kept_bytes(self) -> int:
        return self._total_bytes - self._forgotten_bytes

    def chunks(self) -> list[Chunk]:
        """All chunks of a `complete` log."""
        return self._chunks

    def open(self) -> Cursor:
        cursor = Cursor()
        self.readers.add(cursor)
        return cursor

    def close(self, cursor: Cursor) -> None:
        self.readers.discard(cursor)
        self._make_room()

    def append(self, chunk: Chunk) -> None:
        self._chunks.append(chunk)
        self._total_bytes += len(chunk.data)
        if chunk.kind is ChunkKind.FINISH:
            self.finished = True
        if self._total_bytes - self._forgotten_bytes > 2 * LIMIT_BYTES:
            self._forget_beyond(2 * LIMIT_BYTES)

    def take(self, cursor: Cursor) -> Chunk | None:
        """The reader's next chunk; None when there is none yet. Raises TruncatedAnswer for a reader that was let go."""
        at = cursor.next - self._base
        if at < 0:
            raise TruncatedAnswer("this reader fell too far behind the others of a shared stream")
        if at == len(self._chunks):
            return None
        chunk = self._chunks[at]
        cursor.next += 1
        cursor.read_bytes += len(chunk.data)
        if self._total_bytes > LIMIT_BYTES:
            self._trim()
            self._make_room()
        return chunk

    def full(self) -> bool:
        """Must the writer wait?"""
        return self._total_bytes > LIMIT_BYTES and self._lag_bytes() > LIMIT_BYTES

    async def room(self) -> None:
        """Return when the fastest reader has caught up enough. For the one writer."""
        while self.full():
            self._room = asyncio.get_running_loop().create_future()
            await self._room

    def _lag_bytes(self) -> int:
        """How far the fastest reader is behind."""
        return self._total_bytes - max((cursor.read_bytes for cursor in self.readers), default=0)

    def _make_room(self) -> None:
        room = self._room
        if room is not None and not room.done() and not self.full():
            room.set_result(None)

    def _trim(self) -> None:
        passed = min((cursor.next for cursor in self.readers), default=self._base) - self._base
        if passed >= _TRIM:
            self._forget(passed)

    def _forget_beyond(self, size: int) -> None:
        # The fastest reader is never let go: what it has not read is at most LIMIT_BYTES and one chunk.
        fastest = max((cursor.next for cursor in self.readers), default=self._base) - self._base
        count, kept = 0, self.kept_bytes
        while kept > size and count < fastest:
            kept -= len(self._chunks[count].data)
            count += 1
        self._forget(count)

    def _forget(self, count: int) -> None:
        self._forgotten_bytes += sum(len(chunk.data) for chunk in self._chunks[:count])
        del self._chunks[:count]
        self._base += count
