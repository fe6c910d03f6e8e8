"""One place among the gateway's processes: it is never left empty for longer than the rule for restarts says.

    empty      -- launch -->       starting   the process runs, says hello, is given its start, builds itself
    starting   -- begin -->        serving    it has been asked to begin; `ready` once it says so
    serving    -- it ends -->      empty      a neighbour takes over what can be taken over; launched again after a wait
    serving    -- it is silent --> stuck      as if it had ended, but it may come back; killed when it does not
    serving    -- replaced -->     leaving    its successor is ready; it finishes what it has and ends by itself

A process that is killed loses what it was doing, never the place.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

import structlog

from gateway.control.hub_server import SILENT_S, Member
from gateway.control.restarts import SETTLED_S, RestartRule
from policies.core.clock import Clock

_log = structlog.get_logger("gateway.supervisor")

#: A process that has not said hello and built itself by then, or is silent for as long before it is ready, is taken for dead.
START_S = 60.0
#: A process that is silent for this long is killed: it serves nobody any more.
KILL_SILENT_S = 5.0


class Process(Protocol):
    """What is needed of `asyncio.subprocess.Process`."""

    @property
    def pid(self) -> int: ...

    async def wait(self) -> int: ...

    def send_signal(self, signal: int) -> None: ...


class Child:
    """One process that was started, and what is known of it."""

    def __init__(self, name: str, process: Process, clock: Clock, *, first: bool) -> None:
        self.name = name
        #: Has there been nobody in this seat before?
        self.first = first
        self.process = process
        self.pid = process.pid
        self.started_at = clock.now()
        self.member: Member | None = None
        self.connected = asyncio.Event()
        self.ready = asyncio.Event()
        self.stuck = False
        self.killed = False
        #: The latest it said of itself.
        self.beat: dict[str, Any] = {}
        self.ended: asyncio.Task[int] = asyncio.create_task(process.wait(), name=f"wait-{name}")

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)


@dataclass(frozen=True, slots=True)
class SeatHooks:
    """What the crew does about a seat.

    join      the process has offered itself: bring it up to date and let it begin. Raises when that fails.
    ready     it serves: what neighbours had taken over goes back.
    down      nobody serves here now (ended, or silent): neighbours take over.
    gone      a process of this seat has ended.
    """

    join: Callable[[Child], Awaitable[None]]
    ready: Callable[[Seat, Child], None]
    down: Callable[[Seat], None]
    gone: Callable[[Child], None]


class Seat:
    """Keeps one process of a kind running.

    launch
        Starts a process of the given name. Raises OSError.
    """

    def __init__(
        self,
        name: str,
        launch: Callable[[str], Awaitable[Process]],
        hooks: SeatHooks,
        rule: RestartRule,
        clock: Clock,
    ) -> None:
        self.name = name
        self._start_process = launch
        self._hooks = hooks
        self._clock = clock
        self.rule = rule
        self.current: Child | None = None
        self._candidate: Child | None = None
        self._launches = 0
        self.leaving: list[Child] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False
        self._next_at = 0.0
        #: Why there is no process now; empty when there is one.
        self.reason = "not started yet"

    @property
    def children(self) -> list[Child]:
        return [child for child in (self.current, self._candidate, *self.leaving) if child is not None]

    async def start(self) -> Child:
        """Launch the first process. Raises OSError."""
        self.current = await self._launch()
        self._follow(self.current)
        return self.current

    async def _launch(self) -> Child:
        self._launches += 1
        # Every process has a name of its own, so that what two of one seat say is never mixed up.
        name = self.name if self._launches == 1 else f"{self.name}.{self._launches}"
        child = Child(name, await self._start_process(name), self._clock, first=self._launches == 1)
        if self._stopping:
            # Too late to be among those that `begin_stop` asked.
            child.signal(signal.SIGTERM)
        return child

    def _follow(self, child: Child) -> None:
        task = asyncio.create_task(self._live(child), name=f"follow-{self.name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _live(self, child: Child) -> None:
        """From the launch of a process to its end."""
        introduced = asyncio.create_task(self._introduce(child))
        await asyncio.wait((introduced, child.ended), return_when=asyncio.FIRST_COMPLETED)
        introduced.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            error = (await asyncio.gather(introduced, return_exceptions=True))[0]
            if isinstance(error, Exception) and not child.ended.done():
                _log.error("process_did_not_start", worker=child.name, pid=child.pid, reason=f"{error}")
                child.signal(signal.SIGKILL)
        code = await child.ended
        self._hooks.gone(child)
        if child in self.leaving:
            self.leaving.remove(child)
        elif child is self.current:
            self.current = None
            if not self._stopping:
                await self._again(child, _how_it_ended(code))

    async def _introduce(self, child: Child) -> None:
        try:
            async with asyncio.timeout(START_S):
                await child.connected.wait()
                assert child.member is not None
                await child.member.offered.wait()
                await self._hooks.join(child)
        except TimeoutError:
            raise TimeoutError(f"it was not ready to begin within {START_S:g} s") from None
        await child.ready.wait()
        if child is self.current:
            self.reason = ""
            self._hooks.ready(self, child)

    async def _again(self, child: Child, how: str) -> None:
        """The process ended by itself: launch the next one when the rule allows."""
        was_looping = self.rule.looping
        wait_s = self.rule.ended(self._clock.now() - child.started_at)
        self._next_at = self._clock.now() + wait_s
        self.reason = f"it ended ({how})"
        _log.error("process_ended", worker=child.name, pid=child.pid, how=how, again_in_s=round(wait_s, 2))
        if self.rule.looping and not was_looping:
            _log.error(
                "crash_loop", worker=self.name, ended_times=self.rule.in_a_row,
                what_to_do="its own last log lines say why it ends; the others serve meanwhile",
            )  # fmt: skip
        self._hooks.down(self)
        await self._clock.sleep(wait_s)
        # A successor may be on its way already.
        if self.current is None and self._candidate is None and not self._stopping:
            await self._launch_or_wait()

    def let_go(self, child: Child) -> None:
        """It is on its way out, and it was not us who told it to: the place is filled anew while it finishes what it has."""
        if child is not self.current or self._stopping:
            return
        self.current = None
        self.leaving.append(child)
        task = asyncio.create_task(self._again(child, "told to end by a signal"), name=f"follow-{self.name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _launch_or_wait(self) -> None:
        while True:
            try:
                self.current = await self._launch()
            except OSError as error:
                # No memory, no processes left: others may end, so go on trying.
                wait_s = self.rule.ended(0.0)
                self.reason = f"it cannot be started: {error}"
                _log.error("process_not_started", worker=self.name, reason=str(error), again_in_s=round(wait_s, 2))
                await self._clock.sleep(max(wait_s, 0.5))
                if self._stopping:
                    return
            else:
                self._follow(self.current)
                return

    def look(self) -> None:
        """Called now and then: is the process still there for anybody?"""
        for child in self.children:
            if child.member is None:
                continue
            if child is self.current and child.ready.is_set():
                self._look_at(child, child.member.silent_s())
            elif child.member.silent_s() > START_S:
                self._kill_silent(child)

    def _look_at(self, child: Child, silent_s: float) -> None:
        """At a process that serves."""
        if self._clock.now() - child.started_at >= SETTLED_S:
            self.rule.settled()
        if silent_s < SILENT_S:
            if child.stuck:
                child.stuck = False
                self.reason = ""
                _log.warning("process_is_back", worker=child.name, pid=child.pid)
                self._hooks.ready(self, child)
        elif silent_s > KILL_SILENT_S:
            self._kill_silent(child)
        elif not child.stuck:
            child.stuck = True
            self.reason = "it does not answer"
            _log.error("process_silent", worker=child.name, pid=child.pid, silent_s=round(silent_s, 1))
            self._hooks.down(self)

    def _kill_silent(self, child: Child) -> None:
        if child.killed or child.member is None:
            return
        child.killed = True
        silent_s = round(child.member.silent_s(), 1)
        _log.error("process_killed", worker=child.name, pid=child.pid, silent_s=silent_s)
        child.signal(signal.SIGKILL)

    # ------------------------------------------------------------------------------------------------- replacing

    async def succeed(self) -> Child | None:
        """Put a successor in the seat and return once it is ready. The process that had the seat until then is in
        `leaving` now, and is returned (None when the seat was empty). Raises RuntimeError, with everything as before, when
        the successor did not become ready, or nothing is launched any more."""
        if self._stopping:
            raise RuntimeError("the gateway is stopping")
        new = self._candidate = await self._launch()
        self._follow(new)
        ready = asyncio.create_task(new.ready.wait())
        await asyncio.wait((ready, new.ended), return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        self._candidate = None
        if not new.ready.is_set():
            if self.current is None and not self._stopping:
                # The one before ended meanwhile, and left the seat to this one.
                await self._launch_or_wait()
            how = _how_it_ended(new.ended.result())
            raise RuntimeError(f"{new.name} ended ({how}) before it was ready; its own last log lines say why")
        old, self.current = self.current, new
        if old is not None:
            self.leaving.append(old)
        self.reason = ""
        self._hooks.ready(self, new)
        return old

    def put_back(self) -> bool:
        """Give the seat back to the process that had it last, and end the one that has it. False when that has ended."""
        new, old = self.current, self.leaving[-1] if self.leaving else None
        if new is None or old is None or old.ended.done():
            return False
        self.leaving.remove(old)
        self.leaving.append(new)
        self.current = old
        new.signal(signal.SIGTERM)
        return True

    async def ended(self, child: Child, within_s: float) -> bool:
        """Wait for a process to end by itself; after `within_s` it is killed, and False is returned."""
        done, _ = await asyncio.wait((child.ended,), timeout=within_s)
        if done:
            return True
        _log.error("process_killed", worker=child.name, pid=child.pid, reason=f"did not end within {within_s:g} s")
        child.signal(signal.SIGKILL)
        await child.ended
        return False

    def begin_stop(self) -> None:
        """From now on nothing is launched; whoever runs is asked to end."""
        self._stopping = True
        for child in self.children:
            child.signal(signal.SIGTERM)

    async def stopped(self, within_s: float) -> None:
        await asyncio.gather(*(self.ended(child, within_s) for child in self.children))
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def status(self) -> dict[str, Any]:
        child = self.current
        told: dict[str, Any] = {
            "name": self.name,
            "process": child.name if child is not None else "",
            "state": self._state(),
            "pid": child.pid if child is not None else None,
            "up_s": round(self._clock.now() - child.started_at, 1) if child is not None else 0.0,
            "in_flight": child.beat.get("in_flight", 0) if child is not None else 0,
            "ended": self.rule.total,
            "crash_loop": self.rule.looping,
            "leaving": [other.name for other in self.leaving],
        }
        if self.reason:
            told["reason"] = self.reason
        if child is None and self._next_at > self._clock.now():
            told["again_in_s"] = round(self._next_at - self._clock.now(), 1)
        return told

    def _state(self) -> str:
        if self.current is None:
            return "down"
        if self.current.stuck:
            return "stuck"
        return "serving" if self.current.ready.is_set() else "starting"


def _how_it_ended(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        # Most real-time signals have no name.
        return f"killed by signal {-code}"
