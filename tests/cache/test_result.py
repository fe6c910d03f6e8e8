"""What may be stored, what may be served, and what it says about itself."""

import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.api import Answer, ChatAnswer, EmbeddingsAnswer, Tensor, TensorAnswer
from cache.key import entry_key
from cache.result import Freshness, ResultCache
from policies.core.clock import FakeClock
from policies.language.schema import ResultCache as Life
from tests.support.cache_samples import LIFE, chat_answer, chat_body, digest_of, meta
from tests.support.memory_store import MemoryStore

DIGEST = digest_of(chat_body(temperature=0))
CHECK = DIGEST.check
K1, K2 = entry_key(DIGEST.key, "F1"), entry_key(DIGEST.key, "F2")


def middle() -> float:
    """The draw with which a ttl is not jittered; and no early refresh comes of it."""
    return 0.5


def new_cache(clock: FakeClock, store: MemoryStore | None = None) -> ResultCache:
    return ResultCache(1 << 20, clock, middle, store)


def test_a_stored_answer_is_found_with_its_age(clock: FakeClock) -> None:
    cache = new_cache(clock)
    assert cache.lookup_now([K1], CHECK, LIFE) is None
    assert cache.put(K1, CHECK, chat_answer(), meta(), 840.0, LIFE)
    clock.advance(5)
    found = cache.lookup_now([K2, K1], CHECK, LIFE)
    assert found is not None
    assert (found.key, found.answer, found.tier, found.state) == (K1, chat_answer(), "l1", Freshness.FRESH)
    assert found.age_s == pytest.approx(5)
    assert (found.header.fingerprint, found.header.backend, found.header.rule) == ("F1", "heavy", "hard")
    stats = cache.stats()
    assert (stats["hits_l1"], stats["misses"], stats["saved_ms"], stats["entries"]) == (1, 1, 840.0, 1)


async def test_fresh_then_refreshed_then_stale_then_gone(clock: FakeClock) -> None:
    cache = new_cache(clock)
    cache.put(K1, CHECK, chat_answer(), meta(), 0.0, LIFE)
    seen: dict[float, tuple[str, str]] = {}
    for age in (0.0, 599.0, 601.0, 659.0, 661.0, 3599.0, 3601.0):
        clock.advance(age - (max(seen) if seen else 0.0))
        normal = cache.lookup_now([K1], CHECK, LIFE)
        rung = await cache.stale([K1], CHECK, LIFE)
        seen[age] = (normal.state.name if normal else "-", rung.state.name if rung else "-")
    assert seen == {
        0.0: ("FRESH", "FRESH"),
        599.0: ("FRESH", "FRESH"),
        601.0: ("REFRESH", "REFRESH"),
        659.0: ("REFRESH", "REFRESH"),
        661.0: ("-", "STALE"),
        3599.0: ("-", "STALE"),
        3601.0: ("-", "-"),
    }
    assert cache.stats()["stale_served"] == 6


def test_a_policy_that_got_stricter_counts_for_what_is_stored_already(clock: FakeClock) -> None:
    cache = new_cache(clock)
    cache.put(K1, CHECK, chat_answer(), meta(), 0.0, LIFE)
    clock.advance(20)
    found = cache.lookup_now([K1], CHECK, Life(ttl=10.0, swr=60.0, stale=3600.0))
    assert found is not None
    assert found.state is Freshness.REFRESH
    assert cache.lookup_now([K1], CHECK, Life(ttl=10.0, swr=60.0, stale=15.0)) is None


def test_of_several_models_a_fresh_answer_wins_then_the_earlier(clock: FakeClock) -> None:
    cache = new_cache(clock)
    cache.put(K1, CHECK, chat_answer("old"), meta("F1"), 0.0, LIFE)
    clock.advance(610)
    cache.put(K2, CHECK, chat_answer("new"), meta("F2"), 0.0, LIFE)
    found = cache.lookup_now([K1, K2], CHECK, LIFE)
    assert found is not None
    assert found.key == K2
    cache.put(K1, CHECK, chat_answer("newer"), meta("F1"), 0.0, LIFE)
    found = cache.lookup_now([K1, K2], CHECK, LIFE)
    assert found is not None
    assert found.key == K1


def test_early_refresh_hits_some_readers_shortly_before_expiry(clock: FakeClock) -> None:
    draws = random.Random(7)
    jitter_free = iter([0.5])
    cache = ResultCache(1 << 20, clock, lambda: next(jitter_free, None) or draws.random())
    cache.put(K1, CHECK, chat_answer(), meta(), 2_000.0, LIFE)
    shares = []
    for age, step in ((300.0, 300.0), (597.0, 297.0), (599.9, 2.9)):
        clock.advance(step)
        found = [cache.lookup_now([K1], CHECK, LIFE) for _ in range(2_000)]
        assert all(one is not None for one in found), age
        shares.append(sum(one is not None and one.state is Freshness.REFRESH for one in found) / 2_000)
    assert shares[0] == 0
    assert shares[1] == pytest.approx(math.exp(-1.5), abs=0.04)
    assert shares[2] == pytest.approx(math.exp(-0.05), abs=0.04)


def test_entries_stored_together_do_not_expire_together(clock: FakeClock) -> None:
    cache = ResultCache(1 << 22, clock, random.Random(3).random)
    keys = [entry_key(DIGEST.key, str(number)) for number in range(400)]
    for key in keys:
        cache.put(key, CHECK, chat_answer(), meta(), 0.0, LIFE)
    clock.advance(539)
    fresh = []
    for _ in range(12):
        found = [cache.lookup_now([key], CHECK, LIFE) for key in keys]
        fresh.append(sum(one is not None and one.state is Freshness.FRESH for one in found))
        clock.advance(11)
    assert fresh[0] == 400
    assert fresh[-1] == 0
    assert max(before - after for before, after in itertools.pairwise(fresh)) < 100


def test_another_requests_answer_under_the_same_key_is_a_miss(clock: FakeClock) -> None:
    cache = new_cache(clock)
    cache.put(K1, CHECK, chat_answer(), meta(), 0.0, LIFE)
    assert cache.lookup_now([K1], b"otherone", LIFE) is None
    assert cache.stats()["check_mismatches"] == 1


async def test_what_answered_in_anothers_place_is_only_for_its_own_rung(clock: FakeClock) -> None:
    store = MemoryStore(clock)
    cache = new_cache(clock, store)
    cache.put(K2, CHECK, chat_answer("light"), meta("F2", first_choice=False), 0.0, LIFE)
    await cache.flush()
    other_worker = new_cache(clock, store)
    for reader in (cache, other_worker):
        assert await reader.lookup([K1, K2], CHECK, LIFE) is None
        assert await reader.stale([K1, K2], CHECK, LIFE) is None
        found = await reader.lookup([K2], CHECK, LIFE, any_choice=True)
        assert found is not None
        assert found.answer == chat_answer("light")


def test_a_substitute_does_not_take_the_place_of_a_fresh_first_choice(clock: FakeClock) -> None:
    cache = new_cache(clock)
    cache.put(K1, CHECK, chat_answer("first"), meta(), 0.0, LIFE)
    assert not cache.put(K1, CHECK, chat_answer("second"), meta(first_choice=False), 0.0, LIFE)
    clock.advance(700)
    assert cache.put(K1, CHECK, chat_answer("second"), meta(first_choice=False), 0.0, LIFE)
    assert cache.lookup_now([K1], CHECK, LIFE) is None


EMPTY = np.zeros((0, 4), np.float32)
NEVER_STORED: dict[str, Answer] = {
    "truncated: length": chat_answer(finish_reason="length"),
    "truncated: content_filter": chat_answer(finish_reason="content_filter"),
    "truncated: no reason": chat_answer(finish_reason=""),
    "truncated: second choice": ChatAnswer(
        b'{"choices":[{"message":{"content":"a"},"finish_reason":"stop"},'
        b'{"message":{"content":"b"},"finish_reason":"length"}]}',
        "m",
        "stop",
    ),
    "empty: no choices": ChatAnswer(b'{"choices":[]}', "m", "stop"),
    "empty: no text": chat_answer(""),
    "empty: no message": ChatAnswer(b'{"choices":[{"finish_reason":"stop"}]}', "m", "stop"),
    "malformed: no JSON": ChatAnswer(b"<html>", "m", "stop"),
    "malformed: an error": ChatAnswer(b'{"choices":"error"}', "m", "stop"),
    "empty: no vectors": EmbeddingsAnswer(EMPTY, "m"),
    "not_finite: vectors": EmbeddingsAnswer(np.full((1, 2), np.nan, np.float32), "m"),
    "empty: no outputs": TensorAnswer("m", []),
}


@pytest.mark.parametrize("case", NEVER_STORED)
def test_never_stored(case: str, clock: FakeClock) -> None:
    cache = new_cache(clock)
    assert not cache.put(K1, CHECK, NEVER_STORED[case], meta(), 0.0, LIFE)
    assert cache.lookup_now([K1], CHECK, LIFE) is None
    reason = case.partition(":")[0]
    assert cache.stats()[f"refused_{reason}"] == 1


def test_tainted_answers_and_those_without_a_life_are_never_stored(clock: FakeClock) -> None:
    cache = new_cache(clock)
    assert not cache.put(K1, CHECK, chat_answer(), meta(tainted=True), 0.0, LIFE)
    assert not cache.put(K1, CHECK, chat_answer(), meta(), 0.0, Life(stale=0.0))
    assert cache.lookup_now([K1], CHECK, LIFE) is None


@pytest.mark.parametrize(
    "answer",
    [
        chat_answer("", tool_calls=[{"id": "1", "type": "function"}], finish_reason="tool_calls"),
        chat_answer("", refusal="I would rather not."),
        EmbeddingsAnswer(np.ones((1, 2), np.float32), "m"),
        TensorAnswer("m", [Tensor("y", "FP32", np.ones(2, np.float32))]),
    ],
)
def test_whole_answers_are_stored(answer: Answer, clock: FakeClock) -> None:
    assert new_cache(clock).put(K1, CHECK, answer, meta(), 0.0, LIFE)


# --------------------------------------------------------------------------------------------------- model switches


async def test_a_computation_begun_before_a_switch_is_not_written(clock: FakeClock) -> None:
    store = MemoryStore(clock)
    cache = new_cache(clock, store)
    began = meta("F1", generation=cache.generation("F1"))
    cache.model_switched("F1", "F2")
    assert not cache.put(K1, CHECK, chat_answer(), began, 0.0, LIFE)
    assert not cache.put(K1, CHECK, chat_answer(), meta("F1"), 0.0, LIFE)
    # Back to the old weights: what began before may have been computed by those in between.
    cache.model_switched("F2", "F1")
    assert not cache.put(K1, CHECK, chat_answer(), began, 0.0, LIFE)
    assert cache.put(K1, CHECK, chat_answer(), meta("F1", generation=cache.generation("F1")), 0.0, LIFE)
    await cache.flush()
    assert len(store.values) == 1


async def test_an_answer_of_the_model_before_is_out_of_reach_and_would_be_counted(clock: FakeClock) -> None:
    store = MemoryStore(clock)
    cache = new_cache(clock, store)
    cache.put(K1, CHECK, chat_answer(), meta("F1"), 0.0, LIFE)
    await cache.flush()
    cache.model_switched("F1", "F2")
    assert await cache.lookup([K2], CHECK, LIFE) is None
    assert cache.stats()["dirty_reads"] == 0
    # Asking under the old key is what must never happen: it is refused, and counted.
    assert cache.lookup_now([K1], CHECK, LIFE) is None
    assert cache.stats()["dirty_reads"] == 1


async def test_a_switch_while_l2_is_asked_fences_the_answer(clock: FakeClock) -> None:
    class SwitchingStore(MemoryStore):
        async def get_many(self, kind, keys):  # type: ignore[no-untyped-def]
            found = await super().get_many(kind, keys)
            reader.model_switched("F1", "F2")
            return found

    store = SwitchingStore(clock)
    writer, reader = new_cache(clock, store), new_cache(clock, store)
    writer.put(K1, CHECK, chat_answer(), meta("F1"), 0.0, LIFE)
    await writer.flush()
    assert await reader.lookup([K1], CHECK, LIFE) is None
    stats = reader.stats()
    assert (stats["fenced"], stats["dirty_reads"]) == (1, 0)


# --------------------------------------------------------------------------------------------------------- two tiers


async def test_l2_hits_move_to_l1_with_their_age(clock: FakeClock) -> None:
    store = MemoryStore(clock)
    writer, reader = new_cache(clock, store), new_cache(clock, store)
    writer.put(K1, CHECK, chat_answer(), meta(), 70.0, LIFE)
    await writer.flush()
    clock.advance(595)
    assert reader.lookup_now([K1, K2], CHECK, LIFE) is None
    found = await reader.lookup_l2([K1, K2], CHECK, LIFE)
    assert found is not None
    assert (found.tier, found.state, round(found.age_s)) == ("l2", Freshness.FRESH, 595)
    assert store.reads == [[K1, K2]]
    clock.advance(10)
    found = await reader.lookup([K1], CHECK, LIFE)
    assert found is not None
    assert (found.tier, found.state, round(found.age_s)) == ("l1", Freshness.REFRESH, 605)
    assert store.reads == [[K1, K2]]
    stats = reader.stats()
    assert (stats["hits_l1"], stats["hits_l2"], stats["misses"]) == (1, 1, 0)


async def test_what_lies_in_l2_too_long_is_not_served_by_a_stricter_policy(clock: FakeClock) -> None:
    store = MemoryStore(clock)
    writer, reader = new_cache(clock, store), new_cache(clock, store)
    writer.put(K1, CHECK, chat_answer(), meta(), 0.0, LIFE)
    await writer.flush()
    clock.advance(1000)
    assert await reader.lookup([K1], CHECK, LIFE) is None
    found = await reader.stale([K1], CHECK, LIFE)
    assert found is not None
    assert found.state is Freshness.STALE
    assert await new_cache(clock, store).stale([K1], CHECK, Life(stale=900.0)) is None


async def test_an_older_l2_answer_does_not_push_out_a_newer_one(clock: FakeClock) -> None:
    class SlowStore(MemoryStore):
        async def get_many(self, kind, keys):  # type: ignore[no-untyped-def]
            found = await super().get_many(kind, keys)
            reader.put(K1, CHECK, chat_answer("newer"), meta(), 0.0, LIFE)
            return found

    store = SlowStore(clock)
    writer, reader = new_cache(clock, store), new_cache(clock, store)
    writer.put(K1, CHECK, chat_answer("older"), meta(), 0.0, LIFE)
    await writer.flush()
    clock.advance(10)
    await reader.lookup_l2([K1], CHECK, LIFE)
    found = reader.lookup_now([K1], CHECK, LIFE)
    assert found is not None
    assert found.answer == chat_answer("newer")


async def test_l2_writes_are_batched_bounded_and_awaited_at_the_end(clock: FakeClock) -> None:
    store = MemoryStore(clock)
    cache = ResultCache(64 << 20, clock, middle, store)
    for number in range(1_500):
        cache.put(entry_key(DIGEST.key, str(number)), CHECK, chat_answer(), meta(), 0.0, LIFE)
    assert cache.stats()["l2_dropped"] == 1_500 - 1_024
    await cache.aclose()
    assert len(store.values) == 1_024
    assert max(store.batches) == 32
    cache.put(K1, CHECK, chat_answer(), meta(), 0.0, LIFE)
    assert len(store.values) == 1_024


async def test_large_answers_pass_through_l2(clock: FakeClock) -> None:
    store = MemoryStore(clock)
    writer, reader = ResultCache(8 << 20, clock, middle, store), ResultCache(8 << 20, clock, middle, store)
    noise = random.Random(1).randbytes(200_000).hex()
    writer.put(K1, CHECK, chat_answer(noise), meta(), 0.0, LIFE)
    await writer.flush()
    found = await reader.lookup([K1], CHECK, LIFE)
    assert found is not None
    assert found.answer == chat_answer(noise)


async def test_nothing_is_queued_for_a_store_that_is_being_left_alone(clock: FakeClock) -> None:
    store = MemoryStore(clock)
    store.available = False
    cache = new_cache(clock, store)
    cache.put(K1, CHECK, chat_answer(), meta(), 0.0, LIFE)
    await cache.flush()
    assert store.batches == []
    assert cache.lookup_now([K1], CHECK, LIFE) is not None


async def test_deleted_answers_are_gone_from_both_tiers(clock: FakeClock) -> None:
    store = MemoryStore(clock)
    cache = new_cache(clock, store)
    cache.put(K1, CHECK, chat_answer(), meta(), 0.0, LIFE)
    cache.put(K2, CHECK, chat_answer(), meta("F2"), 0.0, LIFE)
    await cache.delete([K1])
    await cache.flush()
    assert await cache.lookup([K1], CHECK, LIFE) is None
    assert await cache.lookup([K2], CHECK, LIFE) is not None


@given(st.floats(0, 4_000), st.floats(0.0, 0.999), st.floats(0.0, 1e5))
def test_no_draw_ever_serves_a_dead_answer(age: float, draw: float, compute_ms: float) -> None:
    clock = FakeClock()
    cache = ResultCache(1 << 20, clock, lambda: draw)
    cache.put(K1, CHECK, chat_answer(), meta(), compute_ms, LIFE)
    clock.advance(age)
    found = cache.lookup_now([K1], CHECK, LIFE)
    if age > 726.1:
        assert found is None
    if age < 539.9:
        assert found is not None
