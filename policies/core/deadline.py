"""One moment by which a request must have its answer. It travels through every await; nobody starts a clock of their own."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Protocol

from policies.core.clock import Clock
from policies.core.errors import DeadlineExceeded


class Follower(Protocol):
    """Something that has to know when a deadline moves."""

    def reschedule(self) -> None:
        """The deadline has moved later."""
        ...


class Deadline:
    """A moment on the monotonic clock.

    A flight shared by several callers keeps the latest of their moments: `extend` moves it later, and every
    `timeout()` block that is open on it moves along.
    """

    __slots__ = ("at", "clock", "followers")

    def __init__(self, at: float, clock: Clock) -> None:
        self.at = at
        self.clock = clock
        #: Open timeouts, and calls whose other end keeps the deadline too.
        self.followers: list[Follower] | None = None

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
        for follower in self.followers or ():
            follower.reschedule()

    def follow(self, follower: Follower) -> None:
        if self.followers is None:
            self.followers = [follower]
        else:
            self.followers.append(follower)

    def unfollow(self, follower: Follower) -> None:
        assert self.followers is not None
        self.followers.remove(follower)

    def timeout(self) -> _DeadlineTimeout:
        """`async with deadline.timeout():` raises DeadlineExceeded when the moment passes inside the block."""
        return _DeadlineTimeout(self)

    def __repr__(self) -> str:
        return f"Deadline({self.remaining() * 1000:.0f} ms left)"


class _DeadlineTimeout:
    """What `asyncio.timeout` does, in one object instead of three: every call of a backend passes through here."""

    __slots__ = ("_cancelling", "_deadline", "_expired", "_timer", "task")

    def __init__(self, deadline: Deadline) -> None:
        self._deadline = deadline
        self._expired = False

    async def __aenter__(self) -> None:
        deadline = self._deadline
        remaining = deadline.remaining()
        if remaining <= 0:
            raise DeadlineExceeded
        loop = asyncio.get_running_loop()
        task = asyncio.current_task(loop)
        assert task is not None, "a deadline guards a task"
        self.task = task
        #: Cancellations that were asked for before: they are not ours to swallow.
        self._cancelling = task.cancelling()
        self._timer = loop.call_later(remaining, self._expire)
        deadline.follow(self)

    def reschedule(self) -> None:
        """The deadline has moved."""
        self._timer.cancel()
        if not self._expired:
            self._timer = self.task.get_loop().call_later(self._deadline.remaining(), self._expire)

    def _expire(self) -> None:
        self._expired = True
        self.task.cancel()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        self._deadline.unfollow(self)
        if self._expired and self.task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            # Nobody else cancelled the task: the cancellation was our own.
            raise DeadlineExceeded from error
