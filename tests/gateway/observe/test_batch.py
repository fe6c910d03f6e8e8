import asyncio

from gateway.observe.batch import MOST, BatchedObserver
from policies.core.events import Attempted, Event


class Seen:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def on_event(self, event: Event) -> None:
        self.events.append(event)


def attempted(number: int) -> Attempted:
    return Attempted(backend=str(number), outcome="ok", seconds=0.0, first_s=0.0)


async def test_events_wait_for_a_flush_and_keep_their_order() -> None:
    seen = Seen()
    batch = BatchedObserver(seen)
    for number in range(3):
        batch.on_event(attempted(number))
    assert seen.events == []
    batch.flush()
    assert [event.backend for event in seen.events] == ["0", "1", "2"]  # type: ignore[attr-defined]
    batch.flush()
    assert len(seen.events) == 3


async def test_a_full_batch_is_told_at_once() -> None:
    seen = Seen()
    batch = BatchedObserver(seen)
    for number in range(MOST + 1):
        batch.on_event(attempted(number))
    assert len(seen.events) == MOST


async def test_the_last_events_do_not_wait_for_more() -> None:
    seen = Seen()
    batch = BatchedObserver(seen)
    batch.on_event(attempted(1))
    async with asyncio.timeout(2):
        while not seen.events:
            await asyncio.sleep(0)
