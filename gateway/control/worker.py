"""A worker: owns the request path and what it listens with, and offers its actions to the hub (`worker_actions.py`)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from socket import socket
from typing import Any

import structlog

from backends.api import Backend
from backends.slot import ModelPlace
from cache.result import ResultCache
from cache.single_flight import Flights
from gateway.config_sections import Config
from gateway.control.hub import WorkerPort
from gateway.edge.listener import Listener
from gateway.observe.batch import BatchedObserver
from gateway.observe.loop_lag import watch_loop_lag
from gateway.observe.metric_store import Metrics
from gateway.observe.recent import RecentRequests
from gateway.pipeline import Pipeline
from gateway.plan import Compilers
from gateway.readiness import Readiness
from gateway.refresh import Refresher
from policies.core.clock import Clock
from policies.language.schema import Policy

_log = structlog.get_logger("gateway.worker")

#: A stopping gateway goes on to accept for this long at most, so that load balancers see it leave.
LAME_DUCK_S = 1.0
#: An idle connection is kept open for this long by a gateway that stops, and by a worker that is being replaced: there a
#: client's pool may use it again without knowing, and common pools forget an idle connection after five seconds.
IDLE_STOP_S = 0.25
IDLE_LEAVE_S = 5.0


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
    places: tuple[ModelPlace, ...]
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
        self._warming: asyncio.Task[None] | None = None
        self.bound_port = 0

    async def start(self, sockets: Sequence[socket], *, at_once: bool = True) -> None:
        """Begin to load models and to accept from `sockets`, which stay the caller's. `at_once`: accept before the models
        are there, and say so on /readyz; else somebody else serves meanwhile."""
        parts = self._parts
        if at_once:
            self.bound_port = await parts.listener.start(sockets)
        loop = asyncio.get_running_loop()
        self._tasks += [loop.create_task(place.run(), name=f"model-{place.info.name}") for place in parts.places]
        self._warming = loop.create_task(self._warm(sockets, at_once=at_once), name="warm-up")
        self._tasks.append(self._warming)
        self._tasks.append(loop.create_task(watch_loop_lag(parts.metrics, parts.clock), name="loop-lag"))

    async def _warm(self, sockets: Sequence[socket], *, at_once: bool) -> None:
        """Ready when each model has been tried once; those that failed go on trying in the background."""
        await asyncio.gather(*(place.first_try() for place in self._parts.places))
        self._parts.readiness.warming = False
        if not at_once:
            self.bound_port = await self._parts.listener.start(sockets)

    async def ready(self) -> None:
        """Return when each model has been tried once and connections are accepted. Raises OSError when they cannot be,
        CancelledError when the worker is stopped before."""
        assert self._warming is not None, "the worker has been started"
        await asyncio.shield(self._warming)

    @property
    def in_flight(self) -> int:
        """Requests under way."""
        return self._parts.listener.in_flight

    @property
    def generation(self) -> int:
        """Which policies are in force: the number of the change that brought them."""
        return self._parts.pipeline.book.generation

    def metrics(self) -> Metrics:
        """All that was counted, up to now."""
        self._parts.events.flush()
        return self._parts.metrics

    async def adopt(self, name: str, sockets: Sequence[socket]) -> None:
        """Accept also what comes to a neighbour that is not there."""
        if not self._parts.readiness.draining:
            await self._parts.listener.adopt(name, sockets)

    def release(self, name: str) -> None:
        self._parts.listener.release(name)

    def hurry(self) -> None:
        """End a drain now."""
        self._parts.listener.hurry()

    async def stop(self, *, replaced: bool = False) -> None:
        """Graceful end: requests under way have `drain_s` to finish. `replaced`: somebody else accepts from the same
        sockets already."""
        parts = self._parts
        parts.readiness.draining = True
        if replaced:
            parts.listener.stop_listening()
        else:
            await parts.listener.lame_duck(min(LAME_DUCK_S, parts.config.drain_s))
        cut = await parts.listener.drain(parts.config.drain_s, IDLE_LEAVE_S if replaced else IDLE_STOP_S)
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


async def _closed(what: str, close: Callable[[], Awaitable[object]]) -> None:
    """Close one part. One that fails must not keep the rest from being closed."""
    try:
        await close()
    except Exception:
        _log.exception("could_not_be_closed", what=what)
