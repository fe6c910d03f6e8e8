"""The models of the model host as a worker sees them: a Backend for each, and the embedder."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from backends.api import Answer, BackendInfo, ChatRequest, Chunk, ChunkKind, Health, Request, StreamLimits
from backends.link.calls import Calls, StreamCall
from backends.link.wire import read_answer, read_array, request_value
from backends.slot import OnFilled
from policies.core.deadline import Deadline
from policies.core.errors import DeadlineExceeded, FirstTokenTimeout, IdleTimeout, ModelNotReady, TotalTimeout
from policies.core.events import ModelChanged, Observer

NOT_REACHED = "the model host has not been reached yet"
GONE = "the model host is not connected"
UNKNOWN = "the model host has no model of this name"


class LinkedModel:
    """One model of the host: a Backend, and a `backends.slot.ModelPlace`. Made by ModelLink.

    While the host is away, `info` is what was last known, so that what is in the cache goes on being found.

        loading   the host has not been reached yet, or loads the model
        ready     may be called
        failed    the host could not load it, and tries again
        gone      the host is not connected
    """

    def __init__(self, placeholder: BackendInfo, calls: Calls, observer: Observer) -> None:
        self._info = placeholder
        self._calls = calls
        self._observer = observer
        self._state = "loading"
        self._reason = NOT_REACHED
        #: Of the model that answered last; None before the first.
        self._fingerprint: str | None = None
        self._tried = asyncio.Event()
        self.on_filled: OnFilled = lambda _before, _now: None

    @property
    def info(self) -> BackendInfo:
        return self._info

    @property
    def ready(self) -> bool:
        return self._state == "ready"

    @property
    def state(self) -> str:
        return self._state

    @property
    def reason(self) -> str:
        return self._reason

    @property
    def tried(self) -> bool:
        """Has the model been in place or failed before, or was the host waited for in vain?"""
        return self._tried.is_set()

    async def first_try(self) -> None:
        await self._tried.wait()

    async def run(self) -> None:
        """The host loads the model, and the link keeps the connection: there is nothing to do."""

    def heard(self, state: str, reason: str, info: BackendInfo | None) -> None:
        """What the host, or the link about it, says."""
        filled = False
        if state == "ready" and info is not None:
            self._info = info
            filled = info.fingerprint != self._fingerprint
        changed = state != self._state or filled
        self._state, self._reason = state, reason
        if filled:
            before, self._fingerprint = self._fingerprint, self._info.fingerprint
            self.on_filled(before, self._info.fingerprint)
        if changed:
            self._observer.on_event(ModelChanged(model=self._info.name, state=state, reason=reason))
        if state in ("ready", "failed"):
            self._tried.set()

    def give_up_waiting(self) -> None:
        self._tried.set()

    async def infer(self, request: Request, deadline: Deadline) -> Answer:
        self._check()
        name = self._info.name

        def message(call: int, seconds: float, as_json: bool) -> list[Any]:
            return ["infer", call, name, seconds, request_value(request, as_json=as_json)]

        return read_answer(await self._calls.whole(name, deadline, message))

    async def stream(self, request: ChatRequest, deadline: Deadline) -> AsyncIterator[Chunk]:
        self._check()
        name = self._info.name
        call = self._calls.stream(name, deadline)

        def message(number: int, seconds: float, as_json: bool) -> list[Any]:
            return ["stream", number, name, seconds, request_value(request, as_json=as_json)]

        try:
            self._calls.ask(call, message)
        except DeadlineExceeded as error:
            raise _no_content(name) from error
        try:
            deadline.follow(call)
            try:
                while True:
                    chunk = await _first(call, deadline)
                    if chunk is None:
                        return
                    if chunk.kind is ChunkKind.CONTENT:
                        break
                    yield chunk
            finally:
                deadline.unfollow(call)
            yield chunk
            total = Deadline.after(request.limits.total_s, deadline.clock)
            while (chunk := await _next(call, request.limits, total)) is not None:
                yield chunk
        finally:
            self._calls.close(call)

    async def health(self) -> Health:
        return Health(ready=self.ready, reason=self._reason)

    async def aclose(self) -> None:
        """The model is the host's and the connection the link's: nothing is closed."""

    def _check(self) -> None:
        if self._state != "ready":
            raise ModelNotReady(f"the model {self._info.name!r} is not ready: {self._state}", retry_after_s=2.0)

    def __repr__(self) -> str:
        return f"LinkedModel({self._info.name}: {self._state})"


async def _first(call: StreamCall, deadline: Deadline) -> Chunk | None:
    """The next chunk before the first content; None at the end."""
    while (chunk := call.take()) is None:
        if call.over:
            return None
        if not await call.arrival(deadline):
            raise _no_content(call.backend)
    return chunk


async def _next(call: StreamCall, limits: StreamLimits, total: Deadline) -> Chunk | None:
    """The next chunk after the first content; None at the end."""
    idle: Deadline | None = None
    while True:
        # What has arrived counts for nothing after the total: without its end it must not pass for a whole answer.
        if call.drained or not total.expired():
            chunk = call.take()
            if chunk is not None or call.over:
                return chunk
        idle = idle or total.within(limits.idle_s)
        if not await call.arrival(idle):
            if idle.at >= total.at:
                raise TotalTimeout(f"the stream ran past {limits.total_s:g} s", call.backend)
            raise IdleTimeout(f"nothing for {limits.idle_s:g} s", call.backend)


def _no_content(backend: str) -> FirstTokenTimeout:
    return FirstTokenTimeout("no token before the deadline", backend)


class LinkedEmbedder:
    """The host's embedder, for classification. Implements `backends.api.Embedder`; without one, ModelNotReady."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._told: tuple[str, int] | None = None

    def heard(self, told: tuple[str, int] | None) -> None:
        self._told = told

    @property
    def ready(self) -> bool:
        return self._told is not None

    @property
    def fingerprint(self) -> str:
        return self._known()[0]

    @property
    def dimensions(self) -> int:
        return self._known()[1]

    async def embed(self, texts: Sequence[str], deadline: Deadline) -> NDArray[np.float32]:
        self._known()

        def message(call: int, seconds: float, _as_json: bool) -> list[Any]:
            return ["embed", call, seconds, texts]

        return read_array(await self._calls.whole("embedder", deadline, message))

    async def unknown_share(self, text: str, deadline: Deadline) -> float:
        self._known()

        def message(call: int, seconds: float, _as_json: bool) -> list[Any]:
            return ["unknown", call, seconds, text]

        return cast("float", await self._calls.whole("embedder", deadline, message))

    async def aclose(self) -> None:
        """It is the host's."""

    def _known(self) -> tuple[str, int]:
        if self._told is None:
            raise ModelNotReady("the embedder is not ready")
        return self._told
