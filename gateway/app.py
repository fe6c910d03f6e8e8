"""The composition root: configuration in, object graph out. Nothing else in the project builds more than itself."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import xxhash

from backends.api import Backend, BackendInfo, Surface
from backends.guarded import Guarded, GuardOptions
from backends.http_transport import HttpOptions
from backends.oip_http import OipBackend
from backends.openai_http import OpenAIBackend
from backends.slot import Slot
from cache.redis import RedisOptions, RedisStore
from cache.result import ResultCache
from cache.single_flight import Flights
from chaos.injector import Injector
from gateway.config import is_loopback
from gateway.config_sections import BackendSettings, Config
from gateway.control.hub import WorkerPort
from gateway.control.worker import Worker, WorkerParts
from gateway.degrade import Walker
from gateway.dispatch import Dispatcher
from gateway.edge.http_server import EdgeLimits, HttpEdge
from gateway.edge.identity import Identities
from gateway.edge.listener import Listener
from gateway.latency import FirstOutputs
from gateway.models import MODEL_KINDS, ModelSlots
from gateway.observe.batch import BatchedObserver
from gateway.observe.logs import LogObserver
from gateway.observe.metric_store import Family, Metrics, Sample, stats_families
from gateway.observe.metrics import MetricsObserver
from gateway.observe.recent import RecentRequests
from gateway.pipeline import Book, Pipeline, Stages
from gateway.plan import Compilers, PlanBook
from gateway.readiness import Readiness
from gateway.refresh import Refresher
from gateway.secret import Secret, kept_secret
from policies.core.clock import Clock
from policies.core.events import Observer, Observers
from policies.language.builtin import embeddings_policy
from policies.language.policy_set import PolicySet
from policies.language.schema import Policy
from routing.heads import Heads

EMBEDDING_ALIASES = ("embed", "auto-embed", "text-embedding")


@dataclass(frozen=True, slots=True)
class Built:
    """The backends of one process."""

    backends: dict[str, Backend]
    slots: tuple[Slot, ...]
    models: ModelSlots
    remotes: dict[str, OpenAIBackend]

    def families(self) -> list[Family]:
        """What remote backends count by themselves."""
        calls = [Sample((name,), [float(backend.in_flight)]) for name, backend in self.remotes.items()]
        skipped = [Sample((name,), [float(backend.skipped_events)]) for name, backend in self.remotes.items()]
        return [
            Family("gateway_upstream_in_flight", "Calls under way.", "gauge", ("backend",), "sum", calls),
            Family(
                "gateway_upstream_events_skipped", "Malformed stream lines.", "counter", ("backend",), "sum", skipped
            ),
        ]


def builtin_policies(config: Config) -> tuple[Policy, ...]:
    """Policies for names that no file claims: embeddings go to the one embedder."""
    embedders = [name for name, spec in config.backends.items() if Surface.EMBEDDINGS in spec.effective_surfaces()]
    if not embedders:
        return ()
    model = config.backends[embedders[0]].model
    return (embeddings_policy(embedders[0], [*EMBEDDING_ALIASES, *([model] if model else [])]),)


def build_backends(config: Config, clock: Clock, observer: Observer) -> Built:
    """Every configured backend, guarded: limiter -> breaker -> chaos -> transport."""
    models = ModelSlots(config, clock, observer)
    backends: dict[str, Backend] = {}
    slots: list[Slot] = []
    remotes: dict[str, OpenAIBackend] = {}
    for name, spec in config.backends.items():
        inner: Backend
        if spec.kind in MODEL_KINDS:
            inner = slot = models.slot(name, spec)
            slots.append(slot)
        else:
            inner = _remote(name, spec, clock)
            if isinstance(inner, OpenAIBackend):
                remotes[name] = inner
        options = GuardOptions(breaker=spec.breaker, limit=spec.limiter)
        backends[name] = Guarded(Injector(inner), options, clock=clock, observer=observer, random=random.random)
    return Built(backends, tuple(slots), models, remotes)


def _remote(name: str, spec: BackendSettings, clock: Clock) -> Backend:
    info = BackendInfo(
        name=name,
        role=spec.effective_role(),
        model=spec.model or name,
        fingerprint=xxhash.xxh3_128_hexdigest(f"remote\0{name}\0{spec.version}\0{spec.model}".encode()),
        capabilities=spec.remote_capabilities(),
    )
    if spec.kind == "scripted":
        from backends.scripted import Outcome, ScriptedBackend, chat, load_outcomes

        script = spec.script
        outcomes = (
            load_outcomes(script, info) if script is not None else [Outcome(chat("a scripted answer", info.model))]
        )
        return ScriptedBackend(info, outcomes, clock)
    options = HttpOptions(
        base_url=spec.base_url,
        credential=spec.credential.reveal() if spec.credential is not None else "",
        connect_s=spec.timeouts.connect_s,
    )
    return OipBackend(info, options, clock) if spec.kind == "oip" else OpenAIBackend(info, options, clock)


def build_worker(config: Config, policies: PolicySet, heads: Heads, clock: Clock, port: WorkerPort) -> Worker:
    """One worker's object graph. Raises ConfigError for keys that cannot be used."""
    metrics, recent, first_outputs = Metrics(), RecentRequests(), FirstOutputs(clock)
    observer = BatchedObserver(Observers([MetricsObserver(metrics), LogObserver(clock), recent, first_outputs]))
    built = build_backends(config, clock, observer)
    loopback = is_loopback(config.listen.host)
    secret = config.cache.secret or kept_secret(config.state_dir / "cache.secret")
    compilers = Compilers(
        backends=built.backends,
        heads=heads,
        embedder=built.models.embedder,
        secret=secret.reveal().encode(),
        observer=observer,
        expose="all" if loopback else "basic",
    )
    store = _redis(config, clock, secret)
    cache = ResultCache(config.cache.l1_bytes, clock, random.random, store)
    flights = Flights()
    dispatcher = Dispatcher(cache, flights, clock)
    refresher = Refresher(dispatcher, clock)
    walker = Walker(dispatcher, cache, first_outputs, clock, observer)
    identities = Identities.load(config.keys_file, clock, anonymous=config.listen.anonymous_loopback)
    pipeline = Pipeline(
        Book(PlanBook(policies, compilers), identities),
        Stages(cache, walker, refresher, observer, clock),
        loopback,
    )
    for slot in built.slots:
        # From here on the cache knows which fingerprints are current, and counts what is not.
        slot.on_filled = lambda fingerprint: cache.model_switched(None, fingerprint)
    readiness = _readiness(config, built, store)
    readiness.note(lambda: "keys.yaml is not in force: see the log and the admin API" if identities.problem else None)
    limits = edge_limits(config)
    edge = HttpEdge(pipeline, readiness, clock, limits, compilers.expose)
    metrics.source(_cache_families(cache, flights, store))
    metrics.source(built.families)
    closers: list[Any] = [item for item in (built.models.embedder, store) if item is not None]
    return Worker(
        WorkerParts(
            config=config,
            clock=clock,
            port=port,
            pipeline=pipeline,
            listener=Listener(edge, limits),
            readiness=readiness,
            compilers=compilers,
            builtin=builtin_policies(config),
            slots=built.slots,
            backends=built.backends,
            cache=cache,
            flights=flights,
            refresher=refresher,
            recent=recent,
            events=observer,
            metrics=metrics,
            closers=tuple(closers),
        )
    )


def edge_limits(config: Config) -> EdgeLimits:
    return EdgeLimits(
        body_bytes=config.limits.body_bytes,
        header_bytes=config.limits.header_bytes,
        headers=config.limits.headers,
        connections=config.limits.connections,
        header_time_s=config.limits.header_time_s,
        body_time_s=config.limits.body_time_s,
    )


def _redis(config: Config, clock: Clock, secret: Secret) -> RedisStore | None:
    if config.redis is None or config.redis.url is None:
        return None
    # Gateways with other cache secrets cannot read each other's entries; under the same names they would only
    # overwrite them in turns.
    apart = hashlib.blake2b(secret.reveal().encode(), digest_size=4, person=b"redis-names").hexdigest()
    options = RedisOptions(
        url=config.redis.url.reveal(),
        namespace=f"{config.redis.namespace}-{apart}",
        limit_s=config.redis.timeout_s,
    )
    return RedisStore(options, clock, random.random)


def _readiness(config: Config, built: Built, store: RedisStore | None) -> Readiness:
    readiness = Readiness()
    for slot in built.slots:
        spec = config.backends[slot.info.name]
        model = config.models.get(spec.model or slot.info.name)
        readiness.watch(slot, required=spec.required or (model is not None and model.required))
    if store is not None:
        readiness.note(lambda: None if store.available else "Redis is not reachable: answering without L2")
    return readiness


def _cache_families(cache: ResultCache, flights: Flights, store: RedisStore | None) -> Callable[[], list[Family]]:
    def families() -> list[Family]:
        found = stats_families(cache.stats(), "gateway_result_cache", "Result cache")
        found += stats_families(flights.stats(), "gateway_flights", "Calls shared in flight")
        if store is not None:
            found += stats_families(store.stats(), "gateway_redis", "Redis as second cache tier")
        return found

    return families
