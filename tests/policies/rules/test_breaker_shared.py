"""Breakers that tell each other what they found out: each row of the table, and which of two findings wins."""

from collections.abc import Callable

import pytest

from policies.core.errors import BreakerOpen
from policies.rules.breaker import BreakerOptions, BreakerPermit, BreakerState, CircuitBreaker
from policies.rules.breaker_findings import Finding

CLOSED, OPEN, HALF_OPEN = BreakerState


class Worker:
    """A breaker, its changes and what it told."""

    def __init__(self, random: Callable[[], float] = lambda: 0.5, **options: object) -> None:
        self.told: list[Finding] = []
        self.changes: list[tuple[BreakerState, BreakerState, str]] = []
        self.it = CircuitBreaker(
            BreakerOptions(**{"consecutive": 1, "probes": 1} | options),  # type: ignore[arg-type]
            random,
            lambda *change: self.changes.append(change),
            on_finding=self.told.append,
            hold_max_s=300.0,
        )

    @property
    def state(self) -> BreakerState:
        return self.it.state

    def permit(self, now: float) -> BreakerPermit:
        return self.it.acquire(now)

    def fail(self, now: float) -> None:
        self.permit(now).failure(now)

    def hold(self, now: float, seconds: float) -> None:
        self.permit(now).hold(now, seconds, "429")

    def recover(self, now: float) -> None:
        self.permit(now).success(now)

    def hear(self, finding: Finding, now: float) -> None:
        told = len(self.told)
        self.it.hear("w9", finding, now)
        assert len(self.told) == told, "what was heard is never told again"


def closed() -> Worker:
    return Worker()


def opened() -> Worker:
    """At 100, for a second."""
    worker = Worker()
    worker.fail(100.0)
    return worker


def half_open() -> Worker:
    """Since 101, its one probe is out."""
    worker = opened()
    worker.permit(101.0)
    return worker


def tripped(at: float, until: float, **more: object) -> Finding:
    return Finding(opened_at=at, until=until, reason="5 calls failed in a row", **more)  # type: ignore[arg-type]


def held(at: float, until: float) -> Finding:
    return Finding(opened_at=at, held_until=until, reason="429")


def passed(at: float) -> Finding:
    return Finding(passed_at=at, reason="1 probes passed")


ROWS = [
    (closed, tripped(101.4, 103.0), OPEN, "w9: 5 calls failed in a row"),
    (closed, held(101.4, 103.0), OPEN, "w9: 429"),
    (closed, passed(101.4), CLOSED, ""),
    (opened, tripped(101.4, 103.0), OPEN, ""),
    (opened, passed(101.4), CLOSED, "w9: 1 probes passed"),
    (half_open, tripped(101.4, 103.0), OPEN, "w9: 5 calls failed in a row"),
    (half_open, held(101.4, 103.0), OPEN, "w9: 429"),
    (half_open, passed(101.4), CLOSED, "w9: 1 probes passed"),
]


@pytest.mark.parametrize(("begin", "finding", "after", "reason"), ROWS)
def test_every_row(begin: Callable[[], Worker], finding: Finding, after: BreakerState, reason: str) -> None:
    worker = begin()
    before, changes = worker.state, len(worker.changes)
    worker.hear(finding, 101.5)
    assert worker.state is after
    assert worker.changes[changes:] == ([(before, after, reason)] if reason else [])
    assert worker.it.opens_in(101.5) == (1.5 if after is OPEN else 0.0)
    # The same again is harmless.
    worker.hear(finding, 101.5)
    assert worker.changes[changes:] == ([(before, after, reason)] if reason else [])
    assert worker.it.opens_in(101.5) == (1.5 if after is OPEN else 0.0)


def test_it_tells_what_it_found_out_itself() -> None:
    worker = Worker()
    worker.fail(100.0)
    worker.fail(101.0)
    worker.recover(103.0)
    worker.hold(104.0, 5.0)
    assert worker.told == [
        Finding(opened_at=100.0, until=101.0, trips=1, reason="1 calls failed in a row"),
        Finding(opened_at=101.0, until=103.0, trips=2, reason="a probe failed"),
        Finding(passed_at=103.0, trips=2, reason="1 probes passed"),
        Finding(opened_at=104.0, held_until=109.0, passed_at=103.0, trips=2, reason="429"),
    ]


def test_every_finding_says_all_of_it() -> None:
    worker = Worker(open_s=20.0)
    worker.fail(100.0)
    worker.recover(120.0)
    worker.fail(121.0)
    assert worker.told[-1].passed_at == 120.0
    # What a pass has ended, own or heard, is not told again.
    worker.hear(passed(122.0), 122.0)
    worker.hold(123.0, 5.0)
    assert (worker.told[-1].until, worker.told[-1].passed_at) == (0.0, 120.0)


def test_of_two_openings_the_later_end_counts() -> None:
    for finding, left in ((tripped(99.9, 100.5), 1.0), (tripped(99.9, 104.0), 4.0), (held(100.0, 160.0), 60.0)):
        worker = opened()
        worker.hear(finding, 100.0)
        assert worker.it.opens_in(100.0) == pytest.approx(left)


@pytest.mark.parametrize("finding", [tripped(98.0, 99.9), tripped(98.0, 100.0), held(90.0, 95.0), Finding()])
def test_what_is_over_changes_nothing(finding: Finding) -> None:
    worker = closed()
    worker.hear(finding, 100.0)
    assert (worker.state, worker.changes) == (CLOSED, [])


def test_the_moment_of_a_finding_counts_and_not_when_it_arrives() -> None:
    late, early = closed(), closed()
    opening, pass_ = tripped(100.0, 108.0), passed(101.0)
    for worker, order in ((early, (opening, pass_)), (late, (pass_, opening))):
        for finding in (*order, *order):
            worker.hear(finding, 101.5)
        assert worker.state is CLOSED
    assert late.changes == []
    # An opening after that pass counts.
    late.hear(tripped(101.0, 102.0), 101.5)
    assert late.state is OPEN


def test_what_is_over_does_not_outweigh_a_pass() -> None:
    for order in (1, -1):
        worker = Worker(open_s=20.0)
        worker.fail(100.0)
        for finding in (passed(101.0), tripped(102.0, 103.0))[::order]:
            worker.hear(finding, 104.0)
        assert worker.state is CLOSED


def test_a_pass_does_not_close_what_opened_after_it() -> None:
    worker = opened()
    worker.hear(passed(99.5), 100.1)
    worker.hear(passed(100.0), 100.1)
    assert worker.state is OPEN


def test_nobodys_success_ends_a_hold() -> None:
    """The backend itself said when to come back, to this worker or to another."""
    own, other = closed(), closed()
    own.hold(100.0, 60.0)
    other.hear(own.told[0], 100.1)
    for worker in (own, other):
        worker.hear(passed(120.0), 120.1)
        assert worker.it.opens_in(120.0) == 40.0
        # A pass made after its end closes, also one that arrives while nobody has called yet.
        worker.hear(passed(160.5), 161.0)
        assert worker.state is CLOSED


def test_a_hold_counts_although_somebody_passed_meanwhile() -> None:
    worker = opened()
    worker.recover(101.0)
    worker.hear(tripped(100.9, 130.0, held_until=110.0), 101.1)
    assert worker.it.opens_in(101.0) == pytest.approx(9.0)  # the hold's part, not the trip's


def test_a_pass_that_was_missed_is_heard_with_what_came_after() -> None:
    worker = closed()
    worker.hear(tripped(100.0, 130.0), 100.0)
    worker.hear(tripped(111.0, 112.0, passed_at=110.0), 111.1)
    assert worker.it.opens_in(111.0) == pytest.approx(1.0)
    assert [after for _, after, _ in worker.changes] == [OPEN, CLOSED, OPEN]


def test_a_longer_hold_is_told_and_a_burst_of_them_is_told_once() -> None:
    worker = Worker()
    permits = [worker.permit(100.0) for _ in range(300)]
    for number, permit in enumerate(permits):
        now = 100.0 + number / 1000
        permit.hold(now, 1.0, "429")
    assert [finding.opened_at for finding in worker.told] == pytest.approx([100.0, 100.1, 100.2])
    # What the others know already is not told either.
    knowing = Worker()
    permit = knowing.permit(100.0)
    knowing.hear(held(100.0, 160.0), 100.0)
    permit.hold(100.05, 60.0, "429")
    assert knowing.told == []


def test_a_hold_told_while_open_keeps_the_end_of_the_own_trip() -> None:
    worker = Worker(open_s=20.0)
    late = worker.permit(100.0)
    worker.fail(100.0)
    worker.hear(tripped(100.0, 135.0), 100.0)  # another's trip: not this one's to tell
    late.hold(101.0, 5.0, "429")
    assert worker.told[-1] == Finding(opened_at=101.0, until=120.0, held_until=106.0, trips=1, reason="429")


@pytest.mark.parametrize(
    ("finding", "longest"),
    [
        (tripped(100.0, 1e9), 36.0),
        (tripped(100.0, float("inf")), 36.0),
        (held(100.0, 1e9), 300.0),
        (Finding(opened_at=1e9, until=2e9, held_until=2e9, trips=10**6), 300.0),
    ],
)
def test_nobody_is_believed_for_longer_than_this_breaker_could_decide_itself(finding: Finding, longest: float) -> None:
    worker = closed()
    worker.hear(finding, 100.0)
    assert worker.it.opens_in(100.0) == longest


def test_a_pass_from_the_future_is_one_of_now() -> None:
    worker = closed()
    worker.hear(passed(1e9), 100.0)
    worker.hear(tripped(100.5, 102.0), 101.0)
    assert worker.state is OPEN


def test_repeating_a_finding_does_not_lengthen_it() -> None:
    worker = closed()
    for now in (100.0, 110.0, 120.0):
        worker.hear(tripped(100.0, 1e9), now)
    assert worker.it.opens_in(120.0) == 16.0
    worker.hear(tripped(100.0, 1e9), 140.0)
    worker.recover(140.0)
    worker.hear(tripped(100.0, 1e9), 141.0)
    assert worker.state is CLOSED


def test_open_times_grow_whoever_finds_the_failure() -> None:
    one, two = Worker(), Worker()
    now, lengths = 100.0, []
    one.fail(now)
    for finder, other in ((one, two), (two, one), (one, two), (two, one)):
        if lengths:
            finder.fail(now)
        other.hear(finder.told[-1], now)
        assert one.it.opens_in(now) == two.it.opens_in(now)
        lengths.append(one.it.opens_in(now))
        now += lengths[-1]
    assert lengths == [1.0, 2.0, 4.0, 8.0]


def test_workers_probe_together_and_the_first_verdict_ends_it_everywhere() -> None:
    workers = [Worker(probes=3) for _ in range(4)]
    workers[0].fail(100.0)
    for other in workers[1:]:
        other.hear(workers[0].told[0], 100.0)
    probes = {index: [worker.permit(101.0) for _ in range(3)] for index, worker in enumerate(workers)}
    for worker in workers:
        with pytest.raises(BreakerOpen):
            worker.permit(101.0)
    probes[2].pop().failure(101.5)
    for index in (0, 1, 3):
        workers[index].hear(workers[2].told[-1], 101.5)
        probes[index].pop().success(101.6)  # no longer counts
        assert workers[index].it.opens_in(101.5) == 2.0
    for permit in [workers[1].permit(103.5) for _ in range(3)]:
        permit.success(103.6)
    for index in (0, 2, 3):
        workers[index].hear(workers[1].told[-1], 103.6)
        assert workers[index].state is CLOSED
    assert [len(worker.told) for worker in workers] == [1, 1, 1, 0]


def test_a_worker_that_starts_is_open_for_what_is_left() -> None:
    for order in (1, -1):
        worker = closed()
        known = [tripped(80.0, 90.0), tripped(99.0, 101.0), passed(85.0), held(98.0, 128.0)]
        for finding in known[::order]:
            worker.hear(finding, 100.0)
        assert worker.it.opens_in(100.0) == 28.0
        assert [after for _, after, _ in worker.changes] == [OPEN]
