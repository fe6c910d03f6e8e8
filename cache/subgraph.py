"""The subgraph cache: inner tensors of models whose graphs are split, by the digest of everything they were computed from.

bytes    0  "GWT"            magic
         3  version          one byte; another version is a miss
         4  check            8 bytes, xxh3-64 of what follows: a damaged tensor must never become a score
        12  msgpack          list of (name, dtype, shape, bytes)

Not compressed: numbers of a network hardly shrink. What a key covers is the model's business (`backends.api.TensorCache`):
weights, graph, provider, inputs. So nothing here is ever stale, and the time to live only bounds what lies unused.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from cache.api import MISS, Kind, Missing, Store
from cache.memory import Memory
from cache.tiered import Tiered
from policies.core.clock import Clock

MAGIC = b"GWT"
VERSION = 1
TTL_S = 24 * 3600.0
#: A value with more bytes is neither kept nor read.
MAX_VALUE_BYTES = 16 << 20

_FIXED_BYTES = 12
#: Entries stored together do not end together: their life varies by this much to either side.
_JITTER = 0.1
#: Plain numbers only: NumPy would read far more than that out of a dtype's text.
_DTYPES = frozenset(
    {"|b1", "|i1", "|u1", *(f"<{kind}{size}" for kind in "iu" for size in (2, 4, 8)), "<f2", "<f4", "<f8"}
)
#: What an entry, and each array in it, costs in memory besides its numbers.
_ENTRY_BYTES = 512
_ARRAY_BYTES = 160

Tensors = dict[str, NDArray[Any]]


class _Packed(msgspec.Struct, array_like=True, frozen=True):
    """Raw little-endian bytes of one tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes


_to_msgpack = msgspec.msgpack.Encoder().encode
_read = msgspec.msgpack.Decoder(list[_Packed]).decode


class TensorCodec:
    """Named tensors as bytes and back. What cannot be read is a miss and counted in `unreadable`."""

    def __init__(self) -> None:
        self.unreadable = 0
        self.unwritable = 0

    def encode(self, value: Tensors) -> bytes | Missing:
        """MISS for tensors that hold no plain numbers."""
        packed = []
        for name, array in value.items():
            little = array.astype(array.dtype.newbyteorder("<"), copy=False)
            if little.dtype.str not in _DTYPES:
                self.unwritable += 1
                return MISS
            packed.append(_Packed(name, little.dtype.str, little.shape, little.tobytes()))
        data = _to_msgpack(packed)
        return b"".join((MAGIC, bytes((VERSION,)), xxhash.xxh3_64_digest(data), data))

    def decode(self, data: bytes) -> Tensors | Missing:
        try:
            return _decode(data)
        except (msgspec.MsgspecError, ValueError, OverflowError):
            self.unreadable += 1
            return MISS

    def size_bytes(self, value: Tensors) -> int:
        return _ENTRY_BYTES + sum(array.nbytes + _ARRAY_BYTES for array in value.values())


def _decode(data: bytes) -> Tensors:
    body = data[_FIXED_BYTES:]
    if len(data) > MAX_VALUE_BYTES or data[:3] != MAGIC or len(data) < _FIXED_BYTES or data[3] != VERSION:
        raise ValueError
    if xxhash.xxh3_64_digest(body) != data[4:_FIXED_BYTES]:
        raise ValueError
    found: Tensors = {}
    for packed in _read(body):
        # Sizes are counted here first: NumPy takes -1 for "whatever is left".
        if packed.dtype not in _DTYPES or packed.name in found or min(packed.shape, default=0) < 0:
            raise ValueError
        dtype = np.dtype(packed.dtype)
        if math.prod(packed.shape) * dtype.itemsize != len(packed.data):
            raise ValueError
        found[packed.name] = np.frombuffer(packed.data, dtype).reshape(packed.shape)
    return found


class SubgraphCache:
    """Implements `backends.api.TensorCache`. Look-ups never raise; what they give is read-only.

    `random` is uniform in [0, 1).
    """

    def __init__(
        self,
        capacity_bytes: int,
        clock: Clock,
        random: Callable[[], float],
        store: Store | None = None,
        ttl_s: float = TTL_S,
    ) -> None:
        self._codec = TensorCodec()
        memory: Memory[Tensors] = Memory(capacity_bytes, clock)
        self._tiered: Tiered[Tensors] = Tiered(Kind.SUBGRAPH, memory, store, self._codec, clock)
        self._store = store
        self._random = random
        self._ttl_s = ttl_s
        self._epoch = 0
        self._counts = dict.fromkeys(("hits_l1", "hits_l2", "misses", "stored", "too_large"), 0)

    async def get_many(self, keys: Sequence[bytes]) -> list[Tensors | None]:
        """One answer a key, in order: memory, then one round trip to L2 for the rest."""
        keys = [self._named(key) for key in keys]
        counts = self._counts
        found: list[Tensors | None] = []
        for key in keys:
            item = self._tiered.get_now(key)
            found.append(None if item is MISS else item.value)
        wanted = [at for at, tensors in enumerate(found) if tensors is None]
        counts["hits_l1"] += len(keys) - len(wanted)
        if wanted and self._store is not None:
            for at, item in zip(wanted, await self._tiered.get_l2([keys[at] for at in wanted]), strict=True):
                if item is not MISS:
                    found[at] = item.value
                    counts["hits_l2"] += 1
        counts["misses"] += found.count(None)
        return found

    async def put(self, key: bytes, tensors: Tensors) -> None:
        """Keep a copy of `tensors`: they are often views of a whole batch."""
        if self._codec.size_bytes(tensors) > MAX_VALUE_BYTES:
            self._counts["too_large"] += 1
            return
        life_s = self._ttl_s * (1.0 + _JITTER * (2.0 * self._random() - 1.0))
        self._tiered.put(self._named(key), {name: _frozen(array) for name, array in tensors.items()}, life_s)
        self._counts["stored"] += 1

    def set_epoch(self, epoch: int) -> None:
        """Everything kept under another epoch is out of reach from now on (0 at the start)."""
        self._epoch = epoch

    def _named(self, key: bytes) -> bytes:
        if not self._epoch:
            return key
        return hashlib.blake2b(key, digest_size=16, salt=self._epoch.to_bytes(8, "little")).digest()

    def stats(self) -> dict[str, float]:
        """Plain figures since the start; hits and misses count tensors sets looked up, one a row where rows are kept."""
        figures: dict[str, float] = {**self._counts, **self._tiered.stats()}
        figures["unreadable"] = self._codec.unreadable
        figures["unwritable"] = self._codec.unwritable
        return figures

    async def flush(self) -> None:
        """Wait until what was put before has reached L2 or failed to."""
        await self._tiered.flush()

    async def aclose(self) -> None:
        """Write what waits for L2. The store itself is closed by whoever made it."""
        await self._tiered.aclose()


def _frozen(array: NDArray[Any]) -> NDArray[Any]:
    copy = np.array(array, order="C")
    copy.flags.writeable = False
    return copy
