"""Runs of one model that several callers share: the loop round the decisions of `batching`.

    submit -> admitted or refused -> waits -> in a run, on a thread -> answered
                                     |         |
                                     |         +-- the run fails: its halves run by themselves until the bad row stands alone
                                     |         +-- the run is stopped: who is still there waits again, in the old place
                                     +-- cancelled or past its deadline: never run

Nothing is waited for when an instance is free (batching equal lengths gains little on a CPU): what came while the others were
busy makes the next batch. The event loop decides and hands out; threads only run. A run whose members have all left, or that
costs the others more than running them again, is told to stop at its next node.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import math
from collections.abc import Sequence
from typing import Any, cast

from backends.api import Priority
from backends.onnx.batch_run import Answered, Asked, Outcome, Run, Runner, execute
from backends.onnx.batch_stats import BatcherStats, Counts
from backends.onnx.batching import BatchLimits, Row, WaitingRoom, worth_stopping
from backends.onnx.latency import LatencyModel, Safety
from backends.onnx.session import first_line
from policies.core.clock import Clock
from policies.core.deadline import Deadline
from policies.core.errors import DeadlineExceeded, GatewayError, LimitReached, ModelFailed, ModelNotReady

#: Threads of one model at most. A thread is started when it is first needed.
MOST_INSTANCES = 16
#: A model that is idle and said to be too slow for a deadline is tried all the same, so often: the prediction may be wrong.
_PROBE_EVERY_S = 1.0
#: A caller that leaves this close to its deadline has left because of it.
_AT_DEADLINE_S = 0.002


class Batcher:
    """Belongs to one event loop, from the first `submit` on. `name`: whom its errors are about.

    `executor`: gives the threads that run.
    """

    def __init__(
        self,
        runner: Runner,
        model: LatencyModel,
        clock: Clock,
        *,
        name: str,
        limits: BatchLimits | None = None,
        instances: int = 1,
        executor: concurrent.futures.Executor | None = None,
    ) -> None:
        self._runner = runner
        self._model = model
        self._clock = clock
        self._name = name
        self.limits = limits or BatchLimits()
        self._safety = Safety()
        self._room = WaitingRoom(self.limits, model, self._safety)
        self._executor = executor or concurrent.futures.ThreadPoolExecutor(
            MOST_INSTANCES, thread_name_prefix=f"onnx-{name}"
        )
        self._instances = _checked(instances)
        self._running: set[Run] = set()
        self._live: set[Asked] = set()
        self._counts = Counts()
        self._missed = False  # since the last run
        #: A call admitted before the last miss was counted says nothing about how careful we have become since.
        self._careful_since = -math.inf
        self._probed = -math.inf
        self._dispatching = False
        self._timer: asyncio.Task[None] | None = None
        self._timer_at = math.inf
        self._closed = False

    @property
    def instances(self) -> int:
        """How many runs may go on at a time; may be set at any moment. Fewer: what runs ends in peace."""
        return self._instances

    @instances.setter
    def instances(self, number: int) -> None:
        self._instances = _checked(number)
        self._dispatch_soon()

    async def submit(
        self,
        rows: Sequence[Any],
        lengths: Sequence[int],
        deadline: Deadline,
        *,
        priority: Priority = Priority.NORMAL,
        size_bytes: int = 0,
    ) -> Answered:
        """One result for each row. `lengths`: tokens of each; `size_bytes`: memory that they hold while they wait.

        The rows must be valid: a row that fails its run costs its mates a second one. Raises LimitReached (with
        `retry_after_s`) at once when there is no room or the deadline would be missed, DeadlineExceeded, ModelNotReady
        once closed, ModelFailed.
        """
        now = self._clock.now()
        if self._closed:
            raise ModelNotReady(f"the model of {self._name!r} has been unloaded")
        if deadline.at <= now:
            raise DeadlineExceeded
        if not rows:
            return Answered([], 0.0, 0.0, 0.0, now)
        call = Asked(rows, lengths, priority, deadline, now, size_bytes)
        self._admit(call, now)
        self._room.add(call)
        self._live.add(call)
        if call.due < self._timer_at:
            self._wake_at(call.due)
        self._dispatch_soon()
        try:
            await call.future
        except asyncio.CancelledError:
            if not call.done:
                late = self._clock.now() >= deadline.at - _AT_DEADLINE_S
                self._leave(call, missed=late)
            raise
        ended = self._clock.now()
        waited = ended - now - call.pack_s - call.compute_s
        return Answered(call.results, max(waited, 0.0), call.pack_s, call.compute_s, ended)

    def stats(self) -> BatcherStats:
        return self._counts.stats(
            limits=self.limits,
            model=self._model,
            safety=self._safety.factor,
            waiting_rows=self._room.rows,
            running=len(self._running),
            instances=self._instances,
        )

    async def aclose(self) -> None:
        """Later calls, and those of which something waits, raise ModelNotReady; what runs ends first."""
        self._closed = True
        for call in tuple(self._live):
            running = sum(row.call is call for run in call.runs for row in run.rows)
            if running < call.left:
                self._fail(call, self._unloaded())
        if self._timer is not None:
            self._timer.cancel()
        await asyncio.to_thread(self._executor.shutdown, wait=True)

    # -------------------------------------------------------------------------------------------- coming and leaving

    def _admit(self, call: Asked, now: float) -> None:
        busy = len(self._running) >= self._instances
        rest_s = min(max(run.expected_s - (now - run.started), 0.0) for run in self._running) if busy else 0.0
        refusal = self._room.refusal(call, now, rest_s, self._instances)
        if refusal is None:
            return
        if not self._running and not self._live and now - self._probed >= _PROBE_EVERY_S:
            self._probed = now
            call.probe = True
            return
        self._counts.refused += 1
        raise LimitReached(f"{self._name!r} is too busy: {refusal.reason}", retry_after_s=refusal.retry_after_s)

    def _leave(self, call: Asked, *, missed: bool) -> None:
        """The caller does not want the answer any more."""
        if missed:
            self._miss(call)
        else:
            self._counts.cancelled += 1
        self._over(call)
        now = self._clock.now()
        for run in call.runs:
            self._stop_if_useless(run, now)

    def _miss(self, call: Asked) -> None:
        self._counts.missed += 1
        self._missed = self._missed or (not call.probe and call.arrived >= self._careful_since)

    def _over(self, call: Asked) -> None:
        call.done = True
        self._live.discard(call)
        self._room.remove(call)
        call.rows = ()  # they may be large, and the room forgets a call only in time

    def _stop_if_useless(self, run: Run, now: float) -> None:
        if run.stopped:
            return
        left = [row.length for row in run.rows if not row.call.done]
        survivors_s = self._model.expected(len(left), max(left)) if left else 0.0
        if worth_stopping(run.expected_s - (now - run.started), survivors_s):
            run.stopped = True
            run.options.terminate = True
            self._counts.stopped += 1

    def _fail(self, call: Asked, error: GatewayError) -> None:
        self._over(call)
        if not call.future.done():
            call.future.set_exception(error)

    def _unloaded(self) -> ModelNotReady:
        return ModelNotReady(f"the model of {self._name!r} has been unloaded")

    # ---------------------------------------------------------------------------------------------------- deadlines

    def _wake_at(self, at: float) -> None:
        """One timer for all: at the earliest deadline, or earlier when its call has been answered meanwhile."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = at
        self._timer = asyncio.get_running_loop().create_task(self._expire_at(at))

    async def _expire_at(self, at: float) -> None:
        while True:
            await self._clock.sleep(at - self._clock.now())
            now = self._clock.now()
            for call in [call for call in self._live if call.deadline.at <= now]:
                self._leave(call, missed=True)
                if not call.future.done():
                    call.future.set_exception(DeadlineExceeded())
            if not self._live:
                break
            at = self._timer_at = min(call.deadline.at for call in self._live)
        self._timer, self._timer_at = None, math.inf

    # --------------------------------------------------------------------------------------------------------- runs

    def _dispatch_soon(self) -> None:
        """Once all that arrives in this turn of the event loop is here."""
        if self._dispatching or not len(self._room) or len(self._running) >= self._instances:
            return
        self._dispatching = True
        asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self._dispatching = False
        while len(self._running) < self._instances and not self._closed:
            now = self._clock.now()
            rows = self._room.take(now)
            if not rows:
                return
            self._start(rows, now)

    def _start(self, rows: list[Row], now: float) -> None:
        loop = asyncio.get_running_loop()
        longest = max([row.length for row in rows])
        run = Run(rows, longest, self._model.expected(len(rows), longest), now)
        self._running.add(run)
        for call in _calls(rows):
            call.runs.append(run)
        fed = [cast("Asked", call).rows[index] for call, index in rows]
        runner, clock, over = self._runner, self._clock, self._run_over

        def job() -> None:
            loop.call_soon_threadsafe(over, run, execute(runner, run.options, fed, clock))

        self._executor.submit(job)

    def _run_over(self, run: Run, outcome: Outcome) -> None:
        """Back on the event loop. The next run starts before this one's answers are handed out."""
        now = self._clock.now()
        self._running.discard(run)
        for call in _calls(run.rows):
            call.runs.remove(run)
        living = [row for row in run.rows if not row.call.done]
        if outcome.error is None:
            self._learn(run, living, now)
        elif run.stopped:
            self._room.put_back(living)
        elif len(run.rows) > 1 and living:
            self._counts.failed_runs += 1
            self._room.suspect(living)
        self._dispatch()
        if outcome.error is None:
            self._hand_out(run, living, outcome)
        elif self._closed or (len(run.rows) == 1 and not run.stopped):
            for call in _calls(living):
                self._fail(call, self._failure(outcome.error))

    def _failure(self, error: BaseException) -> GatewayError:
        self._counts.failed_runs += 1
        if self._closed:
            return self._unloaded()
        return (
            error if isinstance(error, GatewayError) else ModelFailed(f"a run failed: {first_line(error)}", self._name)
        )

    def _learn(self, run: Run, living: Sequence[Row], now: float) -> None:
        for call in _calls(living):
            if call.deadline.at < now:
                self._miss(call)
        self._safety.run_over(self._missed)
        if self._missed:
            self._missed, self._careful_since = False, now
        self._counts.run_over([row.length for row in run.rows], run.longest)
        self._room.observe(run.rows, now - run.started)

    def _hand_out(self, run: Run, living: Sequence[Row], outcome: Outcome) -> None:
        for (call, index), result in zip(run.rows, outcome.results, strict=True):
            if not call.done:
                asked = cast("Asked", call)
                asked.results[index] = result
                asked.left -= 1
        for call in _calls(living):
            call.pack_s += outcome.pack_s
            call.compute_s += outcome.compute_s
            if not call.left:
                self._over(call)
                if not call.future.done():
                    call.future.set_result(None)


def _checked(instances: int) -> int:
    if not 1 <= instances <= MOST_INSTANCES:
        raise ValueError(f"a model may have 1 to {MOST_INSTANCES} instances, not {instances}")
    return instances


def _calls(rows: Sequence[Row]) -> list[Asked]:
    """Whose rows they are, each once. Nothing but what was asked of the batcher is ever in its room."""
    return cast("list[Asked]", list({id(row.call): row.call for row in rows}.values()))
