"""A worker's end of the hub.

    connect -> hello -> start        what the worker needs to build itself
    serve                            offer what it does, answer what is asked, publish

When the connection is lost and the supervisor is still there, it is made again, and the supervisor brings the worker up to
date; meanwhile the worker goes on alone. When the supervisor is gone, `orphaned` is set: there is nobody left to mind this
process, so it has to end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import structlog

from backends.frames import FrameConnection
from gateway.control.hub import Payload, WorkerPort
from policies.core.clock import Clock

_log = structlog.get_logger("gateway.hub")

RECONNECT_S = 0.2
#: How long the end of a process may wait for the supervisor to read what was sent.
CLOSE_S = 1.0
#: Topics of which only the latest counts: not sent to a supervisor that does not read.
_LATEST_COUNTS = ("beat", "metrics")


class NoSupervisor(Exception):
    """There is nobody to say hello to, or it has refused this process."""


class Who(NamedTuple):
    """What a process says of itself."""

    name: str
    pid: int
    version: str


class HubClient:
    """Belongs to one process. `parent_alive()`: is the supervisor that started this process still there?"""

    def __init__(self, path: Path, who: Who, clock: Clock, parent_alive: Callable[[], bool]) -> None:
        self._path = path
        self._hello = ["hello", who.name, who.pid, who.version]
        self._clock = clock
        self._parent_alive = parent_alive
        self._connection: FrameConnection | None = None
        self._start: asyncio.Future[Payload] = asyncio.get_running_loop().create_future()
        self._lost = asyncio.Event()
        self._port: WorkerPort | None = None
        self._acting: set[asyncio.Task[None]] = set()
        self._keeping: asyncio.Task[None] | None = None
        self.orphaned = asyncio.Event()

    async def connect(self) -> Payload:
        """Say hello; returns what the supervisor gives this process to begin with. Raises NoSupervisor."""
        try:
            await self._open()
        except OSError as error:
            raise NoSupervisor(f"nobody listens at {self._path}: {error.strerror or error}") from error
        return await self._start

    async def _open(self) -> None:
        loop = asyncio.get_running_loop()
        connection = FrameConnection(self._receive, self._on_lost)
        await loop.create_unix_connection(lambda: connection, str(self._path))
        self._connection = connection
        if connection.open:
            self._lost.clear()
        connection.send(self._hello)

    def serve(self, port: WorkerPort) -> None:
        """From now on `port`'s actions are asked for, and what it publishes is sent."""
        self._port = port
        port.connect(self._publish)
        self._offer()
        self._keeping = asyncio.create_task(self._keep_connected(), name="hub")

    def _offer(self) -> None:
        assert self._connection is not None
        assert self._port is not None
        self._connection.send(["offer", list(self._port.commands), list(self._port.queries)])

    async def _keep_connected(self) -> None:
        while True:
            await self._lost.wait()
            while True:
                # A process that ends closes its connections before its children have another parent, and one that refuses
                # us is not to be asked without a pause.
                await self._clock.sleep(RECONNECT_S)
                if not self._parent_alive():
                    self.orphaned.set()
                    return
                try:
                    await self._open()
                    break
                except OSError:
                    continue
            _log.info("hub_connected_again")
            self._offer()
            for tell in self._port.on_connected if self._port is not None else ():
                tell()

    def _publish(self, topic: str, payload: Payload) -> None:
        connection = self._connection
        if connection is None or (connection.behind and topic in _LATEST_COUNTS):
            return
        connection.send(["publish", topic, payload])

    def _receive(self, message: list[Any]) -> None:
        match message:
            case ["ask", int(number), str(kind), str(name), payload] if self._port is not None:
                task = asyncio.create_task(self._act(number, kind, name, payload))
                self._acting.add(task)
                task.add_done_callback(self._acting.discard)
            case ["tell", str(topic), payload]:
                heard = self._port.told.get(topic) if self._port is not None else None
                if heard is not None:
                    heard(payload)
            case ["start", payload]:
                if not self._start.done():
                    self._start.set_result(payload)
            case _:
                raise ValueError("this is no message of the hub")

    async def _act(self, number: int, kind: str, name: str, payload: Payload) -> None:
        # Not by a later connection: there the number is another question's.
        port, connection = self._port, self._connection
        assert port is not None
        assert connection is not None
        value, error = await port.act(kind, name, payload)
        try:
            connection.send(["ack", number, value, error])
        except (TypeError, ValueError, OverflowError) as problem:
            connection.send(["ack", number, None, f"the answer cannot be sent: {problem}"])

    def _on_lost(self, error: Exception | None) -> None:
        if not self._start.done():
            # Not logged: how the log is written is in what has not come.
            self._start.set_exception(NoSupervisor("it refused this process, or has ended"))
        elif error is not None:
            _log.warning("hub_connection_broken", reason=f"{type(error).__name__}: {error}")
        self._lost.set()

    async def aclose(self) -> None:
        """Send what is waiting, then close."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        for task in tuple(self._acting):
            task.cancel()
        if self._port is not None:
            self._port.connect(None)
        connection = self._connection
        if connection is not None and connection.open:
            connection.close()
            try:
                async with asyncio.timeout(CLOSE_S):
                    await self._lost.wait()
            except TimeoutError:
                # A supervisor that stands still must not keep this process from ending.
                connection.abort()
