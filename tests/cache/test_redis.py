"""Redis as an accelerator: whatever it does, reads are hits or misses, and never another key's value."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator

import pytest
import structlog

from cache.api import MISS, Kind, Stored, Write
from cache.key import entry_key
from cache.redis import RedisOptions, RedisStore
from cache.result import ResultCache
from policies.core.clock import FakeClock
from tests.support.cache_samples import LIFE, chat_answer, chat_body, digest_of, meta
from tests.support.redis_server import RedisServer, free_port

pytestmark = pytest.mark.redis

DIGEST = digest_of(chat_body(temperature=0))
K1 = entry_key(DIGEST.key, "F1")


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def new_store(url: str, clock: FakeClock, **options: object) -> RedisStore:
    return RedisStore(RedisOptions(url=url, namespace="test", **options), clock, lambda: 0.5)  # type: ignore[arg-type]


@pytest.fixture
async def store(redis_server: RedisServer, clock: FakeClock) -> AsyncIterator[RedisStore]:
    made = new_store(redis_server.url, clock, limit_s=0.25)
    yield made
    await made.aclose()


async def recovered(store: RedisStore, clock: FakeClock) -> bool:
    """Let the open time pass and give the probe its chance."""
    for _ in range(20):
        clock.advance(40)
        await store.get_many(Kind.RESULT, [key(0)])
        for _ in range(50):
            if store.available:
                return True
            await asyncio.sleep(0.002)
    return False


async def test_values_have_the_contracted_name_and_life(store: RedisStore, redis_server: RedisServer) -> None:
    await store.put_many(Kind.RESULT, [Write(K1, b"value", 3600.0), Write(key(2), b"", 1.0)])
    name = f"gw:test:v1:r:{K1.hex()}"
    assert await redis_server.command("GET", name) == b"$5\r\nvalue\r\n"
    found, empty, absent, other_kind = [
        *await store.get_many(Kind.RESULT, [K1, key(2), key(3)]),
        *await store.get_many(Kind.FEATURE, [K1]),
    ]
    assert isinstance(found, Stored)
    assert found.value == b"value"
    assert 3590 < found.left_s <= 3600
    assert isinstance(empty, Stored)
    assert empty.value == b""
    assert absent is MISS
    assert other_kind is MISS
    await store.delete_many(Kind.RESULT, [K1])
    assert await store.get_many(Kind.RESULT, [K1]) == [MISS]


async def test_answers_outlive_three_restarts_of_the_gateway(redis_server: RedisServer, clock: FakeClock) -> None:
    bodies = [
        {"model": "auto", "messages": [{"role": "user", "content": "Caf\u00e9?"}], "temperature": 0},
        {"temperature": 0, "messages": [{"content": "Cafe\u0301?", "role": "user"}], "model": "auto", "stream": True},
    ]
    for restart in range(4):
        store = new_store(redis_server.url, clock, limit_s=0.25)
        cache = ResultCache(1 << 20, clock, lambda: 0.5, store)
        digest = digest_of(bodies[restart % 2])
        found = await cache.lookup([entry_key(digest.key, "F1")], digest.check, LIFE)
        assert (found is not None) == (restart > 0)
        if found is None:
            cache.put(entry_key(digest.key, "F1"), digest.check, chat_answer(), meta(), 5.0, LIFE)
        else:
            assert (found.tier, found.answer, found.header.compute_ms) == ("l2", chat_answer(), 5.0)
        await cache.aclose()
        await store.aclose()


async def test_a_frozen_server_costs_its_limit_a_few_times_and_then_nothing(
    redis_server: RedisServer, clock: FakeClock
) -> None:
    store = new_store(redis_server.url, clock)
    cache = ResultCache(1 << 20, clock, lambda: 0.5, store)
    await store.put_many(Kind.RESULT, [Write(key(1), b"x", 100.0)])
    redis_server.freeze()
    waits = []
    with structlog.testing.capture_logs() as lines:
        for _ in range(1_000):
            began = time.perf_counter()
            assert await cache.lookup([K1], DIGEST.check, LIFE) is None
            waits.append(time.perf_counter() - began)
    slow = [wait for wait in waits if wait > 0.02]
    assert 1 <= len(slow) <= 8
    assert sorted(waits)[800] < 0.002
    assert len(lines) <= 10
    assert not store.available
    redis_server.thaw()
    assert await recovered(store, clock)
    found = (await store.get_many(Kind.RESULT, [key(1)]))[0]
    assert isinstance(found, Stored)
    assert found.value == b"x"
    await cache.aclose()
    await store.aclose()


async def test_a_long_outage_takes_few_log_lines(redis_server: RedisServer, clock: FakeClock) -> None:
    store = new_store(redis_server.url, clock)
    redis_server.kill()
    with structlog.testing.capture_logs() as lines:
        for _ in range(200):
            clock.advance(5)
            await asyncio.gather(*(store.get_many(Kind.RESULT, [key(n)]) for n in range(5)))
            await store.put_many(Kind.RESULT, [Write(key(1), b"x", 100.0)])
    assert 1 <= len(lines) <= 10
    assert "127.0.0.1" not in str(lines)
    stats = store.stats()
    assert stats["hits"] == 0
    assert stats["read_failures"] > 0
    assert stats["skipped"] > 900
    await store.aclose()


async def test_down_at_start_then_up_then_restarted_empty(clock: FakeClock) -> None:
    server = RedisServer(port=free_port())
    store = new_store(server.url, clock, limit_s=0.25)
    try:
        for _ in range(10):
            assert await store.get_many(Kind.RESULT, [K1]) == [MISS]
        assert not store.available
        await server.start()
        assert await recovered(store, clock)
        await store.put_many(Kind.RESULT, [Write(K1, b"x", 100.0)])
        assert await store.get_many(Kind.RESULT, [K1]) != [MISS]
        server.kill()
        await server.start()
        # The connections that lay idle are dead; one more round trip finds the new server at once.
        assert await store.get_many(Kind.RESULT, [K1]) == [MISS]
        assert store.available
        await store.put_many(Kind.RESULT, [Write(K1, b"y", 100.0)])
        assert await store.get_many(Kind.RESULT, [K1]) != [MISS]
    finally:
        await store.aclose()
        server.close()


async def test_connections_closed_by_the_server_are_replaced_unnoticed(
    store: RedisStore, redis_server: RedisServer
) -> None:
    await store.put_many(Kind.RESULT, [Write(key(n), b"%d" % n, 100.0) for n in range(8)])
    await asyncio.gather(*(store.get_many(Kind.RESULT, [key(n)]) for n in range(8)))
    await redis_server.command("CLIENT", "KILL", "TYPE", "normal")
    found = await asyncio.gather(*(store.get_many(Kind.RESULT, [key(n)]) for n in range(8)))
    values = [item.value for (item,) in found if isinstance(item, Stored)]
    assert values == [b"%d" % n for n in range(8)]
    assert store.stats()["read_failures"] == 0


async def test_values_of_another_type_garbage_and_without_a_life_are_misses(
    redis_server: RedisServer, store: RedisStore, clock: FakeClock
) -> None:
    cache = ResultCache(1 << 20, clock, lambda: 0.5, store)
    name = f"gw:test:v1:r:{K1.hex()}"
    for command in (
        ("RPUSH", name, "a"),
        ("SET", name, "garbage", "PX", "100000"),
        ("SET", name, "GWC\x01" + "x" * 40, "PX", "100000"),
        ("SET", name, "GWC\x02" + "x" * 40, "PX", "100000"),
        ("SET", name, "forever"),
    ):
        await redis_server.command("DEL", name)
        await redis_server.command(*command)
        assert await cache.lookup([K1], DIGEST.check, LIFE) is None, command
    stats = cache.stats()
    assert stats["unreadable"] == 3
    assert stats["l2_unusable"] == 1
    assert store.available
    # What we write takes the place of whatever was there.
    cache.put(K1, DIGEST.check, chat_answer(), meta(), 0.0, LIFE)
    await cache.flush()
    reader = ResultCache(1 << 20, clock, lambda: 0.5, store)
    assert await reader.lookup([K1], DIGEST.check, LIFE) is not None


async def test_a_replica_is_read_and_refused_writes_rest(
    redis_server: RedisServer, store: RedisStore, clock: FakeClock
) -> None:
    await store.put_many(Kind.RESULT, [Write(key(1), b"x", 100.0)])
    await redis_server.command("REPLICAOF", "127.0.0.1", "1")
    with structlog.testing.capture_logs() as lines:
        for _ in range(50):
            await store.put_many(Kind.RESULT, [Write(key(2), b"y", 100.0)])
            assert isinstance((await store.get_many(Kind.RESULT, [key(1)]))[0], Stored)
    assert len(lines) <= 10
    stats = store.stats()
    assert stats["write_refused"] == 5
    assert stats["skipped"] == 45
    assert store.available
    await redis_server.command("REPLICAOF", "NO", "ONE")
    clock.advance(40)
    await store.put_many(Kind.RESULT, [Write(key(2), b"y", 100.0)])
    await store.put_many(Kind.RESULT, [Write(key(3), b"z", 100.0)])
    assert isinstance((await store.get_many(Kind.RESULT, [key(3)]))[0], Stored)


async def test_a_server_out_of_memory_is_read_and_left_alone(redis_server: RedisServer, store: RedisStore) -> None:
    await store.put_many(Kind.RESULT, [Write(key(1), b"x", 100.0)])
    await redis_server.command("CONFIG", "SET", "maxmemory", "1")
    for _ in range(20):
        await store.put_many(Kind.RESULT, [Write(key(2), b"y", 100.0)])
        assert isinstance((await store.get_many(Kind.RESULT, [key(1)]))[0], Stored)
    assert store.stats()["write_refused"] == 5


async def test_a_wrong_password_is_a_miss_and_never_logged(redis_server: RedisServer, clock: FakeClock) -> None:
    await redis_server.command("CONFIG", "SET", "requirepass", "right")
    for password, available in (("wrong-secret", False), ("right", True)):
        url = redis_server.url.replace("//", f"//:{password}@")
        store = new_store(url, clock, limit_s=0.25)
        with structlog.testing.capture_logs() as lines:
            for _ in range(10):
                assert await store.get_many(Kind.RESULT, [K1]) == [MISS]
        assert store.available is available
        assert password not in str(lines) + repr(store)
        await store.aclose()


async def test_something_that_is_no_redis_is_a_miss(clock: FakeClock) -> None:
    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(babble, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        store = new_store(f"redis://127.0.0.1:{port}/0", clock)
        for _ in range(10):
            assert await store.get_many(Kind.RESULT, [K1, key(2)]) == [MISS, MISS]
        assert not store.available
        await store.aclose()


async def test_a_thousand_cancelled_reads_never_yield_another_keys_value(
    redis_server: RedisServer, clock: FakeClock
) -> None:
    # Limits far off, so that every end of a call is a reply or a cancellation.
    store = new_store(redis_server.url, clock, limit_s=5.0, write_limit_s=5.0, max_connections=4)
    draw = random.Random(11)
    await store.put_many(Kind.RESULT, [Write(key(n), b"value %d" % n, 1000.0) for n in range(64)])
    good = cancelled = 0

    async def read(number: int) -> None:
        nonlocal good
        wanted = [number % 64, (number * 7) % 64, 999]
        found = await store.get_many(Kind.RESULT, [key(n) for n in wanted])
        got = [item.value if isinstance(item, Stored) else item for item in found]
        assert got == [b"value %d" % wanted[0], b"value %d" % wanted[1], MISS]
        good += 1

    async def cancel_soon(task: asyncio.Task[None]) -> None:
        for _ in range(draw.randrange(0, 12)):
            await asyncio.sleep(0)
        if draw.random() < 0.5:
            await asyncio.sleep(draw.random() * 0.002)
        task.cancel()

    for batch in range(100):
        doomed = [asyncio.create_task(read(batch * 20 + n)) for n in range(10)]
        others = [asyncio.create_task(read(batch * 20 + n)) for n in range(10, 20)]
        await asyncio.gather(*(cancel_soon(task) for task in doomed))
        results = await asyncio.gather(*doomed, *others, return_exceptions=True)
        cancelled += sum(isinstance(result, asyncio.CancelledError) for result in results)
        assert all(result is None or isinstance(result, asyncio.CancelledError) for result in results)
        assert all(task.exception() is None for task in others)
    assert cancelled > 100
    assert good > 1_000
    assert store.available
    assert store.stats()["read_failures"] == 0
    assert "0 in use" in repr(store)
    await store.aclose()


async def test_more_readers_than_connections_wait_their_turn(redis_server: RedisServer, clock: FakeClock) -> None:
    store = new_store(redis_server.url, clock, limit_s=5.0, max_connections=2)
    await store.put_many(Kind.RESULT, [Write(key(n), b"%d" % n, 100.0) for n in range(100)])
    found = await asyncio.gather(*(store.get_many(Kind.RESULT, [key(n)]) for n in range(100)))
    assert [item.value for (item,) in found if isinstance(item, Stored)] == [b"%d" % n for n in range(100)]
    assert "2 idle" in repr(store)
    await store.aclose()
