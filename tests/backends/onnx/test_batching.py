from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.api import Priority
from backends.onnx.batching import BatchLimits, Call, Row, WaitingRoom, worth_stopping
from tests.support.batch_calls import START_S, TOKEN_S, call, room

VIP, NORMAL, BATCH = Priority
LIMITS = BatchLimits(rows=8, run_s=0.05, vip_run_s=0.02, aging_s=1.0, passes=4)

lengths = st.lists(st.integers(1, 300), min_size=1, max_size=20)
calls = st.lists(
    st.builds(
        lambda rows, priority, due, arrived: call(rows, priority, due=due, arrived=arrived),
        lengths,
        st.sampled_from(list(Priority)),
        st.floats(0.01, 20),
        st.floats(-5, 0),
    ),
    max_size=25,
)


def filled(waiting: list[Call], limits: BatchLimits = LIMITS) -> WaitingRoom:
    made = room(limits)
    for one in sorted(waiting, key=lambda one: one.arrived):
        made.add(one)
    return made


def drained(made: WaitingRoom, now: float = 0.0) -> list[list[Row]]:
    runs = []
    while rows := made.take(now):
        runs.append(rows)
    return runs


# ------------------------------------------------------------------------------------------------------- any contents


@given(calls)
def test_every_row_is_run_once_and_nothing_is_left(waiting: list[Call]) -> None:
    made = filled(waiting)
    taken = Counter((id(row.call), row.at) for rows in drained(made) for row in rows)
    assert taken == Counter((id(one), at) for one in waiting for at in range(len(one.lengths)))
    assert (made.rows, made.size_bytes, len(made)) == (0, 0, 0)


@given(calls, st.floats(0.3, 1))
def test_no_run_is_over_its_caps(waiting: list[Call], factor: float) -> None:
    made = filled(waiting)
    made.safety.factor = factor
    for rows in drained(made):
        longest = max(row.length for row in rows)
        assert len(rows) <= LIMITS.rows
        if len(rows) == 1:
            continue
        vips_come = any(one.key[0] == VIP for one in waiting)
        assert made.model.expected(len(rows), longest) <= (LIMITS.vip_run_s if vips_come else LIMITS.run_s)
        in_time = [row.call.due for row in rows if made.model.expected(1, row.length) <= row.call.due]
        assert all(made.model.p99(len(rows), longest) <= factor * due for due in in_time)


@given(calls)
def test_the_first_or_after_enough_runs_the_oldest_leads_and_vips_are_among_themselves(waiting: list[Call]) -> None:
    made = filled(waiting)
    while made.rows:
        here = [one for one in waiting if one.pending]
        first, oldest = min(here, key=lambda one: one.key), min(here, key=lambda one: one.arrived)
        overdue = made._passed >= LIMITS.passes
        leader, *mates = made.take(0.0)
        assert leader.call is (oldest if overdue else first)
        assert leader.call.key[0] != VIP or all(row.call.key[0] == VIP for row in mates)


@given(st.lists(st.tuples(st.sampled_from(list(Priority)), st.floats(1, 20)), max_size=60))
def test_of_one_class_and_length_the_earliest_deadline_goes_first(asked: list[tuple[Priority, float]]) -> None:
    made = filled([call(16, priority, due=due) for priority, due in asked])
    order = [(row.call.priority, row.call.due) for rows in drained(made) for row in rows]
    assert order == sorted(order)


@given(calls, st.data())
def test_removing_and_putting_back_keep_count(waiting: list[Call], data: st.DataObject) -> None:
    made = filled(waiting)
    for one in waiting:
        if data.draw(st.booleans()):
            made.remove(one)
    rows = made.take(0.0)
    made.put_back(rows)
    left = [one for one in waiting if one.pending]
    assert made.rows == sum(len(one.pending) for one in left)
    assert made.size_bytes == sum(one.size_bytes for one in left)
    assert sum(work[1] for work in made._work) == sum(one.lengths[at] for one in left for at in one.pending)
    again = Counter(row for taken in drained(made) for row in taken)
    assert set(again.values()) <= {1} and set(rows) <= set(again)


# ------------------------------------------------------------------------------------------------------------- lengths


def test_equal_lengths_share_a_run() -> None:
    assert [len(rows) for rows in drained(filled([call(16) for _ in range(20)], BatchLimits(rows=32)))] == [20]


def test_a_long_row_does_not_set_the_length_of_others() -> None:
    made = filled([call(n) for n in (10, 200, 10, 11, 10)])
    assert [sorted(row.length for row in rows) for rows in drained(made)] == [[10, 10, 10, 11], [200]]


@given(st.lists(st.integers(1, 120), min_size=1, max_size=32))
def test_padding_costs_less_than_the_runs_it_saves(asked: list[int]) -> None:
    made = filled([call(n) for n in asked], BatchLimits(rows=32, run_s=10))
    for rows in drained(made):
        longest = max(row.length for row in rows)
        padding = sum(longest - row.length for row in rows)
        assert padding * TOKEN_S <= 1.01 * START_S * (len(rows) - 1)


def test_a_large_call_is_split_into_runs_of_like_rows() -> None:
    made = filled([call([40] * 20 + [5] * 20 + [41] * 20)], BatchLimits(rows=16, run_s=10))
    runs = [[row.length for row in rows] for rows in drained(made)]
    assert sorted(n for rows in runs for n in rows) == [5] * 20 + [40] * 20 + [41] * 20
    assert all(max(rows) - min(rows) <= 1 and len(rows) <= 16 for rows in runs)


def test_the_tightest_deadline_limits_the_run() -> None:
    made = filled([call(16, due=0.006), *(call(16) for _ in range(20))], BatchLimits(rows=32, run_s=10))
    first = made.take(0.0)
    assert first[0].call.due == 0.006
    assert made.model.p99(len(first), 16) <= 0.006 < made.model.p99(len(first) + 1, 16)


def test_a_row_that_cannot_be_in_time_any_more_holds_nobody_up() -> None:
    made = filled([call(16, due=0.001), *(call(16) for _ in range(20))], BatchLimits(rows=32, run_s=10))
    assert len(made.take(0.0)) == 21


# ---------------------------------------------------------------------------------------------------- classes and aging


def test_a_bulk_does_not_stand_before_single_texts() -> None:
    bulk, single = call([16] * 100, due=5), call(16, due=10)
    made = filled([bulk, single])
    assert made.take(0.0)[0].call is single
    vip_bulk = call([16] * 100, VIP, due=1)
    made = filled([vip_bulk, call(16, NORMAL, due=0.9), vip := call(16, VIP)])
    assert made.take(0.0)[0].call is vip, "a VIP's bulk is anybody's"
    assert made.take(0.0)[0].call is not vip_bulk


@pytest.mark.parametrize("priority", [NORMAL, BATCH])
def test_nobody_starves_behind_a_flood_of_vips(priority: Priority) -> None:
    made, now, low = room(LIMITS), 0.0, call(16, priority, due=1e9)
    made.add(low)
    runs = 0
    while low.pending:
        for _ in range(3):
            made.add(call(16, VIP, arrived=now, due=now + 0.1))
        made.take(now)
        now += 0.02
        runs += 1
        assert runs < 1.0 / 0.02 + LIMITS.passes + 3
    assert now > 1.0, "and it does not go before VIPs until it has aged"


@given(st.integers(1, 12), st.integers(1, 5))
def test_each_of_those_who_wait_has_its_turn(count: int, flood: int) -> None:
    made, now = room(LIMITS), 0.0
    # Of unlike lengths, so that none can ride in another's run.
    waiting = [call(20 * (one + 1), BATCH, due=1e9) for one in range(count)]
    for one in waiting:
        made.add(one)
    for _ in range(60 + count * (LIMITS.passes + 2)):
        for _ in range(flood):
            made.add(call(16, NORMAL, arrived=now, due=now + 0.1))
        made.take(now)
        now += 0.02
    assert not any(one.pending for one in waiting)


def test_a_vip_waits_for_no_more_than_the_run_that_goes_on() -> None:
    """Ten times too much other traffic, all of it aged: what runs when a VIP comes is a capped run, and the VIP is next."""
    made = filled([call(60, due=1 + n / 1000, arrived=n / 1000) for n in range(2000)])
    now, limit = 100.0, LIMITS.run_s
    for _ in range(50):
        running = made.take(now)
        assert 0.8 * limit < made.model.expected(len(running), 60) <= limit
        vip = call(16, VIP, arrived=now, due=now + 1)
        made.add(vip)
        assert made.take(now)[0].call is vip
        limit = LIMITS.vip_run_s


def test_without_vips_runs_are_longer() -> None:
    limits = BatchLimits(rows=32, run_s=0.05, vip_run_s=0.01, vip_seen_s=10)
    made = filled([call(16, arrived=n / 100) for n in range(200)], limits)
    assert len(made.take(3.0)) == 31
    made.add(call(16, VIP, arrived=3.0))
    assert [len(made.take(3.0)) for _ in range(2)] == [1, 6]
    assert len(made.take(13.1)) == 31


# ------------------------------------------------------------------------------------------------------------ suspects


def test_the_halves_of_a_failed_run_are_run_by_themselves() -> None:
    made = filled([call(16) for _ in range(5)])
    failed = made.take(0.0)
    made.add(call(16, VIP))
    made.suspect(failed)
    assert [made.take(0.0), made.take(0.0)] == [failed[:3], failed[3:]]
    made.suspect(failed)
    failed[0].call.done = failed[3].call.done = failed[4].call.done = True
    assert made.take(0.0) == failed[1:3]
    assert made.take(0.0)[0].call.priority is VIP, "of the second half nobody is there any more"


# ----------------------------------------------------------------------------------------------------------- admission


def test_the_room_is_bounded_in_rows_and_bytes() -> None:
    made = filled([call(16) for _ in range(3)], BatchLimits(waiting_rows=4, waiting_bytes=1000, vip_share=0))
    assert made.refusal(call(16), 0.0) is None
    refusal = made.refusal(call([16, 16]), 0.0)
    assert refusal is not None and "3 rows wait already" in refusal.reason and refusal.retry_after_s > 0
    refusal = made.refusal(call(16, size_bytes=900), 0.0)
    assert refusal is not None and "300 bytes wait already" in refusal.reason


def test_a_part_of_the_room_is_for_vips() -> None:
    made = filled([call(16) for _ in range(6)], BatchLimits(waiting_rows=8, vip_share=0.25))
    assert made.refusal(call(16), 0.0) is not None
    assert made.refusal(call(16, VIP), 0.0) is None


def test_a_call_larger_than_the_room_is_admitted_when_nobody_waits() -> None:
    limits = BatchLimits(waiting_rows=4)
    assert room(limits).refusal(call([16] * 50), 0.0) is None
    assert filled([call(16)], limits).refusal(call([16] * 50), 0.0) is not None


def test_what_would_be_late_is_refused_with_a_time_to_come_back() -> None:
    made = filled([call(160, due=0.2) for _ in range(10)])  # of 16 ms each
    assert made.refusal(call(16, due=0.3), 0.0) is None
    refusal = made.refusal(call(16, NORMAL, due=0.0019), 0.0)
    assert refusal is not None, "its own run takes 2 ms"
    made = filled([call(160, due=0.05) for _ in range(10)])
    refusal = made.refusal(call(16, due=0.05), 0.0)
    assert refusal is not None and refusal.retry_after_s > 0.1
    assert made.refusal(call(16, VIP, due=0.05), 0.0) is None, "VIPs do not stand behind others"
    assert made.refusal(call(16, due=0.12), 0.0) is not None
    assert made.refusal(call(16, due=0.12), 0.0, instances=2) is None


def test_only_earlier_deadlines_stand_before() -> None:
    made = filled([call(160, due=20) for _ in range(10)])
    assert made.refusal(call(16, due=0.05), 0.0) is None
    assert made.refusal(call(16, due=0.05), 0.0, rest_s=0.06) is not None


single = st.builds(lambda n, p, due: (n, p, due), st.integers(1, 300), st.sampled_from(list(Priority)), st.floats(0, 2))


@given(st.lists(single, max_size=30), st.lists(single, max_size=10), single, st.floats(0, 1), st.floats(0, 1))
def test_admission_is_monotone(
    waiting: list[tuple[int, Priority, float]],
    more: list[tuple[int, Priority, float]],
    asked: tuple[int, Priority, float],
    rest: float,
    later: float,
) -> None:
    """More who wait, a longer run under way or an earlier deadline never turn a refusal into an admission."""
    length, priority, due = asked
    made = filled([call(n, p, due=d) for n, p, d in waiting])
    if made.refusal(call(length, priority, due=due), 0.0, rest) is None:
        assert made.refusal(call(length, priority, due=due + later), 0.0, rest) is None
        assert made.refusal(call(length, priority, due=due), 0.0, rest * later) is None
        return
    for n, p, d in more:
        made.add(call(n, p, due=d))
    assert made.refusal(call(length, priority, due=due), 0.0, rest) is not None


@given(st.lists(st.tuples(st.integers(1, 300), st.floats(0.05, 3)), min_size=1, max_size=60))
def test_those_admitted_are_run_in_time(asked: list[tuple[int, float]]) -> None:
    """On a machine that does as predicted, with everybody there at once and of one class."""
    made = room(LIMITS)
    admitted = []
    for length, due in sorted(asked, key=lambda one: one[1]):
        one = call(length, due=due)
        if made.refusal(one, 0.0) is None:
            made.add(one)
            admitted.append(one)
    now = 0.0
    while rows := made.take(now):
        now += made.model.expected(len(rows), max(row.length for row in rows))
        assert all(row.call.due >= now for row in rows)


def test_a_factor_below_one_keeps_a_reserve() -> None:
    made = room()
    assert made.refusal(call(160, due=0.025), 0.0) is None
    made.safety.factor = 0.7
    assert made.refusal(call(160, due=0.025), 0.0) is not None


def test_what_rows_cost_beyond_their_tokens_is_learnt() -> None:
    made = room()
    rows = [Row(call(16), 0) for _ in range(8)]
    for _ in range(400):
        made.observe(rows, made.model.expected(8, 16))
    assert made._row_s == pytest.approx(made.model.c0 / 8, rel=0.2)


# ------------------------------------------------------------------------------------------------------------- stopping


def test_a_run_is_stopped_for_nobody_or_for_much() -> None:
    assert worth_stopping(0.0, 0.0)
    assert worth_stopping(1.0, 0.1)
    assert not worth_stopping(0.1, 0.1)


@pytest.mark.parametrize("wrong", [{"rows": 0}, {"waiting_rows": 0}, {"run_s": 0.0}, {"vip_run_s": 0.0}, {"passes": 0}])
def test_limits_that_make_no_sense_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        BatchLimits(**wrong)
