import asyncio

import pytest

from backends.api import BackendInfo, Capabilities, ChatRequest, Role
from backends.scripted import Outcome, ScriptedBackend, chat
from backends.slot import RETRY_WAITS_S, Slot
from policies.core.clock import FakeClock
from policies.core.deadline import Deadline
from policies.core.errors import ModelNotReady
from policies.core.events import Event, ModelChanged

REQUEST = ChatRequest({"messages": [{"role": "user", "content": "hi"}]})


def info(fingerprint: str) -> BackendInfo:
    return BackendInfo(name="light", role=Role.LIGHT, model="m", fingerprint=fingerprint, capabilities=Capabilities())


class Loader:
    """Fails as often as told, then gives a model."""

    def __init__(self, clock: FakeClock, failures: int) -> None:
        self.left = failures
        self.clock = clock
        self.tries = 0

    async def __call__(self) -> ScriptedBackend:
        self.tries += 1
        if self.left:
            self.left -= 1
            raise OSError("the file is gone")
        return ScriptedBackend(info("real"), [Outcome(chat("hello"))], self.clock)


class Seen:
    def __init__(self) -> None:
        self.states: list[str] = []

    def on_event(self, event: Event) -> None:
        assert isinstance(event, ModelChanged)
        self.states.append(event.state)


async def test_an_empty_slot_refuses_with_the_reason() -> None:
    clock, seen = FakeClock(), Seen()
    slot = Slot(info("none"), Loader(clock, 1), clock, seen)
    deadline = Deadline.after(5, clock)
    with pytest.raises(ModelNotReady, match="not ready: loading"):
        await slot.infer(REQUEST, deadline)
    assert not await slot.fill()
    with pytest.raises(ModelNotReady, match="not ready: failed"):
        slot.stream(REQUEST, deadline)
    assert not (await slot.health()).ready
    assert "the file is gone" in (await slot.health()).reason
    assert seen.states == ["loading", "failed"]


async def test_loading_is_tried_again_with_growing_waits() -> None:
    clock, seen = FakeClock(), Seen()
    loader = Loader(clock, failures=3)
    slot = Slot(info("none"), loader, clock, seen)
    task = asyncio.create_task(slot.keep_filling())
    for tries, wait in enumerate(RETRY_WAITS_S[:3], start=1):
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert loader.tries == tries
        clock.advance(wait - 0.001)
        await asyncio.sleep(0)
        assert loader.tries == tries
        clock.advance(0.002)
    await task
    assert slot.info.fingerprint == "real"
    assert (await slot.infer(REQUEST, Deadline.after(5, clock))).model == "scripted"  # type: ignore[union-attr]
    assert seen.states[-1] == "ready"


async def test_the_operators_word_adjusts_the_manifests() -> None:
    clock = FakeClock()

    def adjust(found: BackendInfo) -> BackendInfo:
        return BackendInfo(
            name=found.name,
            role=found.role,
            model=found.model,
            fingerprint=found.fingerprint,
            capabilities=Capabilities(languages=frozenset({"zh"})),
        )

    slot = Slot(info("none"), Loader(clock, 0), clock, Seen(), adjust)
    assert await slot.fill()
    assert slot.info.capabilities.languages == {"zh"}
    await slot.aclose()
