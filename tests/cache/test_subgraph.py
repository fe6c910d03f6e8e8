from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.api import MISS, Kind
from cache.redis import RedisOptions, RedisStore
from cache.subgraph import MAGIC, MAX_VALUE_BYTES, VERSION, SubgraphCache, TensorCodec, Tensors
from policies.core.clock import FakeClock, SystemClock
from tests.support.memory_store import MemoryStore
from tests.support.redis_server import RedisServer

KEYS = [bytes([index]) * 16 for index in range(4)]
DTYPES = ["bool", "int8", "uint8", "int16", "int32", "int64", "uint64", "float16", "float32", "float64"]


def tensors(seed: int = 0, width: int = 6) -> Tensors:
    source = np.random.default_rng(seed)
    return {"user": source.normal(size=(1, width)).astype(np.float32), "ids": source.integers(0, 9, size=3)}


def same(one: Tensors | None, other: Tensors) -> bool:
    return (
        one is not None
        and one.keys() == other.keys()
        and all(one[name].dtype == other[name].dtype and np.array_equal(one[name], other[name]) for name in one)
    )


def make(
    clock: FakeClock, store: MemoryStore | None = None, capacity: int = 1 << 20, random: float = 0.5
) -> SubgraphCache:
    return SubgraphCache(capacity, clock, lambda: random, store)


async def test_what_was_put_is_found_in_memory(clock: FakeClock) -> None:
    cache = make(clock)
    await cache.put(KEYS[0], tensors())
    found = await cache.get_many([KEYS[1], KEYS[0]])
    assert found[0] is None and same(found[1], tensors())
    stats = cache.stats()
    assert (stats["hits_l1"], stats["misses"], stats["stored"], stats["entries"]) == (1, 1, 1, 1)


async def test_tensors_are_copied_and_read_only(clock: FakeClock) -> None:
    cache = make(clock)
    batch = np.ones((100, 4), np.float32)
    await cache.put(KEYS[0], {"row": batch[3]})
    batch[:] = 0
    (found,) = await cache.get_many([KEYS[0]])
    assert found is not None and found["row"].base is None and found["row"].tolist() == [1.0] * 4
    with pytest.raises(ValueError, match="read-only"):
        found["row"][0] = 5


async def test_other_workers_find_it_in_the_shared_store(clock: FakeClock) -> None:
    store = MemoryStore(clock)
    one, other = make(clock, store), make(clock, store)
    await one.put(KEYS[0], tensors())
    await one.flush()
    assert {kind for kind, _ in store.values} == {Kind.SUBGRAPH}
    found = await other.get_many(KEYS[:3])
    assert same(found[0], tensors()) and found[1:] == [None, None]
    assert len(store.reads) == 1, "one round trip for all keys"
    assert same((await other.get_many([KEYS[0]]))[0], tensors())
    assert len(store.reads) == 1, "it lies in memory now"
    assert (other.stats()["hits_l2"], other.stats()["hits_l1"], other.stats()["misses"]) == (1, 1, 2)


@pytest.mark.parametrize(("random", "hours"), [(0.0, 24 * 0.9), (1.0, 24 * 1.1)])
async def test_entries_live_a_day_give_or_take_a_tenth(clock: FakeClock, random: float, hours: float) -> None:
    cache = make(clock, random=random)
    await cache.put(KEYS[0], tensors())
    clock.advance(hours * 3600 - 1)
    assert (await cache.get_many([KEYS[0]]))[0] is not None
    clock.advance(2)
    assert (await cache.get_many([KEYS[0]]))[0] is None


async def test_memory_is_bounded_by_bytes(clock: FakeClock) -> None:
    cache = make(clock, capacity=64 << 10)
    for index in range(100):
        await cache.put(index.to_bytes(16, "little"), {"t": np.zeros(1024, np.float32)})
    assert cache.stats()["bytes"] <= 64 << 10
    assert cache.stats()["entries"] <= 16


async def test_a_value_that_is_too_large_is_not_kept(clock: FakeClock) -> None:
    cache = make(clock, capacity=1 << 30)
    await cache.put(KEYS[0], {"t": np.zeros(MAX_VALUE_BYTES, np.uint8)})
    assert await cache.get_many([KEYS[0]]) == [None]
    assert cache.stats()["too_large"] == 1


async def test_another_epoch_reads_nothing_of_the_one_before(clock: FakeClock) -> None:
    store = MemoryStore(clock)
    cache = make(clock, store)
    await cache.put(KEYS[0], tensors())
    cache.set_epoch(7)
    assert await cache.get_many([KEYS[0]]) == [None]
    await cache.put(KEYS[0], tensors(1))
    await cache.flush()
    late = make(clock, store)
    late.set_epoch(7)
    assert same((await late.get_many([KEYS[0]]))[0], tensors(1))


async def test_through_a_real_server_and_without_it(redis_server: RedisServer) -> None:
    clock = SystemClock()
    store = RedisStore(RedisOptions(url=redis_server.url, namespace="t"), clock, lambda: 0.5)
    one, other = (SubgraphCache(1 << 20, clock, lambda: 0.5, store) for _ in range(2))
    await one.put(KEYS[0], tensors())
    await one.flush()
    assert same((await other.get_many([KEYS[0]]))[0], tensors())
    redis_server.close()
    assert (await other.get_many([KEYS[1]])) == [None]
    assert same((await other.get_many([KEYS[0]]))[0], tensors())
    await store.aclose()


# ------------------------------------------------------------------------------------------------------------- codec


@given(
    st.dictionaries(
        st.text(max_size=8),
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3)),
        max_size=3,
    )
)
def test_every_bit_comes_back(shapes: dict[str, tuple[str, list[int]]]) -> None:
    source = np.random.default_rng(0)
    value = {
        name: (source.normal(size=shape) * 50).astype(dtype)
        if dtype[0] == "f"
        else source.integers(0, 2, shape).astype(dtype)
        for name, (dtype, shape) in shapes.items()
    }
    codec = TensorCodec()
    data = codec.encode(value)
    assert data is not MISS
    assert data[:4] == MAGIC + bytes((VERSION,))
    found = codec.decode(data)
    assert found is not MISS and list(found) == list(value)
    for name, array in value.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert found[name].tobytes() == array.tobytes() and not found[name].flags.writeable


def test_what_holds_no_numbers_is_kept_in_memory_only() -> None:
    codec = TensorCodec()
    assert codec.encode({"t": np.array([b"x"], object)}) is MISS
    assert codec.encode({"t": np.array(["x"])}) is MISS
    assert codec.unwritable == 2


@given(st.data())
def test_damaged_bytes_are_a_miss(data: st.DataObject) -> None:
    codec = TensorCodec()
    good = codec.encode(tensors())
    assert good is not MISS
    at = data.draw(st.integers(0, len(good) - 1))
    if data.draw(st.booleans()):
        bad = good[:at]
    else:
        flipped = bytearray(good)
        flipped[at] ^= data.draw(st.integers(1, 255))
        bad = bytes(flipped)
    assert codec.decode(bad) is MISS and codec.unreadable == 1


def sealed(*packed: object) -> bytes:
    """A value whose check is right, whatever it says."""
    import msgspec
    import xxhash

    body = msgspec.msgpack.encode(list(packed))
    return MAGIC + bytes((VERSION,)) + xxhash.xxh3_64_digest(body) + body


@pytest.mark.parametrize(
    "data",
    [
        sealed(("t", "<f4", (2,), b"\0" * 7)),
        sealed(("t", "<f4", (-1,), b"\0" * 8)),
        sealed(("t", "<f4", (-2, -1), b"\0" * 8)),
        sealed(("t", "|O", (1,), b"\0" * 8)),
        sealed(("t", "<f4,<f4", (1,), b"\0" * 8)),
        sealed(("t", "<U2", (1,), b"\0" * 8)),
        sealed(("t", "<f4", (1,), b"\0" * 4), ("t", "<f4", (1,), b"\0" * 4)),
        sealed(("t", "<f4", (2**32, 2**31), b"")),
        sealed(("t", "<f4")),
        sealed(5),
        b"",
        b"GWC" + sealed()[3:],
        MAGIC + bytes((VERSION + 1,)) + sealed()[4:],
    ],
)
def test_what_says_impossible_things_is_a_miss(data: bytes) -> None:
    codec = TensorCodec()
    assert codec.decode(data) is MISS
    assert codec.decode(sealed(("t", "<f4", (1,), b"\0" * 4))) is not MISS
    assert codec.unreadable == 1
