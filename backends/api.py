"""What is asked of a backend and what it answers: the one language between edge, pipeline, cache and models.

A `Backend` has one verb in two forms, `infer` (whole answer) and `stream` (chunks). Guards, pools and chaos are backends
too, wrapped round another one, so they nest in any order.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any, ClassVar, Literal, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from policies.core.deadline import Deadline


class Surface(StrEnum):
    """The kinds of traffic."""

    CHAT = "chat"
    EMBEDDINGS = "embeddings"
    TENSOR = "tensor"


class Role(StrEnum):
    """What a backend is for. `light` is cheap and near; `heavy` is the full answer."""

    LIGHT = "light"
    HEAVY = "heavy"


class Priority(IntEnum):
    """Traffic class; a smaller number is served first."""

    VIP = 0
    NORMAL = 1
    BATCH = 2


# --------------------------------------------------------------------------------------------------------- requests


class StreamLimits(msgspec.Struct, frozen=True, gc=False):
    """Limits of a stream once its first content has been seen (seconds)."""

    idle_s: float = 15.0
    total_s: float = 600.0


class ChatRequest(msgspec.Struct):
    """An OpenAI chat completion. `body` is the client's JSON, checked, with unknown fields kept.

    A backend sends `body` with `model`, `stream` and `stream_options` set by itself, and never changes `body` in place.
    """

    body: dict[str, Any]
    id: str = ""
    priority: Priority = Priority.NORMAL
    limits: StreamLimits = StreamLimits()
    surface: ClassVar[Surface] = Surface.CHAT

    @property
    def messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = self.body["messages"]
        return messages


class EmbeddingsRequest(msgspec.Struct):
    """Texts to embed, in order. `body` is the client's JSON."""

    body: dict[str, Any]
    texts: list[str]
    id: str = ""
    priority: Priority = Priority.NORMAL
    surface: ClassVar[Surface] = Surface.EMBEDDINGS


@dataclass(slots=True)
class Tensor:
    """A named tensor of the Open Inference Protocol.

    `datatype` is the protocol's name (FP32, INT64, BYTES ...). `data` has the tensor's shape; BYTES is an object array of
    `bytes`; BF16 is held as float32 values.
    """

    name: str
    datatype: str
    data: NDArray[Any]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape


@dataclass(slots=True)
class TensorRequest:
    """An Open Inference Protocol v2 `infer`. `model` is the name in the path; `outputs` empty means all of them.

    `body` holds the protocol's `parameters` of the request; `id` of the client's body stays at the edge.
    """

    model: str
    inputs: list[Tensor]
    outputs: tuple[str, ...] = ()
    parameters: dict[str, Any] = field(default_factory=dict)
    id: str = ""
    priority: Priority = Priority.NORMAL
    surface: ClassVar[Surface] = Surface.TENSOR


Request = ChatRequest | EmbeddingsRequest | TensorRequest

# ---------------------------------------------------------------------------------------------------------- answers


class Usage(msgspec.Struct, frozen=True, gc=False):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class ChatAnswer(msgspec.Struct, frozen=True, gc=False):
    """A whole chat completion. `body` is the `chat.completion` JSON exactly as a client receives it."""

    body: bytes
    model: str
    finish_reason: str
    usage: Usage = Usage()
    #: The upstream's `system_fingerprint`, when it says one.
    system_fingerprint: str | None = None


class StageTimes(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Where the time of an answer that was computed in process went, in seconds; runs of one request added up.

    `to_device_s`: making the model's input of the rows; on a CPU nothing is copied back, and `from_device_s` is 0.
    """

    tokenise_s: float = 0.0
    queue_s: float = 0.0
    to_device_s: float = 0.0
    compute_s: float = 0.0
    from_device_s: float = 0.0
    post_s: float = 0.0


@dataclass(frozen=True, slots=True)
class EmbeddingsAnswer:
    """`vectors` is float32 [texts, dimensions], in the order of the request's texts. `stages`: of a fresh answer only."""

    vectors: NDArray[np.float32]
    model: str
    usage: Usage = Usage()
    stages: StageTimes | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class TensorAnswer:
    model: str
    outputs: list[Tensor]
    version: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)


Answer = ChatAnswer | EmbeddingsAnswer | TensorAnswer


class ChunkKind(StrEnum):
    """What a stream chunk carries, decided once by whoever read or made it."""

    META = "meta"  # a role, an empty delta, metadata: not yet an answer
    CONTENT = "content"  # content, reasoning or a tool call: the commit point
    FINISH = "finish"  # carries finish_reason (and perhaps a last bit of content)
    USAGE = "usage"  # `choices: []` with usage


class Chunk(msgspec.Struct, frozen=True, gc=False):
    """One `chat.completion.chunk`. `data` is its JSON, passed on unaltered; the edge adds the SSE framing.

    Failures are exceptions, never chunks: InBandError, TruncatedAnswer, IdleTimeout and so on.
    """

    data: bytes
    kind: ChunkKind


# --------------------------------------------------------------------------------------------------------- backends


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What a model can do. A rung that lacks something a request needs is skipped with the reason."""

    surfaces: frozenset[Surface] = frozenset({Surface.CHAT})
    #: Tokens of prompt and answer together; None = not known, never a reason to skip.
    context_tokens: int | None = None
    #: Of: tools, json_schema, images, audio, n, logprobs.
    features: frozenset[str] = frozenset()
    #: ISO 639-1 codes; None = any.
    languages: frozenset[str] | None = None


class TensorSpec(msgspec.Struct, frozen=True):
    """Name, OIP datatype and shape (-1 = any) of a model's input or output."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    optional: bool = False


class CutVerdict(msgspec.Struct, frozen=True):
    """What splitting a model's graph at a cut came to when it was loaded, compared with the whole graph.

    `label`: `exact` (not a bit differs), `within tolerance`, or `off` (beyond it: nothing is kept there). `difference` is
    the largest of any output. `parts_difference`: the same when rows are run in several runs, as large requests are.
    """

    name: str
    label: Literal["exact", "within tolerance", "off"]
    difference: float
    parts_difference: float = 0.0


class BackendInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What never changes while a backend's model stays the same."""

    name: str
    role: Role
    #: The name its answers carry in `model`.
    model: str
    #: Digest of all that decides an answer (CONTRACTS: weights, graph, tokenizer, template, precision, provider ...).
    fingerprint: str
    capabilities: Capabilities = Capabilities()
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    #: Name of the model that this one may stand in for (tensors only).
    substitutes: str | None = None
    #: Where the graph is split for the subgraph cache.
    cuts: tuple[CutVerdict, ...] = ()


class Health(msgspec.Struct, frozen=True):
    """`ready` = may be called now. `reason` says why not, for people."""

    ready: bool
    reason: str = ""


class Backend(Protocol):
    """Something that answers. All methods may be called concurrently.

    `infer` and `stream` raise BackendError, Rejected, DeadlineExceeded or (the client's own fault, never counted against
    anyone) RequestError of `policies.core.errors`, and nothing else.
    """

    @property
    def info(self) -> BackendInfo: ...

    async def infer(self, request: Request, deadline: Deadline) -> Answer:
        """The whole answer, before `deadline`."""
        ...

    def stream(self, request: ChatRequest, deadline: Deadline) -> AsyncIterator[Chunk]:
        """The answer in chunks. `deadline` bounds the first CONTENT chunk (FirstTokenTimeout); after it `request.limits`.

        A good stream has at least one CONTENT chunk, exactly one FINISH chunk and at most one USAGE chunk after it.
        Closing the iterator (`aclose`) stops the work upstream at once.
        """
        ...

    async def health(self) -> Health: ...

    async def aclose(self) -> None: ...


# ------------------------------------------------------------------------------------- seams implemented in other folders


class Embedder(Protocol):
    """Text to vectors, for classification, the embeddings surface and semantic lookups."""

    @property
    def fingerprint(self) -> str: ...

    @property
    def dimensions(self) -> int: ...

    async def embed(self, texts: Sequence[str], deadline: Deadline) -> NDArray[np.float32]:
        """float32 [len(texts), dimensions], rows of length 1. Raises ModelFailed, LimitReached, DeadlineExceeded."""
        ...

    async def unknown_share(self, text: str, deadline: Deadline) -> float:
        """Share of the text's tokens that the vocabulary does not hold (0..1). Raises as `embed` does."""
        ...


class TensorCache(Protocol):
    """Where a model with declared cuts keeps intermediate tensors. Keys are 16 bytes; the implementer adds tier and epochs."""

    async def get_many(self, keys: Sequence[bytes]) -> list[dict[str, NDArray[Any]] | None]: ...

    async def put(self, key: bytes, tensors: dict[str, NDArray[Any]]) -> None: ...
