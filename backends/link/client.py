"""A worker's end: one connection to the model host, made again for as long as the worker lives.

    link = ModelLink(path, clock)
    light = link.model(placeholder, observer)    a Backend for each model; link.embedder for classification
    link.start() ... await link.aclose()

Between two connections every model is `gone` and refuses with ModelNotReady, so its rung is skipped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog

from backends.api import BackendInfo
from backends.frames import FrameConnection
from backends.link.calls import Calls
from backends.link.linked import GONE, UNKNOWN, LinkedEmbedder, LinkedModel
from backends.link.wire import read_info
from policies.core.clock import Clock
from policies.core.events import Observer

_log = structlog.get_logger("gateway.link")

#: Waits between two tries to connect (seconds): twice as long each time, from the first to the last.
FIRST_WAIT_S, LAST_WAIT_S = 0.02, 1.0
#: Longest wait for a host that is not there before its models count as tried.
UNREACHED_S = 10.0
#: How long the end may wait for the host to read what was sent.
CLOSE_S = 1.0


class ModelLink:
    """The way to the models of the host at `path`. Belongs to one event loop."""

    def __init__(self, path: str | Path, clock: Clock) -> None:
        self._path = str(path)
        self._clock = clock
        self._calls = Calls()
        self._models: dict[str, LinkedModel] = {}
        self._connection: FrameConnection | None = None
        #: Has the host said what it has, on this connection?
        self._heard = False
        #: Did it, on the last connection?
        self._met = False
        self._lost = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._verbs: dict[str, Callable[..., None]] = {
            "done": self._calls.on_done,
            "chunk": self._calls.on_chunk,
            "end": self._calls.on_end,
            "error": self._calls.on_error,
            "models": self._on_models,
            "model": self._on_model,
            "embedder": self._on_embedder,
        }
        self.embedder = LinkedEmbedder(self._calls)

    def model(self, placeholder: BackendInfo, observer: Observer) -> LinkedModel:
        """The host's model of this name; to be asked for before `start`."""
        model = self._models[placeholder.name] = LinkedModel(placeholder, self._calls, observer)
        return model

    @property
    def connected(self) -> bool:
        return self._heard

    @property
    def in_flight(self) -> int:
        """Calls under way."""
        return len(self._calls)

    def start(self) -> None:
        """Connect, and connect again, until `aclose`."""
        self._tasks = [
            asyncio.create_task(self._keep_connected(), name="model-link"),
            asyncio.create_task(self._wait_for_the_host(), name="model-link-first-try"),
        ]

    async def aclose(self) -> None:
        """Calls under way fail with ModelFailed."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        connection = self._connection
        if connection is not None:
            self._heard = False  # whoever leaves need not say that the models are gone
            connection.close()
            try:
                async with asyncio.timeout(CLOSE_S):
                    await self._lost.wait()
            except TimeoutError:
                # A host that stands still must not keep this process from ending.
                connection.abort()

    async def _keep_connected(self) -> None:
        loop = asyncio.get_running_loop()
        wait_s = FIRST_WAIT_S
        while True:
            self._lost.clear()
            try:
                await loop.create_unix_connection(self._new_connection, self._path)
            except OSError:
                pass  # not there yet, or not there again: each model's state says so
            else:
                await self._lost.wait()
                if self._met:
                    wait_s, self._met = FIRST_WAIT_S, False
            await self._clock.sleep(wait_s)
            wait_s = min(2 * wait_s, LAST_WAIT_S)

    def _new_connection(self) -> FrameConnection:
        def made() -> None:
            self._connection = connection
            self._calls.connected(connection)

        connection = FrameConnection(self._receive, self._on_lost, made=made)
        return connection

    async def _wait_for_the_host(self) -> None:
        """Nobody waits for ever for the first try of a model whose host does not come."""
        while not all(model.tried for model in self._models.values()):
            await self._clock.sleep(UNREACHED_S)
            if not self._heard:
                for model in self._models.values():
                    model.give_up_waiting()

    # ----------------------------------------------------------------------------------------- what the host says

    def _receive(self, message: list[Any]) -> None:
        self._verbs[message[0]](*message[1:])

    def _on_lost(self, error: Exception | None) -> None:
        if error is not None:
            _log.warning("link_connection_broken", reason=f"{type(error).__name__}: {error}")
        self._connection = None
        self._calls.lost()
        self.embedder.heard(None)
        if self._heard:
            self._heard = False
            for model in self._models.values():
                model.heard("gone", GONE, None)
        self._lost.set()

    def _on_models(self, models: list[list[Any]], embedder: list[Any] | None) -> None:
        self._heard = self._met = True
        self._on_embedder(embedder)
        for model in models:
            self._on_model(*model)
        named = {model[0] for model in models}
        for name, linked in self._models.items():
            if name not in named:
                linked.heard("failed", UNKNOWN, None)

    def _on_model(self, name: str, state: str, reason: str, info: dict[str, Any]) -> None:
        model = self._models.get(name)
        if model is not None:
            model.heard(state, reason, read_info(info))

    def _on_embedder(self, told: list[Any] | None) -> None:
        self.embedder.heard(None if told is None else (told[0], told[1]))
