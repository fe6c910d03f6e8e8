"""The supervisor: owns policies, keys, the admin listener and the workers' lives. It speaks to workers through the hub only.

SIGTERM, SIGINT    graceful end; a second one no longer waits for what is under way
SIGHUP             gateway.yaml is read again, and every process is replaced by a new one, one after another; no
                   request is dropped. A file with a mistake changes nothing.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
from aiohttp import web
from msgspec.structs import replace

from gateway.config_sections import Config
from gateway.control.admin import AdminAccess, AdminActions, admin_app
from gateway.control.crew import Agreement, Crew
from gateway.control.facts import FactBoard
from gateway.control.hub import Ack
from gateway.control.key_store import KeyStore
from gateway.control.policy_store import SETTLE_S, PolicyStore
from gateway.control.reconfigure import taken_up
from gateway.control.start import Standing
from gateway.control.watch import Watcher
from gateway.control.worker_actions import keys_payload, policies_payload
from gateway.listening import listening_on
from gateway.observe.logs import LogObserver
from gateway.observe.metric_store import Metrics
from gateway.observe.metrics import MetricsObserver
from gateway.observe.processes import process_families
from gateway.observe.quiet import Quiet
from policies.core.clock import Clock
from policies.core.errors import ConfigError
from policies.core.events import Observers

_log = structlog.get_logger("gateway.supervisor")


@dataclass(frozen=True, slots=True)
class SupervisorParts:
    """What a supervisor is made of.

    reread          the operator's configuration as it is now; raises ConfigError
    open_policies   the policies under a configuration; raises ConfigError
    """

    config: Config
    policies: PolicyStore
    keys: KeyStore
    reread: Callable[[], Config]
    open_policies: Callable[[Config], PolicyStore]


class Supervisor:
    """Runs a crew. What its workers must agree on changes here and nowhere else."""

    def __init__(self, parts: SupervisorParts, crew: Crew, clock: Clock) -> None:
        self._config = parts.config
        self._policies = parts.policies
        self._keys = parts.keys
        self._parts = parts
        self._clock = clock
        self.crew = crew
        self._board = FactBoard(crew.hub)
        self._agreement = Agreement(
            # The first of all changes.
            Standing(1, list(self._policies.current.files), self._policies.notices(), self._keys.in_force)
        )
        self.metrics = Metrics()
        self._quiet = Quiet(clock)
        self._observer = Observers([MetricsObserver(self.metrics), LogObserver(clock)])
        self._reloading = asyncio.Lock()
        self._restarting = asyncio.Lock()
        #: Rolling restarts that have not begun: they will read the configuration as it is then.
        self._restarts_due = 0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._stop = asyncio.Event()
        self.admin_port = 0

    async def run(self, announce: Callable[[Supervisor], None]) -> None:
        """Serve until SIGTERM or SIGINT, then stop gracefully. `announce` is called once the gateway is ready."""
        self._watch_signals()
        for line in self._agreement.standing.notices:
            _log.error("policy_notice", problem=line)
        admin = web.AppRunner(self.admin(), access_log=None)
        watcher = Watcher([self._policies.directory, self._config.keys_file], self._on_change, self._clock)
        watching: asyncio.Task[None] | None = None
        try:
            # First the listener that costs nothing: when it cannot be had, no process has been started for nothing.
            await admin.setup()
            host, port = self._config.admin.host, self._config.admin.port
            with listening_on(host, port):
                await web.TCPSite(admin, host, port).start()
            self.admin_port = admin.addresses[0][1]
            await self.crew.start(self._agreement, self._board)
            # Blocked by `gateway serve`: one that came when there was nothing yet to replace is heard now.
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
            watching = asyncio.create_task(watcher.run(), name="watch")
            await self._until_stopped(self.crew.ready())
            if not self._stop.is_set():
                announce(self)
            await self._until_stopped(watching)
        finally:
            _log.info("stopping", in_flight=self.crew.in_flight, at_most_s=self._config.drain_s)
            tasks = [*self._tasks, *([watching] if watching is not None else [])]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.crew.stop()
            await admin.cleanup()
            _log.info("stopped")

    def _watch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self._on_signal)
        loop.add_signal_handler(signal.SIGHUP, self._on_hang_up)

    def _on_signal(self) -> None:
        """The first signal drains; a second one no longer waits for what is under way."""
        if self._stop.is_set():
            self.crew.hurry()
        self._stop.set()

    def _on_hang_up(self) -> None:
        if self._stop.is_set() or self._restarts_due:
            # One that has not begun does for all the signals until then.
            return
        self._begin_restart()

    async def _until_stopped(self, other: Coroutine[Any, Any, None] | asyncio.Task[None]) -> None:
        """Until the end is asked for, or `other` is over. Raises what `other` raised."""
        # Of the watcher: without it edits would be ignored silently, so it is better to end and be started again.
        task = asyncio.ensure_future(other)
        stop = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait((task, stop), return_when=asyncio.FIRST_COMPLETED)
        if task.done() and not task.cancelled():
            task.result()
        else:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        stop.cancel()

    def admin(self) -> web.Application:
        access = AdminAccess(self._config.admin.token, self._config.admin.view_token)
        return admin_app(
            self.crew, access, AdminActions(self.reload_policies, self.restart_workers), self._own_families
        )

    def _own_families(self) -> list[Any]:
        return [*self.metrics.families(), *process_families(self.crew.status())]

    async def restart_workers(self) -> list[str]:
        """The rolling restart, one at a time. Returns what went wrong, a line each. The end of the gateway gives it up."""
        task = self._begin_restart()
        await asyncio.wait((task,))
        return ["the rolling restart was given up: the gateway is stopping"] if task.cancelled() else task.result()

    def _begin_restart(self) -> asyncio.Task[list[str]]:
        self._restarts_due += 1
        task = asyncio.create_task(self._restart_in_turn(), name="rolling-restart")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _restart_in_turn(self) -> list[str]:
        try:
            await self._restarting.acquire()
        finally:
            self._restarts_due -= 1
        try:
            if self._stop.is_set():
                return ["nothing was restarted: the gateway is stopping"]
            return await self._restart_workers()
        except Exception as error:
            # Of a signal nobody waits for the outcome.
            _log.exception("rolling_restart_failed")
            return [f"the rolling restart failed, see the log: {type(error).__name__}: {error}"]
        finally:
            self._restarting.release()

    async def _restart_workers(self) -> list[str]:
        _log.info("rolling_restart")
        before = self._config, self._policies, self._agreement.standing
        try:
            await self._take_up_configuration()
        except ConfigError as error:
            for line in error.problems:
                _log.error("configuration_not_taken_up", problem=line)
            return ["nothing was restarted: the configuration has mistakes", *error.problems]
        tried = self._agreement.standing
        problems, taken_up = await self.crew.restart(self._config)
        if not taken_up:
            self._config, self._policies, served = before
            standing = self._agreement.standing
            if standing.generation == tried.generation:
                # Nobody serves by these policies. (Else others have come meanwhile, and everybody serves by those.)
                policies, generation = served.policies, served.generation
                self._agreement.standing = replace(standing, generation=generation, policies=policies)
        for problem in problems:
            _log.error("rolling_restart_problem", problem=problem)
        # Policies that only the new configuration makes sense of, or that came meanwhile.
        async with self._reloading:
            if self._agreement.standing.policies != list(self._policies.current.files):
                await self._swap_policies()
        _log.info("rolling_restart_done", problems=len(problems))
        return problems

    async def _take_up_configuration(self) -> None:
        """Read gateway.yaml again, and the policies under what it says. Raises ConfigError, with nothing changed."""
        reread = await asyncio.to_thread(self._parts.reread)
        config, notes = taken_up(self._config, reread)
        for note in notes:
            _log.warning("configuration_needs_full_restart", note=note)
        if config == self._config:
            return
        async with self._reloading, self._agreement.changing:
            policies = await asyncio.to_thread(self._parts.open_policies, config)
            self._config, self._policies = config, policies
            standing, files = self._agreement.standing, list(policies.current.files)
            if files != standing.policies:
                # For the workers to come; those that go keep what they can make sense of.
                self._agreement.standing = replace(standing, generation=standing.generation + 1, policies=files)
        _log.info("configuration_taken_up")

    # ---------------------------------------------------------------------------------------- what workers agree on

    async def _on_change(self, changed: frozenset[Path]) -> float | None:
        if self._config.keys_file in changed:
            await self._reload_keys()
        await self.reload_policies()
        return SETTLE_S if self._policies.unsettled else None

    async def _reload_keys(self) -> None:
        before = self._keys.in_force
        if not await asyncio.to_thread(self._keys.reload):
            return
        now = self._keys.in_force
        async with self._agreement.changing:
            self._agreement.standing = replace(self._agreement.standing, keys=now)
            acks = await self.crew.hub.command("keys.swap", keys_payload(now))
        if now.problem:
            _log.error("keys_not_reloaded", problem=now.problem)
        elif now.data != before.data:
            _log.info("keys_reloaded", keys=max((ack.value["keys"] for ack in acks if not ack.error), default=0))
        self._tell_behind("keys", acks)

    async def reload_policies(self) -> dict[str, Any]:
        """Take up changed policy files and hand the set to every worker."""
        async with self._reloading:
            events = await asyncio.to_thread(self._policies.reload)
            for event in events:
                self._observer.on_event(event)
            behind: dict[str, str] = {}
            # Also those that a worker held back the last time: else they would pass for being in force.
            if self._agreement.standing.policies != list(self._policies.current.files):
                behind = await self._swap_policies()
            await self._tell_notices()
            return {
                "policies": [f"{policy.policy}@{policy.version}" for policy in self._policies.current.policies],
                "problems": self._policies.notices(),
                "workers_behind": behind,
            }

    async def _swap_policies(self) -> dict[str, str]:
        """All workers compile the new set; then all put it in force. Returns those that did not, with the reason.

        A worker that cannot compile what has passed every check holds back all of them: one of them alone must never
        answer by other policies than the rest. One that is merely not there is brought up to date when it is back.
        """
        hub, agreement = self.crew.hub, self._agreement
        async with agreement.changing:
            before = agreement.standing
            standing = replace(before, generation=before.generation + 1, policies=list(self._policies.current.files))
            acks = await hub.command("policies.prepare", policies_payload(standing))
            refused = {ack.worker: ack.error for ack in acks if ack.refused}
            if refused:
                for worker, error in refused.items():
                    _log.error(
                        "policies_not_swapped", worker=worker, error=error, in_force="the ones before, everywhere"
                    )
                return refused
            agreement.standing = standing
            acks = await hub.command("policies.commit", {"generation": standing.generation})
        return self._tell_behind("policies", acks)

    async def _tell_notices(self) -> None:
        """What is not as the policy files say is known to every worker: /readyz says that there is something, /notices what."""
        lines = self._policies.notices()
        async with self._agreement.changing:
            if lines != self._agreement.standing.notices:
                self._agreement.standing = replace(self._agreement.standing, notices=lines)
                await self.crew.hub.command("policies.notices", {"lines": lines})

    def _tell_behind(self, what: str, acks: list[Ack]) -> dict[str, str]:
        """Log the workers that did not take something up, each now and then. Returns them with the reason."""
        behind = {ack.worker: ack.error for ack in acks if ack.error}
        for worker, error in behind.items():
            more = self._quiet.admit((what, worker))
            if more is not None:
                _log.error("worker_behind", worker=worker, what=what, error=error, **more)
        return behind
