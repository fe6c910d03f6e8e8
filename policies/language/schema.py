"""What a policy file may say: one Struct a section. The `#:` comments are also what an editor shows beside a key.

A field whose behaviour does not exist yet is marked `Later`; a file that uses it is refused with "not available in this
version" instead of being silently ignored. Once read, durations ("300ms", "10m") are floats in seconds, shares ("30%")
floats 0..1 and sizes ("64MiB") integers in bytes.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

#: Seconds, zero allowed; `Limit` is a duration that must be more than nothing.
Duration = Annotated[float, Meta(ge=0, extra={"unit": "duration"}, extra_json_schema={"x-unit": "duration"})]
Limit = Annotated[float, Meta(gt=0, extra={"unit": "duration"}, extra_json_schema={"x-unit": "duration"})]
Share = Annotated[float, Meta(extra={"unit": "share"}, extra_json_schema={"x-unit": "share"})]
Size = Annotated[int, Meta(ge=0, extra={"unit": "size"}, extra_json_schema={"x-unit": "size"})]
Later = Annotated[Any, Meta(extra={"later": True}, extra_json_schema={"x-later": True})]

#: A name that may stand in headers and metric labels.
Name = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
#: A name that clients put in `model`.
ModelName = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.:/@+-]*$")]
HeaderName = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")]
Text = Annotated[str, Meta(min_length=1)]
Version = Annotated[int, Meta(ge=1, le=2**31)]
#: A signal's score and what it is compared with.
Score = Annotated[float, Meta(ge=0, le=1)]

SurfaceName = Literal["chat", "embeddings", "tensor"]
Rung = Literal["heavy", "light", "stale", "default"]


def file_key(field: str) -> str:
    """The file's key of a field: without `_s`, since in a file the value carries the unit (`open_s` -> `open: 30s`)."""
    return field.removesuffix("_s")


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename=file_key):
    """Base of every section: unknown keys are errors."""


class Match(Section, frozen=True, kw_only=True):
    """Which requests this policy is for."""

    #: Names a client may put in `model` (or in the OIP path).
    aliases: Annotated[tuple[ModelName, ...], Meta(min_length=1)]
    #: Kinds of traffic: chat, embeddings, tensor.
    surfaces: Annotated[tuple[SurfaceName, ...], Meta(min_length=1)] = ("chat",)
    #: Tenants this policy is for; empty = all.
    tenants: tuple[Name, ...] = ()
    #: Backends that a client may name directly instead of an alias.
    backends: tuple[Name, ...] = ()


class Timeouts(Section, frozen=True, kw_only=True):
    """Limits of streams: `first_token` counts from the start of a rung, `idle` between chunks, `total` over all."""

    #: The longest wait for the first token of a stream, from the start of a rung.
    first_token: Limit = 5.0
    #: The longest pause between two chunks of a stream.
    idle: Limit = 15.0
    #: The longest a whole stream may take.
    total: Limit = 600.0


class SignalSpec(Section, frozen=True, kw_only=True):
    """One named signal. `kind` is a registered signal; the other keys belong to some kinds only."""

    #: What is looked at: keywords, length, structure, complexity ...
    kind: Name
    #: keywords: words and phrases; Chinese anywhere, English on word boundaries.
    any: tuple[Text, ...] = ()
    #: complexity, embedding_head: name of a trained head file.
    head: str = ""
    #: length: tokens at which the score reaches 1.
    tokens: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    #: structure: which of code, maths, table, list, json, tools count; empty = all.
    marks: tuple[Name, ...] = ()


class Classify(Section, frozen=True, kw_only=True):
    """Signals by the name that rules use."""

    #: Your name for a signal -> what it looks at.
    signals: dict[Name, SignalSpec] = {}


class Condition(Section, frozen=True, kw_only=True):
    """Either a comparison of one signal's score, or a combination of conditions."""

    #: Name of a signal under `classify.signals`.
    signal: str = ""
    #: True when the signal's score (0 to 1) is this or more.
    at_least: Score | None = None
    #: True when the signal's score (0 to 1) is less than this.
    below: Score | None = None
    #: True when every condition in the list is.
    all: tuple[Condition, ...] = ()
    #: True when at least one condition in the list is.
    any: tuple[Condition, ...] = ()
    # `not` is a Python keyword.
    #: True when the condition is not.
    not_: Condition | None = msgspec.field(default=None, name="not")


class Canned(Section, frozen=True, kw_only=True):
    """An answer without a model: text for chat, tensors by output name (nested lists) for tensor traffic."""

    #: The answer of a chat request.
    text: str = ""
    #: The answer of a tensor request: output name -> nested lists of values.
    tensors: dict[ModelName, tuple[Any, ...]] = {}


class Route(Section, frozen=True, kw_only=True):
    """First match wins. A route without `when` always matches and must be the last."""

    #: Shown in `x-gateway-route`.
    name: Name
    #: When this route is taken; without it, always.
    when: Condition | None = None
    #: light, heavy, the name of a backend, or canned (with `answer`).
    to: Text
    #: The answer of a route to `canned`.
    answer: Canned | None = None
    split: Later = None
    shadow: Later = None


class ResultCache(Section, frozen=True, kw_only=True):
    """Freshness of stored answers: fresh to `ttl`, served and refreshed to `ttl + swr`, stale rung to `stale`."""

    #: How long an answer is fresh.
    ttl: Limit = 600.0
    #: How much longer it is served at once and refreshed behind.
    swr: Duration = 60.0
    #: Until what age the ladder's `stale` rung may use it.
    stale: Duration = 3600.0


class Cache(Section, frozen=True, kw_only=True):
    """What is stored and which fields make two requests the same."""

    #: off = nothing is looked up or stored for this policy.
    enabled: bool = True
    #: Who shares stored answers: all, one tenant, or one user.
    scope: Literal["all", "tenant", "user"] = "tenant"
    #: `user` scope on tensor traffic: the input that names the user.
    user_tensor: str = ""
    #: Body fields that do not make two requests different.
    ignore: tuple[Text, ...] = ("user", "safety_identifier", "metadata", "store")
    #: Request headers whose values are part of the key.
    vary: tuple[HeaderName, ...] = ()
    #: deterministic = only requests with temperature 0 or a seed; all = every complete answer.
    store: Literal["deterministic", "all"] = "deterministic"
    #: Bump to make every stored answer of this policy unreachable.
    version: Version = 1
    #: How long answers live.
    result: ResultCache = ResultCache()
    #: Numeric input -> width of the bucket it is rounded down to.
    bucket: dict[Text, Annotated[float, Meta(gt=0)]] = {}
    #: Inputs (tensors) or body fields (chat) that are no part of the key.
    drop: tuple[Text, ...] = ()
    tags: Later = None
    feature: Later = None
    subgraph: Later = None
    semantic: Later = None


class Policy(Section, frozen=True, kw_only=True):
    """One policy file."""

    #: The policy's name, in headers, metrics and `gateway why`.
    policy: Name
    #: Counts up with each change; shown with the name in `x-gateway-policy`.
    version: Version
    #: Which requests this policy is for.
    match: Match
    #: The time one request may take in all, whatever is tried.
    deadline: Limit = 30.0
    #: Limits inside the deadline.
    timeouts: Timeouts = Timeouts()
    #: What is looked at before routing.
    classify: Classify = Classify()
    #: Where requests go; the first that matches wins, the last has no `when`.
    routes: tuple[Route, ...] = ()
    #: What is tried in which order when an answer fails.
    ladder: Annotated[tuple[Rung, ...], Meta(min_length=1)] = ("heavy", "light", "stale", "default")
    #: The answer of the `default` rung; without it, an error that says when to try again.
    default_answer: Canned | None = None
    #: What is stored, for whom and how long.
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
