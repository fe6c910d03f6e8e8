"""Workers as processes, with one model host for all of them.

The listening sockets belong to this crew and stay open as long as it lives: one for each worker, all on one port
(SO_REUSEPORT), and the kernel spreads connections over them. A worker accepts from its own; while it is down or silent its
neighbours accept from it as well, so what waits in its queue is served by somebody. A successor accepts from the same socket
before its predecessor stops.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from gateway.config_sections import Config
from gateway.control.adoption import Adoption
from gateway.control.crew import Agreement, CannotServeAtAll, Restarted
from gateway.control.facts import ALL_TOPIC, FactBoard
from gateway.control.hub import Payload
from gateway.control.hub_server import HubServer, Member
from gateway.control.launch import launch
from gateway.control.private_folder import make_private_folder
from gateway.control.process import HURRY
from gateway.control.restarts import RestartRule
from gateway.control.rolling import ModelSocket, replace_all
from gateway.control.seat import START_S, Child, Process, Seat, SeatHooks
from gateway.control.sockets import Group, bind_sockets, close_groups, descriptors, spec_of
from gateway.control.start import Start, to_payload
from gateway.control.worker import IDLE_LEAVE_S, LAME_DUCK_S
from gateway.control.worker_actions import catch_up
from gateway.models import in_process_models
from gateway.observe.fleet import Fleet
from gateway.observe.metric_store import Family
from gateway.observe.quiet import Quiet
from gateway.observe.ticks import tick
from gateway.version import version
from policies.core.clock import Clock

_log = structlog.get_logger("gateway.supervisor")

MODEL_HOST = "model-host"
#: Behind the drain limit: closing backends and caches, and leaving the interpreter.
_GRACE_S = 5.0
#: A worker that is still behind everybody else after this long is brought up to date again.
_BEHIND_S = 2.0
#: How long the supervisor may take to learn that it is told to end itself.
_LET_GO_S = 0.25


class ProcessCrew:
    """Implements `Crew`. `random` gives 0..1, for the waits between restarts."""

    def __init__(self, config: Config, clock: Clock, random: Callable[[], float]) -> None:
        self._config = config
        self._clock = clock
        self._random = random
        self._quiet = Quiet(clock)
        self.hub = HubServer(clock, version())
        self.hub.on_hello, self.hub.absent = self._on_hello, self._absent
        self.hub.subscribe(self._on_published)
        self._adoption = Adoption(self.hub)
        self._folder = Path()
        self._sockets: list[Group] = []
        self._agreement: Agreement | None = None
        self._board: FactBoard | None = None
        self._fleet = Fleet()
        self._models = ModelSocket(Path())
        self._host: Seat | None = None
        self._workers: list[Seat] = []
        self._restarting = asyncio.Lock()
        self._looking: asyncio.Task[None] | None = None
        self._behind_since: dict[str, float] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    # --------------------------------------------------------------------------------------------------- life

    @property
    def data_port(self) -> int:
        port: int = self._sockets[0][0].getsockname()[1]
        return port

    @property
    def in_flight(self) -> int:
        return sum(child.beat.get("in_flight", 0) for seat in self._workers for child in seat.children)

    async def start(self, agreement: Agreement, board: FactBoard) -> None:
        self._agreement, self._board = agreement, board
        config = self._config
        self._sockets = bind_sockets(config.listen.host, config.listen.port, config.workers)
        self._folder = make_private_folder()
        await self.hub.listen(self._folder / "hub.sock")
        if in_process_models(config):
            self._models = ModelSocket(self._folder)
            self._host = self._seat(MODEL_HOST, self._launch_host)
            await self._host.start()
        for number in range(config.workers):
            self._workers.append(self._seat(f"worker-{number + 1}", partial(self._launch_worker, number)))
        for seat in self._workers:
            await seat.start()
        self._looking = asyncio.create_task(self._look(), name="look-after-processes")

    @property
    def _seats(self) -> list[Seat]:
        return [*([self._host] if self._host is not None else []), *self._workers]

    def _seat(self, name: str, launch: Callable[[str], Awaitable[Process]]) -> Seat:
        hooks = SeatHooks(self._join, self._on_ready, self._on_down, self._on_gone)
        return Seat(name, launch, hooks, RestartRule(self._random), self._clock)

    async def _launch_host(self, name: str) -> Process:
        return await self._launch("model-host", name)

    async def _launch_worker(self, number: int, name: str) -> Process:
        doors = ["--own", str(number), "--sockets", spec_of(self._sockets)]
        return await self._launch("worker", name, doors, descriptors(self._sockets))

    async def _launch(self, verb: str, name: str, more: Sequence[str] = (), fds: Sequence[int] = ()) -> Process:
        return await launch(self._folder / "hub.sock", verb, name, more, fds)

    async def ready(self) -> None:
        children = [seat.current for seat in self._seats]
        while not all(child is not None and child.ready.is_set() for child in children):
            looping = [seat for seat in self._seats if seat.rule.looping]
            if looping:
                seat = looping[0]
                raise CannotServeAtAll(
                    f"{seat.name} ended {seat.rule.total} times before it was ready ({seat.reason}); "
                    "its own last log lines say why"
                )
            await self._clock.sleep(0.01)
            children = [seat.current for seat in self._seats]

    def hurry(self) -> None:
        for seat in self._workers:
            for child in seat.children:
                child.signal(HURRY)

    async def stop(self) -> None:
        # The workers hold the sockets too, and close them when their queues are empty.
        close_groups(self._sockets)
        for seat in self._workers:
            seat.begin_stop()
        limit_s = LAME_DUCK_S + self._config.drain_s + _GRACE_S
        await asyncio.gather(*(seat.stopped(limit_s) for seat in self._workers))
        if self._host is not None:
            # Nobody is left to ask it anything.
            self._host.begin_stop()
            await self._host.stopped(_GRACE_S)
        # Until now somebody had to see who stands still: a drain waits for those who work.
        tasks = [*self._tasks, *([self._looking] if self._looking is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.hub.aclose()
        if self._folder != Path():
            shutil.rmtree(self._folder, ignore_errors=True)

    # --------------------------------------------------------------------------------------------- rolling restart

    async def restart(self, config: Config) -> Restarted:
        async with self._restarting:
            before, self._config = self._config, config
            ends_within_s = before.drain_s + IDLE_LEAVE_S + _GRACE_S
            done = await replace_all(self._host, self._workers, self._models, ends_within_s)
            if not done.taken_up:
                self._config = before
            return done

    # ------------------------------------------------------------------------------------------- from the processes

    def _child(self, pid: int) -> tuple[Seat, Child] | None:
        return next(((seat, child) for seat in self._seats for child in seat.children if child.pid == pid), None)

    def _on_hello(self, member: Member) -> Payload | None:
        found = self._child(member.pid)
        if found is None or self._agreement is None or self._board is None:
            return None
        _, child = found
        again, child.member = child.member, member
        child.connected.set()
        if again is not None:
            # It had lost its connection, and may have missed something.
            self._spawn(self._repair(child))
        models_at = self._models.path if self._host is not None else ""
        start = Start(self._config, self._agreement.standing, models_at, self._board.known())
        return to_payload(start)

    async def _repair(self, child: Child) -> None:
        """Of a process that has missed something; `_look` tries again when it does not work."""
        assert child.member is not None
        try:
            async with asyncio.timeout(START_S):
                await child.member.offered.wait()
            await self._bring_up_to_date(child)
        except (RuntimeError, TimeoutError) as error:
            more = self._quiet.admit(child.name)
            if more is not None:
                told = str(error) or "it does not offer itself"
                _log.error("worker_behind", worker=child.name, error=told, **more)
        else:
            await self._adoption.tell(child.member)

    async def _join(self, child: Child) -> None:
        await self._bring_up_to_date(child)
        assert child.member is not None
        ack = await child.member.ask("command", "begin", {"at_once": child.first})
        if ack.error:
            raise RuntimeError(ack.error)

    async def _bring_up_to_date(self, child: Child) -> None:
        """Give a process what it may have missed, and count it in. Under the lock: no change is half way."""
        assert self._agreement is not None
        member = child.member
        assert member is not None
        async with self._agreement.changing:
            for name, payload in catch_up(self._agreement.standing):
                if name in member.commands:
                    ack = await member.ask("command", name, payload)
                    if ack.error:
                        raise RuntimeError(f"{name}: {ack.error}")
            member.joined = True
            if self._board is not None:
                # From now on it is told each; what was told while it could not be is in here.
                member.tell(ALL_TOPIC, self._board.told_by_others(child.name))

    def _on_published(self, process: str, topic: str, payload: Payload) -> None:
        child = self._named(process)
        if child is None:
            return
        if topic == "beat":
            child.beat = payload
        elif topic == "ready":
            child.ready.set()
        elif topic == "metrics":
            self._fleet.heard(process, payload["families"])
        elif topic == "leaving":
            self._spawn(self._let_go(child))

    async def _let_go(self, child: Child) -> None:
        # Who tells all processes to end at once (service managers do) has told this one too.
        await self._clock.sleep(_LET_GO_S)
        for seat in self._workers:
            seat.let_go(child)

    def _named(self, process: str) -> Child | None:
        return next((child for seat in self._seats for child in seat.children if child.name == process), None)

    def _on_ready(self, seat: Seat, child: Child) -> None:
        if seat is not self._host:
            self._spawn(self._adoption.up(self._workers.index(seat)))
            if child.member is not None:
                self._spawn(self._adoption.tell(child.member))

    def _on_down(self, seat: Seat) -> None:
        if seat is not self._host:
            self._spawn(self._adoption.down(self._workers.index(seat)))

    def _on_gone(self, child: Child) -> None:
        self._fleet.ended(child.name)
        self._behind_since.pop(child.name, None)
        if self._board is not None:
            self._board.gone(child.name)

    def _spawn(self, what: Any) -> None:
        task = asyncio.ensure_future(what)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _look(self) -> None:
        while True:
            late_s = await tick(self._clock)
            now = self._clock.now()
            if late_s > 1.0:
                # It was this process that stood still (a paused machine): silence says nothing now.
                for member in self.hub.members:
                    member.heard_at = now
                continue
            for seat in self._seats:
                seat.look()
                self._catch_up_if_behind(seat, now)

    def _catch_up_if_behind(self, seat: Seat, now: float) -> None:
        """A command that a silent worker missed must not be missed for good."""
        assert self._agreement is not None
        child = seat.current
        if child is None or child.member is None or child.stuck or seat is self._host:
            return
        if self._agreement.changing.locked():
            return
        if self._restarting.locked():
            # Who is about to go need not learn what is for those who come.
            return
        # One that has not joined again is told of no change at all, not even of keys.
        same = child.beat.get("generation", 0) == self._agreement.standing.generation and child.member.joined
        if same or not child.ready.is_set():
            self._behind_since.pop(child.name, None)
        elif now - self._behind_since.setdefault(child.name, now) > _BEHIND_S:
            self._behind_since[child.name] = now
            self._spawn(self._repair(child))

    # ---------------------------------------------------------------------------------------------------- figures

    def _absent(self) -> dict[str, str]:
        return {
            seat.name: f"it is not there ({seat.reason or 'starting'}); it begins with what is in force then"
            for seat in self._workers
            if seat.current is None or seat.current.member is None or not seat.current.member.joined
        }

    async def families(self) -> Mapping[str, list[Family]]:
        before = self._fleet.known()
        for ack in await self.hub.query("metrics", {}):
            # One that has ended meanwhile has been counted already.
            if not ack.error and self._named(ack.worker) is not None:
                self._fleet.answered(ack.worker, ack.value, before)
        return self._fleet.families()

    def status(self) -> list[dict[str, Any]]:
        return [seat.status() for seat in self._seats]
