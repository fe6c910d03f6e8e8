"""Sentence embeddings in process: MiniLM on ONNX Runtime, for classification, semantic lookups and the embeddings surface.

Texts of all callers share runs of the model (`batcher`); tokenising is done on the event loop when it is quick, else on a
thread of its own, so the texts of the next run are read while this one is computed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from backends.api import (
    Answer,
    BackendInfo,
    ChatRequest,
    Chunk,
    EmbeddingsAnswer,
    EmbeddingsRequest,
    Health,
    Priority,
    Request,
    Role,
    StageTimes,
    Usage,
)
from backends.onnx.batch_stats import BatcherStats
from backends.onnx.batcher import Batcher
from backends.onnx.batching import BatchLimits
from backends.onnx.encoder_run import EncoderRunner, measured_latency
from backends.onnx.fingerprint import loaded_fingerprint
from backends.onnx.manifest import Manifest, ModelDamaged, ModelError, backend_info, read_manifest
from backends.onnx.session import OneThread, SessionSettings, check_names, create_session, provider_of
from backends.onnx.tokens import head_and_tail, padded, read_tokenizer
from policies.core.clock import Clock, SystemClock
from policies.core.deadline import Deadline
from policies.core.errors import CannotServe, InvalidRequest, ModelFailed

#: `embed` reads at most this much of a text, the length up to which MiniLM was trained.
READ_TOKENS = 256
#: Beyond this a text is cut before it is tokenised (its ends hold more than READ_TOKENS tokens in any real text).
_READ_CHARACTERS = 8_000
#: The embeddings surface: no text of the longest allowed token count is longer than this in practice.
_CHARACTERS_PER_TOKEN = 32
#: Up to here tokenising takes less than handing it to another thread and is done on the event loop (about .4 ms).
_INLINE_CHARACTERS = 1_500
#: Tokenised in one go by the thread: about 10 ms.
_SHARE_CHARACTERS = 32_000
MAX_TEXTS = 2_048
#: A call of `embed` of so few texts is one that a request waits for on its way (classification, semantic lookup): it goes
#: before bulks, whoever they belong to.
_FEW_TEXTS = 4
#: A token id while it waits: a pointer and a number.
_BYTES_PER_ID = 36

FloatArray = NDArray[np.float32]
_INPUTS = ("input_ids", "attention_mask")


class MiniLmEmbedder:
    """Implements `backends.api.Embedder`. Belongs to one event loop; made by `load`."""

    def __init__(
        self,
        manifest: Manifest,
        tokenizer: Any,
        session: ort.InferenceSession,
        name: str,
        batcher: Batcher,
        clock: Clock,
    ) -> None:
        self.manifest = manifest
        self.name = name
        self.provider = provider_of(session)
        self.dimensions: int = manifest.architecture["dimensions"]
        self.max_tokens = manifest.capabilities.context_tokens or READ_TOKENS
        self.fingerprint = loaded_fingerprint(manifest.fingerprint, self.provider)
        self._vocabulary: int = manifest.architecture["vocabulary"]
        self._tokenizer = tokenizer
        self._unknown: int = tokenizer.token_to_id("[UNK]")
        self._session = session
        self._thread = OneThread(name)
        self.batcher = batcher
        self._clock = clock
        self._closed = False

    @classmethod
    async def load(
        cls,
        folder: Path,
        *,
        name: str = "embedder",
        settings: SessionSettings | None = None,
        limits: BatchLimits | None = None,
        clock: Clock | None = None,
    ) -> MiniLmEmbedder:
        """Load, try and measure the model in `folder`, in a thread. Raises ModelError (ModelMissing, ModelDamaged ...)."""
        return await asyncio.to_thread(cls._load, folder, name, settings, limits, clock or SystemClock())

    @classmethod
    def _load(
        cls, folder: Path, name: str, settings: SessionSettings | None, limits: BatchLimits | None, clock: Clock
    ) -> MiniLmEmbedder:
        manifest = read_manifest(folder)
        if manifest.kind != "embedder":
            raise ModelError(f"{folder} holds a model of kind {manifest.kind}, not an embedder")
        tokenizer = read_tokenizer(folder / "tokenizer.json")
        if tokenizer.get_vocab_size() > manifest.architecture["vocabulary"] or tokenizer.token_to_id("[UNK]") is None:
            raise ModelDamaged(
                f"{folder}: the tokenizer does not belong to this model; run `gateway models build --force`"
            )
        session = create_session(folder / "model.onnx", settings)
        check_names(session, _INPUTS, ["embedding"])
        # Some graphs load and fail at the first run, so loading is not enough.
        tried = session.run(["embedding"], padded([tokenizer.encode("ready?").ids, tokenizer.encode("").ids]))[0]
        if tried.shape != (2, manifest.architecture["dimensions"]) or not np.isfinite(tried).all():
            raise ModelDamaged(f"{folder}: the model gives {tried.shape} or numbers that are not finite")
        runner = EncoderRunner(session)
        longest = manifest.capabilities.context_tokens or READ_TOKENS
        latency = measured_latency(runner, clock, token=tokenizer.token_to_id("[UNK]"), longest=longest)
        batcher = Batcher(runner, latency, clock, name=name, limits=limits)
        return cls(manifest, tokenizer, session, name, batcher, clock)

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def session(self) -> ort.InferenceSession:
        """For a model that has this very graph in it. A session may be run from several threads."""
        return self._session

    def tokenize(self, text: str) -> list[int]:
        """All token ids of a text, with [CLS] and [SEP] round them. About 1.2 us a token."""
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    async def unknown_share(self, text: str, deadline: Deadline) -> float:
        """Share (0..1) of the text's own tokens that are [UNK]; 0 for a text without any. Reads the ends of a long text."""
        text = _ends(text)
        if len(text) <= _INLINE_CHARACTERS:
            return self._unknown_in(text)
        return await self._thread.run(lambda _options: self._unknown_in(text), deadline)

    def _unknown_in(self, text: str) -> float:
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids.count(self._unknown) / len(ids) if ids else 0.0

    def stats(self) -> BatcherStats:
        """Of the runs of this model."""
        return self.batcher.stats()

    async def embed(self, texts: Sequence[str], deadline: Deadline, *, priority: Priority | None = None) -> FloatArray:
        """float32 [texts, dimensions], rows of length 1.

        Reads the first and last 128 tokens of a longer text. `priority` None: a few texts go as a VIP's, many as anybody's.
        Raises LimitReached (too busy for the deadline), DeadlineExceeded, ModelNotReady, ModelFailed.
        """
        if priority is None:
            priority = Priority.VIP if len(texts) <= _FEW_TEXTS else Priority.NORMAL
        return await self.embed_tokens(await self.read(texts, deadline), deadline, priority)

    async def read(self, texts: Sequence[str], deadline: Deadline) -> list[list[int]]:
        """The token ids that `embed` reads of each text."""
        rows = await self.tokenize_all([_ends(text) for text in texts], deadline)
        return [head_and_tail(row, READ_TOKENS) for row in rows]

    async def tokenize_all(self, texts: Sequence[str], deadline: Deadline) -> list[list[int]]:
        """`tokenize` for each text: on the event loop when that is quick, else on a thread, a share at a time."""
        if sum(map(len, texts)) <= _INLINE_CHARACTERS:
            return [self.tokenize(text) for text in texts]
        rows: list[list[int]] = []
        for share in _shares(texts):
            rows += await self._thread.run(self._tokenize_in_thread, deadline, share)
        return rows

    def _tokenize_in_thread(self, _options: ort.RunOptions, texts: Sequence[str]) -> list[list[int]]:
        return [self.tokenize(text) for text in texts]

    async def embed_tokens(
        self, rows: Sequence[Sequence[int]], deadline: Deadline, priority: Priority = Priority.NORMAL
    ) -> FloatArray:
        """Like `embed`, from token ids: 1 to `max_tokens` a row, each in the vocabulary (else ModelFailed)."""
        return (await self.embed_timed(rows, deadline, priority))[0]

    async def embed_timed(
        self,
        rows: Sequence[Sequence[int]],
        deadline: Deadline,
        priority: Priority = Priority.NORMAL,
        tokenise_s: float = 0.0,
    ) -> tuple[FloatArray, StageTimes]:
        """`embed_tokens`, and where the time went. `tokenise_s`: what the caller has spent on that."""
        lengths = []
        for row in rows:
            if not 0 < len(row) <= self.max_tokens or min(row) < 0 or max(row) >= self._vocabulary:
                raise ModelFailed(f"a row of {len(row)} token ids is outside what the model reads", self.name)
            lengths.append(len(row))
        size = _BYTES_PER_ID * sum(lengths)
        got = await self.batcher.submit(rows, lengths, deadline, priority=priority, size_bytes=size)
        vectors = np.empty((len(rows), self.dimensions), np.float32)
        for index, vector in enumerate(got.results):
            vectors[index] = vector
        if not np.isfinite(vectors).all():
            raise ModelFailed("an embedding is not finite", self.name)
        post_s = self._clock.now() - got.at
        return vectors, StageTimes(
            tokenise_s=tokenise_s,
            queue_s=got.queue_s,
            to_device_s=got.to_device_s,
            compute_s=got.compute_s,
            post_s=post_s,
        )

    async def aclose(self) -> None:
        """Later calls raise ModelNotReady."""
        self._closed = True
        await self.batcher.aclose()
        await self._thread.aclose()


def _shares(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    """`texts` in order, in slices of about _SHARE_CHARACTERS, so that other callers get their turn in between."""
    start = characters = 0
    for index, text in enumerate(texts):
        characters += len(text)
        if characters >= _SHARE_CHARACTERS:
            yield texts[start : index + 1]
            start, characters = index + 1, 0
    if start < len(texts):
        yield texts[start:]


def _ends(text: str) -> str:
    """A text that tokenises in bounded time: its first and last characters when it is very long."""
    if len(text) <= _READ_CHARACTERS:
        return text
    half = _READ_CHARACTERS // 2
    return text[:half] + " " + text[-half:]


class EmbeddingsBackend:
    """`backends.api.Backend` for the embeddings surface, over an embedder that may be shared with the classifier."""

    def __init__(
        self,
        embedder: MiniLmEmbedder,
        *,
        name: str,
        role: Role,
        release: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`release`: what closing does with an embedder that is not its own; without it the embedder is closed."""
        self._embedder = embedder
        self._release = release or embedder.aclose
        self._info = backend_info(embedder.manifest, name=name, role=role, provider=embedder.provider)

    @classmethod
    async def load(
        cls, folder: Path, *, name: str, role: Role, settings: SessionSettings | None = None
    ) -> EmbeddingsBackend:
        """With an embedder of its own."""
        return cls(await MiniLmEmbedder.load(folder, name=name, settings=settings), name=name, role=role)

    @property
    def info(self) -> BackendInfo:
        return self._info

    @property
    def embedder(self) -> MiniLmEmbedder:
        return self._embedder

    async def infer(self, request: Request, deadline: Deadline) -> Answer:
        """Vectors in the order of the texts. Raises InvalidRequest for a text that the model cannot read whole."""
        if not isinstance(request, EmbeddingsRequest):
            raise CannotServe(f"{self._info.name} embeds texts; it does not serve {request.surface} traffic")
        embedder = self._embedder
        self._check(request)
        began = deadline.clock.now()
        rows = await embedder.tokenize_all(request.texts, deadline)
        tokenise_s = deadline.clock.now() - began
        for index, row in enumerate(rows):
            if len(row) > embedder.max_tokens:
                raise InvalidRequest(
                    f"input {index} has {len(row)} tokens; {self._info.model} reads at most {embedder.max_tokens}. Split the text",
                    param="input",
                    code="context_length_exceeded",
                )
        vectors, stages = await embedder.embed_timed(rows, deadline, request.priority, tokenise_s)
        return EmbeddingsAnswer(vectors, self._info.model, Usage(prompt_tokens=sum(map(len, rows))), stages)

    def _check(self, request: EmbeddingsRequest) -> None:
        """What can be seen without tokenising."""
        dimensions = request.body.get("dimensions")
        if dimensions is not None and dimensions != self._embedder.dimensions:
            raise InvalidRequest(
                f"{self._info.model} gives {self._embedder.dimensions} dimensions only", param="dimensions"
            )
        if not 0 < len(request.texts) <= MAX_TEXTS:
            raise InvalidRequest(f"input holds {len(request.texts)} texts; 1 to {MAX_TEXTS} are allowed", param="input")
        limit = self._embedder.max_tokens * _CHARACTERS_PER_TOKEN
        for index, text in enumerate(request.texts):
            if len(text) > limit:
                raise InvalidRequest(
                    f"input {index} has {len(text)} characters; {self._info.model} reads at most "
                    f"{self._embedder.max_tokens} tokens. Split the text",
                    param="input",
                    code="context_length_exceeded",
                )

    async def stream(self, request: ChatRequest, deadline: Deadline) -> AsyncIterator[Chunk]:
        """Embeddings do not stream: always CannotServe."""
        del deadline
        raise CannotServe(f"{self._info.name} embeds texts; it does not serve {request.surface} traffic")
        yield  # makes this a generator, as the protocol wants

    async def health(self) -> Health:
        return Health(ready=False, reason="the model is unloaded") if self._embedder.closed else Health(ready=True)

    async def aclose(self) -> None:
        await self._release()
