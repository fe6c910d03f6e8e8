"""Without faults the injector is not there; with one, calls go through it and streams still close."""

import asyncio
from typing import Any

import pytest

from backends.scripted import Outcome, ScriptedBackend, chat
from chaos.injector import Injector
from policies.core.clock import FakeClock
from policies.core.deadline import Deadline
from policies.core.errors import ConnectFailed
from tests.support.upstream import info, question


class Slow:
    """Waits a second, or raises."""

    name = "slow"

    def __init__(self, clock: FakeClock, error: Exception | None = None) -> None:
        self.clock = clock
        self.error = error

    async def before(self, request: Any, deadline: Deadline) -> None:
        await self.clock.sleep(1.0)
        if self.error is not None:
            raise self.error


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def backend(clock: FakeClock) -> ScriptedBackend:
    return ScriptedBackend(info("m"), [Outcome(chat("a b c"))], clock)


async def test_without_faults_it_is_the_backend(clock: FakeClock, backend: ScriptedBackend) -> None:
    injector = Injector(backend)
    deadline = Deadline.after(5, clock)
    assert await injector.infer(question(), deadline) == await backend.infer(question(), deadline)
    stream = injector.stream(question(), deadline)
    assert type(stream) is type(backend.stream(question(), deadline))
    assert injector.info is backend.info
    assert repr(injector) == f"Injector(no faults, {backend!r})"
    await injector.aclose()
    assert not (await injector.health()).ready


async def test_faults_come_first(clock: FakeClock, backend: ScriptedBackend) -> None:
    injector = Injector(backend)
    injector.faults.append(Slow(clock))
    deadline = Deadline.after(5, clock)
    whole = asyncio.ensure_future(injector.infer(question(), deadline))
    stream = injector.stream(question(), deadline)
    first = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    assert backend.calls == []
    clock.advance(1.0)
    await whole
    await first
    await stream.aclose()  # type: ignore[attr-defined]
    assert (len(backend.calls), backend.cancelled, backend.in_flight) == (2, 1, 0)

    injector.faults[:] = [Slow(clock, ConnectFailed("injected"))]
    failed = asyncio.ensure_future(injector.infer(question(), deadline))
    await asyncio.sleep(0)
    clock.advance(1.0)
    with pytest.raises(ConnectFailed):
        await failed
    assert len(backend.calls) == 2
    assert repr(injector).startswith("Injector(slow, ")
