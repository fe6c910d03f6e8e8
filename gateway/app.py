"""The composition root: configuration in, object graph out. Nothing else in the project builds more than itself."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import xxhash
from msgspec.structs import replace

from backends.api import Backend, BackendInfo, Surface
from backends.guarded import Guarded, GuardOptions
from backends.http_transport import HttpOptions
from backends.link.client import ModelLink
from backends.oip_http import OipBackend
from backends.openai_http import OpenAIBackend
from backends.slot import ModelPlace
from cache.redis import RedisStore
from cache.result import ResultCache
from cache.single_flight import Flights
from cache.subgraph import SubgraphCache
from chaos.injector import Injector
from gateway.config import is_loopback
from gateway.config_sections import BackendSettings, Config
from gateway.control.crew import Crew
from gateway.control.facts import HubSharedState
from gateway.control.hub import WorkerPort
from gateway.control.in_process import InProcessCrew
from gateway.control.key_store import KeyStore
from gateway.control.policy_store import PolicyStore, keep_folder
from gateway.control.process_crew import ProcessCrew
from gateway.control.start import Start
from gateway.control.supervisor import Supervisor, SupervisorParts
from gateway.control.worker import Worker, WorkerParts
from gateway.control.worker_actions import WorkerActions
from gateway.degrade import Walker
from gateway.dispatch import Dispatcher
from gateway.edge.http_server import EdgeLimits, HttpEdge
from gateway.edge.identity import Identities
from gateway.edge.listener import Listener
from gateway.known import known_names
from gateway.latency import FirstOutputs
from gateway.models import MODEL_KINDS, LinkedModels, ModelSlots
from gateway.observe.batch import BatchedObserver
from gateway.observe.logs import LogObserver
from gateway.observe.metric_store import Family, Metrics, Sample, stats_families
from gateway.observe.metrics import MetricsObserver
from gateway.observe.processes import in_flight_family
from gateway.observe.recent import RecentRequests
from gateway.pipeline import Book, Pipeline, Stages
from gateway.plan import Compilers, PlanBook
from gateway.readiness import Readiness
from gateway.refresh import Refresher
from gateway.secret import kept_secret
from gateway.shared_embedder import EmbedderPlace
from gateway.stores import redis_store, subgraph_cache, subgraph_families
from policies.core.clock import Clock
from policies.core.events import Observer, Observers
from policies.core.shared_state import SharedState
from policies.language.builtin import embeddings_policy
from policies.language.policy_set import PolicySet
from policies.language.schema import Policy
from routing.heads import Heads

EMBEDDING_ALIASES = ("embed", "auto-embed", "text-embedding")


@dataclass(frozen=True, slots=True)
class Built:
    """The backends of one process."""

    backends: dict[str, Backend]
    places: tuple[ModelPlace, ...]
    embedder: EmbedderPlace | None
    remotes: dict[str, OpenAIBackend]
    tensors: SubgraphCache | None
    models: ModelSlots | LinkedModels

    def families(self) -> list[Family]:
        """What remote backends count by themselves, and models that are split."""
        calls = [Sample((name,), [float(backend.in_flight)]) for name, backend in self.remotes.items()]
        skipped = [Sample((name,), [float(backend.skipped_events)]) for name, backend in self.remotes.items()]
        return [
            Family("gateway_upstream_in_flight", "Calls under way.", "gauge", ("backend",), "sum", calls),
            Family(
                "gateway_upstream_events_skipped", "Malformed stream lines.", "counter", ("backend",), "sum", skipped
            ),
            *(subgraph_families(self.tensors, self.models.cut_counts) if self.tensors is not None else ()),
            *self.models.families(),
        ]


def builtin_policies(config: Config) -> tuple[Policy, ...]:
    """Policies for names that no file claims: embeddings go to the one embedder."""
    embedders = [name for name, spec in config.backends.items() if Surface.EMBEDDINGS in spec.effective_surfaces()]
    if not embedders:
        return ()
    model = config.backends[embedders[0]].model
    return (embeddings_policy(embedders[0], [*EMBEDDING_ALIASES, *([model] if model else [])]),)


def build_backends(
    config: Config, around: Surroundings, observer: Observer, shared: SharedState, store: RedisStore | None = None
) -> Built:
    """Every configured backend, guarded: limiter -> breaker -> chaos -> transport. `store`: second tier for tensors."""
    clock = around.clock
    tensors: SubgraphCache | None = None
    models: ModelSlots | LinkedModels
    if around.link is None:
        tensors = subgraph_cache(config, clock, store)
        models = ModelSlots(config, clock, observer, tensors)
    else:
        models = LinkedModels(config, around.link, observer)
    backends: dict[str, Backend] = {}
    places: list[ModelPlace] = []
    remotes: dict[str, OpenAIBackend] = {}
    for name, spec in config.backends.items():
        inner: Backend
        if spec.kind in MODEL_KINDS:
            inner = place = models.place(name, spec)
            places.append(place)
        else:
            inner = _remote(name, spec, clock)
            if isinstance(inner, OpenAIBackend):
                remotes[name] = inner
        options = GuardOptions(breaker=spec.breaker, limit=spec.limiter)
        backends[name] = Guarded(
            Injector(inner), options, clock=clock, observer=observer, random=random.random, shared=shared
        )
    return Built(backends, tuple(places), models.embedder, remotes, tensors, models)


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


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Where a worker lives. `link`: the way to the model host; None = models run in this process."""

    clock: Clock
    port: WorkerPort
    link: ModelLink | None = None


def build_worker(start: Start, heads: Heads, around: Surroundings) -> Worker:
    """One worker's object graph."""
    config, clock = start.config, around.clock
    metrics, recent, first_outputs = Metrics(), RecentRequests(), FirstOutputs(clock)
    observer = BatchedObserver(Observers([MetricsObserver(metrics), LogObserver(clock), recent, first_outputs]))
    store = redis_store(config, clock)
    built = build_backends(config, around, observer, HubSharedState(around.port, start.facts), store)
    loopback, secret = is_loopback(config.listen.host), config.cache.secret
    assert secret is not None, "the supervisor fills in what the file leaves out"
    compilers = Compilers(
        backends=built.backends,
        heads=heads,
        embedder=built.embedder,
        secret=secret.reveal().encode(),
        observer=observer,
        expose="all" if loopback else "basic",
    )
    cache = ResultCache(config.cache.l1_bytes, clock, random.random, store)
    flights = Flights()
    dispatcher = Dispatcher(cache, flights, clock)
    refresher = Refresher(dispatcher, clock)
    walker = Walker(dispatcher, cache, first_outputs, clock, observer)
    book = _book(start, compilers, clock)
    pipeline = Pipeline(book, Stages(cache, walker, refresher, observer, clock), loopback)
    for place in built.places:
        # From here on the cache knows which fingerprints are current, and counts what is not.
        place.on_filled = cache.model_switched
    readiness = _readiness(config, built, store)
    readiness.policy_notices = list(start.standing.notices)
    readiness.note(
        lambda: "keys.yaml is not in force: see the log and the admin API" if book.identities.problem else None
    )
    limits = edge_limits(config)
    edge = HttpEdge(pipeline, readiness, clock, limits, compilers.expose)
    metrics.source(_cache_families(cache, flights, store))
    metrics.source(built.families)
    listener = Listener(edge, limits)
    metrics.source(lambda: [in_flight_family(listener.in_flight)])
    closers: list[Any] = [item for item in (built.embedder, built.tensors, store) if item is not None]
    parts = WorkerParts(
        config=config,
        clock=clock,
        port=around.port,
        pipeline=pipeline,
        listener=listener,
        readiness=readiness,
        compilers=compilers,
        builtin=builtin_policies(config),
        places=built.places,
        backends=built.backends,
        cache=cache,
        flights=flights,
        refresher=refresher,
        recent=recent,
        events=observer,
        metrics=metrics,
        closers=tuple(closers),
    )
    WorkerActions(parts)
    return Worker(parts)


def _book(start: Start, compilers: Compilers, clock: Clock) -> Book:
    """What all workers agree on, compiled for this one."""
    standing = start.standing
    identities = Identities(clock, anonymous=start.config.listen.anonymous_loopback)
    identities.take(standing.keys.data, standing.keys.problem)
    plans = PlanBook(PolicySet(standing.policies, builtin_policies(start.config)), compilers)
    return Book(standing.generation, plans, identities)


def build_supervisor(config: Config, clock: Clock, reread: Callable[[], Config] | None = None) -> Supervisor:
    """The whole gateway. `reread` gives the configuration as it is at a rolling restart [the same]. Raises ConfigError."""
    heads = Heads.shipped()

    def open_policies(config: Config) -> PolicyStore:
        keep = keep_folder(config.state_dir, config.policies_dir)
        known = known_names(config, heads)
        return PolicyStore.open(config.policies_dir, known, clock, builtin_policies(config), keep)

    policies, keys = open_policies(config), KeyStore.open(config.keys_file)
    if config.cache.secret is None:
        cache = replace(config.cache, secret=kept_secret(config.state_dir / "cache.secret"))
        config = replace(config, cache=cache)
    crew: Crew
    if config.workers == 1:
        crew = InProcessCrew(config, lambda start, port: build_worker(start, heads, Surroundings(clock, port)), clock)
    else:
        crew = ProcessCrew(config, clock, random.random)
    parts = SupervisorParts(config, policies, keys, reread or (lambda: config), open_policies)
    return Supervisor(parts, crew, clock)


def edge_limits(config: Config) -> EdgeLimits:
    return EdgeLimits(
        body_bytes=config.limits.body_bytes,
        header_bytes=config.limits.header_bytes,
        headers=config.limits.headers,
        connections=config.limits.connections,
        header_time_s=config.limits.header_time_s,
        body_time_s=config.limits.body_time_s,
    )


def _readiness(config: Config, built: Built, store: RedisStore | None) -> Readiness:
    readiness = Readiness()
    for place in built.places:
        spec = config.backends[place.info.name]
        model = config.models.get(spec.model or place.info.name)
        readiness.watch(place, required=spec.required or (model is not None and model.required))
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
