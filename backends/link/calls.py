"""A worker's calls to the model host: numbered, many at once on one connection, each with its caller's deadline.

The deadline is kept here as well as there, so that a host which has stopped holds nobody: the caller gets its timeout, the
host is told to stop when it reads again. When the connection is lost, every call on it fails at once.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable
from typing import Any

from backends.api import Chunk, ChunkKind
from backends.frames import FrameConnection
from backends.link.wire import read_error
from policies.core.deadline import Deadline
from policies.core.errors import CannotServe, DeadlineExceeded, GatewayError, ModelFailed, ModelNotReady

#: More than this waits to be read by the host: it has stopped, or cannot keep up.
MOST_WAITING_BYTES = 16 << 20
#: Chunks that wait for a stream's reader: from the first number on the host is asked to pause, from the second to go on.
PAUSE_AT, RESUME_AT = 64, 16

#: What is asked, from (call, seconds left, are its bodies to be JSON text?).
Message = Callable[[int, float, bool], list[Any]]

_KINDS = {kind.value: kind for kind in ChunkKind}


class Calls:
    """The calls under way. Without a connection every new one raises ModelNotReady."""

    def __init__(self) -> None:
        self._connection: FrameConnection | None = None
        self._open: dict[int, WholeCall | StreamCall] = {}
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self._open)

    def connected(self, connection: FrameConnection) -> None:
        self._connection = connection

    def lost(self) -> None:
        """Every call fails: nobody will answer it."""
        self._connection = None
        for call in tuple(self._open.values()):
            call.fail(ModelFailed("the model host ended, or its connection did, while it was answering", call.backend))

    async def whole(self, backend: str, deadline: Deadline, message: Message) -> Any:
        """The value of one answer."""
        call = WholeCall(self, next(self._numbers), backend, deadline)
        self.ask(call, message)
        return await call.answer()

    def stream(self, backend: str, deadline: Deadline) -> StreamCall:
        """A stream to `ask` for, to take from and to `close`."""
        return StreamCall(self, next(self._numbers), backend, deadline)

    def ask(self, call: WholeCall | StreamCall, message: Message) -> None:
        """Send a call on its way. Raises ModelNotReady, DeadlineExceeded, CannotServe for what no message can carry."""
        seconds = call.deadline.remaining()
        if seconds <= 0:
            raise DeadlineExceeded
        connection = self._connection
        if connection is None or not connection.open:
            raise ModelNotReady("the model host is not connected", retry_after_s=2.0)
        if connection.behind and connection.waiting_bytes > MOST_WAITING_BYTES:
            raise ModelNotReady("the model host does not read what it is asked", retry_after_s=2.0)
        try:
            try:
                connection.send(message(call.number, seconds, False))
            except OverflowError:
                connection.send(message(call.number, seconds, True))
        except (TypeError, ValueError) as error:
            # The error of a text that cannot be encoded quotes it.
            what = error if type(error) is ValueError else type(error).__name__
            raise CannotServe(f"{call.backend}: the request cannot be handed to the model host: {what}") from error
        self._open[call.number] = call

    def tell(self, *message: Any) -> None:
        """Something about a call under way; of no use to a host that is gone."""
        if self._connection is not None:
            self._connection.send(message)

    def close(self, call: WholeCall | StreamCall) -> None:
        """Nobody waits for `call` any more: unless it is over, the host is told to stop."""
        self._open.pop(call.number, None)
        if not call.over:
            self.tell("cancel", call.number)

    # ----------------------------------------------------------------------------------------- what the host says

    def on_done(self, number: int, value: Any) -> None:
        call = self._open.get(number)
        if isinstance(call, WholeCall):
            call.done(value)

    def on_error(self, number: int, error: list[Any]) -> None:
        call = self._open.get(number)
        if call is not None:
            call.fail(read_error(error))

    def on_chunk(self, number: int, data: bytes, kind: str) -> None:
        call = self._open.get(number)
        if isinstance(call, StreamCall):
            call.add(Chunk(data, _KINDS[kind]))

    def on_end(self, number: int) -> None:
        call = self._open.get(number)
        if isinstance(call, StreamCall):
            call.end()


class WholeCall:
    """A call that has one answer."""

    __slots__ = ("_calls", "_future", "_timer", "backend", "deadline", "number", "over")

    def __init__(self, calls: Calls, number: int, backend: str, deadline: Deadline) -> None:
        self._calls = calls
        self.number = number
        self.backend = backend
        self.deadline = deadline
        self.over = False
        self._future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def answer(self) -> Any:
        future, deadline = self._future, self.deadline
        self._timer = future.get_loop().call_later(deadline.remaining(), self._expire)
        deadline.follow(self)
        try:
            return await future
        finally:
            deadline.unfollow(self)
            self._timer.cancel()
            self._calls.close(self)

    def done(self, value: Any) -> None:
        self.over = True
        if not self._future.done():
            self._future.set_result(value)

    def fail(self, error: GatewayError) -> None:
        self.over = True
        if not self._future.done():
            self._future.set_exception(error)

    def _expire(self) -> None:
        if not self._future.done():
            self._future.set_exception(DeadlineExceeded())

    def reschedule(self) -> None:
        """The deadline has moved."""
        remaining = self.deadline.remaining()
        self._timer.cancel()
        self._timer = self._future.get_loop().call_later(remaining, self._expire)
        self._calls.tell("extend", self.number, remaining)


class StreamCall:
    """A call that is answered in chunks. `deadline` is that of the first content."""

    __slots__ = (
        "_calls",
        "_chunks",
        "_error",
        "_paused",
        "_timer",
        "_waiting",
        "backend",
        "deadline",
        "number",
        "over",
    )

    def __init__(self, calls: Calls, number: int, backend: str, deadline: Deadline) -> None:
        self._calls = calls
        self.number = number
        self.backend = backend
        self.deadline = deadline
        self.over = False
        self._chunks: deque[Chunk] = deque()
        self._error: GatewayError | None = None
        self._paused = False
        self._timer: asyncio.TimerHandle | None = None
        self._waiting: asyncio.Future[bool] | None = None

    @property
    def drained(self) -> bool:
        """Is it over, with every chunk taken?"""
        return self.over and not self._chunks

    def take(self) -> Chunk | None:
        """The next chunk that has arrived; None = none now. Raises the error of a stream that failed after its last."""
        if self._chunks:
            chunk = self._chunks.popleft()
            if self._paused and len(self._chunks) <= RESUME_AT:
                self._paused = False
                self._calls.tell("resume", self.number)
            return chunk
        if self._error is not None:
            raise self._error
        return None

    async def arrival(self, deadline: Deadline) -> bool:
        """Wait for the host's next word; False when `deadline` came first."""
        remaining = deadline.remaining()
        if remaining <= 0:
            return False
        loop = asyncio.get_running_loop()
        waiting: asyncio.Future[bool] = loop.create_future()
        self._waiting = waiting
        self._timer = loop.call_later(remaining, _settle, waiting, False)
        try:
            return await waiting
        finally:
            self._waiting = None
            self._timer.cancel()

    def add(self, chunk: Chunk) -> None:
        self._chunks.append(chunk)
        if len(self._chunks) >= PAUSE_AT and not self._paused:
            self._paused = True
            self._calls.tell("pause", self.number)
        self._wake()

    def end(self) -> None:
        self.over = True
        self._wake()

    def fail(self, error: GatewayError) -> None:
        self._error = error
        self.end()

    def _wake(self) -> None:
        if self._waiting is not None:
            _settle(self._waiting, True)

    def reschedule(self) -> None:
        """The deadline of the first content has moved."""
        remaining = self.deadline.remaining()
        if self._waiting is not None and self._timer is not None:
            self._timer.cancel()
            self._timer = asyncio.get_running_loop().call_later(remaining, _settle, self._waiting, False)
        self._calls.tell("extend", self.number, remaining)


def _settle(future: asyncio.Future[bool], value: bool) -> None:
    if not future.done():
        future.set_result(value)
