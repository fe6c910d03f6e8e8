"""When a process may be started again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.control.restarts import LOOP, MOST_WAIT_S, SETTLED_S, RestartRule


def test_the_table():
    rule = RestartRule(lambda: 0.5)
    assert [rule.ended(1.0) for _ in range(9)] == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert rule.total == 9


def test_a_long_life_starts_anew():
    rule = RestartRule(lambda: 0.5)
    for _ in range(6):
        rule.ended(0.1)
    assert rule.looping
    assert rule.ended(SETTLED_S) == 0.0
    assert not rule.looping
    assert [rule.ended(1.0), rule.ended(1.0)] == [0.0, 0.5]


def test_a_crash_loop_is_five_short_lives_in_a_row():
    rule = RestartRule(lambda: 0.5)
    told = []
    for _ in range(LOOP + 1):
        rule.ended(0.1)
        told.append(rule.looping)
    assert told == [False] * (LOOP - 1) + [True, True]


@given(st.lists(st.tuples(st.floats(0, 200), st.floats(0, 1))))
def test_waits_are_bounded(lives):
    draws = iter([draw for _, draw in lives])
    rule = RestartRule(lambda: next(draws))
    for lived_s, _ in lives:
        wait_s = rule.ended(lived_s)
        assert 0.0 <= wait_s <= MOST_WAIT_S * 1.2
        if lived_s >= SETTLED_S:
            assert wait_s == 0.0
