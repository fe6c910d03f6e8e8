"""One stream for equal requests, from its first chunk, at everybody's own pace, in bounded memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence

import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.api import Chunk, ChunkKind
from cache.chunk_log import LIMIT_BYTES, ChunkLog
from cache.single_flight import Flights
from policies.core.clock import SystemClock
from policies.core.deadline import Deadline
from policies.core.errors import DeadlineExceeded, Draining, GatewayError, InBandError, TruncatedAnswer

KEY = b"k" * 16

ROLE = Chunk(b"role", ChunkKind.META)
FINISH = Chunk(b"finish", ChunkKind.FINISH)
USAGE = Chunk(b"usage", ChunkKind.USAGE)


def text(number: int, size: int = 0) -> Chunk:
    return Chunk(b"%d" % number + b"x" * size, ChunkKind.CONTENT)


WHOLE = [ROLE, text(1), text(2), text(3), FINISH, USAGE]


class Upstream:
    """A stream that goes on as far as the test lets it."""

    def __init__(self, chunks: Sequence[Chunk] = tuple(WHOLE), error: Exception | None = None) -> None:
        self.chunks = chunks
        self.error = error
        self.started = 0
        self.closed = 0
        self.sent = 0
        self.deadline: Deadline | None = None
        self._gate = asyncio.Semaphore(0)

    def let(self, count: int) -> None:
        for _ in range(count):
            self._gate.release()

    async def __call__(self, deadline: Deadline) -> AsyncGenerator[Chunk, None]:
        self.started += 1
        self.deadline = deadline
        try:
            for chunk in self.chunks:
                await self._gate.acquire()
                self.sent += 1
                yield chunk
            if self.error is not None:
                raise self.error
        finally:
            self.closed += 1


def within(seconds: float) -> Deadline:
    return Deadline.after(seconds, SystemClock())


async def settle() -> None:
    for _ in range(12):
        await asyncio.sleep(0)


async def collect(chunks: AsyncIterator[Chunk], into: list[Chunk] | None = None) -> list[Chunk]:
    got = [] if into is None else into
    async for chunk in chunks:
        got.append(chunk)
    return got


@pytest.fixture
async def flights() -> AsyncIterator[Flights]:
    made = Flights()
    yield made
    await settle()
    assert repr(made) == "Flights(0 whole, 0 streams, 0 tasks)"
    await made.aclose()


async def test_one_call_and_every_reader_gets_the_whole_stream(flights: Flights) -> None:
    upstream, stored = Upstream(), []
    upstream.let(99)
    readers = [flights.stream(KEY, upstream, within(5), stored.append) for _ in range(20)]
    assert await asyncio.gather(*map(collect, readers)) == [WHOLE] * 20
    assert (upstream.started, upstream.closed) == (1, 1)
    assert stored == [WHOLE]


async def test_whoever_joins_half_way_reads_from_the_start(flights: Flights) -> None:
    upstream = Upstream()
    first: list[Chunk] = []
    one = asyncio.create_task(collect(flights.stream(KEY, upstream, within(5)), first))
    await settle()
    upstream.let(3)
    await settle()
    assert first == WHOLE[:3]
    late: list[Chunk] = []
    two = asyncio.create_task(collect(flights.stream(KEY, upstream, within(5)), late))
    await settle()
    assert late == WHOLE[:3]
    upstream.let(99)
    assert await asyncio.gather(one, two) == [WHOLE, WHOLE]
    assert upstream.started == 1


async def test_a_slow_reader_slows_nobody(flights: Flights) -> None:
    upstream = Upstream()
    slow = flights.stream(KEY, upstream, within(5))
    fast = asyncio.create_task(collect(flights.stream(KEY, upstream, within(5))))
    upstream.let(99)
    assert await anext(slow) == ROLE
    assert await fast == WHOLE
    assert await collect(slow) == WHOLE[1:]


async def test_the_first_reader_leaves_and_the_others_read_on(flights: Flights) -> None:
    upstream, stored = Upstream(), []
    first = flights.stream(KEY, upstream, within(5), stored.append)
    second = flights.stream(KEY, upstream, within(5))
    upstream.let(2)
    assert [await anext(first), await anext(second)] == [ROLE, ROLE]
    await first.aclose()
    await settle()
    assert upstream.closed == 0
    upstream.let(99)
    assert await collect(second) == WHOLE[1:]
    assert stored == [WHOLE]


async def test_the_last_reader_to_leave_closes_the_upstream_at_once(flights: Flights) -> None:
    upstream, stored = Upstream(), []
    readers = [flights.stream(KEY, upstream, within(5), stored.append) for _ in range(2)]
    upstream.let(2)
    for reader in readers:
        await anext(reader)
    for reader in readers:
        assert upstream.closed == 0
        await reader.aclose()
        await settle()
    assert upstream.closed == 1
    assert stored == []


async def test_a_cancelled_reader_leaves(flights: Flights) -> None:
    upstream = Upstream()
    reader = asyncio.create_task(collect(flights.stream(KEY, upstream, within(5))))
    await settle()
    reader.cancel()
    await settle()
    assert upstream.closed == 1


@pytest.mark.parametrize("sent", [0, 3])
async def test_an_error_comes_after_what_came_before_it_to_each_as_its_own(flights: Flights, sent: int) -> None:
    upstream, stored = Upstream(WHOLE[:sent], InBandError("overloaded", "heavy")), []
    upstream.let(99)
    got: list[list[Chunk]] = [[], []]
    readers = [flights.stream(KEY, upstream, within(5), stored.append) for _ in got]
    errors = await asyncio.gather(*map(collect, readers, got), return_exceptions=True)
    assert got == [WHOLE[:sent]] * 2
    assert all(isinstance(error, InBandError) and error.backend == "heavy" for error in errors)
    assert errors[0] is not errors[1]
    assert stored == []


async def test_a_stream_that_was_not_finished_is_not_stored(flights: Flights) -> None:
    upstream, stored = Upstream(WHOLE[:3]), []
    upstream.let(99)
    assert await collect(flights.stream(KEY, upstream, within(5), stored.append)) == WHOLE[:3]
    assert stored == []


async def test_the_deadline_ends_with_the_first_content(flights: Flights) -> None:
    upstream = Upstream()
    upstream.let(1)
    waiting = flights.stream(KEY, upstream, within(0.03))
    assert await anext(waiting) == ROLE
    with pytest.raises(DeadlineExceeded):
        await anext(waiting)
    await asyncio.sleep(0.3)
    assert upstream.closed == 1

    upstream = Upstream()
    upstream.let(2)
    committed = flights.stream(KEY, upstream, within(0.03))
    assert [await anext(committed), await anext(committed)] == WHOLE[:2]
    await asyncio.sleep(0.05)
    upstream.let(99)
    assert await collect(committed) == WHOLE[2:]


async def test_each_reader_keeps_its_own_deadline_and_the_call_gets_the_latest(flights: Flights) -> None:
    upstream = Upstream()
    hasty = asyncio.create_task(collect(flights.stream(KEY, upstream, within(0.03))))
    patient = asyncio.create_task(collect(flights.stream(KEY, upstream, within(5))))
    with pytest.raises(DeadlineExceeded):
        await hasty
    assert upstream.deadline is not None
    assert upstream.deadline.remaining() > 4
    upstream.let(99)
    assert await patient == WHOLE


async def test_a_stream_that_was_never_read_is_never_started(flights: Flights) -> None:
    upstream = Upstream()
    reader = flights.stream(KEY, upstream, within(5))
    await reader.aclose()
    with pytest.raises(DeadlineExceeded):
        await anext(flights.stream(KEY, upstream, within(-1)))
    assert upstream.started == 0


async def test_a_failing_close_is_logged_and_costs_nobody_the_answer(flights: Flights) -> None:
    class Rude:
        def __init__(self) -> None:
            self._left = list(WHOLE)

        def __aiter__(self) -> Rude:
            return self

        async def __anext__(self) -> Chunk:
            if not self._left:
                raise StopAsyncIteration
            return self._left.pop(0)

        async def aclose(self) -> None:
            raise OSError("gone")

    with structlog.testing.capture_logs() as lines:
        assert await collect(flights.stream(KEY, lambda _: Rude(), within(5))) == WHOLE
        await settle()
    assert len(lines) == 1


# ------------------------------------------------------------------------------------------------------ long streams

BIG = [ROLE, *(text(number, 64 << 10) for number in range(80)), FINISH]


async def test_a_lone_slow_reader_holds_the_upstream_back(flights: Flights) -> None:
    upstream, stored = Upstream(BIG), []
    upstream.let(999)
    reader = flights.stream(KEY, upstream, within(5), stored.append)
    await anext(reader)
    for _ in range(20):
        await settle()
    assert 16 <= upstream.sent <= 19  # about one MiB of 64 KiB chunks
    assert [ROLE, *await collect(reader)] == BIG
    assert stored == []


async def test_a_stream_whose_beginning_is_gone_is_not_joined(flights: Flights) -> None:
    upstream = Upstream(BIG)
    upstream.let(30)
    first: list[Chunk] = []
    one = asyncio.create_task(collect(flights.stream(KEY, upstream, within(5)), first))
    await settle()
    while len(first) < 30:
        await settle()
    two = asyncio.create_task(collect(flights.stream(KEY, upstream, within(5))))
    await settle()
    assert upstream.started == 2
    upstream.let(999)
    assert await asyncio.gather(one, two) == [BIG, BIG]


async def test_a_reader_that_falls_too_far_behind_is_let_go_and_slows_nobody(flights: Flights) -> None:
    upstream = Upstream(BIG)
    upstream.let(1)
    slow = flights.stream(KEY, upstream, within(5))
    fast = flights.stream(KEY, upstream, within(5))
    assert [await anext(slow), await anext(fast)] == [ROLE, ROLE]
    upstream.let(999)
    assert [ROLE, *await collect(fast)] == BIG
    assert upstream.started == 1
    with pytest.raises(TruncatedAnswer):
        await collect(slow)


async def test_a_reader_that_is_only_a_little_behind_stays(flights: Flights) -> None:
    upstream = Upstream(BIG)
    upstream.let(1)
    readers = [flights.stream(KEY, upstream, within(5)) for _ in range(3)]
    got = [[await anext(reader)] for reader in readers]
    upstream.let(999)
    for _ in range(len(BIG) - 1):
        for reader, chunks in zip(readers, got, strict=True):
            chunks.append(await anext(reader))
    assert got == [BIG] * 3
    for reader in readers:
        assert await collect(reader) == []
    assert upstream.started == 1


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 300 << 10)), min_size=1, max_size=120))
@settings(deadline=None)
def test_the_log_is_bounded_and_loses_nothing_for_the_fastest(story: list[tuple[int, int]]) -> None:
    log = ChunkLog()
    readers = [log.open() for _ in range(3)]
    got: list[list[int]] = [[] for _ in readers]
    lost: set[int] = set()
    written = 0
    for who, size in story:
        if who < 3:
            if who not in lost:
                try:
                    chunk = log.take(readers[who])
                except TruncatedAnswer:
                    lost.add(who)
                else:
                    if chunk is not None:
                        got[who].append(int(chunk.data.rstrip(b"x")))
        elif not log.full():
            log.append(text(written, size))
            written += 1
        assert log.kept_bytes <= 3 * LIMIT_BYTES + (300 << 10)
    for chunks in got:
        assert chunks == list(range(len(chunks)))
    fastest = max(range(3), key=lambda who: readers[who].next)
    while log.take(readers[fastest]) is not None:
        pass
    assert readers[fastest].next == written


async def test_closing_ends_streams_with_their_reason() -> None:
    flights, upstream = Flights(), Upstream()
    upstream.let(2)
    reader = flights.stream(KEY, upstream, within(5))
    assert await anext(reader) == ROLE
    await flights.aclose()
    with pytest.raises(Draining):
        await collect(reader)
    assert upstream.closed == 1


@given(st.lists(st.tuples(st.sampled_from(["join", "read", "leave", "let", "fail"]), st.integers(0, 5)), max_size=40))
@settings(deadline=None)
def test_after_any_interleaving_nothing_is_left(story: list[tuple[str, int]]) -> None:
    async def run() -> None:
        flights = Flights()
        upstreams = [Upstream(), Upstream()]
        readers: list[asyncio.Task[list[Chunk]]] = []
        got: list[list[Chunk]] = []
        for act, number in story:
            upstream = upstreams[number % 2]
            if act == "join":
                got.append([])
                stream = flights.stream(bytes([number % 2]) * 16, upstream, within(5))
                readers.append(asyncio.create_task(collect(stream, got[-1])))
            elif act == "leave" and readers:
                readers[number % len(readers)].cancel()
            elif act == "let":
                upstream.let(number)
            elif act == "fail":
                upstream.error = InBandError("x")
            await asyncio.sleep(0)
        for reader in readers[::3]:
            reader.cancel()
        await settle()
        for upstream in upstreams:
            upstream.let(1_000)
        outcomes = await asyncio.gather(*readers, return_exceptions=True)
        for outcome, chunks in zip(outcomes, got, strict=True):
            assert isinstance(outcome, list | GatewayError | asyncio.CancelledError)
            assert chunks == WHOLE[: len(chunks)]
            if not isinstance(outcome, asyncio.CancelledError):
                assert chunks == WHOLE
        await settle()
        assert repr(flights) == "Flights(0 whole, 0 streams, 0 tasks)"
        assert all(upstream.started == upstream.closed for upstream in upstreams)

    asyncio.run(run())
