"""One moment by which a request must have its answer. It travels through every await; nobody starts a clock of their own."""

from __future__ import annotations

import asyncio
from types import TracebackType

from policies.core.clock import Clock
from policies.core.errors import DeadlineExceeded


class Deadline:
    """A moment on the monotonic clock.

    A flight shared by several callers keeps the latest of their moments: `extend` moves it later, and every
    `timeout()` block that is open on it moves along.
    """

    __slots__ = ("at", "clock", "open_timeouts")

    def __init__(self, at: float, clock: Clock) -> None:
        self.at = at
        self.clock = clock
        self.open_timeouts: list[asyncio.Timeout] | None = None

    @classmethod
    def after(cls, seconds: float, clock: Clock) -> Deadline:
        return cls(clock.now() + seconds, clock)

    def remaining(self) -> float:
        """Seconds left; negative once passed."""
        return self.at - self.clock.now()

    def expired(self) -> bool:
        return self.at <= self.clock.now()

    def within(self, seconds: float) -> Deadline:
        """A deadline at most `seconds` from now and never later than this one."""
        return Deadline(min(self.at, self.clock.now() + seconds), self.clock)

    def less(self, seconds: float) -> Deadline:
        """This deadline, moved `seconds` earlier: what is kept in reserve for later steps."""
        return Deadline(self.at - seconds, self.clock)

    def extend(self, at: float) -> None:
        """Move this deadline to `at` if that is later, with every timeout now open on it."""
        if at <= self.at:
            return
        self.at = at
        if self.open_timeouts:
            when = asyncio.get_running_loop().time() + self.remaining()
            for timeout in self.open_timeouts:
                timeout.reschedule(when)

    def timeout(self) -> _DeadlineTimeout:
        """`async with deadline.timeout():` raises DeadlineExceeded when the moment passes inside the block."""
        return _DeadlineTimeout(self)

    def __repr__(self) -> str:
        return f"Deadline({self.remaining() * 1000:.0f} ms left)"


class _DeadlineTimeout:
    __slots__ = ("_deadline", "_timeout")

    def __init__(self, deadline: Deadline) -> None:
        self._deadline = deadline
        self._timeout: asyncio.Timeout | None = None

    async def __aenter__(self) -> None:
        remaining = self._deadline.remaining()
        if remaining <= 0:
            raise DeadlineExceeded
        self._timeout = timeout = asyncio.timeout(remaining)
        await timeout.__aenter__()
        if self._deadline.open_timeouts is None:
            self._deadline.open_timeouts = [timeout]
        else:
            self._deadline.open_timeouts.append(timeout)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        timeout = self._timeout
        assert timeout is not None and self._deadline.open_timeouts is not None
        self._deadline.open_timeouts.remove(timeout)
        try:
            await timeout.__aexit__(kind, error, trace)
        except TimeoutError as raised:
            # Only our own expiry becomes DeadlineExceeded; a TimeoutError of the body passes as it is.
            if timeout.expired():
                raise DeadlineExceeded from raised
            raise
