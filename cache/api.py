"""What a store is: bytes under 16-byte keys, by kind, with a life. Every tier is built on this."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, StrEnum
from typing import Final, Generic, Literal, Protocol, TypeVar

import msgspec


class Kind(StrEnum):
    """The kinds of things stored; the letter stands in their names."""

    RESULT = "r"
    FEATURE = "f"
    SUBGRAPH = "s"
    LEASE = "l"


class Miss(Enum):
    """Nothing there. A type of its own, so that a stored None or empty value is never taken for it."""

    MISS = "miss"

    def __repr__(self) -> str:
        return "MISS"


MISS: Final = Miss.MISS
Missing = Literal[Miss.MISS]

V = TypeVar("V")


class Stored(msgspec.Struct, frozen=True, gc=False):
    """A value as a store returns it, with the seconds it has left to live there."""

    value: bytes
    left_s: float


class Write(msgspec.Struct, frozen=True, gc=False):
    """A value to be stored under `key` (16 bytes) for `ttl_s` seconds."""

    key: bytes
    value: bytes
    ttl_s: float


class Store(Protocol):
    """A place to keep bytes, shared between processes or not. It fails open: trouble is a miss and a counter.

    No method raises anything but CancelledError. A cancelled call harms no other call.
    """

    async def get_many(self, kind: Kind, keys: Sequence[bytes]) -> list[Stored | Missing]:
        """One answer a key, in order."""
        ...

    async def put_many(self, kind: Kind, writes: Sequence[Write]) -> None: ...

    async def delete_many(self, kind: Kind, keys: Sequence[bytes]) -> None: ...

    @property
    def available(self) -> bool:
        """False while it is known to be down and is being left alone. Never affects readiness."""
        ...

    def stats(self) -> dict[str, float]:
        """Counters since the start."""
        ...

    async def aclose(self) -> None: ...


class Item(msgspec.Struct, Generic[V], frozen=True):
    """A decoded value in memory. `expires_at` is on the injected clock; `size_bytes` is what it costs to keep."""

    value: V
    expires_at: float
    size_bytes: int


class Codec(Protocol[V]):
    """Between a tier's values and a store's bytes. `decode` never raises: what it cannot read is a miss."""

    def encode(self, value: V) -> bytes | Missing: ...

    def decode(self, data: bytes) -> V | Missing: ...

    def size_bytes(self, value: V) -> int: ...
