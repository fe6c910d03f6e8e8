"""One worker in the supervisor's own process: what `workers: 1` runs. Same hub, same actions, no other process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import structlog

from gateway.config_sections import Config
from gateway.control.crew import Agreement, Restarted
from gateway.control.facts import FactBoard
from gateway.control.hub import InProcessHub, WorkerPort
from gateway.control.sockets import Group, bind_sockets, close_groups
from gateway.control.start import Start
from gateway.control.worker import Worker
from gateway.observe.fleet import Fleet
from gateway.observe.metric_store import Family
from policies.core.clock import Clock

_log = structlog.get_logger("gateway.supervisor")

NAME = "worker-1"

#: Builds a worker that offers its actions at the port.
Build = Callable[[Start, WorkerPort], Worker]


class InProcessCrew:
    """Implements `Crew`."""

    def __init__(self, config: Config, build: Build, clock: Clock) -> None:
        self._config = config
        self._build = build
        self._clock = clock
        self.hub = InProcessHub()
        self._sockets: list[Group] = []
        self._agreement: Agreement | None = None
        self._fleet = Fleet()
        self._worker: Worker | None = None
        self._port: WorkerPort | None = None
        #: Those that have a successor, and their processes' names; each ends in a task of its own.
        self._leaving: dict[Worker, str] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._started_at = clock.now()
        self._starts = 0
        self._hurried = False
        self._restarting = asyncio.Lock()

    @property
    def worker(self) -> Worker:
        assert self._worker is not None, "the crew has been started"
        return self._worker

    @property
    def data_port(self) -> int:
        return self.worker.bound_port

    @property
    def in_flight(self) -> int:
        workers = [*self._leaving, *([self._worker] if self._worker is not None else [])]
        return sum(worker.in_flight for worker in workers)

    async def start(self, agreement: Agreement, board: FactBoard) -> None:
        self._agreement = agreement
        self._sockets = bind_sockets(self._config.listen.host, self._config.listen.port, 1)
        self._worker, self._port = await self._new(at_once=True)

    async def _new(self, *, at_once: bool) -> tuple[Worker, WorkerPort]:
        """A worker that has begun, under the lock: no change passes it by."""
        assert self._agreement is not None
        self._starts += 1
        async with self._agreement.changing:
            port = WorkerPort(NAME if self._starts == 1 else f"{NAME}.{self._starts}")
            worker = self._build(Start(self._config, self._agreement.standing), port)
            self.hub.attach(port)
            try:
                await worker.start(self._sockets[0], at_once=at_once)
            except BaseException:
                self.hub.detach(port)
                raise
            self._started_at = self._clock.now()
            return worker, port

    async def ready(self) -> None:
        await self.worker.ready()

    async def restart(self, config: Config) -> Restarted:
        async with self._restarting:
            before, self._config = self._config, config
            old, old_port = self._worker, self._port
            assert old is not None
            assert old_port is not None
            try:
                new, port = await self._successor()
            except Exception as error:
                _log.exception("worker_not_replaced")
                self._config = before
                return Restarted([f"{NAME} was not replaced: {type(error).__name__}: {error}"], taken_up=False)
            self._leaving[old] = old_port.worker
            self._worker, self._port = new, port
            ending = asyncio.create_task(self._end(old, old_port, replaced=True), name="end-replaced")
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)
            # Should this restart be given up, the old worker goes on to its end: it has requests under way.
            await asyncio.shield(ending)
            return Restarted([])

    async def _successor(self) -> tuple[Worker, WorkerPort]:
        """A second worker, which is ready. When it cannot be had, nothing is left of it."""
        new, port = await self._new(at_once=False)
        try:
            await new.ready()
        except BaseException:
            await self._end(new, port, replaced=False)
            raise
        return new, port

    async def _end(self, worker: Worker, port: WorkerPort, *, replaced: bool) -> None:
        if self._hurried:
            worker.hurry()
        try:
            await worker.stop(replaced=replaced)
        finally:
            self._leaving.pop(worker, None)
            self.hub.detach(port)
            self._fleet.heard(port.worker, worker.metrics().plain())
            self._fleet.ended(port.worker)

    def hurry(self) -> None:
        self._hurried = True
        for worker in (self._worker, *self._leaving):
            if worker is not None:
                worker.hurry()

    async def stop(self) -> None:
        close_groups(self._sockets)
        if self._worker is not None and self._port is not None:
            worker, port = self._worker, self._port
            self._leaving[worker] = port.worker
            self._worker = self._port = None
            await asyncio.gather(self._end(worker, port, replaced=False), *self._ending)

    async def families(self) -> Mapping[str, list[Family]]:
        alive = dict(self._leaving)
        if self._worker is not None and self._port is not None:
            alive[self._worker] = self._port.worker
        return {**self._fleet.families(), **{name: worker.metrics().families() for worker, name in alive.items()}}

    def status(self) -> list[dict[str, Any]]:
        worker = self._worker
        return [
            {
                "name": NAME,
                "process": self._port.worker if self._port is not None else "",
                "state": "serving" if worker is not None else "down",
                "pid": None,
                "up_s": round(self._clock.now() - self._started_at, 1),
                "in_flight": worker.in_flight if worker is not None else 0,
                "ended": 0,
                "crash_loop": False,
                "leaving": [*self._leaving.values()],
            }
        ]
