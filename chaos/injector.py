"""Where faults enter: a backend below the breaker, so that what is injected is judged as if it were real."""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine
from typing import Any, Protocol

from backends.api import Answer, Backend, BackendInfo, ChatRequest, Chunk, Health, Request
from policies.core.deadline import Deadline


class Fault(Protocol):
    """Something that goes wrong with the calls of one target."""

    @property
    def name(self) -> str: ...

    async def before(self, request: Request, deadline: Deadline) -> None:
        """Wait or raise ahead of the call; must be cancellable."""
        ...


class Injector:
    """A backend with the faults that are active on it. Without faults it is the backend itself, at the price of one call."""

    __slots__ = ("_backend", "faults")

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.faults: list[Fault] = []

    @property
    def info(self) -> BackendInfo:
        return self._backend.info

    def infer(self, request: Request, deadline: Deadline) -> Coroutine[Any, Any, Answer]:
        return self._faulty_infer(request, deadline) if self.faults else self._backend.infer(request, deadline)

    def stream(self, request: ChatRequest, deadline: Deadline) -> AsyncIterator[Chunk]:
        return self._faulty_stream(request, deadline) if self.faults else self._backend.stream(request, deadline)

    async def health(self) -> Health:
        return await self._backend.health()

    async def aclose(self) -> None:
        await self._backend.aclose()

    async def _faulty_infer(self, request: Request, deadline: Deadline) -> Answer:
        for fault in tuple(self.faults):
            await fault.before(request, deadline)
        return await self._backend.infer(request, deadline)

    async def _faulty_stream(self, request: ChatRequest, deadline: Deadline) -> AsyncIterator[Chunk]:
        for fault in tuple(self.faults):
            await fault.before(request, deadline)
        chunks = self._backend.stream(request, deadline)
        try:
            async for chunk in chunks:
                yield chunk
        finally:
            # An async generator left half-read stops its upstream only when closed.
            close = getattr(chunks, "aclose", None)
            if close is not None:
                await close()

    def __repr__(self) -> str:
        active = ", ".join(fault.name for fault in self.faults) or "no faults"
        return f"Injector({active}, {self._backend!r})"
