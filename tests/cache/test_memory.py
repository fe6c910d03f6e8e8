"""L1 keeps to its bytes, and to our clock."""

from cache.api import MISS, Item
from cache.memory import Memory
from policies.core.clock import FakeClock


def test_an_item_lives_until_its_moment_on_our_clock(clock: FakeClock) -> None:
    memory: Memory[str | None] = Memory(1000, clock)
    memory.put(b"a", Item("A", clock.now() + 10, 10))
    memory.put(b"none", Item(None, clock.now() + 10, 10))
    found = memory.get(b"a")
    assert found is not MISS
    assert found.value == "A"
    stored_none = memory.get(b"none")
    assert stored_none is not MISS
    assert stored_none.value is None
    clock.jump_wall(1e6)
    assert memory.get(b"a") is not MISS
    clock.advance(10)
    assert memory.get(b"a") is MISS
    assert memory.stats()["entries"] == 1


def test_bytes_are_bounded(clock: FakeClock) -> None:
    memory: Memory[int] = Memory(100_000, clock)
    for number in range(5_000):
        memory.put(number.to_bytes(16, "big"), Item(number, clock.now() + 10, 100))
    stats = memory.stats()
    assert stats["bytes"] <= 100_000
    assert stats["entries"] <= 1_000
    assert stats["evictions"] >= 4_000


def test_what_cannot_fit_or_is_dead_is_not_kept(clock: FakeClock) -> None:
    memory: Memory[int] = Memory(1000, clock)
    memory.put(b"big", Item(1, clock.now() + 10, 1001))
    memory.put(b"dead", Item(1, clock.now(), 1))
    assert memory.get(b"big") is MISS
    assert memory.get(b"dead") is MISS


def test_delete_and_clear(clock: FakeClock) -> None:
    memory: Memory[int] = Memory(1000, clock)
    for key in (b"a", b"b", b"c"):
        memory.put(key, Item(1, clock.now() + 10, 1))
    memory.delete(b"a")
    assert memory.get(b"a") is MISS
    memory.clear()
    assert memory.get(b"b") is MISS
