"""Equal requests at the same time cost one call. A flight is one call of one model; whoever asks for the same joins it.

A flight owns its task, so no waiter's fate is another's:
    a waiter joins             the flight's deadline becomes the latest of its waiters'
    a waiter's deadline comes  that waiter gets DeadlineExceeded; the flight goes on for the others
    a waiter is cancelled      the same; when it was the last one, the call is cancelled at once
    the last deadline comes    the call may end by itself, so that its own time limit is counted where such things are
                               counted; shortly after, it is cancelled
    the call ends              it leaves the table, the answer is handed to `on_done` once, then to every waiter
    the call fails             every waiter gets the error as an exception of its own
Joining, leaving and ending are synchronous: there is no moment in which a flight is half joined.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import Any

import structlog

from backends.api import Answer, Chunk, ChunkKind
from cache.chunk_log import ChunkLog
from policies.core.deadline import Deadline
from policies.core.errors import BackendError, DeadlineExceeded, Draining

_log = structlog.get_logger("gateway.cache.flights")

#: How long a call may outlive its last deadline before it is cancelled.
_LINGER_S = 0.25

StartWhole = Callable[[Deadline], Awaitable[Answer]]
StartStream = Callable[[Deadline], AsyncIterator[Chunk]]
WholeDone = Callable[[Answer], object]
StreamDone = Callable[[Sequence[Chunk]], object]


class _Flight:
    """One call. `over`: it can be joined no more, and `error` or the result is what it came to."""

    __slots__ = ("_error_given", "deadline", "error", "key", "log", "over", "result", "table", "task", "waiting")

    def __init__(self, table: dict[bytes, _Flight], key: bytes, deadline: Deadline, log: ChunkLog | None) -> None:
        self.table = table
        self.key = key
        self.deadline = Deadline(deadline.at, deadline.clock)
        self.log = log
        self.result: Answer | None = None
        self.error: Exception | None = None
        self._error_given = False
        self.over = False
        self.task: asyncio.Task[None] | None = None
        #: A future for each waiter that is waiting now: True = its deadline has come, False = look again.
        self.waiting: set[asyncio.Future[bool]] = set()
        table[key] = self

    def wake(self) -> None:
        for future in self.waiting:
            if not future.done():
                future.set_result(False)

    def end(self, error: Exception | None = None) -> None:
        """Leave the table and tell all waiters. Only the first end counts."""
        if not self.over:
            self.error = error
            self.leave_table()
            self.wake()

    def leave_table(self) -> None:
        self.over = True
        if self.table.get(self.key) is self:
            del self.table[self.key]

    def failure(self) -> Exception:
        """The error for one waiter; from the second on a copy, so that no two tracebacks grow in one exception."""
        assert self.error is not None
        if not self._error_given:
            self._error_given = True
            return self.error
        return _copied(self.error)

    def abandon(self, at_deadline: bool) -> None:
        """The last waiter has left."""
        self.leave_table()
        task = self.task
        assert task is not None
        if at_deadline and self.deadline.remaining() < _LINGER_S:
            timer = asyncio.get_running_loop().call_later(_LINGER_S, task.cancel)
            task.add_done_callback(lambda _: timer.cancel())
        else:
            task.cancel()

    async def woken(self, remaining_s: float | None) -> bool:
        """Wait for the flight's next sign. True when `remaining_s` went by first."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[bool] = loop.create_future()
        timer = None if remaining_s is None else loop.call_later(remaining_s, _expire, future)
        self.waiting.add(future)
        try:
            return await future
        finally:
            self.waiting.discard(future)
            if timer is not None:
                timer.cancel()


class Flights:
    """The calls in flight in this process, by entry key; whole answers and streams apart."""

    def __init__(self) -> None:
        self._whole: dict[bytes, _Flight] = {}
        self._streams: dict[bytes, _Flight] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self._started = 0
        self._joined = 0

    def __len__(self) -> int:
        return len(self._whole) + len(self._streams)

    def __repr__(self) -> str:
        return f"Flights({len(self._whole)} whole, {len(self._streams)} streams, {len(self._tasks)} tasks)"

    async def whole(
        self, key: bytes, start: StartWhole, deadline: Deadline, on_done: WholeDone | None = None
    ) -> Answer:
        """The answer of the one call for `key`. `start` and `on_done` are used only if there is no such call yet.

        Raises what the call raised (as an exception of one's own), DeadlineExceeded, or Draining after `aclose`.
        """
        remaining = self._remaining(deadline)
        flight = self._whole.get(key)
        if flight is None:
            flight = _Flight(self._whole, key, deadline, None)
            self._launch(flight, _run_whole(flight, start, on_done))
        else:
            self._joined += 1
            flight.deadline.extend(deadline.at)
        expired = False
        try:
            expired = await flight.woken(remaining)
        finally:
            if not flight.over and not flight.waiting:
                flight.abandon(expired)
        if flight.result is not None:
            return flight.result
        if flight.error is not None:
            raise flight.failure()
        raise DeadlineExceeded

    async def stream(
        self, key: bytes, start: StartStream, deadline: Deadline, on_done: StreamDone | None = None
    ) -> AsyncGenerator[Chunk, None]:
        """The chunks of the one stream for `key`, from its first, at the caller's own pace.

        `deadline` ends with the first CONTENT chunk received. `on_done` gets all chunks of a stream that ended well,
        unless it grew beyond what the log keeps. Close the iterator to leave. Raises as `whole` does; and
        TruncatedAnswer for a reader that fell too far behind others.
        """
        self._remaining(deadline)
        flight = self._streams.get(key)
        if flight is None or flight.log is None or not flight.log.complete:
            # No call, or one whose beginning is gone: then a new one takes its place in the table.
            flight = _Flight(self._streams, key, deadline, ChunkLog())
            self._launch(flight, _run_stream(flight, start, on_done))
        else:
            self._joined += 1
            flight.deadline.extend(deadline.at)
        log = flight.log
        assert log is not None
        cursor = log.open()
        committed = expired = False
        try:
            while True:
                chunk = log.take(cursor)
                if chunk is not None:
                    committed = committed or chunk.kind is ChunkKind.CONTENT
                    yield chunk
                elif flight.over:
                    break
                else:
                    expired = await flight.woken(None if committed else deadline.remaining())
                    if expired:
                        raise DeadlineExceeded
            if flight.error is not None:
                raise flight.failure()
        finally:
            log.close(cursor)
            if not flight.over and not log.readers:
                flight.abandon(expired)

    def stats(self) -> dict[str, float]:
        return {"in_flight": len(self), "started": self._started, "joined": self._joined}

    async def aclose(self) -> None:
        """Cancel all calls; their waiters get Draining. Nothing can be joined or started any more."""
        self._closed = True
        for flight in [*self._whole.values(), *self._streams.values()]:
            flight.end(Draining("the gateway is shutting down"))
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _remaining(self, deadline: Deadline) -> float:
        if self._closed:
            raise Draining("the gateway is shutting down")
        remaining = deadline.remaining()
        if remaining <= 0:
            raise DeadlineExceeded
        return remaining

    def _launch(self, flight: _Flight, run: Coroutine[Any, Any, None]) -> None:
        self._started += 1
        task = flight.task = asyncio.create_task(run)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _run_whole(flight: _Flight, start: StartWhole, on_done: WholeDone | None) -> None:
    try:
        answer = await start(flight.deadline)
    except asyncio.CancelledError:
        flight.end(BackendError("the call was cancelled from within"))
        raise
    except Exception as error:
        flight.end(error)
        return
    flight.result = answer
    _hand_on(on_done, answer)
    flight.end()


async def _run_stream(flight: _Flight, start: StartStream, on_done: StreamDone | None) -> None:
    log = flight.log
    assert log is not None
    chunks: AsyncIterator[Chunk] | None = None
    try:
        chunks = start(flight.deadline)
        async for chunk in chunks:
            log.append(chunk)
            flight.wake()
            if log.full():
                await log.room()
        if log.finished and log.complete:
            _hand_on(on_done, log.chunks())
        flight.end()
    except asyncio.CancelledError:
        flight.end(BackendError("the stream was cancelled from within"))
        raise
    except Exception as error:
        flight.end(error)
    finally:
        close = getattr(chunks, "aclose", None)
        if close is not None:
            await _closed(close)


async def _closed(close: Callable[[], Awaitable[None]]) -> None:
    try:
        await close()
    except Exception:
        # The answer, or its error, has been given already.
        _log.exception("a stream failed while it was being closed")


def _hand_on(on_done: Callable[[Any], object] | None, result: object) -> None:
    if on_done is not None:
        try:
            on_done(result)
        except Exception:
            # Storing is a favour to later requests: it must not cost this one its answer.
            _log.exception("an answer could not be handed on for storing")


def _expire(future: asyncio.Future[bool]) -> None:
    if not future.done():
        future.set_result(True)


def _copied(error: Exception) -> Exception:
    """An exception that says the same, with a traceback that grows apart. Not by calling the class: signatures differ."""
    twin = type(error).__new__(type(error))
    twin.args = error.args
    twin.__dict__.update(error.__dict__)
    twin.__cause__ = error.__cause__
    twin.__suppress_context__ = error.__suppress_context__
    return twin.with_traceback(error.__traceback__)
