"""The breaker as its docstring describes it: by example, and as a machine under arbitrary use."""

import contextlib

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from policies.core.errors import BreakerOpen
from policies.rules.breaker import (
    TRANSITIONS,
    BreakerEvent,
    BreakerOptions,
    BreakerPermit,
    BreakerState,
    CircuitBreaker,
)

CLOSED, OPEN, HALF_OPEN = BreakerState


def breaker(**options: object) -> CircuitBreaker:
    return CircuitBreaker(BreakerOptions(**options), lambda: 0.5)  # type: ignore[arg-type]


def fail(it: CircuitBreaker, times: int, now: float) -> None:
    for _ in range(times):
        it.acquire(now).failure(now)


def succeed(it: CircuitBreaker, times: int, now: float) -> None:
    for _ in range(times):
        it.acquire(now).success(now)


def test_the_table_holds_every_transition_of_the_docstring() -> None:
    import policies.rules.breaker as module

    assert module.__doc__ is not None
    lines = module.__doc__.split("Transitions")[1].split("Outcomes")[0].splitlines()[2:]
    said = {tuple(line.split()[:3]) for line in lines if line.strip()}
    assert said == {(before.name, event.value, after.name) for (before, event), after in TRANSITIONS.items()}


def test_failures_in_a_row_open_it_and_a_success_between_does_not() -> None:
    it = breaker()
    fail(it, 4, 0.0)
    succeed(it, 1, 0.0)
    fail(it, 4, 0.0)
    assert it.state is CLOSED
    fail(it, 1, 0.0)
    assert it.state is OPEN
    with pytest.raises(BreakerOpen) as caught:
        it.acquire(0.25)
    assert caught.value.retry_after_s == pytest.approx(0.75)


@pytest.mark.parametrize(("good", "opens"), [(10, True), (11, False), (9, False)])
def test_the_failure_rate_needs_enough_calls_and_half_of_them(good: int, opens: bool) -> None:
    """9 + 9 calls are too few; 10 of 20 opens; 10 of 21 is below half."""
    it = breaker(consecutive=100)
    succeed(it, good, 0.0)
    fail(it, 10 if good > 9 else 9, 0.0)
    assert (it.state is OPEN) is opens


def test_old_calls_leave_the_window() -> None:
    it = breaker(consecutive=100)
    fail(it, 19, 0.0)
    assert it.counts(9.9) == (0, 19)
    assert it.counts(10.0) == (0, 0)
    fail(it, 1, 10.0)
    assert it.state is CLOSED


def opened(**options: object) -> CircuitBreaker:
    it = breaker(**options)
    fail(it, 5, 0.0)
    return it


def test_exactly_the_permitted_probes_pass_and_close_it() -> None:
    it = opened()
    permits = []
    for _ in range(1000):
        with contextlib.suppress(BreakerOpen):
            permits.append(it.acquire(1.0))
    assert len(permits) == 3
    for permit in permits:
        assert it.state is HALF_OPEN
        permit.success(1.1)
    assert it.state is CLOSED


def test_one_failed_probe_opens_it_for_longer_each_time_up_to_the_maximum() -> None:
    it = opened(open_max_s=10.0)
    now, lengths = 0.0, []
    for _ in range(6):
        lengths.append(it.opens_in(now))
        now += it.opens_in(now)
        it.acquire(now).failure(now)
    assert lengths == [1, 2, 4, 8, 10, 10]


def test_the_open_time_is_jittered() -> None:
    for random, length in ((0.0, 0.8), (1.0, 1.2)):
        it = CircuitBreaker(BreakerOptions(), lambda random=random: random)  # type: ignore[misc]
        fail(it, 5, 0.0)
        assert it.opens_in(0.0) == pytest.approx(length)


def test_the_open_time_starts_small_again_after_a_quiet_window() -> None:
    it = opened()
    succeed(it, 3, 1.0)
    fail(it, 5, 2.0)
    assert it.opens_in(2.0) == 2.0  # the same trouble
    succeed(it, 3, 4.0)
    fail(it, 5, 20.0)
    assert it.opens_in(20.0) == 1.0


def test_a_probe_that_is_ignored_or_never_returns_gives_its_permit_back() -> None:
    it = opened(probes=1, probe_timeout_s=30.0)
    it.acquire(1.0).ignore()
    lost = it.acquire(1.0)
    with pytest.raises(BreakerOpen):
        it.acquire(30.9)
    second = it.acquire(31.0)
    lost.failure(31.0)  # too late to count
    assert it.state is HALF_OPEN
    second.success(31.0)
    assert it.state is CLOSED


def test_a_stream_proves_itself_by_its_first_content_and_is_judged_again_at_its_end() -> None:
    it = opened(probes=1)
    stream = it.acquire(1.0)
    stream.progress(1.2)
    assert it.state is CLOSED
    stream.progress(1.3)
    stream.failure(60.0)
    assert it.counts(60.0) == (0, 1)


def test_late_outcomes_of_an_earlier_state_do_not_count() -> None:
    it = breaker(probes=1)
    late = [it.acquire(0.0) for _ in range(10)]
    fail(it, 5, 0.0)
    it.acquire(1.0).success(1.0)
    for permit in late:
        permit.failure(1.0)
    assert (it.state, it.counts(1.0)) == (CLOSED, (0, 0))


def test_of_two_holds_the_longer_counts() -> None:
    it = breaker()
    permits = [it.acquire(0.0) for _ in range(3)]
    for permit, seconds in zip(permits, (5.0, 60.0, 1.0), strict=True):
        permit.hold(0.0, seconds, "429")
    assert it.opens_in(0.0) == 60.0
    it.acquire(60.0).hold(60.0, 2.0, "429")
    assert it.opens_in(60.0) == 2.0


def test_changes_are_reported_with_their_reason() -> None:
    seen: list[tuple[BreakerState, BreakerState, str]] = []
    it = CircuitBreaker(BreakerOptions(probes=1), lambda: 0.5, lambda *change: seen.append(change))
    fail(it, 5, 0.0)
    it.acquire(1.0).success(1.0)
    assert seen == [
        (CLOSED, OPEN, "5 calls failed in a row"),
        (OPEN, HALF_OPEN, "the open time is over"),
        (HALF_OPEN, CLOSED, "1 probes passed"),
    ]


def test_a_permit_closes_once() -> None:
    permit = breaker().acquire(0.0)
    permit.success(0.0)
    with pytest.raises(RuntimeError, match="exactly once"):
        permit.failure(0.0)


def test_it_says_how_it_is() -> None:
    it = breaker()
    fail(it, 3, 0.0)
    assert repr(it) == "CircuitBreaker(CLOSED, 3/5 failures in a row)"
    fail(it, 2, 0.0)
    assert repr(it) == "CircuitBreaker(OPEN, until 1.00, trip 1)"
    it.acquire(1.0)
    assert repr(it) == "CircuitBreaker(HALF_OPEN, 0/3 probes passed, 1 out)"


class BreakerMachine(RuleBasedStateMachine):
    """Any order of calls, outcomes and time: the table is kept, probes are bounded, and it never sticks."""

    @initialize(probes=st.integers(1, 4), random=st.floats(0, 1))
    def start(self, probes: int, random: float) -> None:
        self.now = 100.0
        self.options = BreakerOptions(probes=probes, consecutive=3, min_calls=5, probe_timeout_s=7.0)
        self.breaker = CircuitBreaker(self.options, lambda: random, self.changed)
        self.permits: list[BreakerPermit] = []
        self.changes: list[tuple[BreakerState, BreakerState]] = []
        self.probes_out = 0

    def changed(self, before: BreakerState, after: BreakerState, reason: str) -> None:
        assert reason
        self.changes.append((before, after))

    @rule()
    def call(self) -> None:
        before = self.breaker.state
        wait = self.breaker.opens_in(self.now)
        try:
            permit = self.breaker.acquire(self.now)
        except BreakerOpen:
            assert before is not CLOSED
            return
        assert wait == 0
        assert permit.probe is (self.breaker.state is HALF_OPEN)
        self.permits.append(permit)

    @rule(data=st.data(), outcome=st.sampled_from(["success", "failure", "ignore", "hold", "progress"]))
    def end(self, data: st.DataObject, outcome: str) -> None:
        if not self.permits:
            return
        permit = data.draw(st.sampled_from(self.permits))
        if outcome == "progress":
            permit.progress(self.now)
            return
        self.permits.remove(permit)
        if outcome == "ignore":
            permit.ignore()
        elif outcome == "hold":
            permit.hold(self.now, 5.0, "429")
        else:
            getattr(permit, outcome)(self.now)

    @rule(seconds=st.sampled_from([0.1, 1.0, 8.0, 40.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def changes_are_in_the_table(self) -> None:
        allowed = {(before, after) for (before, _), after in TRANSITIONS.items()}
        assert set(getattr(self, "changes", ())) <= allowed

    @invariant()
    def probes_are_bounded_and_it_never_sticks(self) -> None:
        if not hasattr(self, "breaker"):
            return
        it = self.breaker
        if it.state is HALF_OPEN:
            live = [p for p in self.permits if p.probe and p.generation == it._generation]
            assert len(live) + it._passed <= self.options.probes
        assert it.opens_in(self.now) <= 36.0


BreakerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestBreakerMachine = BreakerMachine.TestCase


def test_every_event_has_a_transition() -> None:
    assert {event for _, event in TRANSITIONS} == set(BreakerEvent)
