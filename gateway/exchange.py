"""One request on its way through the gateway, and what is known about how it was answered. No HTTP library here."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from backends.api import Answer, BackendInfo, Chunk, Request

if TYPE_CHECKING:
    from gateway.edge.identity import Identity


@dataclass(frozen=True, slots=True)
class Controls:
    """What a client may ask of the gateway itself (CONTRACTS, section 1)."""

    no_cache: bool = False
    no_store: bool = False
    only_if_cached: bool = False
    degrade_off: bool = False
    timeout_s: float | None = None


#: Shared by all requests without control headers; never changed.
DEFAULT_CONTROLS = Controls()


@dataclass(slots=True)
class Record:
    """How one request went: the source of the answer's headers, of `gateway why`, and of the Completed event.

    Holds names, numbers and digests only; never prompt text, keys or secrets.
    """

    request_id: str
    surface: str
    started: float
    stream: bool = False
    policy: str = ""
    tenant: str = ""
    priority: str = ""
    rule: str = ""
    rung: str = ""
    backend: str = ""
    degraded: str = ""
    fingerprint: str = ""
    #: all, basic or none: which headers the answer carries.
    expose: str = "basic"
    age_s: float | None = None
    #: Seconds spent waiting for a model or a store.
    waited_s: float = 0.0
    first_s: float = 0.0
    seconds: float = 0.0
    outcome: str = ""
    status: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    #: Explains every rule and score when asked: callable kept instead of rendered text.
    explain: Any = None
    #: (entry key digest in hex, outcome) of each cache look-up.
    lookups: list[tuple[str, str]] = field(default_factory=list)
    #: One dict a step: rung, backend, outcome or skip reason, milliseconds.
    steps: list[dict[str, Any]] = field(default_factory=list)


@dataclass(slots=True)
class Exchange:
    """A parsed request with its circumstances. `identity` is filled in by the pipeline."""

    request: Request
    model: str
    record: Record
    stream: bool = False
    include_usage: bool = False
    authorization: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    controls: Controls = DEFAULT_CONTROLS
    identity: Identity | None = None


@dataclass(slots=True)
class Reply:
    """The answer: whole, or a committed stream (`held` are the chunks up to the commit point, then `rest`)."""

    record: Record
    answer: Answer | None = None
    held: list[Chunk] = field(default_factory=list)
    rest: AsyncIterator[Chunk] | None = None


class Handler(Protocol):
    """What an edge talks to: the pipeline, or a model server without policies."""

    async def handle(self, exchange: Exchange) -> Reply:
        """Raises GatewayError; a stream that fails before its commit point raises here too."""
        ...

    def completed(self, record: Record) -> None:
        """The answer has been sent, or has failed: `record` is final. Called exactly once a request."""
        ...

    def models(self, authorization: str | None) -> list[tuple[str, str]]:
        """(name, owner) of what a client may put in `model`."""
        ...

    def describe(self, model: str, authorization: str | None) -> BackendInfo | None:
        """The backend that a tensor model's name stands for, for its metadata; None = no such name."""
        ...
