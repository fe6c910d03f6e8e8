import asyncio

import pytest

from policies.core.clock import FakeClock, SystemClock
from policies.core.deadline import Deadline
from policies.core.errors import DeadlineExceeded


def test_children_are_never_later_than_their_parent() -> None:
    clock = FakeClock()
    deadline = Deadline.after(10, clock)
    assert deadline.within(3).remaining() == 3
    assert deadline.within(30).remaining() == 10
    assert deadline.less(4).remaining() == 6
    clock.advance(11)
    assert deadline.expired()
    assert deadline.remaining() == -1


async def test_a_passed_deadline_refuses_to_start() -> None:
    clock = FakeClock()
    deadline = Deadline.after(1, clock)
    clock.advance(1)
    with pytest.raises(DeadlineExceeded):
        async with deadline.timeout():
            pytest.fail("the block must not run")


async def test_the_block_ends_when_the_moment_comes() -> None:
    deadline = Deadline.after(0.01, SystemClock())
    with pytest.raises(DeadlineExceeded):
        async with deadline.timeout():
            await asyncio.Event().wait()


async def test_extending_moves_open_blocks_along() -> None:
    clock = SystemClock()
    deadline = Deadline.after(0.01, clock)
    later = asyncio.Event()
    asyncio.get_running_loop().call_later(0.05, later.set)
    async with deadline.timeout():
        deadline.extend(clock.now() + 5)
        await later.wait()
    deadline.extend(clock.now())  # never earlier
    assert deadline.remaining() > 4


async def test_a_timeout_error_of_the_body_passes() -> None:
    with pytest.raises(TimeoutError):
        async with Deadline.after(5, SystemClock()).timeout():
            raise TimeoutError("the body's own")


async def test_a_cancellation_from_outside_stays_a_cancellation() -> None:
    async def body() -> None:
        async with Deadline.after(5, SystemClock()).timeout():
            await asyncio.Event().wait()

    task = asyncio.create_task(body())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_the_fake_clock_wakes_sleepers_in_order() -> None:
    clock = FakeClock()
    woken: list[int] = []

    async def sleeper(seconds: int) -> None:
        await clock.sleep(seconds)
        woken.append(seconds)

    tasks = [asyncio.create_task(sleeper(s)) for s in (3, 1, 2)]
    await asyncio.sleep(0)
    clock.advance(2)
    await asyncio.sleep(0)
    assert woken == [1, 2]
    clock.advance(1)
    await asyncio.gather(*tasks)
    assert woken == [1, 2, 3]
