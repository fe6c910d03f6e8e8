"""Time, as one small dependency. Nothing else in the project reads a clock."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """A source of time. `now` never goes back; `wall` is only for people and logs."""

    def now(self) -> float:
        """Monotonic seconds; only differences mean anything."""
        ...

    def wall(self) -> float:
        """Seconds since 1970-01-01 UTC."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return after `seconds`; cancellable."""
        ...


class SystemClock:
    """The machine's clock."""

    __slots__ = ()

    def now(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class FakeClock:
    """A clock that moves only when a test says so: `advance(30)`.

    Sleepers wake, in order, when their moment has been passed.
    """

    __slots__ = ("_now", "_sleepers", "_wall")

    def __init__(self, now: float = 1_000.0, wall: float = 1_700_000_000.0) -> None:
        self._now = now
        self._wall = wall
        self._sleepers: list[tuple[float, asyncio.Future[None]]] = []

    def now(self) -> float:
        return self._now

    def wall(self) -> float:
        return self._wall

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        wake: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sleepers.append((self._now + seconds, wake))
        await wake

    def advance(self, seconds: float) -> None:
        """Move both clocks forward and wake whoever slept until then."""
        self._now += seconds
        self._wall += seconds
        due = sorted((s for s in self._sleepers if s[0] <= self._now), key=lambda s: s[0])
        self._sleepers = [s for s in self._sleepers if s[0] > self._now]
        for _, wake in due:
            if not wake.done():
                wake.set_result(None)

    def jump_wall(self, seconds: float) -> None:
        """What an administrator or NTP does: the wall clock leaps, monotonic time does not."""
        self._wall += seconds
