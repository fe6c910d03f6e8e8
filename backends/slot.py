"""A place for a model that may still be loading, may fail to load, and may be loaded anew.

The slot is a Backend. Without a model it refuses with ModelNotReady, so its rung is skipped; loading is tried again with
growing waits until it succeeds. What a missing model means for readiness is the gateway's decision, not the slot's.

    reload    the new model is loaded beside the old one and takes its place in one step, or the old one stays; calls
              under way end on the model they began with, which is closed after the last of them
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol, TypedDict, cast

import structlog

from backends.api import Answer, Backend, BackendInfo, ChatRequest, Chunk, Health, Request
from policies.core.clock import Clock
from policies.core.deadline import Deadline
from policies.core.errors import ModelNotReady
from policies.core.events import ModelChanged, Observer

_log = structlog.get_logger("gateway.models")

#: Waits between attempts to load, in seconds; the last one repeats.
RETRY_WAITS_S = (1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
#: How long calls may go on on a model that has been replaced: it holds its memory until then.
REPLACED_LIMIT_S = 120.0

#: Told (fingerprint of the model before, None = there was none; fingerprint of the model now).
OnFilled = Callable[[str | None, str], object]


class ModelPlace(Backend, Protocol):
    """Where a worker finds one model: a Slot of its own process, or the same model in the model host."""

    #: Called when a model is in place, before any call reaches it.
    on_filled: OnFilled

    @property
    def ready(self) -> bool: ...

    @property
    def state(self) -> str:
        """ready, loading, failed or gone (its process is not there): what may be told to anybody."""
        ...

    @property
    def reason(self) -> str:
        """Why it is not ready: paths and library messages, for the admin listener and the log. Empty = it is."""
        ...

    async def first_try(self) -> None:
        """Return when the model is in place or has failed to load for the first time. Needs `run`."""
        ...

    async def run(self) -> None:
        """Do what it takes to have the model in place; returns when there is nothing more to do for it here."""
        ...


class Reloaded(TypedDict):
    """What a reload came to. Fingerprints are empty where there is no model; `error` is empty when it went well."""

    before: str
    after: str
    seconds: float
    error: str


class Slot:
    """Holds one Backend, or the reason why there is none. `info` before the first load is the configured placeholder."""

    def __init__(
        self,
        placeholder: BackendInfo,
        load: Callable[[], Awaitable[Backend]],
        clock: Clock,
        observer: Observer,
        adjust: Callable[[BackendInfo], BackendInfo] = lambda info: info,
    ) -> None:
        self._info = placeholder
        #: What the operator says differently from the model's manifest.
        self._adjust = adjust
        self._load = load
        self._clock = clock
        self._observer = observer
        self._held: _Held | None = None
        self._reason = "still loading"
        self._failed = False
        #: One load at a time: two copies of a model in memory are enough.
        self._loading = asyncio.Lock()
        self._tried = asyncio.Event()
        self._replaced: dict[asyncio.Task[None], _Held] = {}
        self.on_filled: OnFilled = lambda _before, _now: None
        #: Called after each change of `state`, `reason` or `info`.
        self.watchers: list[Callable[[], None]] = []

    @property
    def info(self) -> BackendInfo:
        return self._info

    @property
    def ready(self) -> bool:
        return self._held is not None

    @property
    def state(self) -> str:
        if self._held is not None:
            return "ready"
        return "failed" if self._failed else "loading"

    @property
    def reason(self) -> str:
        return "" if self._held is not None else self._reason

    # ---------------------------------------------------------------------------------------------------- loading

    async def fill(self) -> bool:
        """Try once to load, unless there is a model; True when there is one."""
        async with self._loading:
            if self._held is None:
                self._tell("loading")
                error = await self._load_anew()
                if error:
                    self._reason, self._failed = error, True
                    self._tell("failed", error)
                else:
                    self._tell("ready")
        self._tried.set()
        return self._held is not None

    async def keep_filling(self) -> None:
        """Try until the model is in place; waits grow from 1 s to 60 s."""
        attempt = 0
        while not await self.fill():
            await self._clock.sleep(RETRY_WAITS_S[min(attempt, len(RETRY_WAITS_S) - 1)])
            attempt += 1

    async def run(self) -> None:
        await self.keep_filling()

    async def first_try(self) -> None:
        await self._tried.wait()

    async def reload(self) -> Reloaded:
        """Load the model anew from where it lies now. Never raises for a model that cannot be loaded: see `error`."""
        began = self._clock.now()
        before = ""
        if self._held is None:
            await self.fill()
            error = self.reason
        else:
            async with self._loading:
                before = self._info.fingerprint
                error = await self._load_anew()
            if not error:
                self._tell("ready", f"loaded anew; its fingerprint was {before}")
        after = self._info.fingerprint if self._held is not None else ""
        return Reloaded(before=before, after=after, seconds=self._clock.now() - began, error=error)

    async def _load_anew(self) -> str:
        """Load and put in place; the reason if that failed."""
        try:
            model = await self._load()
        except Exception as error:  # whatever went wrong is shown; what was there goes on
            return f"{type(error).__name__}: {error}"
        old, before = self._held, self._info.fingerprint
        self._held, self._info = _Held(model), self._adjust(model.info)
        self.on_filled(before if old is not None else None, self._info.fingerprint)
        if old is not None:
            old.over = asyncio.Event()
            task = asyncio.create_task(self._close(old), name=f"close-replaced-{self._info.name}")
            self._replaced[task] = old
            task.add_done_callback(self._replaced.pop)
        return ""

    async def _close(self, old: _Held) -> None:
        """Close a replaced model after its last call, or at the limit: then what is left fails with ModelNotReady."""
        assert old.over is not None
        if old.calls:
            waits: list[asyncio.Future[object]] = [
                asyncio.ensure_future(old.over.wait()),
                asyncio.ensure_future(_slept(self._clock)),
            ]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
        try:
            await old.model.aclose()
        except Exception:
            _log.exception("replaced_model_could_not_be_closed", model=self._info.name)

    def _tell(self, state: str, reason: str = "") -> None:
        self._observer.on_event(ModelChanged(model=self._info.name, state=state, reason=reason))
        for watcher in self.watchers:
            watcher()

    # ------------------------------------------------------------------------------------------------------ calls

    async def infer(self, request: Request, deadline: Deadline) -> Answer:
        held = self._ready_model()
        held.calls += 1
        try:
            return await held.model.infer(request, deadline)
        finally:
            held.ended()

    def stream(self, request: ChatRequest, deadline: Deadline) -> AsyncIterator[Chunk]:
        return _stream(self._ready_model(), request, deadline)

    async def health(self) -> Health:
        if self._held is None:
            return Health(ready=False, reason=self._reason)
        return await self._held.model.health()

    async def aclose(self) -> None:
        """Close the model, and those it has replaced at once."""
        closing = list(self._replaced)
        for old in self._replaced.values():
            if old.over is not None:
                old.over.set()
        await asyncio.gather(*closing)
        if self._held is not None:
            await self._held.model.aclose()

    def _ready_model(self) -> _Held:
        if self._held is None:
            raise ModelNotReady(f"the model {self._info.name!r} is not ready: {self.state}", retry_after_s=2.0)
        return self._held

    def __repr__(self) -> str:
        return f"Slot({self._info.name}: {self.state})"


class _Held:
    """A model and how many calls are on it."""

    __slots__ = ("calls", "model", "over")

    def __init__(self, model: Backend) -> None:
        self.model = model
        self.calls = 0
        #: Of a model that has been replaced: there is no call on it any more, or it must end now.
        self.over: asyncio.Event | None = None

    def ended(self) -> None:
        self.calls -= 1
        if self.over is not None and not self.calls:
            self.over.set()


class _Closable(AsyncIterator[Chunk]):
    async def aclose(self) -> None: ...


async def _stream(held: _Held, request: ChatRequest, deadline: Deadline) -> AsyncIterator[Chunk]:
    held.calls += 1
    # Every stream is a generator in fact.
    chunks = cast("_Closable", held.model.stream(request, deadline))
    try:
        async for chunk in chunks:
            yield chunk
    finally:
        try:
            await chunks.aclose()
        finally:
            held.ended()


async def _slept(clock: Clock) -> object:
    await clock.sleep(REPLACED_LIMIT_S)
    return None
