"""A decoder without a model: the generation engine's view of one, with every run recorded and, on demand, held up."""

from __future__ import annotations

import threading

import numpy as np

VOCABULARY = 64
#: A run that a test holds up longer than this has been forgotten.
_LIMIT_S = 10.0


class ScriptedRoom:
    """Answers token n + 1 for token n of the prompt's first token's sequence; prompts name themselves by their first token."""

    def __init__(self, rooms: ScriptedRooms) -> None:
        self.rooms = rooms
        self.name = -1

    def run(self, tokens: list[int], length: int) -> np.ndarray:
        if length == 0:
            self.name = tokens[0]
        return self.rooms.run(self.name, len(tokens), length)


class ScriptedRooms:
    """Stands where `Rooms` stands. `runs` holds (prompt's first token, tokens read) in order.

    After `hold()` each run waits for one `step()`. `broken[name]` makes the runs of that prompt raise it.
    """

    def __init__(self) -> None:
        self.runs: list[tuple[int, int]] = []
        self.given = 0
        self.broken: dict[int, Exception] = {}
        self.answers: dict[int, int] = {}
        self.started = threading.Semaphore(0)
        self._steps: threading.Semaphore | None = None

    def hold(self) -> None:
        self._steps = threading.Semaphore(0)

    def step(self, runs: int = 1) -> None:
        assert self._steps is not None
        self._steps.release(runs)

    def free(self) -> None:
        """Hold nothing up any more."""
        steps, self._steps = self._steps, None
        if steps is not None:
            steps.release(10_000)

    def run(self, name: int, count: int, length: int) -> np.ndarray:
        self.started.release()
        steps = self._steps  # `free` takes it away from another thread
        if steps is not None and not steps.acquire(timeout=_LIMIT_S):
            raise TimeoutError("the test never let this run go on")
        self.runs.append((name, count))
        if name in self.broken:
            raise self.broken[name]
        logits = np.zeros(VOCABULARY, np.float32)
        logits[self.answers.get(name, 33)] = 5.0
        return logits

    def take(self, tokens: int) -> ScriptedRoom:
        self.given += 1
        return ScriptedRoom(self)

    def grown(self, room: ScriptedRoom, length: int, tokens: int) -> ScriptedRoom:
        return room

    def give_back(self, room: ScriptedRoom) -> None:
        self.given -= 1
