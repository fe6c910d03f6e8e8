"""One kind of stored thing over two stores: decoded values in memory (L1), bytes in a shared store (L2, optional)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Generic, TypeVar

from cache.api import MISS, Codec, Item, Kind, Missing, Store, Write
from cache.memory import Memory
from policies.core.clock import Clock

V = TypeVar("V")

#: Values waiting for L2: more, or more bytes, are dropped (and counted). They are in L1 all the same.
_QUEUE_ITEMS = 1024
_QUEUE_BYTES = 64 << 20
#: What one round trip may carry.
_BATCH_ITEMS = 32
_BATCH_BYTES = 1 << 20
#: Values over this are encoded and decoded in a thread: compressing a megabyte takes milliseconds.
_THREAD_BYTES = 128 << 10


class Tiered(Generic[V]):
    """Reads L1, then L2 for the rest; writes L1 at once and L2 behind the caller's back."""

    def __init__(self, kind: Kind, memory: Memory[V], store: Store | None, codec: Codec[V], clock: Clock) -> None:
        self._kind = kind
        self._memory = memory
        self._store = store
        self._codec = codec
        self._clock = clock
        self._queue: dict[bytes, Item[V]] = {}
        self._queued_bytes = 0
        self._writer: asyncio.Task[None] | None = None
        self._closed = False
        self._dropped = 0
        #: Synchronous L1 look-up of one key.
        self.get_now = memory.get

    @property
    def has_l2(self) -> bool:
        return self._store is not None

    async def get_l2(self, keys: Sequence[bytes]) -> list[Item[V] | Missing]:
        """L2 only, in one round trip. What is found moves to L1 with the time it has left."""
        if self._store is None:
            return [MISS] * len(keys)
        found: list[Item[V] | Missing] = []
        for key, stored in zip(keys, await self._store.get_many(self._kind, keys), strict=True):
            if stored is MISS:
                found.append(MISS)
                continue
            # The time left counts from the reply, so before anything slow.
            expires_at = self._clock.now() + stored.left_s
            if len(stored.value) > _THREAD_BYTES:
                value = await asyncio.to_thread(self._codec.decode, stored.value)
            else:
                value = self._codec.decode(stored.value)
            if value is MISS:
                found.append(MISS)
                continue
            item = Item(value, expires_at, self._codec.size_bytes(value))
            known = self._memory.get(key)
            if known is not MISS and known.expires_at > expires_at:
                item = known  # stored here while we were asking there
            else:
                self._memory.put(key, item)
            found.append(item)
        return found

    async def get_many(self, keys: Sequence[bytes]) -> list[Item[V] | Missing]:
        """L1, then one L2 round trip for what was not there. One answer a key, in order."""
        found: list[Item[V] | Missing] = [self._memory.get(key) for key in keys]
        wanted = [at for at, item in enumerate(found) if item is MISS]
        if wanted and self._store is not None:
            for at, item in zip(wanted, await self.get_l2([keys[at] for at in wanted]), strict=True):
                found[at] = item
        return found

    def put(self, key: bytes, value: V, ttl_s: float) -> None:
        """Store for `ttl_s` seconds. Needs a running event loop when there is an L2."""
        item = Item(value, self._clock.now() + ttl_s, self._codec.size_bytes(value))
        self._memory.put(key, item)
        if self._store is None:
            return
        known = self._queue.pop(key, None)
        if known is not None:
            self._queued_bytes -= known.size_bytes
        full = len(self._queue) >= _QUEUE_ITEMS or self._queued_bytes + item.size_bytes > _QUEUE_BYTES
        if full or self._closed or not self._store.available:
            self._dropped += 1
            return
        self._queue[key] = item
        self._queued_bytes += item.size_bytes
        if self._writer is None or self._writer.done():
            self._writer = asyncio.create_task(self._write(self._store), name=f"cache-write-{self._kind.value}")

    async def delete_many(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._memory.delete(key)
            known = self._queue.pop(key, None)
            if known is not None:
                self._queued_bytes -= known.size_bytes
        if self._store is not None:
            await self._store.delete_many(self._kind, keys)

    def stats(self) -> dict[str, float]:
        """L1's figures, and writes to L2 that wait or were dropped."""
        return {**self._memory.stats(), "l2_waiting": len(self._queue), "l2_dropped": self._dropped}

    async def flush(self) -> None:
        """Wait until what was put before is in L2 (or has failed)."""
        while self._writer is not None and not self._writer.done():
            await asyncio.shield(self._writer)

    async def aclose(self, limit_s: float = 1.0) -> None:
        """Write what waits, for at most `limit_s`. The store itself belongs to whoever made it."""
        self._closed = True
        writer = self._writer
        if writer is not None:
            await asyncio.wait({writer}, timeout=limit_s)
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)

    async def _write(self, store: Store) -> None:
        while self._queue:
            writes: list[Write] = []
            size = 0
            while self._queue and len(writes) < _BATCH_ITEMS and size < _BATCH_BYTES:
                # Oldest first.
                key = next(iter(self._queue))
                item = self._queue.pop(key)
                self._queued_bytes -= item.size_bytes
                if item.size_bytes > _THREAD_BYTES:
                    data = await asyncio.to_thread(self._codec.encode, item.value)
                else:
                    data = self._codec.encode(item.value)
                left_s = item.expires_at - self._clock.now()
                if data is not MISS and left_s > 0:
                    writes.append(Write(key, data, left_s))
                    size += len(data)
            await store.put_many(self._kind, writes)
