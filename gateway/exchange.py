"""One request on its way through the gateway, and what is known about how it was answered. No HTTP library here."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from backends.api import Answer, BackendInfo, Chunk, Request
from policies.core.events import Completed

if TYPE_CHECKING:
    from gateway.plan import Prepared


class Controls(msgspec.Struct, frozen=True):
    """What a client may ask of the gateway itself (CONTRACTS, section 1)."""

    no_cache: bool = False
    no_store: bool = False
    only_if_cached: bool = False
    degrade_off: bool = False
    timeout_s: float | None = None


#: Shared by all requests without control headers; never changed.
DEFAULT_CONTROLS = Controls()


class RungStep(NamedTuple):
    """One rung of a walk. `outcome`: ok, hit-l1, hit-l2, skipped, or an error's code."""

    rung: str
    backend: str
    outcome: str
    seconds: float = 0.0
    reason: str = ""


class Record(Completed, kw_only=True):
    """How one request went: the source of the answer's headers and of `gateway why`, and itself the Completed event.

    Holds names, numbers and digests only; never prompt text, keys or secrets.
    """

    #: Monotonic seconds at arrival.
    started: float
    fingerprint: str = ""
    #: all, basic or none: which headers the answer carries.
    expose: str = "basic"
    age_s: float | None = None
    #: The router and the reading: rendered only when somebody asks why.
    explain: tuple[Any, Any] | None = None
    #: Digest of the request; empty where nothing was looked up.
    digest: bytes = b""
    #: What became of each rung, in order.
    steps: list[RungStep] = []


class Exchange(msgspec.Struct):
    """A parsed request with its circumstances."""

    request: Request
    model: str
    record: Record
    stream: bool = False
    include_usage: bool = False
    authorization: str | None = None
    headers: Mapping[str, str] = {}
    controls: Controls = DEFAULT_CONTROLS
    #: What the pipeline found out about an equal request before; it may leave its findings here.
    prepared: Prepared | None = None
    #: `request` belongs to other exchanges too: it must be copied before anything in it is set.
    shared: bool = False


class Reply(msgspec.Struct):
    """The answer: whole, or a committed stream (`held` are the chunks up to the commit point, then `rest`)."""

    record: Record
    answer: Answer | None = None
    held: list[Chunk] = []
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
