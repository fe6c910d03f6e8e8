"""One answer in the making: what was asked, how far it has come, and the way its text takes to the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from backends.api import Priority
from backends.onnx.decoder import Room, Rooms
from backends.onnx.detokenize import StreamText
from backends.onnx.sampling import Sampler
from policies.core.errors import GatewayError


class Piece(NamedTuple):
    """Text that may be shown now. `tokens` counts the whole answer so far; `finish` is stop, length or not yet."""

    text: str
    tokens: int
    finish: str | None


@dataclass(frozen=True, slots=True)
class Work:
    """One answer to make. Prompt and answer together must fit the context; `streaming` False = one Piece at the end."""

    prompt: list[int]
    max_tokens: int
    sampler: Sampler
    text: StreamText
    priority: Priority = Priority.NORMAL
    streaming: bool = True


class Sequence:
    """Two sides. On the event loop: `next` and `deliver`. On the engine's thread: `advance`, `say` and `post`."""

    __slots__ = (
        "_error",
        "_length",
        "_loop",
        "_parts",
        "_pieces",
        "_token",
        "_wake",
        "cancelled",
        "order",
        "room",
        "tokens",
        "work",
    )

    def __init__(self, work: Work, order: int) -> None:
        self.work = work
        self.order = order
        self.cancelled = False
        # The event loop's.
        self._loop = asyncio.get_running_loop()
        self._pieces: deque[Piece] = deque()
        self._error: GatewayError | None = None
        self._wake: asyncio.Future[None] | None = None
        # The engine thread's: key/value memory, tokens it holds, tokens said, the last one, text not yet delivered.
        self.room: Room | None = None
        self._length = 0
        self.tokens = 0
        self._token = -1
        self._parts: list[str] = []

    def rank(self) -> tuple[int, int]:
        """Who is served first: by class, then by arrival."""
        return (self.work.priority, self.order)

    @property
    def urgent(self) -> bool:
        """A VIP that has not said anything yet."""
        return self.work.priority is Priority.VIP and self.tokens == 0

    async def next(self) -> Piece:
        """The next piece. After one with `finish` there is none. Raises ModelFailed or ModelNotReady."""
        while not self._pieces:
            if self._error is not None:
                raise self._error
            self._wake = self._loop.create_future()
            await self._wake
        return self._pieces.popleft()

    def ready(self) -> Piece | None:
        """A piece that has already come, or None."""
        return self._pieces.popleft() if self._pieces else None

    def deliver(self, piece: Piece | None, error: GatewayError | None) -> None:
        """Hand a piece, or the end by an error, to whoever awaits `next`."""
        if piece is not None:
            self._pieces.append(piece)
        else:
            self._error = error
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def post(self, piece: Piece | None, error: GatewayError | None) -> None:
        """`deliver` from another thread."""
        try:
            self._loop.call_soon_threadsafe(self.deliver, piece, error)
        except RuntimeError:
            # The event loop is closed, so nobody can be waiting for this.
            self.cancelled = True

    def advance(self, rooms: Rooms, prefill_piece: int) -> NDArray[np.float32] | None:
        """Run the graph once. Returns logits [V] when the next token is due, None while the prompt is being read."""
        prompt, length = self.work.prompt, self._length
        if length >= len(prompt):
            tokens = [self._token]
        else:
            tokens = prompt[length : length + piece_size(len(prompt) - length, prefill_piece)]
        if self.room is None:
            self.room = rooms.take(len(prompt) + 1)
        self.room = rooms.grown(self.room, length, length + len(tokens))
        logits = self.room.run(tokens, length)
        self._length = length + len(tokens)
        return logits if self._length >= len(prompt) else None

    def say(self, token: int, stop_tokens: frozenset[int]) -> str | None:
        """Take the token into the answer. Returns the finish reason once there is one.

        A stop token ends the answer and is not part of it: neither of its text nor of its count.
        """
        work, text, finish = self.work, "", None
        if token in stop_tokens:
            finish = "stop"
        else:
            self._token = token
            self.tokens += 1
            text = work.text.push(token)
            if work.text.stopped:
                finish = "stop"
            elif self.tokens >= work.max_tokens:
                finish = "length"
        if finish is not None:
            text += work.text.finish()
        if not work.streaming:
            self._parts.append(text)
            text = "".join(self._parts) if finish is not None else ""
        if text or finish is not None:
            self.post(Piece(text, self.tokens, finish), None)
        return finish


def piece_size(left: int, piece: int) -> int:
    """Tokens of a prompt to read next, at most `piece` + 1: a single token is never left over.

    A last piece of one token would give other bits than the whole prompt at once.
    """
    return left if left <= piece + 1 else piece
