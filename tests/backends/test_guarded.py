"""What the guard refuses, counts and reports. Time is a fake clock's; the backend is scripted."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from backends.api import Chunk, ChunkKind, Health, TensorRequest
from backends.guarded import Guarded, GuardOptions, verdict
from backends.scripted import Outcome, ScriptedBackend, chat
from chaos.injector import Injector
from policies.core import errors
from policies.core.clock import FakeClock
from policies.core.deadline import Deadline
from policies.core.events import Attempted, BreakerChanged, Event
from policies.rules.breaker import BreakerOptions, BreakerState
from policies.rules.limit import LimitOptions
from tests.support.upstream import info, question

OK = Outcome(chat("one two three"))


class Events:
    def __init__(self) -> None:
        self.seen: list[Event] = []

    def on_event(self, event: Event) -> None:
        self.seen.append(event)

    def outcomes(self) -> list[str]:
        return [event.outcome for event in self.seen if isinstance(event, Attempted)]


class Bench:
    """A guard, what is under it, and the clock."""

    def __init__(self, *outcomes: Outcome, options: GuardOptions | None = None) -> None:
        self.clock = FakeClock()
        self.backend = ScriptedBackend(info("m"), list(outcomes), self.clock)
        self.events = Events()
        self.guard = Guarded(
            Injector(self.backend),
            options or GuardOptions(),
            clock=self.clock,
            observer=self.events,
            random=lambda: 0.5,
        )

    def deadline(self, seconds: float = 10.0) -> Deadline:
        return Deadline.after(seconds, self.clock)

    async def infer(self, seconds: float = 10.0) -> str:
        """The outcome's name."""
        task = asyncio.ensure_future(self.guard.infer(question(), self.deadline(seconds)))
        await self.settle()
        if not task.done():
            self.clock.advance(seconds)
        try:
            await task
        except errors.GatewayError as error:
            return error.code
        return "ok"

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    def idle(self) -> bool:
        """No permit of any kind is out."""
        return self.guard.limiter.in_use == 0 and not self.guard.breaker._probes and self.backend.in_flight == 0


def failing(error: errors.GatewayError, **more: Any) -> Outcome:
    return Outcome(error=error, **more)


async def test_the_order_is_limiter_breaker_chaos_transport() -> None:
    bench = Bench(failing(errors.UpstreamStatus(500)), options=GuardOptions(limit=LimitOptions(max_concurrent=1)))
    guard = bench.guard
    layers = ["ConcurrencyLimiter(", "CircuitBreaker(", "Injector(", "ScriptedBackend("]
    places = [repr(guard).index(layer) for layer in layers]
    assert places == sorted(places)
    # A full limiter refuses before the breaker is asked: no probe is spent.
    for _ in range(5):
        await bench.infer()
    bench.clock.advance(1.0)
    room = guard.limiter.acquire()
    assert await bench.infer() == "limit_reached"
    assert guard.breaker.state is BreakerState.OPEN
    room.ignored()
    # Chaos is below the breaker: what it injects counts, and the transport is not reached.
    calls = len(bench.backend.calls)
    bench.backend._left["*"] = [OK]

    class Fault:
        name = "always"

        async def before(self, request: Any, deadline: Deadline) -> None:
            raise errors.ConnectFailed("injected")

    injector = guard._backend
    assert isinstance(injector, Injector)
    injector.faults.append(Fault())
    assert await bench.infer() == "upstream_unreachable"
    assert len(bench.backend.calls) == calls
    assert guard.breaker.state is BreakerState.OPEN
    assert bench.idle()


VERDICTS = {
    "failure": [
        errors.ConnectFailed(),
        errors.UpstreamStatus(500),
        errors.UpstreamStatus(501),
        errors.UpstreamStatus(408),
        errors.UpstreamStatus(302),
        errors.MalformedAnswer(),
        errors.TruncatedAnswer(),
        errors.InBandError(),
        errors.IdleTimeout(),
        errors.TotalTimeout(),
        errors.ModelFailed(),
        KeyError("a defect"),
    ],
    "timeout": [errors.FirstTokenTimeout(), errors.DeadlineExceeded()],
    "hold": [errors.UpstreamStatus(429), errors.UpstreamMisconfigured(401)],
    "ignored": [
        errors.ClientFault(400, b"", ""),
        errors.ContextTooLong(400, b"", ""),
        errors.InvalidRequest("x"),
        errors.LimitReached(),
        errors.ModelNotReady(),
        errors.CannotServe(),
        asyncio.CancelledError(),
        GeneratorExit(),
    ],
}


@pytest.mark.parametrize(("name", "error"), [(name, error) for name, some in VERDICTS.items() for error in some])
def test_verdicts(name: str, error: BaseException) -> None:
    assert verdict(error).value == name


async def test_five_failures_open_it_and_later_calls_are_not_made() -> None:
    bench = Bench(failing(errors.UpstreamStatus(503)))
    outcomes = [await bench.infer() for _ in range(8)]
    assert outcomes == ["upstream_status"] * 5 + ["breaker_open"] * 3
    assert len(bench.backend.calls) == 5
    assert bench.events.outcomes() == ["upstream_status"] * 5
    changes = [event for event in bench.events.seen if isinstance(event, BreakerChanged)]
    assert [(change.backend, change.before, change.after) for change in changes] == [("heavy", "closed", "open")]
    assert (await bench.guard.health()) == Health(ready=True, reason="its breaker is open")
    assert bench.idle()


@pytest.mark.parametrize("error", [errors.ClientFault(422, b"", ""), errors.LimitReached(), errors.InvalidRequest("x")])
async def test_what_is_not_the_backends_fault_never_opens_it(error: errors.GatewayError) -> None:
    bench = Bench(failing(error))
    for _ in range(30):
        await bench.infer()
    assert bench.guard.breaker.state is BreakerState.CLOSED
    assert bench.idle()


async def test_a_hundred_cancelled_calls_leave_it_closed_and_everything_free() -> None:
    bench = Bench(Outcome(chat("a"), delay_s=5))
    for stream in (False, True):
        tasks = [
            asyncio.ensure_future(
                anext(bench.guard.stream(question(), bench.deadline()))
                if stream
                else bench.guard.infer(question(), bench.deadline())
            )
            for _ in range(50)
        ]
        await bench.settle()
        assert bench.guard.limiter.in_use == 50
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert bench.events.outcomes() == ["client_closed"] * 100
    assert bench.guard.breaker.state is BreakerState.CLOSED
    assert bench.idle()


async def test_misconfiguration_rests_the_backend_after_one_call() -> None:
    bench = Bench(failing(errors.UpstreamMisconfigured(401)), OK)
    assert [await bench.infer(), await bench.infer()] == ["upstream_misconfigured", "breaker_open"]
    bench.clock.advance(10.0)
    assert await bench.infer() == "ok"


@pytest.mark.parametrize(("asked", "rest"), [(None, 1.0), (5.0, 5.0), (1e6, 300.0)])
async def test_429_rests_the_backend_as_long_as_it_asks(asked: float | None, rest: float) -> None:
    bench = Bench(failing(errors.UpstreamStatus(429, retry_after_s=asked)), OK)
    assert await bench.infer() == "upstream_status"
    assert bench.guard.breaker.opens_in(bench.clock.now()) == rest


async def test_timeouts_count_only_when_the_backend_had_a_fair_time() -> None:
    slow = Outcome(chat("a"), delay_s=60)
    bench = Bench(slow)
    for _ in range(20):
        assert await bench.infer(0.05) == "deadline_exceeded"
    assert bench.guard.breaker.state is BreakerState.CLOSED
    for _ in range(5):
        assert await bench.infer(1.0) == "deadline_exceeded"
    assert bench.guard.breaker.state is BreakerState.OPEN

    usual = Bench(Outcome(chat("a"), delay_s=2.0), slow)
    task = asyncio.ensure_future(usual.guard.infer(question(), usual.deadline()))
    await usual.settle()
    usual.clock.advance(2.0)
    await task
    for _ in range(20):
        await usual.infer(1.0)  # shorter than its answers take
    assert usual.guard.breaker.state is BreakerState.CLOSED
    for _ in range(5):
        await usual.infer(3.0)
    assert usual.guard.breaker.state is BreakerState.OPEN


async def test_a_deadline_that_has_passed_calls_nobody() -> None:
    bench = Bench(OK)
    assert await bench.infer(0.0) == "deadline_exceeded"
    assert (bench.backend.calls, bench.events.seen) == ([], [])


async def collect(stream: AsyncIterator[Chunk]) -> list[Chunk]:
    return [piece async for piece in stream]


async def test_a_stream_is_judged_at_its_end() -> None:
    bench = Bench(failing(errors.TruncatedAnswer(), chunks=3))
    for _ in range(5):
        with pytest.raises(errors.TruncatedAnswer):
            await collect(bench.guard.stream(question(), bench.deadline()))
    assert bench.guard.breaker.state is BreakerState.OPEN
    with pytest.raises(errors.BreakerOpen):
        await collect(bench.guard.stream(question(), bench.deadline()))
    assert bench.idle()


async def test_times_of_a_stream() -> None:
    bench = Bench(Outcome(chat("a b"), delay_s=2.0, every_s=1.0))
    task = asyncio.ensure_future(collect(bench.guard.stream(question(), bench.deadline())))
    for _ in range(8):
        await bench.settle()
        bench.clock.advance(1.0)
    chunks = await task
    assert [piece.kind for piece in chunks] == [
        ChunkKind.META,
        ChunkKind.CONTENT,
        ChunkKind.CONTENT,
        ChunkKind.FINISH,
        ChunkKind.USAGE,
    ]
    assert [event for event in bench.events.seen if isinstance(event, Attempted)] == [
        Attempted(request_id="req-1", backend="heavy", outcome="ok", seconds=6.0, first_s=3.0)
    ]


@pytest.mark.parametrize(("read", "outcome"), [(1, "client_closed"), (2, "client_closed"), (5, "ok")])
async def test_a_consumer_that_stops_reading(read: int, outcome: str) -> None:
    """Before the finish that is its own affair; after it the answer was complete."""
    bench = Bench(OK)
    stream = bench.guard.stream(question(), bench.deadline())
    for _ in range(read):
        await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]
    assert bench.events.outcomes() == [outcome]
    assert bench.backend.cancelled == 1
    assert bench.idle()


async def test_exactly_the_permitted_probes_reach_the_backend_and_streams_close_it_early() -> None:
    options = GuardOptions(breaker=BreakerOptions(probes=2))
    bench = Bench(*[failing(errors.ConnectFailed())] * 5, Outcome(chat("a"), every_s=100.0), options=options)
    for _ in range(5):
        await bench.infer()
    bench.clock.advance(1.0)
    streams = [bench.guard.stream(question(), bench.deadline()) for _ in range(1000)]
    tasks = [asyncio.ensure_future(anext(stream)) for stream in streams]
    await bench.settle()
    refused = [task for task in tasks if task.done() and isinstance(task.exception(), errors.BreakerOpen)]
    assert (len(bench.backend.calls), len(refused)) == (7, 998)
    passed = [stream for stream, task in zip(streams, tasks, strict=True) if task not in refused]
    for stream in passed:
        task = asyncio.ensure_future(anext(stream))
        await bench.settle()
        bench.clock.advance(100.0)
        await task
    assert bench.guard.breaker.state is BreakerState.CLOSED
    for stream in passed:
        await stream.aclose()  # type: ignore[attr-defined]
    assert bench.idle()


async def test_a_probe_whose_caller_leaves_frees_its_permit() -> None:
    options = GuardOptions(breaker=BreakerOptions(probes=1))
    bench = Bench(*[failing(errors.ConnectFailed())] * 5, Outcome(chat("a"), delay_s=5), OK, options=options)
    for _ in range(5):
        await bench.infer()
    bench.clock.advance(1.0)
    probe = asyncio.ensure_future(bench.guard.infer(question(), bench.deadline()))
    await bench.settle()
    assert await bench.infer() == "breaker_open"
    probe.cancel()
    await asyncio.gather(probe, return_exceptions=True)
    assert await bench.infer() == "ok"
    assert bench.guard.breaker.state is BreakerState.CLOSED


async def test_a_jump_of_the_wall_clock_changes_nothing() -> None:
    bench = Bench(failing(errors.UpstreamStatus(500)))
    for _ in range(5):
        await bench.infer()
    bench.clock.jump_wall(3600)
    assert await bench.infer() == "breaker_open"


async def test_a_defect_of_a_backend_is_counted_and_not_swallowed() -> None:
    class Broken(ScriptedBackend):
        async def infer(self, request: Any, deadline: Deadline) -> Any:
            raise KeyError("oops")

    bench = Bench(OK)
    bench.guard._backend = Broken(info("m"), [OK], bench.clock)
    with pytest.raises(KeyError):
        await bench.guard.infer(TensorRequest("m", []), bench.deadline())
    assert bench.events.outcomes() == ["internal_error"]
    assert bench.idle()


async def test_closing_closes_what_is_below() -> None:
    bench = Bench(OK)
    await bench.guard.aclose()
    assert bench.backend.closed
    assert (await bench.guard.health()) == Health(ready=False, reason="closed")
