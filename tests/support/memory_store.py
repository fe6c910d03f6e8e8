"""A store in a dict, on the test's clock: what a shared store would do, with every call written down."""

from __future__ import annotations

from collections.abc import Sequence

from cache.api import MISS, Kind, Missing, Stored, Write
from policies.core.clock import Clock


class MemoryStore:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.values: dict[tuple[Kind, bytes], tuple[bytes, float]] = {}
        self.reads: list[list[bytes]] = []
        self.batches: list[int] = []
        self.available = True

    async def get_many(self, kind: Kind, keys: Sequence[bytes]) -> list[Stored | Missing]:
        self.reads.append(list(keys))
        found: list[Stored | Missing] = []
        for key in keys:
            value, until = self.values.get((kind, key), (b"", 0.0))
            left = until - self._clock.now()
            found.append(Stored(value, left) if left > 0 else MISS)
        return found

    async def put_many(self, kind: Kind, writes: Sequence[Write]) -> None:
        self.batches.append(len(writes))
        for write in writes:
            self.values[kind, write.key] = (write.value, self._clock.now() + write.ttl_s)

    async def delete_many(self, kind: Kind, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.values.pop((kind, key), None)

    def stats(self) -> dict[str, float]:
        return {"reads": len(self.reads)}

    async def aclose(self) -> None:
        self.available = False
