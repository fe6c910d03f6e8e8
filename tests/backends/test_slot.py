import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from backends.api import BackendInfo, Capabilities, ChatRequest, Chunk, Role
from backends.scripted import Outcome, ScriptedBackend, chat
from backends.slot import REPLACED_LIMIT_S, RETRY_WAITS_S, Slot
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


# ----------------------------------------------------------------------------------------------------------- reload


class Models:
    """Gives the models (or raises the errors) that it was made with, one for each load."""

    def __init__(self, *given: ScriptedBackend | Exception) -> None:
        self.given = list(given)
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self) -> ScriptedBackend:
        await self.gate.wait()
        found = self.given.pop(0)
        if isinstance(found, Exception):
            raise found
        return found


def model(fingerprint: str, clock: FakeClock, delay_s: float = 0.0) -> ScriptedBackend:
    return ScriptedBackend(info(fingerprint), [Outcome(chat(f"from {fingerprint}"), delay_s=delay_s)], clock)


async def test_a_reload_puts_the_new_model_in_place_and_lets_calls_end_on_the_old_one() -> None:
    clock, seen = FakeClock(), Seen()
    old, new = model("old", clock, delay_s=2.0), model("new", clock)
    models = Models(old, new)
    slot = Slot(info("none"), models, clock, seen)
    filled: list[tuple[str | None, str]] = []
    slot.on_filled = lambda before, now: filled.append((before, now))
    changes: list[str] = []
    slot.watchers.append(lambda: changes.append(slot.info.fingerprint))
    await slot.fill()
    deadline = Deadline.after(60, clock)
    whole = asyncio.create_task(slot.infer(REQUEST, deadline))
    stream = asyncio.create_task(_all(slot.stream(REQUEST, deadline)))
    await asyncio.sleep(0)
    models.gate.clear()
    reload = asyncio.create_task(slot.reload())
    await asyncio.sleep(0)
    assert slot.ready and slot.info.fingerprint == "old"  # in force until the new one is there
    clock.advance(0.5)
    models.gate.set()
    assert await reload == {"before": "old", "after": "new", "seconds": 0.5, "error": ""}
    assert filled == [(None, "old"), ("old", "new")]
    assert changes == ["none", "old", "new"]
    assert await slot.infer(REQUEST, deadline) == chat("from new")
    assert old.in_flight == 2 and not old.closed
    clock.advance(2.0)
    assert await whole == chat("from old")
    assert len(await stream) > 2
    assert await _soon(lambda: old.closed)
    assert seen.states == ["loading", "ready", "ready"]
    await slot.aclose()
    assert new.closed


async def _all(chunks: AsyncIterator[Chunk]) -> list[Chunk]:
    return [chunk async for chunk in chunks]


async def _soon(condition: Callable[[], bool]) -> bool:
    for _ in range(20):
        if condition():
            return True
        await asyncio.sleep(0)
    return False


async def test_a_replaced_model_without_calls_is_closed_at_once_and_one_with_calls_at_the_limit() -> None:
    clock = FakeClock()
    idle, busy, last = model("1", clock), model("2", clock, delay_s=3600), model("3", clock)
    slot = Slot(info("none"), Models(idle, busy, last), clock, Seen())
    await slot.fill()
    await slot.reload()
    assert await _soon(lambda: idle.closed)
    task = asyncio.create_task(slot.infer(REQUEST, Deadline.after(9000, clock)))
    await asyncio.sleep(0)
    await slot.reload()
    assert not await _soon(lambda: busy.closed)
    clock.advance(REPLACED_LIMIT_S + 1)
    assert await _soon(lambda: busy.closed)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await slot.aclose()


async def test_the_end_does_not_wait_for_calls_on_a_replaced_model() -> None:
    clock = FakeClock()
    old, new = model("old", clock, delay_s=3600), model("new", clock)
    slot = Slot(info("none"), Models(old, new), clock, Seen())
    await slot.fill()
    task = asyncio.create_task(slot.infer(REQUEST, Deadline.after(9000, clock)))
    await asyncio.sleep(0)
    await slot.reload()
    await asyncio.wait_for(slot.aclose(), 1.0)
    assert old.closed and new.closed
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_reload_that_fails_leaves_the_model_in_force() -> None:
    clock, seen = FakeClock(), Seen()
    old = model("old", clock)
    slot = Slot(info("none"), Models(old, OSError("the disk is gone")), clock, seen)
    await slot.fill()
    told = await slot.reload()
    assert told == {"before": "old", "after": "old", "seconds": 0.0, "error": "OSError: the disk is gone"}
    assert (slot.ready, slot.state, slot.reason) == (True, "ready", "")
    assert await slot.infer(REQUEST, Deadline.after(5, clock)) == chat("from old")
    assert seen.states == ["loading", "ready"]
    await slot.aclose()


async def test_a_reload_without_a_model_is_a_try_to_load() -> None:
    clock, seen = FakeClock(), Seen()
    slot = Slot(info("none"), Models(OSError("no"), OSError("still no"), model("it", clock)), clock, seen)
    running = asyncio.create_task(slot.run())
    await slot.first_try()
    assert slot.state == "failed"
    told = await slot.reload()
    assert (told["before"], told["after"], told["error"]) == ("", "", "OSError: still no")
    told = await slot.reload()
    assert (told["before"], told["after"], told["error"]) == ("", "it", "")
    clock.advance(RETRY_WAITS_S[0] + 0.1)
    await asyncio.wait_for(running, 1.0)  # there is nothing left to load
    assert seen.states[-1] == "ready"
    await slot.aclose()


async def test_two_reloads_at_once_load_one_after_the_other() -> None:
    clock = FakeClock()
    models = Models(model("1", clock), model("2", clock), model("3", clock))
    slot = Slot(info("none"), models, clock, Seen())
    await slot.fill()
    models.gate.clear()
    reloads = asyncio.gather(slot.reload(), slot.reload())
    await asyncio.sleep(0)
    models.gate.set()
    both = await reloads
    assert [(told["before"], told["after"]) for told in both] == [("1", "2"), ("2", "3")]
    await slot.aclose()
