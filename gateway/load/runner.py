"""The open loop: every request starts at its intended moment, whatever the others do."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gateway.load.arrivals import Arrival
from gateway.load.client import LoadClient, OwnLimitReached
from gateway.load.mix import Caller, Mix, Shot
from gateway.load.outcome import Outcome, classify
from gateway.load.recorder import Record, Recorder
from policies.core.clock import Clock


@dataclass(frozen=True, slots=True)
class LoopOptions:
    """`late_after_s`: a request that leaves later than this after its moment makes the run invalid.

    `max_in_flight` bounds memory and sockets; a request that finds no slot is dropped, which makes the run invalid too.
    """

    late_after_s: float = 0.1
    max_in_flight: int = 10_000


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What the loop itself saw: real length (seconds, from the first moment to the last answer) and its own load."""

    elapsed_s: float
    #: Processor time of this process over the elapsed time; Python has one core, so 1 is the end.
    cpu_share: float
    interrupted: bool


@dataclass(frozen=True, slots=True)
class Traffic:
    """What is sent, and by whom."""

    mix: Mix
    pick: Callable[[], Caller]


class OpenLoop:
    """Sends arrivals through a client into a recorder. `stop` may be called at any time, from the event loop."""

    def __init__(
        self,
        client: LoadClient,
        traffic: Traffic,
        recorder: Recorder,
        clock: Clock,
        options: LoopOptions | None = None,
    ) -> None:
        self._client = client
        self._traffic = traffic
        self._recorder = recorder
        self._clock = clock
        self._options = options or LoopOptions()
        self._flying: set[asyncio.Task[None]] = set()
        self._sender: asyncio.Task[None] | None = None
        self._broken: BaseException | None = None
        self._interrupted = False

    def stop(self) -> None:
        """Send no more, abandon what is in flight; `run` returns soon after."""
        self._interrupted = True
        self._cancel()

    async def run(self, arrivals: Iterator[Arrival]) -> RunFacts:
        """Send all arrivals, wait for all answers. An error in our own code is raised, not counted."""
        begin, cpu = self._clock.now(), _cpu_s()
        self._sender = asyncio.create_task(self._send_all(arrivals, begin))
        try:
            await asyncio.wait((self._sender,))
            if not self._sender.cancelled():
                self._sender.result()
            while self._flying:
                await asyncio.wait(tuple(self._flying))
        finally:
            # Reached early only when `run` itself was cancelled or our own code broke.
            self._cancel()
            await asyncio.gather(self._sender, *self._flying, return_exceptions=True)
        if self._broken is not None:
            raise self._broken
        elapsed = self._clock.now() - begin
        return RunFacts(elapsed, (_cpu_s() - cpu) / elapsed if elapsed > 0 else 0.0, self._interrupted)

    async def _send_all(self, arrivals: Iterator[Arrival], begin: float) -> None:
        clock, recorder, flying = self._clock, self._recorder, self._flying
        mix, pick = self._traffic.mix, self._traffic.pick
        limit = self._options.max_in_flight
        for arrival in arrivals:
            # Made before the wait, so that the work of making it is not part of the lag.
            shot, caller = mix.shot(arrival), pick()
            # Also when we are behind: requests already started must get their turn.
            await clock.sleep(max(0.0, begin + arrival.at_s - clock.now()))
            if len(flying) >= limit:
                recorder.dropped(arrival.at_s, caller.label)
                continue
            task = asyncio.create_task(self._one(shot, caller, arrival.at_s, begin))
            flying.add(task)
            task.add_done_callback(self._landed)

    async def _one(self, shot: Shot, caller: Caller, at_s: float, begin: float) -> None:
        due, recorder = begin + at_s, self._recorder
        recorder.issued(self._clock.now() - due, self._options.late_after_s)
        try:
            reply = await self._client.send(shot, caller.key)
        except OwnLimitReached as reached:
            recorder.own_limit(at_s, caller.label, str(reached))
            return
        except asyncio.CancelledError:
            latency_s = self._clock.now() - due
            recorder.ended(Record(at_s, caller.label, "none", Outcome.ABANDONED, latency_s))
            raise
        seen, first = reply.seen, reply.first_at
        recorder.ended(
            Record(
                at_s,
                caller.label,
                seen.rung,
                classify(seen),
                reply.ended_at - due,
                None if first is None else first - due,
                reply.chunks,
                0.0 if first is None else reply.ended_at - first,
                seen.status,
                seen.error,
            )
        )

    def _landed(self, task: asyncio.Task[None]) -> None:
        self._flying.discard(task)
        if not task.cancelled() and task.exception() is not None and self._broken is None:
            self._broken = task.exception()
            self._cancel()

    def _cancel(self) -> None:
        if self._sender is not None:
            self._sender.cancel()
        for task in tuple(self._flying):
            task.cancel()


def _cpu_s() -> float:
    """Processor seconds of this process so far."""
    times = os.times()
    return times.user + times.system
