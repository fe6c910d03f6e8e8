"""The three verbs between the supervisor and its workers. Admin API, command line and dashboard use nothing else.

    publish   a worker tells what happened; nobody waits
    command   every worker does something and acknowledges it, or the acknowledgement says why not
    query     every worker answers a question

Payloads are plain values (what msgpack can carry). The in-process transport sends them through msgpack too, so that code
that works with one worker works with several.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import msgspec

Payload = dict[str, Any]
Action = Callable[[Payload], Awaitable[Any]]


class Ack(msgspec.Struct, frozen=True):
    """One worker's answer to a command or query. `error` is empty when it went well."""

    worker: str
    value: Any = None
    error: str = ""


class Hub(Protocol):
    """What the supervisor's side sees."""

    async def command(self, name: str, payload: Payload) -> list[Ack]: ...

    async def query(self, name: str, payload: Payload) -> list[Ack]: ...

    def subscribe(self, listener: Callable[[str, str, Payload], None]) -> None:
        """`listener(worker, topic, payload)` hears what workers publish."""
        ...


class WorkerPort:
    """A worker's side: the actions it offers, by name, and its way to publish."""

    def __init__(self, worker: str) -> None:
        self.worker = worker
        self.commands: dict[str, Action] = {}
        self.queries: dict[str, Action] = {}
        self._send: Callable[[str, str, Payload], None] | None = None

    def connect(self, send: Callable[[str, str, Payload], None]) -> None:
        self._send = send

    def publish(self, topic: str, payload: Payload) -> None:
        if self._send is not None:
            self._send(self.worker, topic, payload)


class InProcessHub:
    """The transport for one worker in the supervisor's own process."""

    def __init__(self) -> None:
        self._ports: list[WorkerPort] = []
        self._listeners: list[Callable[[str, str, Payload], None]] = []

    def attach(self, port: WorkerPort) -> None:
        self._ports.append(port)
        port.connect(self._deliver)

    def subscribe(self, listener: Callable[[str, str, Payload], None]) -> None:
        self._listeners.append(listener)

    def _deliver(self, worker: str, topic: str, payload: Payload) -> None:
        for listener in self._listeners:
            listener(worker, topic, _through_the_wire(payload))

    async def command(self, name: str, payload: Payload) -> list[Ack]:
        return await self._ask_all(name, payload, [port.commands for port in self._ports])

    async def query(self, name: str, payload: Payload) -> list[Ack]:
        return await self._ask_all(name, payload, [port.queries for port in self._ports])

    async def _ask_all(self, name: str, payload: Payload, tables: list[dict[str, Action]]) -> list[Ack]:
        asked = [
            _ask(port.worker, table.get(name), name, _through_the_wire(payload))
            for port, table in zip(self._ports, tables, strict=True)
        ]
        return await asyncio.gather(*asked)


async def _ask(worker: str, action: Action | None, name: str, payload: Payload) -> Ack:
    if action is None:
        return Ack(worker, error=f"this worker does not know {name!r}")
    try:
        return Ack(worker, _through_the_wire(await action(payload)))
    except Exception as error:
        # A worker's failure is its acknowledgement: the caller learns which one failed and why.
        return Ack(worker, error=f"{type(error).__name__}: {error}")


def _through_the_wire(value: Any) -> Any:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value))
