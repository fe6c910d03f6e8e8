"""What a policy file may say: one Struct a section.

A field whose behaviour does not exist yet is marked `Later`; a file that uses it is refused with "not available in this
version" instead of being silently ignored. Once read, durations ("300ms", "10m") are floats in seconds, shares ("30%")
floats 0..1 and sizes ("64MiB") integers in bytes.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

Duration = Annotated[float, Meta(extra={"unit": "duration"}, extra_json_schema={"type": "string"})]
Share = Annotated[float, Meta(extra={"unit": "share"})]
Later = Annotated[Any, Meta(extra={"later": True})]

Rung = Literal["heavy", "light", "stale", "default"]


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of every section: unknown keys are errors."""


class Match(Section, frozen=True, kw_only=True):
    """Which requests this policy is for."""

    #: Names a client may put in `model` (or in the OIP path).
    aliases: tuple[str, ...]
    surfaces: tuple[Literal["chat", "embeddings", "tensor"], ...] = ("chat",)
    #: Tenants this policy is for; empty = all.
    tenants: tuple[str, ...] = ()
    #: Backends that a client may name directly instead of an alias.
    backends: tuple[str, ...] = ()


class Timeouts(Section, frozen=True, kw_only=True):
    """`first_token` counts from the start of a rung; `idle` between chunks; `total` for a whole stream."""

    first_token: Duration = 5.0
    idle: Duration = 15.0
    total: Duration = 600.0


class SignalSpec(Section, frozen=True, kw_only=True):
    """One named signal. `kind` is a registered signal; the other keys belong to some kinds only."""

    kind: str
    #: keywords: words and phrases; Chinese anywhere, English on word boundaries.
    any: tuple[str, ...] = ()
    #: complexity, embedding_head: name of a trained head file.
    head: str = ""
    #: length: tokens at which the score reaches 1.
    tokens: int = 0
    #: structure: which of code, maths, table, list, json, tools count; empty = all.
    marks: tuple[str, ...] = ()


class Classify(Section, frozen=True, kw_only=True):
    """Signals by the name that rules use."""

    signals: dict[str, SignalSpec] = {}


class Condition(Section, frozen=True, kw_only=True):
    """Either a comparison of one signal's score, or a combination of conditions."""

    signal: str = ""
    at_least: float | None = None
    below: float | None = None
    all: tuple[Condition, ...] = ()
    any: tuple[Condition, ...] = ()
    # `not` is a Python keyword.
    not_: Condition | None = msgspec.field(default=None, name="not")


class Canned(Section, frozen=True, kw_only=True):
    """An answer without a model: text for chat, tensors by output name (nested lists) for tensor traffic."""

    text: str = ""
    tensors: dict[str, tuple[Any, ...]] = {}


class Route(Section, frozen=True, kw_only=True):
    """First match wins. A route without `when` always matches and must be the last."""

    name: str
    when: Condition | None = None
    #: light, heavy, the name of a backend, or canned (with `answer`).
    to: str
    answer: Canned | None = None
    split: Later = None
    shadow: Later = None


class ResultCache(Section, frozen=True, kw_only=True):
    """Freshness of stored answers: fresh to `ttl`, served and refreshed to `ttl + swr`, stale rung to `stale`."""

    ttl: Duration = 600.0
    swr: Duration = 60.0
    stale: Duration = 3600.0


class Cache(Section, frozen=True, kw_only=True):
    """What is stored and which fields make two requests the same."""

    #: off = nothing is looked up or stored for this policy.
    enabled: bool = True
    scope: Literal["all", "tenant", "user"] = "tenant"
    #: `user` scope on tensor traffic: the input that names the user.
    user_tensor: str = ""
    ignore: tuple[str, ...] = ("user", "safety_identifier", "metadata", "store")
    #: Request headers whose values are part of the key.
    vary: tuple[str, ...] = ()
    store: Literal["deterministic", "all"] = "deterministic"
    #: Bump to make every stored answer of this policy unreachable.
    version: int = 1
    result: ResultCache = ResultCache()
    #: Numeric input -> width of the bucket it is rounded down to.
    bucket: dict[str, float] = {}
    #: Inputs (tensors) or body fields (chat) that are no part of the key.
    drop: tuple[str, ...] = ()
    tags: Later = None
    feature: Later = None
    subgraph: Later = None
    semantic: Later = None


class Policy(Section, frozen=True, kw_only=True):
    """One policy file."""

    policy: str
    version: int
    match: Match
    deadline: Duration = 30.0
    timeouts: Timeouts = Timeouts()
    classify: Classify = Classify()
    routes: tuple[Route, ...] = ()
    ladder: tuple[Rung, ...] = ("heavy", "light", "stale", "default")
    default_answer: Canned | None = None
    cache: Cache = Cache()
    #: What answers say about themselves; unset = all on a loopback listener, else basic.
    expose_headers: Literal["all", "basic", "none"] | None = None
    attempts: Later = None
    hedge: Later = None
    slo: Later = None
    late: Later = None
    features: Later = None
    record: Later = None
    rollout: Later = None
    thresholds: Later = None
    examples: Later = None
