"""What the operator's `gateway.yaml` may say: one Struct a section. The `#:` comments explain the keys.

As in policy files, a duration is `300ms`, a share `30%`, a size `64MiB`; once read they are seconds, 0..1 and bytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from backends.api import Capabilities, Role, Surface
from gateway.secret import Secret
from policies.language.schema import Duration, Later, Limit, Name, Section, Size, Text
from policies.rules.breaker import BreakerOptions
from policies.rules.limit import LimitOptions

Port = Annotated[int, Meta(ge=0, le=65_535)]
Positive = Annotated[int, Meta(ge=1, le=1_000_000)]
Bytes = Annotated[int, Meta(ge=1, extra={"unit": "size"}, extra_json_schema={"x-unit": "size"})]
Url = Annotated[str, Meta(extra={"unit": "url"})]
#: Where the name of a variable belongs, people paste its value now and then.
EnvName = Annotated[
    str, Meta(min_length=1, max_length=128, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", extra={"secret": True})
]
Language = Annotated[str, Meta(pattern=r"^[a-z]{2,3}$")]
Source = Annotated[str, Meta(min_length=1, pattern=r"^(pypi|hf|file|model):.+$")]
#: Filled in while loading; no key of the file.
ResolvedSecret = Annotated[Secret | None, Meta(extra={"resolved": True})]
ResolvedPath = Annotated[Path, Meta(extra={"resolved": True})]

#: More would be a mistake: they share one machine's cores.
MOST_WORKERS = 256

#: A path that the file does not give.
UNSET = Path("?")

BackendKind = Literal["openai", "oip", "onnx_chat", "onnx_two_tower", "onnx_embedder", "scripted"]
Feature = Literal["tools", "json_schema", "images", "audio", "n", "logprobs"]
ALL_FEATURES = frozenset(("tools", "json_schema", "images", "audio", "n", "logprobs"))
REMOTE_KINDS = ("openai", "oip")

_SURFACES: dict[str, frozenset[Surface]] = {
    "openai": frozenset({Surface.CHAT}),
    "oip": frozenset({Surface.TENSOR}),
    "onnx_chat": frozenset({Surface.CHAT}),
    "onnx_two_tower": frozenset({Surface.TENSOR}),
    "onnx_embedder": frozenset({Surface.EMBEDDINGS}),
    "scripted": frozenset({Surface.CHAT}),
}


class Listen(Section, frozen=True, kw_only=True):
    """The data listener."""

    host: Text = "127.0.0.1"
    #: 0 = any free port.
    port: Port = 8080
    #: Requests from this machine need no key and belong to the tenant `local`.
    anonymous_loopback: bool = True


class Admin(Section, frozen=True, kw_only=True):
    """The admin listener. Outside loopback it needs `token_env`."""

    host: Text = "127.0.0.1"
    port: Port = 8081
    #: Environment variable with the token that may look and change.
    token_env: EnvName | None = None
    #: Environment variable with the token that may only look.
    view_token_env: EnvName | None = None
    token: ResolvedSecret = None
    view_token: ResolvedSecret = None


class Limits(Section, frozen=True, kw_only=True):
    """What one client may take."""

    body_bytes: Bytes = 4 << 20
    #: One header line.
    header_bytes: Bytes = 8 << 10
    headers: Positive = 128
    connections: Positive = 10_000
    #: From the first byte of a request to the end of its headers.
    header_time_s: Limit = 10.0
    body_time_s: Limit = 30.0


class Redis(Section, frozen=True, kw_only=True):
    """The second cache tier; leave the section out to do without."""

    #: redis://HOST:PORT/DB; with a password, use `url_env`.
    url: Secret | None = None
    url_env: EnvName | None = None
    timeout_s: Limit = 0.03
    #: Gateways with the same namespace and the same cache secret share entries.
    namespace: Name = "default"


class CacheSettings(Section, frozen=True, kw_only=True):
    """Sizes of the caches in one worker."""

    l1_bytes: Size = 64 << 20
    #: Inner tensors of models that are split, in the memory of the process that runs the models.
    subgraph_bytes: Size = 64 << 20
    #: Environment variable with the secret that keys the check digests; gateways that share Redis must share it.
    #: Without it, one is made and kept in the state folder.
    secret_env: EnvName | None = None
    secret: ResolvedSecret = None


class Log(Section, frozen=True, kw_only=True):
    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["json", "console"] = "json"


class CapabilitySettings(Section, frozen=True, kw_only=True):
    """What a backend can do, where it does not say so itself. Unset = what its kind or its model says."""

    surfaces: frozenset[Surface] | None = None
    context_tokens: Annotated[int, Meta(ge=1)] | None = None
    features: frozenset[Feature] | None = None


class ModelSettings(Section, frozen=True, kw_only=True):
    """A model that runs inside the gateway."""

    #: pypi:PACKAGE==VERSION, hf:ORG/NAME[@REVISION]/FILE, file:PATH or model:OTHER (built from another one).
    #: Unset = the catalogue's source for a model of this name.
    source: Source | None = None
    variant: Literal["fp32", "q8"] = "q8"
    provider: Literal["cpu", "cuda", "tensorrt"] = "cpu"
    #: Not ready without it, instead of ready but degraded.
    required: bool = False
    capabilities: CapabilitySettings = CapabilitySettings()
    #: ISO 639-1 codes; unset = what the model's manifest says.
    languages: frozenset[Language] | None = None


class BackendTimeouts(Section, frozen=True, kw_only=True):
    connect_s: Limit = 0.25


class BackendSettings(Section, frozen=True, kw_only=True):
    """Something that answers. Which keys apply depends on `kind`; see gateway.yaml."""

    kind: BackendKind
    #: Unset = heavy for remote and scripted ones, light for models inside the gateway.
    role: Role | None = None
    base_url: Url = ""
    #: The model's name at a remote service, or under `models` for one inside the gateway.
    model: str = ""
    #: Environment variable with the API key sent to the service.
    credential_env: EnvName | None = None
    #: Part of the fingerprint of a remote backend: bump it when the service changes its model.
    version: str = "1"
    capabilities: CapabilitySettings = CapabilitySettings()
    #: ISO 639-1 codes; unset = any (remote) or what the model's manifest says.
    languages: frozenset[Language] | None = None
    limiter: LimitOptions = LimitOptions()
    breaker: BreakerOptions = BreakerOptions()
    timeouts: BackendTimeouts = BackendTimeouts()
    #: Models inside the gateway: not ready without it, instead of ready but degraded.
    required: bool = False
    #: scripted: the file of outcomes.
    script: Path | None = None
    credential: ResolvedSecret = None
    price: Later = None
    replicas: Later = None
    retry_budget: Later = None
    hedge_budget: Later = None
    pool: Later = None
    health: Later = None

    def servable_surfaces(self) -> frozenset[Surface]:
        """What a backend of this kind can serve at all."""
        return frozenset(Surface) if self.kind == "scripted" else _SURFACES[self.kind]

    def effective_role(self) -> Role:
        return self.role or (Role.HEAVY if self.kind in (*REMOTE_KINDS, "scripted") else Role.LIGHT)

    def effective_surfaces(self) -> frozenset[Surface]:
        return self.capabilities.surfaces or _SURFACES[self.kind]

    def remote_capabilities(self) -> Capabilities:
        """Capabilities of a backend that has no manifest: everything that the operator has not narrowed."""
        narrowed = self.capabilities.features
        return Capabilities(
            surfaces=self.effective_surfaces(),
            context_tokens=self.capabilities.context_tokens,
            features=ALL_FEATURES if narrowed is None else frozenset(narrowed),
            languages=self.languages,
        )


class Config(Section, frozen=True, kw_only=True):
    """The operator's configuration. Folders are absolute once loaded."""

    listen: Listen = Listen()
    admin: Admin = Admin()
    limits: Limits = Limits()
    #: Processes that answer requests. With more than one, the models run in a process of their own, once for all of them.
    workers: Annotated[int, Meta(ge=1, le=MOST_WORKERS)] = 1
    redis: Redis | None = None
    cache: CacheSettings = CacheSettings()
    #: Relative paths count from the configuration file's folder.
    keys_file: Path = Path("keys.yaml")
    policies_dir: Path = Path("policies")
    #: Unset = `models` in $GATEWAY_HOME.
    models_dir: Path = UNSET
    log: Log = Log()
    #: How long a stopping gateway waits for requests that are under way.
    drain_s: Duration = 30.0
    models: dict[Name, ModelSettings] = msgspec.field(default_factory=dict)
    backends: dict[Name, BackendSettings] = msgspec.field(default_factory=dict)
    chaos: Later = None
    otel: Later = None
    #: Where the gateway keeps what must survive a restart.
    state_dir: ResolvedPath = UNSET
    #: The file this was read from; None = built-in defaults.
    source: Annotated[Path | None, Meta(extra={"resolved": True})] = None
