"""A backend without a model: it answers what it was told to. For tests, demonstrations and drills; usable from config.

Time passes through the injected clock, so with a fake clock nothing waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from backends.api import (
    Answer,
    BackendInfo,
    ChatAnswer,
    ChatRequest,
    Chunk,
    ChunkKind,
    EmbeddingsRequest,
    Health,
    Request,
    TensorAnswer,
    TensorRequest,
)
from backends.openai_assemble import replay
from backends.openai_wire import read_completion
from backends.scripted_steps import completion
from policies.core.clock import Clock
from policies.core.deadline import Deadline
from policies.core.errors import (
    ClientFault,
    ConfigError,
    ConnectFailed,
    DeadlineExceeded,
    FirstTokenTimeout,
    GatewayError,
    InBandError,
    MalformedAnswer,
    ModelFailed,
    TruncatedAnswer,
    UpstreamMisconfigured,
    UpstreamStatus,
)
from policies.language.check import check
from policies.language.problems import Problems
from policies.language.schema import Duration, Section
from policies.language.yaml_reader import read_bytes, read_yaml


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one call comes to: after `delay_s` the error, else the answer.

    A stream gives the answer's chunks `every_s` apart; with an error it gives the first `chunks` of them before it.
    """

    answer: Answer | None = None
    error: GatewayError | None = None
    delay_s: float = 0.0
    every_s: float = 0.0
    chunks: int = 0


class OutcomeSpec(Section, frozen=True, kw_only=True):
    """An outcome as configuration says it. `text` is the answer (tensors are echoed); `error` one of connect,
    status, misconfigured, client, malformed, truncated, in_band, model."""

    text: str = "a scripted answer"
    error: str = ""
    status: int = 500
    delay: Duration = 0.0
    every: Duration = 0.0
    chunks: int = 0


def _error(kind: str, status: int, backend: str) -> GatewayError:
    errors: dict[str, GatewayError] = {
        "connect": ConnectFailed("scripted", backend),
        "status": UpstreamStatus(status, backend),
        "misconfigured": UpstreamMisconfigured(401, backend),
        "client": ClientFault(
            400, b'{"error":{"message":"scripted","code":"invalid_request"}}', "application/json", backend
        ),
        "malformed": MalformedAnswer("scripted", backend),
        "truncated": TruncatedAnswer("scripted", backend),
        "in_band": InBandError("scripted", backend),
        "model": ModelFailed("scripted", backend),
    }
    if kind not in errors:
        raise ValueError(f"error {kind!r} is not one of {', '.join(sorted(errors))}")
    return errors[kind]


def outcome(spec: OutcomeSpec, info: BackendInfo) -> Outcome:
    """The outcome a spec describes. Raises ValueError for an unknown error name."""
    error = _error(spec.error, spec.status, info.name) if spec.error else None
    return Outcome(chat(spec.text, info.model), error, spec.delay, spec.every, spec.chunks)


def chat(text: str, model: str = "scripted") -> ChatAnswer:
    """A whole chat answer with this text."""
    return read_completion(msgspec.json.encode(completion({"content": text}, model=model)))


class ScriptedBackend:
    """`outcomes` are used up in order and the last one repeats; a mapping has a list for each requested model name, `*` for
    any other. `calls` holds every request seen, `cancelled` counts those whose caller left."""

    def __init__(
        self, info: BackendInfo, outcomes: Sequence[Outcome] | Mapping[str, Sequence[Outcome]], clock: Clock
    ) -> None:
        self.info = info
        self.calls: list[Request] = []
        self.in_flight = 0
        self.cancelled = 0
        self.closed = False
        self._clock = clock
        by_name = outcomes if isinstance(outcomes, Mapping) else {"*": outcomes}
        self._left = {name: list(reversed(some)) for name, some in by_name.items()}
        if not all(self._left.values()):
            raise ValueError("a script needs at least one outcome")

    async def infer(self, request: Request, deadline: Deadline) -> Answer:
        told = self._next(request)
        self.in_flight += 1
        try:
            if not await self._pass(told.delay_s, deadline):
                raise DeadlineExceeded
            if told.error is not None:
                raise told.error
            return self._answer(told, request)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.in_flight -= 1

    async def stream(self, request: ChatRequest, deadline: Deadline) -> AsyncIterator[Chunk]:
        told = self._next(request)
        self.in_flight += 1
        try:
            if not await self._pass(told.delay_s, deadline):
                raise FirstTokenTimeout("scripted", self.info.name)
            answer = self._answer(told, request) if told.answer is not None or told.error is None else chat("scripted")
            if not isinstance(answer, ChatAnswer):
                raise MalformedAnswer("the scripted answer is no chat answer", self.info.name)
            chunks = split_content(replay(answer, include_usage=True))
            for number, chunk in enumerate(chunks if told.error is None else chunks[: told.chunks]):
                if number and told.every_s:
                    await self._clock.sleep(told.every_s)
                yield chunk
            if told.error is not None:
                raise told.error
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled += 1
            raise
        finally:
            self.in_flight -= 1

    async def health(self) -> Health:
        return Health(ready=not self.closed, reason="closed" if self.closed else "")

    async def aclose(self) -> None:
        self.closed = True

    def _next(self, request: Request) -> Outcome:
        self.calls.append(request)
        name = request.model if isinstance(request, TensorRequest) else str(request.body.get("model", ""))
        left = self._left.get(name) or self._left.get("*")
        if left is None:
            raise UpstreamMisconfigured(404, self.info.name)
        return left.pop() if len(left) > 1 else left[0]

    async def _pass(self, seconds: float, deadline: Deadline) -> bool:
        """Let time pass; False when the deadline came first."""
        left = deadline.remaining()
        if seconds >= left:
            await self._clock.sleep(max(left, 0.0))
            return False
        if seconds:
            await self._clock.sleep(seconds)
        return True

    def _answer(self, told: Outcome, request: Request) -> Answer:
        if isinstance(request, TensorRequest) and not isinstance(told.answer, TensorAnswer):
            return TensorAnswer(self.info.model, request.inputs)
        if told.answer is None or (isinstance(request, EmbeddingsRequest) and isinstance(told.answer, ChatAnswer)):
            raise MalformedAnswer("nothing is scripted for this kind of request", self.info.name)
        return told.answer

    def __repr__(self) -> str:
        return f"ScriptedBackend({self.info.name!r}, {len(self.calls)} calls, {self.in_flight} in flight)"


def split_content(chunks: list[Chunk]) -> list[Chunk]:
    """Content cut at blanks, as a model would have sent it: the same answer in more chunks."""
    made: list[Chunk] = []
    for chunk in chunks:
        body = msgspec.json.decode(chunk.data)
        delta = body["choices"][0]["delta"] if body["choices"] else {}
        text = delta.get("content")
        if chunk.kind is not ChunkKind.CONTENT or not text or " " not in text:
            made.append(chunk)
            continue
        words = text.split(" ")
        for number, word in enumerate(words):
            delta["content"] = word if number == 0 else " " + word
            if delta["content"]:
                made.append(Chunk(msgspec.json.encode(body), ChunkKind.CONTENT))
    return made


class OutcomesFile(Section, frozen=True, kw_only=True):
    """A file of outcomes: used up in order, the last one repeats."""

    outcomes: tuple[OutcomeSpec, ...]


def load_outcomes(path: Path, info: BackendInfo) -> list[Outcome]:
    """Read a file of outcomes (YAML). Raises ConfigError with file:line:column."""
    problems = Problems(str(path))
    root = read_yaml(read_bytes(path), problems)
    if root is None:
        raise ConfigError(problems.lines())
    parsed = check(root, OutcomesFile, problems)
    problems.raise_any()
    try:
        return [outcome(spec, info) for spec in parsed.outcomes]
    except ValueError as error:
        raise ConfigError([f"{path}: {error}"]) from None
