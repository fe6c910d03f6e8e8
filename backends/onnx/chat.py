"""A chat model inside this process, as a Backend: OpenAI chat completions from an ONNX decoder.

    body -> checked call -> token ids (a thread of its own) -> Generator (its thread) -> pieces of text -> JSON

The event loop checks the body and writes a few bytes of JSON a token; all else happens on the two threads.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import onnxruntime as ort

from backends.api import (
    Answer,
    BackendInfo,
    ChatAnswer,
    ChatRequest,
    Chunk,
    Health,
    Request,
    Role,
    StreamLimits,
    Surface,
    Usage,
)
from backends.onnx.chat_prompt import ChatPrompt
from backends.onnx.chat_request import (
    ChatCall,
    GenerationDefaults,
    client_fault,
    context_too_long,
    read_call,
    read_defaults,
)
from backends.onnx.chat_wire import AnswerWriter
from backends.onnx.decoder import Rooms, decoder_shape
from backends.onnx.detokenize import StreamText, TokenBytes
from backends.onnx.generation import GenerationLimits, Generator
from backends.onnx.manifest import Manifest, ModelDamaged, ModelError, backend_info, read_manifest
from backends.onnx.sampling import Sampler, Sampling
from backends.onnx.sequence import Piece, Sequence, Work
from backends.onnx.session import SessionSettings, create_session, provider_of
from policies.core.clock import Clock
from policies.core.deadline import Deadline
from policies.core.errors import (
    CannotServe,
    DeadlineExceeded,
    FirstTokenTimeout,
    IdleTimeout,
    ModelFailed,
    ModelNotReady,
    TotalTimeout,
)

GRAPH_NAME = "model.onnx"


def random_seed() -> int:
    """A seed for a request that brings none."""
    return secrets.randbits(63)


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """How a chat model runs.

    `context_tokens` caps the model's own context: key/value memory grows with it, for each active answer.
    `default_max_tokens` holds where a request sets no limit.
    """

    session: SessionSettings = field(default_factory=SessionSettings)
    limits: GenerationLimits = field(default_factory=GenerationLimits)
    context_tokens: int = 2048
    default_max_tokens: int = 512
    seeds: Callable[[], int] = random_seed


@dataclass(frozen=True, slots=True)
class LoadedChat:
    """Everything read from a model folder: what `load_files` does in a thread."""

    info: BackendInfo
    prompt: ChatPrompt
    vocabulary: TokenBytes
    defaults: GenerationDefaults
    rooms: Rooms


class OnnxChatBackend:
    """Backend for chat. Belongs to the event loop it was made on."""

    def __init__(self, loaded: LoadedChat, clock: Clock, settings: ChatSettings) -> None:
        self._info = loaded.info
        self._loaded = loaded
        self._clock = clock
        self._settings = settings
        self._closed = False
        self._system_fingerprint = f"fp_{loaded.info.fingerprint[:12]}"
        self._prepare = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix=f"tokens-{loaded.info.name}")
        stop_tokens = frozenset(loaded.defaults.stop_tokens)
        self.generator = Generator(loaded.info.name, loaded.rooms, stop_tokens, clock, settings.limits)

    @property
    def info(self) -> BackendInfo:
        return self._info

    async def health(self) -> Health:
        if self._closed or self.generator.closed:
            return Health(ready=False, reason="the model has been unloaded or its engine failed")
        return Health(ready=True)

    async def aclose(self) -> None:
        """Answers under way fail with ModelNotReady."""
        self._closed = True
        await self.generator.aclose()
        # What is being tokenised (milliseconds) ends, and is then refused by the engine.
        await asyncio.to_thread(self._prepare.shutdown, wait=True)

    async def infer(self, request: Request, deadline: Deadline) -> Answer:
        """A ChatAnswer. An answer without text raises ModelFailed, unless a stop string cut all of it."""
        chat = self._chat(request)
        async with deadline.timeout():
            writer, sequence, prompt_tokens = await self._begin(chat, streaming=False)
            try:
                piece = await sequence.next()
            finally:
                self.generator.cancel(sequence)
        self._refuse_empty(piece, sequence)
        usage = Usage(prompt_tokens, piece.tokens)
        assert piece.finish is not None  # without streaming there is one piece, the last
        body = writer.whole(piece.text, piece.finish, usage)
        return ChatAnswer(body, self._info.model, piece.finish, usage, self._system_fingerprint)

    async def stream(self, request: ChatRequest, deadline: Deadline) -> AsyncIterator[Chunk]:
        chat = self._chat(request)
        try:
            async with deadline.timeout():
                writer, sequence, prompt_tokens = await self._begin(chat, streaming=True)
        except DeadlineExceeded as error:
            raise FirstTokenTimeout("no token before the deadline", self._info.name) from error
        try:
            yield writer.role()
            try:
                async with deadline.timeout():
                    piece = await sequence.next()
            except DeadlineExceeded as error:
                raise FirstTokenTimeout("no token before the deadline", self._info.name) from error
            self._refuse_empty(piece, sequence)
            # Even an answer that a stop string cut to nothing has one content chunk: it is complete, not absent.
            yield writer.content(piece.text)
            total = Deadline.after(request.limits.total_s, self._clock)
            while piece.finish is None:
                piece = await self._next(sequence, request.limits, total)
                if piece.text:
                    yield writer.content(piece.text)
            yield writer.finish(piece.finish)
            yield writer.usage(Usage(prompt_tokens, piece.tokens))
        finally:
            self.generator.cancel(sequence)

    async def _next(self, sequence: Sequence, limits: StreamLimits, total: Deadline) -> Piece:
        if (piece := sequence.ready()) is not None and not total.expired():
            return piece
        idle = total.within(limits.idle_s)
        try:
            async with idle.timeout():
                return await sequence.next()
        except DeadlineExceeded as error:
            if idle.at >= total.at:
                raise TotalTimeout(f"the stream ran past {limits.total_s:g} s", self._info.name) from error
            raise IdleTimeout(f"no token for {limits.idle_s:g} s", self._info.name) from error

    async def _begin(self, request: ChatRequest, *, streaming: bool) -> tuple[AnswerWriter, Sequence, int]:
        """Check, tokenise, queue. Returns with it the number of prompt tokens."""
        call = read_call(request, self._loaded.defaults, self._info.name)
        prompt = await self._prompt_tokens(call)
        room = self._context - len(prompt)
        if room < 1:
            raise context_too_long(len(prompt), self._context, self._info.name)
        work = Work(
            prompt=prompt,
            max_tokens=min(call.max_tokens or self._settings.default_max_tokens, room),
            sampler=Sampler(call.sampling(self._settings.seeds())),
            text=StreamText(self._loaded.vocabulary, call.stops),
            priority=request.priority,
            streaming=streaming,
        )
        sequence = self.generator.submit(work)
        answer_id = f"chatcmpl-{request.id or secrets.token_hex(12)}"
        writer = AnswerWriter(answer_id, int(self._clock.wall()), self._info.model, self._system_fingerprint)
        return writer, sequence, len(prompt)

    async def _prompt_tokens(self, call: ChatCall) -> list[int]:
        """Rendered and encoded on the preparing thread; what cannot fit is refused before any work is done."""
        size = sum(len(turn["content"]) for turn in call.turns)
        fewest = -(-size // self._loaded.vocabulary.longest)
        if fewest >= self._context:
            raise context_too_long(fewest, self._context, self._info.name, at_least=True)
        if self._closed:
            raise ModelNotReady(f"the model of {self._info.name!r} has been unloaded")
        job = self._prepare.submit(self._loaded.prompt.tokens, call.turns)
        try:
            return await asyncio.wrap_future(job)
        except ValueError as error:
            raise client_fault(str(error), "messages", self._info.name) from error

    def _refuse_empty(self, piece: Piece, sequence: Sequence) -> None:
        if not piece.text and piece.finish is not None and not sequence.work.text.stopped:
            raise ModelFailed("the model ended its answer without any text", self._info.name)

    def _chat(self, request: Request) -> ChatRequest:
        if not isinstance(request, ChatRequest):
            raise CannotServe(f"{self._info.name} is a chat model; it does not serve {request.surface} traffic")
        return request

    @property
    def _context(self) -> int:
        return self._loaded.rooms.shape.context_tokens


async def load_chat(
    folder: Path, *, name: str, role: Role, clock: Clock, settings: ChatSettings | None = None
) -> OnnxChatBackend:
    """Load a chat model folder and run it once, in a thread. Raises ModelError or one of its kinds."""
    settings = settings or ChatSettings()
    loaded = await asyncio.to_thread(load_files, folder, name=name, role=role, settings=settings)
    return OnnxChatBackend(loaded, clock, settings)


def load_files(folder: Path, *, name: str, role: Role, settings: ChatSettings) -> LoadedChat:
    """The blocking part of `load_chat`."""
    manifest = read_manifest(folder)
    if manifest.kind != "chat" or Surface.CHAT not in manifest.capabilities.surfaces:
        raise ModelDamaged(f"{folder} holds a model of kind {manifest.kind!r}; a chat model is needed here")
    prompt = ChatPrompt(folder)
    try:
        vocabulary = TokenBytes.of(prompt.tokenizer)
    except ValueError as error:
        raise ModelDamaged(f"{folder}: {error}; build the model again") from error
    session = create_session(folder / GRAPH_NAME, settings.session)
    context = min(settings.context_tokens, manifest.capabilities.context_tokens or settings.context_tokens)
    rooms = Rooms(session, decoder_shape(session, context))
    loaded = LoadedChat(_info(manifest, session, name, role, context), prompt, vocabulary, read_defaults(folder), rooms)
    _warm_up(loaded)
    return loaded


def _info(manifest: Manifest, session: ort.InferenceSession, name: str, role: Role, context: int) -> BackendInfo:
    info = backend_info(manifest, name=name, role=role, provider=provider_of(session))
    capabilities = msgspec.structs.replace(info.capabilities, context_tokens=context)
    return msgspec.structs.replace(info, capabilities=capabilities)


def _warm_up(loaded: LoadedChat) -> None:
    """One prompt and two steps: a load is no check, and the first run of a graph is slow."""
    rooms = loaded.rooms
    if len(loaded.vocabulary.table) != rooms.shape.vocabulary:
        raise ModelError(
            f"the tokenizer has {len(loaded.vocabulary.table)} tokens and the graph {rooms.shape.vocabulary}; "
            "build the model again"
        )
    prompt = loaded.prompt.tokens([{"role": "user", "content": "Hello"}])[: rooms.shape.context_tokens - 2]
    room = rooms.take(len(prompt) + 2)
    try:
        logits = room.run(prompt, 0)
        for step in range(2):
            token = Sampler(Sampling(temperature=0)).next(logits)
            logits = room.run([token], len(prompt) + step)
    except Exception as error:
        raise ModelError(
            f"the first run of {loaded.info.name} failed: {str(error)[:200]}; rebuild the model"
        ) from error
    rooms.give_back(room)
