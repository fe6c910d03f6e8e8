"""A worker as a process of its own: what `gateway serve` starts for each of several workers."""

from __future__ import annotations

from dataclasses import dataclass

import structlog

from backends.link.client import ModelLink
from gateway.control.hub import Payload, WorkerPort
from gateway.control.process import Life
from gateway.control.sockets import Group, close_groups
from gateway.control.start import Start
from gateway.control.worker import Worker
from policies.core.clock import Clock

_log = structlog.get_logger("gateway.worker")


@dataclass(frozen=True, slots=True)
class Doors:
    """The listening sockets of all workers; `own` is the number of this worker's."""

    groups: list[Group]
    own: int


def worker_life(start: Start, port: WorkerPort, doors: Doors, clock: Clock) -> Life:
    """The life of one worker, with its actions at `port`."""
    from gateway.app import Surroundings, build_worker
    from routing.heads import Heads

    link = ModelLink(start.models_at, clock) if start.models_at else None
    worker = build_worker(start, Heads.shipped(), Surroundings(clock, port, link))
    neighbours = _Neighbours(worker, doors)
    neighbours.offer(port)

    async def begin(at_once: bool) -> None:
        if link is not None:
            link.start()
        await worker.start(doors.groups[doors.own], at_once=at_once)
        await worker.ready()

    async def stop(replaced: bool) -> None:
        if not replaced:
            # All stop: whoever is the last to close a socket empties its queue, so everybody accepts from all of them.
            await neighbours.adopt_all()
        # The listener has copies of those that it accepts from.
        close_groups(doors.groups)
        try:
            await worker.stop(replaced=replaced)
        finally:
            if link is not None:
                await link.aclose()

    def beat() -> Payload:
        return {"in_flight": worker.in_flight, "generation": worker.generation}

    return Life(begin, stop, worker.hurry, beat, worker.metrics)


class _Neighbours:
    """Accepting for a neighbour that is not there."""

    def __init__(self, worker: Worker, doors: Doors) -> None:
        self._worker = worker
        self._doors = doors

    def offer(self, port: WorkerPort) -> None:
        port.commands["listen.adopt"] = self._adopt
        port.commands["listen.release"] = self._release

    async def adopt_all(self) -> None:
        for number, group in enumerate(self._doors.groups):
            if number != self._doors.own:
                try:
                    await self._worker.adopt(str(number), group)
                except OSError as error:
                    # Of no more weight than the drain that comes next: no file descriptors, say.
                    _log.warning("not_adopted", number=number, reason=str(error))

    async def _adopt(self, payload: Payload) -> None:
        number = payload["number"]
        if number != self._doors.own:
            await self._worker.adopt(str(number), self._doors.groups[number])

    async def _release(self, payload: Payload) -> None:
        self._worker.release(str(payload["number"]))
