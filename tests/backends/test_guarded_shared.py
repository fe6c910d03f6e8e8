"""Guards of the same backend in several workers: what one finds out, the others know, and no call is slower for it."""

import pytest

from backends.guarded import Guarded, GuardOptions
from backends.scripted import Outcome, ScriptedBackend, chat
from policies.core import errors
from policies.core.clock import FakeClock
from policies.core.deadline import Deadline
from policies.core.events import BreakerChanged, Event, FactRefused
from policies.core.shared_state import Alone, SharedState
from policies.rules.breaker import BreakerOptions, BreakerState
from tests.support.shared_state import Host
from tests.support.upstream import info, question

OK = Outcome(chat("one two three"))
BROKEN = Outcome(error=errors.UpstreamStatus(503))
CLOSED, OPEN, HALF_OPEN = BreakerState


class Worker:
    """A guard over its own scripted backend, with what it reported."""

    def __init__(self, clock: FakeClock, shared: SharedState, *outcomes: Outcome) -> None:
        self.events: list[Event] = []
        self.clock = clock
        self.backend = ScriptedBackend(info("m"), list(outcomes) or [OK], clock)
        self.guard = Guarded(
            self.backend,
            GuardOptions(breaker=BreakerOptions(probes=2)),
            clock=clock,
            observer=self,
            random=lambda: 0.5,
            shared=shared,
        )

    def on_event(self, event: Event) -> None:
        self.events.append(event)

    @property
    def state(self) -> BreakerState:
        return self.guard.breaker.state

    def changes(self) -> list[tuple[str, str]]:
        return [(event.after, event.reason) for event in self.events if isinstance(event, BreakerChanged)]

    async def calls(self, times: int) -> set[str]:
        """The outcomes' names."""
        seen = set()
        for _ in range(times):
            try:
                await self.guard.infer(question(), Deadline.after(10.0, self.clock))
            except errors.GatewayError as error:
                seen.add(error.code)
            else:
                seen.add("ok")
        return seen


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def host() -> Host:
    return Host()


async def test_what_one_worker_finds_out_the_others_know(clock: FakeClock, host: Host) -> None:
    one, two, three = (
        Worker(clock, host.worker(f"worker-{number}"), *outcomes)
        for number, outcomes in ((1, [OK]), (2, [BROKEN] * 5 + [OK]), (3, [OK]))
    )
    assert await two.calls(5) == {"upstream_status"}
    for other in (one, three):
        assert other.changes() == [("open", "worker-2: 5 calls failed in a row")]
        assert await other.calls(3) == {"breaker_open"}
        assert other.backend.calls == []
    clock.advance(1.0)
    assert await one.calls(2) == {"ok"}
    assert [worker.state for worker in (one, two, three)] == [CLOSED, CLOSED, CLOSED]
    assert two.changes()[-1] == ("closed", "worker-1: 2 probes passed")
    # One opening and one pass: nobody told what it had only heard.
    assert host.told == [("worker-2", "breaker/heavy"), ("worker-1", "breaker/heavy")]


async def test_calls_that_change_nothing_tell_nothing(clock: FakeClock, host: Host) -> None:
    worker = Worker(clock, host.worker("worker-1"), *[OK, BROKEN] * 10)
    assert await worker.calls(18) == {"ok", "upstream_status"}
    assert (worker.state, host.told) == (CLOSED, [])


async def test_a_neighbours_success_does_not_end_the_rest_that_the_backend_asked_for(
    clock: FakeClock, host: Host
) -> None:
    host.connected = False
    throttled = Outcome(error=errors.UpstreamStatus(429, retry_after_s=60.0))
    one = Worker(clock, host.worker("worker-1"), throttled, OK)
    two = Worker(clock, host.worker("worker-2"), *[BROKEN] * 5, OK)
    await one.calls(1)
    await two.calls(5)
    clock.advance(1.0)
    assert await two.calls(2) == {"ok"}
    assert two.state is CLOSED
    host.connected = True
    host.deliver_all()
    # Both are left alone for the rest of the minute, and both are let in again after it.
    assert [worker.guard.breaker.opens_in(clock.now()) for worker in (one, two)] == [59.0, 59.0]
    assert two.changes()[-1] == ("open", "worker-1: upstream_status")
    clock.advance(59.0)
    assert await one.calls(2) == {"ok"}
    assert [one.state, two.state] == [CLOSED, CLOSED]


async def test_a_hold_is_believed_as_long_as_this_guard_would_hold(clock: FakeClock, host: Host) -> None:
    worker = Worker(clock, host.worker("worker-1"))
    now = clock.now()
    host.worker("worker-2").tell("breaker/heavy", {"opened_at": now, "held_until": now + 1e6, "reason": "429"})
    assert worker.guard.breaker.opens_in(now) == 300.0


async def test_each_goes_on_alone_when_nothing_arrives(clock: FakeClock, host: Host) -> None:
    host.connected = False
    one = Worker(clock, host.worker("worker-1"), *[BROKEN] * 5, OK)
    two = Worker(clock, host.worker("worker-2"))
    alone = Worker(clock, Alone(), *[BROKEN] * 5, OK)
    for worker in (one, alone):
        assert await worker.calls(5) == {"upstream_status"}
        assert worker.state is OPEN
    assert await two.calls(5) == {"ok"}
    clock.advance(1.0)
    for worker in (one, alone):
        assert await worker.calls(2) == {"ok"}
        assert worker.state is CLOSED
    assert one.changes() == alone.changes()
    assert two.changes() == []


async def test_a_worker_that_starts_knows_what_the_others_know(clock: FakeClock, host: Host) -> None:
    one = Worker(clock, host.worker("worker-1"), BROKEN)
    await one.calls(5)
    new = Worker(clock, host.worker("worker-2"))
    assert new.changes() == [("open", "worker-1: 5 calls failed in a row")]
    clock.advance(1.0)
    newer = Worker(clock, host.worker("worker-3"))
    assert (newer.state, newer.changes()) == (CLOSED, [])


async def test_what_a_worker_found_out_outlives_it_until_its_time_is_over(clock: FakeClock, host: Host) -> None:
    one = Worker(clock, host.worker("worker-1"), BROKEN)
    two = Worker(clock, host.worker("worker-2"))
    await one.calls(5)
    host.gone("worker-1")
    assert await two.calls(1) == {"breaker_open"}
    clock.advance(1.0)
    assert await two.calls(2) == {"ok"}
    assert two.state is CLOSED


async def test_other_backends_are_not_concerned(clock: FakeClock, host: Host) -> None:
    worker = Worker(clock, host.worker("worker-1"))
    now = clock.now()
    host.worker("worker-2").tell("breaker/light", {"opened_at": now, "until": now + 5.0})
    assert worker.state is CLOSED


@pytest.mark.parametrize(
    "fact", [{"until": "soon"}, {"until": float("nan")}, {"opened_at": -1.0}, {"trips": 1.5}, {"reason": None}]
)
async def test_what_cannot_be_read_is_reported_and_changes_nothing(clock: FakeClock, host: Host, fact: dict) -> None:
    worker = Worker(clock, host.worker("worker-1"))
    host.worker("worker-2").tell("breaker/heavy", {"opened_at": 1e3, "until": 1e9} | fact)
    (event,) = worker.events
    assert isinstance(event, FactRefused)
    assert (event.key, event.teller) == ("breaker/heavy", "worker-2")
    assert next(iter(fact)) in event.reason
    assert worker.state is CLOSED


async def test_fields_it_does_not_know_are_passed_over(clock: FakeClock, host: Host) -> None:
    worker = Worker(clock, host.worker("worker-1"))
    now = clock.now()
    host.worker("worker-2").tell("breaker/heavy", {"opened_at": now, "until": now + 5.0, "ramp": 0.25})
    assert worker.guard.breaker.opens_in(now) == 5.0
