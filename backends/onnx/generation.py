"""Several answers at once from one decoder on one thread: they take turns, a token (or a piece of a prompt) a turn.

The event loop only submits work and receives pieces of text; running the graph, choosing tokens and making text of them
happen on the engine's own thread, which works as long as anybody has a turn. Rules:

- At most `active` sequences hold key/value memory; `waiting` more may queue, by class, then by arrival; the rest is refused.
- Turns go round. A new VIP's prompt is read before anyone else's next turn, and VIPs have `vip_extra` places of their own.
- A long prompt is read in pieces, so that nobody waits longer than one piece for the next token.
- `cancel` frees the place at once, or after the token that is being made.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from bisect import insort
from collections import deque
from dataclasses import dataclass

from backends.api import Priority
from backends.onnx.decoder import Room, Rooms
from backends.onnx.sequence import Sequence, Work
from policies.core.clock import Clock
from policies.core.errors import GatewayError, LimitReached, ModelFailed, ModelNotReady


@dataclass(frozen=True, slots=True)
class GenerationLimits:
    """How much one engine takes on. `prefill_piece`: tokens of a prompt that are read in one turn (at least 2)."""

    active: int = 8
    vip_extra: int = 2
    waiting: int = 32
    prefill_piece: int = 64


class Generator:
    """The engine. Belongs to one event loop; `backend` names whom its errors are about."""

    def __init__(
        self, backend: str, rooms: Rooms, stop_tokens: frozenset[int], clock: Clock, limits: GenerationLimits
    ) -> None:
        if limits.prefill_piece < 2:
            raise ValueError("prefill_piece must be at least 2: a prompt's last token alone gives other bits")
        self._backend = backend
        self._rooms = rooms
        self._stop_tokens = stop_tokens
        self._clock = clock
        self._limits = limits
        self._executor = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix=f"generate-{backend}")
        # Guards everything below; held for moments only, never during a run.
        self._lock = threading.Lock()
        self._waiting: list[Sequence] = []
        self._active: set[Sequence] = set()
        self._turns: deque[Sequence] = deque()
        self._urgent: deque[Sequence] = deque()
        self._orphans: list[Room] = []
        self._working = False
        self._closed = False
        self._submitted = 0
        self._turn_s = 0.02

    @property
    def active(self) -> int:
        return len(self._active)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def closed(self) -> bool:
        """Unloaded, or the engine itself has failed."""
        return self._closed

    @property
    def cache_bytes(self) -> int:
        """Key/value memory in use."""
        return self._rooms.bytes_in_use

    def submit(self, work: Work) -> Sequence:
        """Queue `work`. Raises LimitReached when too many wait, ModelNotReady once closed."""
        extra = self._limits.vip_extra if work.priority is Priority.VIP else 0
        with self._lock:
            if self._closed:
                raise ModelNotReady(f"the model of {self._backend!r} has been unloaded")
            if len(self._active) + len(self._waiting) >= self._limits.active + self._limits.waiting + extra:
                raise LimitReached(
                    f"{len(self._active)} answers of {self._backend!r} are being made and {len(self._waiting)} wait",
                    retry_after_s=self._place_free_s(),
                )
            self._submitted += 1
            sequence = Sequence(work, self._submitted)
            insort(self._waiting, sequence, key=Sequence.rank)
            self._admit()
            if not self._working:
                self._working = True
                self._executor.submit(self._work)
        return sequence

    def cancel(self, sequence: Sequence) -> None:
        """Stop making this answer; harmless when it is finished."""
        with self._lock:
            sequence.cancelled = True
            if sequence in self._waiting:
                self._waiting.remove(sequence)
            elif (line := self._urgent if sequence.urgent else self._turns) and sequence in line:
                line.remove(sequence)
                self._leave(sequence)
            # Otherwise its turn is running (the worker looks at `cancelled` next), or it is over.

    async def aclose(self) -> None:
        """Fail what is under way with ModelNotReady, end the turn that runs, end the thread."""
        self._fail_all(ModelNotReady(f"the model of {self._backend!r} has been unloaded"), close=True)
        await asyncio.to_thread(self._executor.shutdown, wait=True)

    # ------------------------------------------------------------------------------------------ the engine's thread

    def _work(self) -> None:
        """Give turns until nobody wants one."""
        try:
            while (sequence := self._next_turn()) is not None:
                self._turn(sequence)
        except BaseException as error:  # a defect of the engine itself: nobody may be left waiting
            self._fail_all(ModelFailed(f"the engine failed: {type(error).__name__}", self._backend), close=True)
            raise

    def _next_turn(self) -> Sequence | None:
        with self._lock:
            for room in self._orphans:
                self._rooms.give_back(room)
            self._orphans.clear()
            if self._urgent:
                return self._urgent.popleft()
            if self._turns:
                return self._turns.popleft()
            self._working = False
            return None

    def _turn(self, sequence: Sequence) -> None:
        """One piece of a prompt or one token; afterwards the sequence lines up again or leaves."""
        began = self._clock.now()
        finish: str | None = None
        try:
            logits = sequence.advance(self._rooms, self._limits.prefill_piece)
            if logits is not None:
                finish = sequence.say(sequence.work.sampler.next(logits), self._stop_tokens)
        except Exception as error:
            text = str(error).splitlines()[0][:200] if str(error) else ""
            failed = ModelFailed(f"a run failed: {type(error).__name__}: {text}", self._backend)
            sequence.post(None, failed)
            finish = "failed"
        self._turn_s += 0.05 * (self._clock.now() - began - self._turn_s)
        with self._lock:
            if finish is None and not sequence.cancelled and sequence in self._active:
                self._line_up(sequence, again=True)
            else:
                self._leave(sequence)

    # ------------------------------------------------------------------------------------------------ under the lock

    def _admit(self) -> None:
        """Give free places to those who wait. Called whenever either changes, so that nobody is overtaken."""
        while self._waiting:
            vip = self._waiting[0].work.priority is Priority.VIP
            if len(self._active) >= self._limits.active + (self._limits.vip_extra if vip else 0):
                return
            sequence = self._waiting.pop(0)
            self._active.add(sequence)
            self._line_up(sequence, again=False)

    def _line_up(self, sequence: Sequence, *, again: bool) -> None:
        """Urgent ones keep the order of their arrival and go before all others, who go round."""
        if not sequence.urgent:
            self._turns.append(sequence)
        elif again:
            self._urgent.appendleft(sequence)
        else:
            self._urgent.append(sequence)

    def _leave(self, sequence: Sequence) -> None:
        """Give up the place; the room goes back on the engine's thread."""
        self._active.discard(sequence)
        if sequence.room is not None:
            self._orphans.append(sequence.room)
            sequence.room = None
        self._admit()

    def _place_free_s(self) -> float:
        """About when the next place is free: the fewest tokens an active answer may still need, at the present pace."""
        left = min((s.work.max_tokens - s.tokens for s in self._active), default=0)
        return min(60.0, max(1.0, left * len(self._active) * self._turn_s))

    def _fail_all(self, error: GatewayError, *, close: bool) -> None:
        with self._lock:
            self._closed = self._closed or close
            everyone = [*self._waiting, *self._active]
            self._waiting.clear()
            for sequence in (*self._urgent, *self._turns):
                self._leave(sequence)
            self._urgent.clear()
            self._turns.clear()
            self._active.clear()
        for sequence in everyone:
            sequence.post(None, error)
