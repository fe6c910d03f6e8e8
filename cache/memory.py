"""L1: decoded values in this process, bounded by bytes. moka-py evicts (W-TinyLFU); our clock decides what has expired."""

from __future__ import annotations

from typing import Generic, TypeVar

from moka_py import Moka

from cache.api import MISS, Item, Missing
from policies.core.clock import Clock

V = TypeVar("V")


class Memory(Generic[V]):
    """Values by key, at most `capacity_bytes` of them by their own reckoning (`Item.size_bytes`)."""

    def __init__(self, capacity_bytes: int, clock: Clock) -> None:
        self.capacity_bytes = capacity_bytes
        self._clock = clock
        self._evicted = 0
        # Looking for expired entries is ours: a moka time limit would run on another clock.
        self._items: Moka[bytes, Item[V]] = Moka(
            capacity_bytes, weigher=lambda _key, item: item.size_bytes, eviction_listener=self._on_eviction
        )

    def get(self, key: bytes) -> Item[V] | Missing:
        """The live item under `key`. About half a microsecond."""
        item = self._items.get(key)
        if item is None:
            return MISS
        if item.expires_at <= self._clock.now():
            self._items.remove(key)
            return MISS
        return item

    def put(self, key: bytes, item: Item[V]) -> None:
        """Keep `item`, unless it is dead already or could never fit."""
        if item.size_bytes <= self.capacity_bytes and item.expires_at > self._clock.now():
            self._items.set(key, item)

    def delete(self, key: bytes) -> None:
        self._items.remove(key)

    def clear(self) -> None:
        self._items.clear()

    def stats(self) -> dict[str, float]:
        """Entries, bytes (as reckoned) and evictions for want of room, after pending upkeep."""
        self._items.run_pending_tasks()
        return {
            "entries": self._items.count(),
            "bytes": self._items.weighted_size(),
            "evictions": self._evicted,
        }

    def _on_eviction(self, _key: bytes, _item: Item[V], cause: str) -> None:
        if cause == "size":
            self._evicted += 1
