"""The supervisor: owns policies, keys, the admin listener and the worker's life. It speaks to workers through the hub only."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import structlog
from aiohttp import web

from gateway.config_sections import Config
from gateway.control.admin import AdminAccess, admin_app
from gateway.control.hub import InProcessHub
from gateway.control.policy_store import SETTLE_S, PolicyStore
from gateway.control.watch import Watcher
from gateway.control.worker import Worker
from gateway.listening import listening_on
from gateway.observe.logs import LogObserver
from gateway.observe.metric_store import Metrics
from gateway.observe.metrics import MetricsObserver
from policies.core.clock import Clock
from policies.core.events import Observers

_log = structlog.get_logger("gateway.supervisor")


class Supervisor:
    """Runs one worker in this process, with the same code that serves several: everything goes through the hub."""

    def __init__(
        self,
        config: Config,
        policies: PolicyStore,
        clock: Clock,
        hub: InProcessHub,
    ) -> None:
        self._config = config
        self._policies = policies
        self._clock = clock
        self._hub = hub
        self._metrics = Metrics()
        self._observer = Observers([MetricsObserver(self._metrics), LogObserver(clock)])
        self._reloading = asyncio.Lock()
        self.admin_port = 0

    async def run(self, worker: Worker, announce: Callable[[Worker, Supervisor], None]) -> None:
        """Serve until SIGTERM or SIGINT, then stop gracefully. `announce` is called once the gateway is ready."""
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self._on_signal, stop, worker)
        admin = web.AppRunner(self.admin(), access_log=None)
        watcher = Watcher([self._policies.directory, self._config.keys_file], self._on_change, self._clock)
        watching: asyncio.Task[None] | None = None
        try:
            await worker.start()
            await self._tell_notices()
            await admin.setup()
            host, port = self._config.admin.host, self._config.admin.port
            with listening_on(host, port):
                await web.TCPSite(admin, host, port).start()
            self.admin_port = admin.addresses[0][1]
            watching = loop.create_task(watcher.run(), name="watch")
            await self._until_ready(worker, stop)
            if not stop.is_set():
                announce(worker, self)
            await self._until_stopped(stop, watching)
        finally:
            _log.info("stopping", in_flight=worker.in_flight, at_most_s=self._config.drain_s)
            if watching is not None:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
            await worker.stop()
            await admin.cleanup()
            _log.info("stopped")

    def _on_signal(self, stop: asyncio.Event, worker: Worker) -> None:
        """The first signal drains; a second one no longer waits for what is under way."""
        if stop.is_set():
            worker.hurry()
        stop.set()

    async def _until_ready(self, worker: Worker, stop: asyncio.Event) -> None:
        tasks = [asyncio.ensure_future(worker.ready()), asyncio.ensure_future(stop.wait())]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()

    async def _until_stopped(self, stop: asyncio.Event, watching: asyncio.Task[None]) -> None:
        waiting = asyncio.ensure_future(stop.wait())
        await asyncio.wait([waiting, watching], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if watching.done() and not stop.is_set():
            # Without the watcher edits would be ignored silently: better to end and be restarted.
            watching.result()

    def admin(self) -> web.Application:
        access = AdminAccess(self._config.admin.token, self._config.admin.view_token)
        return admin_app(self._hub, access, self.reload_policies, self._metrics.families)

    async def _on_change(self, changed: frozenset[Path]) -> float | None:
        if self._config.keys_file in changed:
            for ack in await self._hub.command("keys.reload", {}):
                told = ack.value or {}
                bad = ack.error or told.get("problem")
                write = _log.error if bad else _log.info
                write("keys_not_reloaded" if bad else "keys_reloaded", worker=ack.worker, error=ack.error, **told)
        await self.reload_policies()
        return SETTLE_S if self._policies.unsettled else None

    async def reload_policies(self) -> dict[str, Any]:
        """Take up changed policy files and hand the set to every worker."""
        async with self._reloading:
            events = await asyncio.to_thread(self._policies.reload)
            for event in events:
                self._observer.on_event(event)
            errors: dict[str, str] = {}
            if any(event.outcome == "applied" for event in events):
                files = self._policies.current.files
                payload = {"policies": [msgspec.to_builtins(policy) for policy in files]}
                acks = await self._hub.command("policies.swap", payload)
                errors = {ack.worker: ack.error for ack in acks if ack.error}
                for name, error in errors.items():
                    _log.error("policies_not_swapped", worker=name, error=error)
            await self._tell_notices()
            return {
                "policies": [f"{policy.policy}@{policy.version}" for policy in self._policies.current.policies],
                "problems": self._policies.notices(),
                "workers_behind": errors,
            }

    async def _tell_notices(self) -> None:
        """What is not as the policy files say is known to every worker: /readyz says that there is something, /notices what."""
        await self._hub.command("policies.notices", {"lines": self._policies.notices()})
