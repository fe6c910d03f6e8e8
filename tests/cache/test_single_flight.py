"""One call for equal requests; nobody's fate is another's; nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import AsyncIterator

import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.api import Answer, ChatAnswer
from cache.single_flight import Flights
from policies.core.clock import SystemClock
from policies.core.deadline import Deadline
from policies.core.errors import (
    BackendError,
    DeadlineExceeded,
    Draining,
    GatewayError,
    MethodNotAllowed,
    UpstreamStatus,
)
from tests.support.cache_samples import chat_answer

KEY = b"k" * 16


class Call:
    """A backend call that ends when the test says so."""

    def __init__(self) -> None:
        self.started = 0
        self.cancelled = 0
        self.deadline: Deadline | None = None
        self._end: asyncio.Future[Answer] | None = None

    async def __call__(self, deadline: Deadline) -> Answer:
        self.started += 1
        self.deadline = deadline
        self._end = asyncio.get_running_loop().create_future()
        try:
            return await self._end
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    def answer(self, answer: Answer) -> None:
        assert self._end is not None
        self._end.set_result(answer)

    def fail(self, error: BaseException) -> None:
        assert self._end is not None
        self._end.set_exception(error)


def within(seconds: float) -> Deadline:
    return Deadline.after(seconds, SystemClock())


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.fixture
async def flights() -> AsyncIterator[Flights]:
    made = Flights()
    yield made
    await settle()
    assert repr(made) == "Flights(0 whole, 0 streams, 0 tasks)"
    await made.aclose()


async def test_five_hundred_equal_requests_are_one_call(flights: Flights) -> None:
    call, stored = Call(), []
    waiters = [asyncio.create_task(flights.whole(KEY, call, within(5), stored.append)) for _ in range(500)]
    await settle()
    call.answer(chat_answer())
    answers = await asyncio.gather(*waiters)
    assert call.started == 1
    assert answers == [chat_answer()] * 500
    assert stored == [chat_answer()]
    assert flights.stats() == {"in_flight": 0, "started": 1, "joined": 499}


async def test_different_keys_are_different_calls(flights: Flights) -> None:
    calls = [Call(), Call()]
    waiters = [asyncio.create_task(flights.whole(bytes([n]) * 16, call, within(5))) for n, call in enumerate(calls)]
    await settle()
    for number, call in enumerate(calls):
        call.answer(chat_answer(str(number)))
    assert await asyncio.gather(*waiters) == [chat_answer("0"), chat_answer("1")]


async def test_the_first_client_leaves_and_the_others_are_served(flights: Flights) -> None:
    call, stored = Call(), []
    first, second, third = (asyncio.create_task(flights.whole(KEY, call, within(5), stored.append)) for _ in range(3))
    await settle()
    first.cancel()
    await settle()
    assert first.cancelled()
    assert call.cancelled == 0
    call.answer(chat_answer())
    assert await asyncio.gather(second, third) == [chat_answer()] * 2
    assert stored == [chat_answer()]


async def test_the_last_to_leave_cancels_the_call_at_once(flights: Flights) -> None:
    call, stored = Call(), []
    waiters = [asyncio.create_task(flights.whole(KEY, call, within(5), stored.append)) for _ in range(3)]
    await settle()
    for waiter in waiters:
        assert call.cancelled == 0
        waiter.cancel()
        await settle()
    assert call.cancelled == 1
    assert stored == []
    # Whoever comes now does not board a call that is being cancelled.
    again = asyncio.create_task(flights.whole(KEY, call, within(5)))
    await settle()
    call.answer(chat_answer())
    assert await again == chat_answer()
    assert call.started == 2


async def test_a_failure_reaches_every_waiter_as_its_own(flights: Flights) -> None:
    call, stored = Call(), []
    waiters = [asyncio.create_task(flights.whole(KEY, call, within(5), stored.append)) for _ in range(3)]
    await settle()
    call.fail(UpstreamStatus(503, "heavy", retry_after_s=2.0))
    errors = await asyncio.gather(*waiters, return_exceptions=True)
    assert len({id(error) for error in errors}) == 3
    for error in errors:
        assert isinstance(error, UpstreamStatus)
        assert (error.status, error.backend, error.retry_after_s) == (503, "heavy", 2.0)
        assert "503" in str(error)
    assert stored == []
    # Failed means forgotten: the next request calls again.
    later = asyncio.create_task(flights.whole(KEY, call, within(5)))
    await settle()
    assert call.started == 2
    call.answer(chat_answer())
    assert await later == chat_answer()


async def test_errors_with_any_signature_can_be_shared(flights: Flights) -> None:
    call = Call()
    waiters = [asyncio.create_task(flights.whole(KEY, call, within(5))) for _ in range(2)]
    await settle()
    call.fail(MethodNotAllowed("no", ("GET",)))
    for error in await asyncio.gather(*waiters, return_exceptions=True):
        assert isinstance(error, MethodNotAllowed)
        assert error.allowed == ("GET",)


async def test_each_waiter_keeps_its_own_deadline_and_the_call_gets_the_latest(flights: Flights) -> None:
    call, stored = Call(), []
    hasty = asyncio.create_task(flights.whole(KEY, call, within(0.05), stored.append))
    patient = asyncio.create_task(flights.whole(KEY, call, within(5)))
    await settle()
    assert call.deadline is not None
    assert call.deadline.remaining() > 4
    with pytest.raises(DeadlineExceeded):
        await hasty
    assert call.cancelled == 0
    call.answer(chat_answer())
    assert await patient == chat_answer()
    assert stored == [chat_answer()]


async def test_a_call_that_outlives_every_deadline_may_count_its_own_limit_and_is_then_cancelled(
    flights: Flights,
) -> None:
    seen: list[str] = []

    async def obedient(deadline: Deadline) -> Answer:
        try:
            async with deadline.timeout():
                await asyncio.Event().wait()
        except DeadlineExceeded:
            seen.append("own limit")
            raise
        raise AssertionError

    with pytest.raises(DeadlineExceeded):
        await flights.whole(KEY, obedient, within(0.02))
    await asyncio.sleep(0.02)
    assert seen == ["own limit"]
    call = Call()
    with pytest.raises(DeadlineExceeded):
        await flights.whole(KEY, call, within(0.02))
    assert call.cancelled == 0
    await asyncio.sleep(0.3)
    assert call.cancelled == 1


async def test_the_last_to_expire_cancels_when_the_call_has_long_to_run(flights: Flights) -> None:
    call = Call()
    patient = asyncio.create_task(flights.whole(KEY, call, within(60)))
    hasty = asyncio.create_task(flights.whole(KEY, call, within(0.03)))
    await settle()
    patient.cancel()
    with pytest.raises(DeadlineExceeded):
        await hasty
    await settle()
    assert call.cancelled == 1


async def test_a_passed_deadline_starts_nothing(flights: Flights) -> None:
    call = Call()
    with pytest.raises(DeadlineExceeded):
        await flights.whole(KEY, call, within(-1))
    assert call.started == 0


async def test_a_store_that_raises_does_not_cost_the_answer(flights: Flights) -> None:
    def broken(_: Answer) -> None:
        raise RuntimeError("disk full")

    call = Call()
    waiter = asyncio.create_task(flights.whole(KEY, call, within(5), broken))
    await settle()
    with structlog.testing.capture_logs() as lines:
        call.answer(chat_answer())
        assert await waiter == chat_answer()
    assert len(lines) == 1


async def test_a_call_that_cancels_itself_is_a_failure_not_the_waiters_cancellation(flights: Flights) -> None:
    async def suicidal(_: Deadline) -> Answer:
        raise asyncio.CancelledError

    with pytest.raises(BackendError):
        await flights.whole(KEY, suicidal, within(5))


async def test_an_answer_stored_in_the_callback_is_there_before_the_next_request_can_miss_it(
    flights: Flights,
) -> None:
    call = Call()
    stored: list[Answer] = []
    waiter = asyncio.create_task(flights.whole(KEY, call, within(5), stored.append))
    await settle()
    call.answer(chat_answer())
    while len(flights):
        assert stored == []
        await asyncio.sleep(0)
    assert stored == [chat_answer()]
    await waiter


async def test_closing_tells_waiters_and_refuses_newcomers() -> None:
    flights, call = Flights(), Call()
    waiters = [asyncio.create_task(flights.whole(KEY, call, within(5))) for _ in range(2)]
    await settle()
    await flights.aclose()
    errors = await asyncio.gather(*waiters, return_exceptions=True)
    assert all(isinstance(error, Draining) for error in errors)
    assert call.cancelled == 1
    assert len(flights) == 0
    with pytest.raises(Draining):
        await flights.whole(KEY, call, within(5))


async def test_closing_before_the_call_has_begun() -> None:
    flights, call = Flights(), Call()
    waiter = asyncio.create_task(flights.whole(KEY, call, within(5)))
    await asyncio.sleep(0)
    await flights.aclose()
    with pytest.raises(Draining):
        await waiter
    assert call.started == 0


steps = st.lists(
    st.tuples(st.sampled_from(["join", "leave", "answer", "fail", "pause", "hasty"]), st.integers(0, 2)), max_size=30
)


@given(steps)
@settings(deadline=None)
def test_after_any_interleaving_nothing_is_left(story: list[tuple[str, int]]) -> None:
    async def run() -> None:
        flights = Flights()
        calls = {number: Call() for number in range(3)}
        stored: list[ChatAnswer] = []
        waiters: list[asyncio.Task[Answer]] = []
        ended = 0
        for act, number in story:
            call = calls[number]
            if act in ("join", "hasty"):
                deadline = within(5 if act == "join" else 1e-6)
                waiters.append(asyncio.create_task(flights.whole(bytes([number]) * 16, call, deadline, stored.append)))
            elif act == "leave" and waiters:
                waiters[number % len(waiters)].cancel()
            elif act in ("answer", "fail") and call._end is not None and not call._end.done():
                ended += act == "answer"
                if act == "answer":
                    call.answer(chat_answer(str(number)))
                else:
                    call.fail(UpstreamStatus(500))
            elif act == "pause":
                await settle()
        for waiter in waiters[::2]:
            waiter.cancel()
        await settle()
        for call in calls.values():
            if call._end is not None and not call._end.done():
                ended += 1
                call.answer(chat_answer())
        for outcome in await asyncio.gather(*waiters, return_exceptions=True):
            assert isinstance(outcome, ChatAnswer | GatewayError | asyncio.CancelledError)
        for _ in range(60):
            await settle()
            if "0 tasks" not in repr(flights):
                await asyncio.sleep(0.01)
        assert repr(flights) == "Flights(0 whole, 0 streams, 0 tasks)"
        assert len(stored) <= ended

    asyncio.run(run())


async def test_a_thousand_requests_at_random_moments_lose_nothing(flights: Flights) -> None:
    draw = random.Random(5)
    running: dict[bytes, int] = {}

    async def call(key: bytes) -> Answer:
        running[key] = running.get(key, 0) + 1
        assert running[key] == 1, "two calls of one key at once"
        try:
            await asyncio.sleep(draw.random() * 0.01)
            if draw.random() < 0.2:
                raise UpstreamStatus(500)
            return chat_answer(key.hex())
        finally:
            running[key] -= 1

    async def client() -> str:
        await asyncio.sleep(draw.random() * 0.3)
        key = bytes([draw.randrange(8)]) * 16
        leave_after = draw.choice([None, None, draw.random() * 0.01])
        try:
            async with asyncio.timeout(leave_after):
                answer = await flights.whole(key, lambda _: call(key), within(5))
        except UpstreamStatus:
            return "failed"
        except TimeoutError:
            return "left"
        assert answer == chat_answer(key.hex())
        return "served"

    outcomes = await asyncio.gather(*(client() for _ in range(1_000)))
    assert {outcomes.count(kind) > 20 for kind in ("served", "failed", "left")} == {True}
    gc.collect()
