"""What the gateway's processes have in common: they meet the supervisor at the hub, begin when told, and end when told, or
when there is no supervisor any more.

    SIGTERM, or the supervisor is gone    a graceful end, however often: whoever runs the gateway may send it to every
                                          process (systemd does), and the supervisor sends it too
    HURRY                                 no longer wait for what is under way
    SIGINT, SIGHUP                        the supervisor's business
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from gateway.control.hub import Payload, WorkerPort
from gateway.control.hub_client import HubClient, Who
from gateway.control.reporter import publish_figures, report
from gateway.control.start import Start, from_payload
from gateway.observe import logs
from gateway.observe.metric_store import Metrics
from gateway.version import version
from policies.core.clock import Clock

_log = structlog.get_logger("gateway.process")

HURRY = signal.SIGUSR1


@dataclass(frozen=True, slots=True)
class Place:
    """How a process finds its supervisor."""

    hub: Path
    name: str
    supervisor: int


@dataclass(frozen=True, slots=True)
class Life:
    """What one kind of process does.

    begin    start to serve; returns once everything has been tried that is to be there at the start; given whether nobody
             else serves in this place, so that it should be seen at once
    stop     the graceful end; given whether a successor has the place already
    """

    begin: Callable[[bool], Awaitable[None]]
    stop: Callable[[bool], Awaitable[None]]
    hurry: Callable[[], None]
    beat: Callable[[], Payload]
    metrics: Callable[[], Metrics]


async def run_process(place: Place, clock: Clock, build: Callable[[Start, WorkerPort], Life]) -> None:
    """From the first hello to the end. Raises NoSupervisor."""
    ending = _Ending()
    ending.watch_signals()
    hub = HubClient(place.hub, Who(place.name, os.getpid(), version()), clock, lambda: os.getppid() == place.supervisor)
    payload = await _unless_asked(ending, hub.connect())
    if payload is None:
        return
    start = from_payload(payload)
    log = start.config.log
    sink = logs.configure(log.level, human=log.format == "console", worker=place.name)
    port = WorkerPort(place.name)
    life = build(start, port)
    life.metrics().source(sink.families)
    ending.hurry = life.hurry
    began: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    async def begin(payload: Payload) -> None:
        if not began.done():
            began.set_result(payload["at_once"])

    async def leave(_payload: Payload) -> None:
        ending.replaced = True
        ending.asked.set()

    port.commands["begin"] = begin
    port.commands["leave"] = leave
    hub.serve(port)
    tasks = [
        asyncio.create_task(report(port, clock, life.beat, life.metrics), name="report"),
        asyncio.create_task(_begin(began, life, port), name="begin"),
        asyncio.create_task(ending.orphaned_by(hub), name="orphaned"),
    ]
    try:
        await _until_asked(ending, tasks)
        # What has not been begun by now is not begun any more: the end would not know of it.
        tasks[1].cancel()
        await asyncio.wait(tasks[1:2])
        _log.info("stopping", **life.beat())
        if not ending.replaced:
            port.publish("leaving", {})
        await life.stop(ending.replaced)
        publish_figures(port, life.metrics())
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await hub.aclose()
        if hub.orphaned.is_set():
            _tidy(place.hub)


def _tidy(hub: Path) -> None:
    """Nobody else takes away the socket of a supervisor that was killed; the last process also takes its folder."""
    with contextlib.suppress(OSError):
        hub.unlink(missing_ok=True)
        hub.parent.rmdir()


async def _unless_asked(ending: _Ending, connecting: Coroutine[Any, Any, Payload]) -> Payload | None:
    """What a hello is answered with; None when the end is asked for before that."""
    asked = asyncio.create_task(ending.asked.wait())
    connected = asyncio.create_task(connecting)
    await asyncio.wait((asked, connected), return_when=asyncio.FIRST_COMPLETED)
    asked.cancel()
    if connected.done():
        return connected.result()
    connected.cancel()
    return None


async def _begin(began: asyncio.Future[bool], life: Life, port: WorkerPort) -> None:
    await life.begin(await began)
    settle_garbage_collector()
    port.publish("ready", {})
    # The supervisor may have been away just then.
    port.on_connected.append(lambda: port.publish("ready", {}))


async def _until_asked(ending: _Ending, tasks: Sequence[asyncio.Task[None]]) -> None:
    """Until the end is asked for. Raises what went wrong with one of the tasks: a process without it would be of no use,
    and nobody would know why."""
    asked = asyncio.create_task(ending.asked.wait())
    running = {asked, *tasks}
    while not asked.done():
        done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    asked.cancel()


class _Ending:
    """When and how this process is to end."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.replaced = False
        self.hurry: Callable[[], None] = lambda: None

    def watch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.asked.set)
        loop.add_signal_handler(HURRY, self._on_hurry)
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)

    def _on_hurry(self) -> None:
        self.hurry()
        self.asked.set()

    async def orphaned_by(self, hub: HubClient) -> None:
        await hub.orphaned.wait()
        _log.error("supervisor_gone", what_to_do="this process finishes what it has and ends; start the gateway again")
        self.asked.set()


def settle_garbage_collector() -> None:
    """What start-up made stays for good: take it out of every later collection, and collect less often.

    A request makes a few dozen short-lived containers; with the default thresholds the collector's share of a cached
    answer is larger than the cache's.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
