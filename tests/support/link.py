"""A model host and workers in one loop, over a real Unix socket."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from backends.api import Answer, Backend, BackendInfo, ChatRequest, Chunk, Health, Request, Role
from backends.frames import FrameConnection
from backends.link.client import ModelLink
from backends.link.linked import LinkedModel
from backends.link.server import LinkServer
from backends.link.wire import info_value
from backends.slot import Slot
from policies.core.clock import Clock, FakeClock, SystemClock
from policies.core.deadline import Deadline
from policies.core.errors import ModelNotReady
from policies.core.events import Event, ModelChanged, Observers
from tests.support.waiting import until


def info(name: str = "light", fingerprint: str = "one") -> BackendInfo:
    return BackendInfo(name=name, role=Role.LIGHT, model=f"{name}-model", fingerprint=fingerprint)


class Seen:
    """The states that were told."""

    def __init__(self) -> None:
        self.states: list[str] = []

    def on_event(self, event: Event) -> None:
        assert isinstance(event, ModelChanged)
        self.states.append(event.state)


class Worker:
    """One worker's link, with a model `light`."""

    def __init__(self, path: Path, clock: Clock, names: Sequence[str] = ("light",)) -> None:
        self.link = ModelLink(path, clock)
        self.seen = Seen()
        self.models = {name: self.link.model(info(name, "placeholder"), self.seen) for name in names}
        self.filled: list[tuple[str | None, str]] = []
        self.light.on_filled = lambda before, now: self.filled.append((before, now))

    @property
    def light(self) -> LinkedModel:
        return self.models["light"]


class Host:
    """A model host at `path` whose models are what `make` gives (a new one for each load)."""

    def __init__(self, path: Path, clock: Clock, **make: Callable[[], Backend]) -> None:
        self.path = path
        self.slots = {name: Slot(info(name, "none"), _loader(give), clock, Observers()) for name, give in make.items()}
        self.embedder = ToyEmbedder()
        self.server = LinkServer(self.slots, self.embedder, clock)

    async def start(self) -> Host:
        await self.server.start(self.path)
        for slot in self.slots.values():
            await slot.fill()
        return self

    async def aclose(self) -> None:
        await self.server.aclose()
        for slot in self.slots.values():
            await slot.aclose()


def _loader(give: Callable[[], Backend]) -> Callable[[], Any]:
    async def load() -> Backend:
        return give()

    return load


@asynccontextmanager
async def linked(
    folder: Path, backend: Backend, clock: Clock | None = None, workers: int = 1
) -> AsyncIterator[tuple[Host, list[Worker]]]:
    """A host with `backend` as `light`, and workers that know it is ready."""
    clock = clock or FakeClock()
    path = folder / "models.sock"
    host = await Host(path, clock, light=lambda: backend).start()
    all_workers = [Worker(path, clock) for _ in range(workers)]
    try:
        for worker in all_workers:
            worker.link.start()
        for worker in all_workers:
            await until(lambda worker=worker: worker.light.ready)
        yield host, all_workers
    finally:
        for worker in all_workers:
            await worker.link.aclose()
        await host.aclose()


class OverLink:
    """Any backend as a worker sees it: a Backend with a host and a link of its own."""

    def __init__(
        self, host: Host, worker: ModelLink, model: LinkedModel, folder: tempfile.TemporaryDirectory[str]
    ) -> None:
        self._host, self._link, self._model, self._folder = host, worker, model, folder

    @classmethod
    async def of(cls, backend: Backend) -> OverLink:
        folder = tempfile.TemporaryDirectory()
        clock, name = SystemClock(), backend.info.name
        host = await Host(Path(folder.name) / "models.sock", clock, **{name: lambda: backend}).start()
        link = ModelLink(host.path, clock)
        model = link.model(info(name), Observers())
        link.start()
        await model.first_try()
        return cls(host, link, model, folder)

    @property
    def info(self) -> BackendInfo:
        return self._model.info

    async def infer(self, request: Request, deadline: Deadline) -> Answer:
        return await self._model.infer(request, deadline)

    def stream(self, request: ChatRequest, deadline: Deadline) -> AsyncIterator[Chunk]:
        return self._model.stream(request, deadline)

    async def health(self) -> Health:
        return await self._model.health()

    async def aclose(self) -> None:
        await self._link.aclose()
        await self._host.aclose()
        self._folder.cleanup()

    def __repr__(self) -> str:
        return repr(self._model)


class ToyEmbedder:
    """Vectors of two numbers. `told` None: it is not there yet."""

    def __init__(self) -> None:
        self.told: tuple[str, int] | None = ("encoder-1", 2)
        self.error: Exception | None = None

    @property
    def fingerprint(self) -> str:
        return self._told()[0]

    @property
    def dimensions(self) -> int:
        return self._told()[1]

    async def embed(self, texts: Sequence[str], deadline: Any) -> Any:
        if self.error is not None:
            raise self.error
        return np.float32([[len(text), 1] for text in texts])

    async def unknown_share(self, text: str, deadline: Any) -> float:
        return text.count("?") / len(text)

    def _told(self) -> tuple[str, int]:
        if self.told is None:
            raise ModelNotReady("no embedder")
        return self.told


class FrozenHost:
    """Says what it has and never answers: what a host looks like that has stopped. `asked` holds what it was sent."""

    def __init__(self) -> None:
        self.asked: list[list[Any]] = []
        self.ends: list[FrameConnection] = []

    async def start(self, path: Path) -> FrozenHost:
        self._server = await asyncio.get_running_loop().create_unix_server(self._accept, str(path))
        return self

    def _accept(self) -> FrameConnection:
        def made() -> None:
            end.send(["models", [["light", "ready", "", info_value(info())]], None])

        end = FrameConnection(self.asked.append, lambda _: None, made=made)
        self.ends.append(end)
        return end

    def say(self, *message: Any) -> None:
        self.ends[-1].send(message)

    def calls(self, verb: str) -> list[list[Any]]:
        return [message for message in self.asked if message[0] == verb]

    async def aclose(self) -> None:
        self._server.close()
        for end in self.ends:
            end.close()
        await asyncio.sleep(0)
