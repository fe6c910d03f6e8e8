"""The hub's middle: the supervisor's end of every connection, over one Unix socket that only this user may open.

A member says hello with its name and process id; `on_hello` knows the processes that were started and answers with what the
member needs to begin, or refuses. From its offer on the member is asked for what it offers, once it has joined:

    connected   said hello; has been given its start
    offered     has built itself and said what it does
    joined      commands must reach it, queries are answered by it: also while it is on its way out, for a key that is
                revoked must not be good there for the length of a drain
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog

from backends.frames import FrameConnection
from gateway.control.hub import ANSWER_S, Ack, Listener, Payload
from policies.core.clock import Clock

_log = structlog.get_logger("gateway.hub")

#: A member that has not been heard of for this long is not waited for: it gets the message when it reads again.
SILENT_S = 1.5


class Member:
    """One process at the hub."""

    def __init__(self, hub: HubServer, clock: Clock) -> None:
        self._hub = hub
        self._clock = clock
        self._asked: dict[int, asyncio.Future[tuple[Any, str, bool]]] = {}
        self._ids = itertools.count(1)
        self.connection = FrameConnection(self._receive, self._lost)
        self.name = ""
        self.pid = 0
        self.commands: frozenset[str] = frozenset()
        self.queries: frozenset[str] = frozenset()
        self.offered = asyncio.Event()
        self.joined = False
        self.heard_at = clock.now()

    def silent_s(self) -> float:
        """Seconds since anything was heard of it."""
        return self._clock.now() - self.heard_at

    async def ask(self, kind: str, name: str, payload: Payload, limit_s: float = ANSWER_S) -> Ack:
        """Never raises: what goes wrong is the acknowledgement."""
        number = next(self._ids)
        future: asyncio.Future[tuple[Any, str, bool]] = asyncio.get_running_loop().create_future()
        self._asked[number] = future
        try:
            if not self.connection.send(["ask", number, kind, name, payload]):
                return Ack(self.name, error="it is not connected", reached=False)
            silent_s = self.silent_s()
            if silent_s > SILENT_S:
                late = f"it has not been heard of for {silent_s:.1f} s; it will act when it is back"
                return Ack(self.name, error=late, reached=False)
            async with asyncio.timeout(limit_s):
                value, error, reached = await future
            return Ack(self.name, value, error, reached)
        except TimeoutError:
            return Ack(self.name, error=f"no answer within {limit_s:g} s", reached=False)
        except (TypeError, ValueError, OverflowError) as error:
            return Ack(self.name, error=f"it cannot be asked that: {error}")
        finally:
            del self._asked[number]

    def tell(self, topic: str, payload: Payload) -> None:
        self.connection.send(["tell", topic, payload])

    def _receive(self, message: list[Any]) -> None:
        self.heard_at = self._clock.now()
        match message:
            case ["publish", str(topic), payload]:
                self._hub.heard(self, topic, payload)
            case ["ack", int(number), value, str(error)]:
                future = self._asked.get(number)
                if future is not None and not future.done():
                    future.set_result((value, error, True))
            case ["hello", str(name), int(pid), str(version)]:
                self._hello(name, pid, version)
            case ["offer", commands, queries]:
                self.commands, self.queries = frozenset(commands), frozenset(queries)
                self.offered.set()
            case _:
                raise ValueError("this is no message of the hub")

    def _hello(self, name: str, pid: int, version: str) -> None:
        self.name, self.pid = name, pid
        if version != self._hub.version:
            # Somebody has installed another release over the running one: what the two would say to each other may differ.
            raise ValueError(
                f"{name!r} is release {version}, and this supervisor is {self._hub.version}; start the whole gateway anew"
            )
        start = self._hub.on_hello(self)
        if start is None:
            raise ValueError(f"{name!r} with process id {pid} is none of ours")
        self._hub.members.append(self)
        self.connection.send(["start", start])

    def _lost(self, error: Exception | None) -> None:
        for future in self._asked.values():
            if not future.done():
                future.set_result((None, "it ended, or its connection did", False))
        self._hub.lost(self, error)


class HubServer:
    """Implements `Hub` for processes.

    on_hello
        Called with a member that has said who it is; returns its start, or None to refuse it.
    absent
        Names of workers that are not there now, with the reason: they are in every command's acknowledgements.
    """

    def __init__(self, clock: Clock, version: str) -> None:
        self._clock = clock
        self.version = version
        self._listeners: list[Listener] = []
        self._server: asyncio.Server | None = None
        self.members: list[Member] = []
        self.on_hello: Callable[[Member], Payload | None] = lambda _member: None
        self.absent: Callable[[], dict[str, str]] = dict

    async def listen(self, path: Path) -> None:
        """Open the socket, readable and writable by this user only. Raises OSError."""
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # Bound with the mode it has to have: there is no moment in which somebody else could open it.
            before = os.umask(0o177)
            try:
                listening.bind(str(path))
            finally:
                os.umask(before)
            loop = asyncio.get_running_loop()
            self._server = await loop.create_unix_server(self._accept, sock=listening)
        except BaseException:
            listening.close()
            raise

    def _accept(self) -> FrameConnection:
        return Member(self, self._clock).connection

    async def aclose(self) -> None:
        if self._server is not None:
            self._server.close()
        for member in tuple(self.members):
            member.connection.close()

    # ---------------------------------------------------------------------------------------------- the hub's verbs

    async def command(self, name: str, payload: Payload, limit_s: float = ANSWER_S) -> list[Ack]:
        members = [member for member in self.members if member.joined and name in member.commands]
        acks = await asyncio.gather(*(member.ask("command", name, payload, limit_s) for member in members))
        told = {ack.worker for ack in acks}
        missing = [
            Ack(worker, error=why, reached=False, asked=False)
            for worker, why in self.absent().items()
            if worker not in told
        ]
        return sorted([*acks, *missing], key=lambda ack: ack.worker)

    async def query(self, name: str, payload: Payload) -> list[Ack]:
        members = [member for member in self.members if member.joined and name in member.queries]
        acks = await asyncio.gather(*(member.ask("query", name, payload) for member in members))
        return sorted(acks, key=lambda ack: ack.worker)

    def subscribe(self, listener: Listener) -> None:
        self._listeners.append(listener)

    def tell_others(self, worker: str, topic: str, payload: Payload) -> None:
        for member in self.members:
            if member.name != worker and member.joined:
                member.tell(topic, payload)

    # ---------------------------------------------------------------------------------------------- from the members

    def heard(self, member: Member, topic: str, payload: Payload) -> None:
        for listener in self._listeners:
            listener(member.name, topic, payload)

    def lost(self, member: Member, error: Exception | None) -> None:
        if error is not None:
            _log.warning("hub_connection_broken", worker=member.name, reason=f"{type(error).__name__}: {error}")
        if member in self.members:
            # The end of a connection says nothing about the process: that is watched by itself.
            self.members.remove(member)
            member.joined = False
