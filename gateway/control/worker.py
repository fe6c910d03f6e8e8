"""A worker: owns the data listener and the request path, and offers its actions to the hub."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import structlog

from backends.api import Backend
from backends.guarded import Guarded
from backends.slot import Slot
from cache.result import ResultCache
from cache.single_flight import Flights
from gateway.config_sections import Config
from gateway.control.hub import WorkerPort
from gateway.edge.listener import Listener
from gateway.listening import listening_on
from gateway.observe.batch import BatchedObserver
from gateway.observe.loop_lag import watch_loop_lag
from gateway.observe.metric_store import Metrics
from gateway.observe.recent import RecentRequests
from gateway.pipeline import Pipeline
from gateway.plan import Compilers, PlanBook
from gateway.readiness import Readiness
from gateway.refresh import Refresher
from policies.core.clock import Clock
from policies.language.policy_set import PolicySet
from policies.language.schema import Policy

_log = structlog.get_logger("gateway.worker")


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """The object graph of one worker, built by `gateway.app`."""

    config: Config
    clock: Clock
    port: WorkerPort
    pipeline: Pipeline
    listener: Listener
    readiness: Readiness
    compilers: Compilers
    builtin: tuple[Policy, ...]
    slots: tuple[Slot, ...]
    backends: dict[str, Backend]
    cache: ResultCache
    flights: Flights
    refresher: Refresher
    recent: RecentRequests
    events: BatchedObserver
    metrics: Metrics
    #: Closed last, in this order: shared stores and the like.
    closers: tuple[Any, ...]


class Worker:
    """Runs one worker. Stop order: not ready, stop listening, drain, cancel, backends, caches."""

    def __init__(self, parts: WorkerParts) -> None:
        self._parts = parts
        self._tasks: list[asyncio.Task[None]] = []
        self._warmed = asyncio.Event()
        self.bound_port = 0
        port = parts.port
        port.commands["policies.swap"] = self._swap_policies
        port.commands["policies.notices"] = self._take_notices
        port.commands["keys.reload"] = self._reload_keys
        port.queries["metrics"] = self._metrics
        port.queries["why"] = self._why
        port.queries["requests"] = self._requests
        port.queries["policies"] = self._policies
        port.queries["backends"] = self._backends
        port.queries["models"] = self._models
        port.queries["notices"] = self._notices
        port.queries["cache"] = self._cache

    async def start(self) -> None:
        """Begin to load models and to listen. Raises CannotListen when the port cannot be had."""
        listen = self._parts.config.listen
        with listening_on(listen.host, listen.port):
            self.bound_port = await self._parts.listener.start(listen.host, listen.port)
        loop = asyncio.get_running_loop()
        first_tries = [loop.create_task(slot.fill(), name=f"load-{slot.info.name}") for slot in self._parts.slots]
        self._tasks.append(loop.create_task(self._warm(first_tries), name="warm-up"))
        self._tasks.append(loop.create_task(watch_loop_lag(self._parts.metrics, self._parts.clock), name="loop-lag"))

    async def _warm(self, first_tries: list[asyncio.Task[bool]]) -> None:
        """Ready when each model has been tried once; those that failed go on trying in the background."""
        results = await asyncio.gather(*first_tries)
        self._parts.readiness.warming = False
        self._warmed.set()
        missing = [slot for slot, ok in zip(self._parts.slots, results, strict=True) if not ok]
        await asyncio.gather(*(slot.keep_filling() for slot in missing))

    async def ready(self) -> None:
        """Return when each model has been tried once."""
        await self._warmed.wait()

    @property
    def in_flight(self) -> int:
        """Requests under way."""
        return self._parts.listener.in_flight

    def hurry(self) -> None:
        """End a drain now."""
        self._parts.listener.hurry()

    async def stop(self) -> None:
        """Graceful end: requests under way have `drain_s` to finish."""
        parts = self._parts
        parts.readiness.draining = True
        cut = await parts.listener.drain(parts.config.drain_s)
        if cut:
            _log.warning("drain_limit_reached", cut=cut, after_s=parts.config.drain_s)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await _closed("listener", parts.listener.close)
        await _closed("refresher", parts.refresher.aclose)
        await _closed("flights", parts.flights.aclose)
        for name, backend in parts.backends.items():
            await _closed(f"backend {name}", backend.aclose)
        await _closed("cache", parts.cache.aclose)
        parts.events.flush()
        for closer in parts.closers:
            await _closed(type(closer).__name__, closer.aclose)

    # ------------------------------------------------------------------------------------------------ hub's actions

    async def _swap_policies(self, payload: dict[str, Any]) -> dict[str, Any]:
        policies = msgspec.convert(payload["policies"], list[Policy])
        plans = PlanBook(PolicySet(policies, self._parts.builtin), self._parts.compilers)
        self._parts.pipeline.book.plans = plans
        return {"policies": [plan.label for plan in plans.plans]}

    async def _take_notices(self, payload: dict[str, Any]) -> None:
        self._parts.readiness.policy_notices = list(payload["lines"])

    async def _reload_keys(self, payload: dict[str, Any]) -> dict[str, Any]:
        identities = self._parts.pipeline.book.identities
        changed = identities.reload()
        return {"changed": changed, "keys": len(identities), "problem": identities.problem}

    async def _metrics(self, payload: dict[str, Any]) -> Any:
        self._parts.events.flush()
        return msgspec.to_builtins(self._parts.metrics.families())

    async def _why(self, payload: dict[str, Any]) -> Any:
        self._parts.events.flush()
        return self._parts.recent.explain(payload["id"])

    async def _requests(self, payload: dict[str, Any]) -> Any:
        self._parts.events.flush()
        return self._parts.recent.newest(payload["count"])

    async def _policies(self, payload: dict[str, Any]) -> Any:
        return [
            {"policy": plan.label, "surface": str(plan.surface), "first_choices": list(plan.router.first_choices())}
            for plan in self._parts.pipeline.book.plans.plans
        ]

    async def _backends(self, payload: dict[str, Any]) -> Any:
        told = []
        for name, backend in self._parts.backends.items():
            info, health = backend.info, await backend.health()
            told.append(
                {
                    "name": name,
                    "role": str(info.role),
                    "model": info.model,
                    "fingerprint": info.fingerprint,
                    "surfaces": sorted(info.capabilities.surfaces),
                    "ready": health.ready,
                    "reason": health.reason,
                    "guard": repr(backend) if isinstance(backend, Guarded) else "",
                }
            )
        return told

    async def _models(self, payload: dict[str, Any]) -> Any:
        return [
            {
                "name": slot.info.name,
                "model": slot.info.model,
                "ready": slot.model is not None,
                "state": slot.state,
                "reason": slot.reason,
                "fingerprint": slot.info.fingerprint,
            }
            for slot in self._parts.slots
        ]

    async def _notices(self, payload: dict[str, Any]) -> Any:
        """What is not as the files say, in full: one line each."""
        keys = self._parts.pipeline.book.identities.problem
        return {"policies": self._parts.readiness.policy_notices, "keys": keys.split("\n") if keys else []}

    async def _cache(self, payload: dict[str, Any]) -> Any:
        return {"result": self._parts.cache.stats(), "flights": repr(self._parts.flights)}


async def _closed(what: str, close: Callable[[], Awaitable[object]]) -> None:
    """Close one part. One that fails must not keep the rest from being closed."""
    try:
        await close()
    except Exception:
        _log.exception("could_not_be_closed", what=what)
