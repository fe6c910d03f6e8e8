"""The verbs between the supervisor and its workers. Admin API, command line and dashboard use nothing else.

    publish   a worker tells what happened; nobody waits
    command   every worker does something and acknowledges it, or the acknowledgement says why not
    query     every worker answers a question
    tell      the supervisor passes on what another worker published; nobody waits

Payloads are plain values (what msgpack can carry). The in-process transport sends them through msgpack too, so that code
that works with one worker works with several. What a member of the hub does not offer it is not asked for: the model host
answers to some of what workers answer to.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import msgspec

Payload = dict[str, Any]
Action = Callable[[Payload], Awaitable[Any]]
#: `heard(worker, topic, payload)`.
Listener = Callable[[str, str, Payload], None]

#: How long whoever is asked may take to answer, unless it is known to take longer.
ANSWER_S = 5.0


class Ack(msgspec.Struct, frozen=True):
    """One worker's answer to a command or query. `error` is empty when it went well."""

    worker: str
    value: Any = None
    error: str = ""
    #: False = it has not answered (in time), or was not there to be asked; it may still act.
    reached: bool = True
    #: False = it was not there.
    asked: bool = True

    @property
    def refused(self) -> bool:
        """It was asked, and could not do it."""
        return self.reached and bool(self.error)


class Hub(Protocol):
    """What the supervisor's side sees."""

    async def command(self, name: str, payload: Payload, limit_s: float = ANSWER_S) -> list[Ack]:
        """One acknowledgement a worker, also from those that could not be reached, or not within `limit_s`."""
        ...

    async def query(self, name: str, payload: Payload) -> list[Ack]: ...

    def subscribe(self, listener: Listener) -> None:
        """`listener` hears what workers publish."""
        ...

    def tell_others(self, worker: str, topic: str, payload: Payload) -> None:
        """To every worker but this one."""
        ...


class WorkerPort:
    """A worker's side: the actions it offers, by name, its way to publish, and what it wants to be told."""

    def __init__(self, worker: str) -> None:
        self.worker = worker
        self.commands: dict[str, Action] = {}
        self.queries: dict[str, Action] = {}
        #: Topic -> what to do with what is told.
        self.told: dict[str, Callable[[Payload], None]] = {}
        #: Called when a lost connection has been made again: what others should know has to be told anew.
        self.on_connected: list[Callable[[], None]] = []
        self._send: Callable[[str, Payload], None] | None = None

    def connect(self, send: Callable[[str, Payload], None] | None) -> None:
        """`send(topic, payload)`; None = there is nobody to publish to."""
        self._send = send

    def publish(self, topic: str, payload: Payload) -> None:
        if self._send is not None:
            self._send(topic, payload)

    async def act(self, kind: str, name: str, payload: Payload) -> tuple[Any, str]:
        """Do what a command or a query asks; (value, error). Never raises but CancelledError."""
        action = (self.commands if kind == "command" else self.queries).get(name)
        if action is None:
            return None, f"this process does not know {name!r}"
        try:
            return await action(payload), ""
        except Exception as error:
            # A worker's failure is its acknowledgement: the caller learns which one failed and why.
            return None, f"{type(error).__name__}: {error}"


class InProcessHub:
    """The transport for a worker in the supervisor's own process."""

    def __init__(self) -> None:
        self._ports: list[WorkerPort] = []
        self._listeners: list[Listener] = []

    def attach(self, port: WorkerPort) -> None:
        self._ports.append(port)
        port.connect(lambda topic, payload: self._deliver(port.worker, topic, payload))

    def detach(self, port: WorkerPort) -> None:
        self._ports.remove(port)
        port.connect(None)

    def subscribe(self, listener: Listener) -> None:
        self._listeners.append(listener)

    def tell_others(self, worker: str, topic: str, payload: Payload) -> None:
        for port in self._ports:
            heard = port.told.get(topic)
            if heard is not None and port.worker != worker:
                heard(_through_the_wire(payload))

    def _deliver(self, worker: str, topic: str, payload: Payload) -> None:
        for listener in self._listeners:
            listener(worker, topic, _through_the_wire(payload))

    async def command(self, name: str, payload: Payload, _limit_s: float = ANSWER_S) -> list[Ack]:
        # Whoever works in this very process cannot be lost.
        return await self._ask_all("command", name, payload)

    async def query(self, name: str, payload: Payload) -> list[Ack]:
        return await self._ask_all("query", name, payload)

    async def _ask_all(self, kind: str, name: str, payload: Payload) -> list[Ack]:
        asked = [_ask(port, kind, name, _through_the_wire(payload)) for port in self._ports]
        return await asyncio.gather(*asked)


async def _ask(port: WorkerPort, kind: str, name: str, payload: Payload) -> Ack:
    value, error = await port.act(kind, name, payload)
    return Ack(port.worker, _through_the_wire(value), error)


def _through_the_wire(value: Any) -> Any:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value))
