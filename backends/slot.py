"""A place for a model that may still be loading or may fail to load.

The slot is a Backend. Without a model it refuses with ModelNotReady, so its rung is skipped; loading is tried again with
growing waits until it succeeds. What a missing model means for readiness is the gateway's decision, not the slot's.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

from backends.api import Answer, Backend, BackendInfo, ChatRequest, Chunk, Health, Request
from policies.core.clock import Clock
from policies.core.deadline import Deadline
from policies.core.errors import ModelNotReady
from policies.core.events import ModelChanged, Observer

#: Waits between attempts to load, in seconds; the last one repeats.
RETRY_WAITS_S = (1.0, 2.0, 5.0, 10.0, 30.0, 60.0)


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
        self._model: Backend | None = None
        self._reason = "still loading"
        self._failed = False
        #: Told the new model's fingerprint when it is in place.
        self.on_filled: Callable[[str], None] = lambda _fingerprint: None

    @property
    def info(self) -> BackendInfo:
        return self._info

    @property
    def model(self) -> Backend | None:
        return self._model

    @property
    def state(self) -> str:
        """ready, loading or failed: what may be told to anybody. Why it failed is for the operator: `reason`."""
        if self._model is not None:
            return "ready"
        return "failed" if self._failed else "loading"

    @property
    def reason(self) -> str:
        """Why there is no model: paths and library messages, for the admin listener and the log. Empty = there is one."""
        return "" if self._model is not None else self._reason

    async def fill(self) -> bool:
        """Try once to load; True when the model is in place."""
        name = self._info.name
        self._observer.on_event(ModelChanged(model=name, state="loading"))
        try:
            self._model = await self._load()
        except Exception as error:  # whatever went wrong is shown, and loading is tried again
            self._reason = f"{type(error).__name__}: {error}"
            self._failed = True
            self._observer.on_event(ModelChanged(model=name, state="failed", reason=self._reason))
            return False
        self._info = self._adjust(self._model.info)
        self.on_filled(self._info.fingerprint)
        self._observer.on_event(ModelChanged(model=name, state="ready"))
        return True

    async def keep_filling(self) -> None:
        """Try until the model is in place; waits grow from 1 s to 60 s."""
        attempt = 0
        while not await self.fill():
            await self._clock.sleep(RETRY_WAITS_S[min(attempt, len(RETRY_WAITS_S) - 1)])
            attempt += 1

    def _ready_model(self) -> Backend:
        if self._model is None:
            raise ModelNotReady(f"the model {self._info.name!r} is not ready: {self.state}", retry_after_s=2.0)
        return self._model

    async def infer(self, request: Request, deadline: Deadline) -> Answer:
        return await self._ready_model().infer(request, deadline)

    def stream(self, request: ChatRequest, deadline: Deadline) -> AsyncIterator[Chunk]:
        return self._ready_model().stream(request, deadline)

    async def health(self) -> Health:
        if self._model is None:
            return Health(ready=False, reason=self._reason)
        return await self._model.health()

    async def aclose(self) -> None:
        if self._model is not None:
            await self._model.aclose()

    def __repr__(self) -> str:
        return f"Slot({self._info.name}: {self.state})"
