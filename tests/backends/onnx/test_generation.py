from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from backends.api import Priority
from backends.onnx.detokenize import StreamText, TokenBytes
from backends.onnx.generation import GenerationLimits, Generator
from backends.onnx.sampling import Sampler, Sampling
from backends.onnx.sequence import Piece, Sequence, Work, piece_size
from policies.core.clock import FakeClock
from policies.core.errors import LimitReached, ModelFailed, ModelNotReady
from tests.support.scripted_decoder import VOCABULARY, ScriptedRooms

STOP = 2
LETTERS = TokenBytes([bytes([32 + value]) for value in range(VOCABULARY)])


def work(name: int, max_tokens: int = 3, priority: Priority = Priority.NORMAL, prompt: int = 2, **extra) -> Work:
    """`prompt` tokens, the first of which names the sequence in the decoder's record."""
    return Work(
        prompt=[name, *[1] * (prompt - 1)],
        max_tokens=max_tokens,
        sampler=Sampler(Sampling(temperature=0.0)),
        text=StreamText(LETTERS),
        priority=priority,
        **extra,
    )


async def finish(sequence: Sequence) -> tuple[str, Piece]:
    """The whole text and the last piece."""
    text = ""
    async with asyncio.timeout(10):
        while True:
            piece = await sequence.next()
            text += piece.text
            if piece.finish is not None:
                return text, piece


async def started(rooms: ScriptedRooms, runs: int = 1) -> None:
    """Until the engine is inside so many more runs."""
    for _ in range(runs):
        assert await asyncio.to_thread(rooms.started.acquire, timeout=10)


@pytest.fixture
def rooms() -> ScriptedRooms:
    return ScriptedRooms()


@pytest.fixture
async def generator(rooms: ScriptedRooms) -> AsyncIterator[Generator]:
    limits = GenerationLimits(active=2, vip_extra=1, waiting=2, prefill_piece=4)
    made = Generator("light", rooms, frozenset({STOP}), FakeClock(), limits)
    yield made
    rooms.free()
    await made.aclose()


async def test_text_ends_by_length_and_counts_its_tokens(generator, rooms):
    text, last = await finish(generator.submit(work(5)))
    assert text == chr(32 + 33) * 3
    assert (last.tokens, last.finish) == (3, "length")
    assert rooms.runs == [(5, 2), (5, 1), (5, 1)]


async def test_a_stop_token_ends_the_text_and_is_not_counted(generator, rooms):
    rooms.answers[5] = STOP
    text, last = await finish(generator.submit(work(5)))
    assert (text, last.tokens, last.finish) == ("", 0, "stop")


async def test_a_whole_answer_comes_in_one_piece(generator):
    sequence = generator.submit(work(5, streaming=False))
    piece = await sequence.next()
    assert piece == Piece(chr(32 + 33) * 3, 3, "length")


async def test_sequences_take_turns_token_by_token(generator, rooms):
    rooms.hold()
    first, second = generator.submit(work(5, 4)), generator.submit(work(6, 4))
    rooms.free()
    await asyncio.gather(finish(first), finish(second))
    assert [name for name, _ in rooms.runs] == [5, 6, 5, 6, 5, 6, 5, 6]


async def test_a_long_prompt_is_read_in_pieces_between_the_tokens_of_others(generator, rooms):
    rooms.hold()
    short, long = generator.submit(work(5, 4)), generator.submit(work(6, 1, prompt=13))
    rooms.free()
    await asyncio.gather(finish(short), finish(long))
    assert rooms.runs == [(5, 2), (6, 4), (5, 1), (6, 4), (5, 1), (6, 5), (5, 1)]


async def test_a_vip_prompt_is_read_before_the_next_turn_of_others(generator, rooms):
    rooms.hold()
    others = [generator.submit(work(name, 5)) for name in (5, 6)]
    rooms.step(2)
    await started(rooms, 3)  # the third run, of 5, is under way
    vip = generator.submit(work(7, 2, Priority.VIP, prompt=9))
    rooms.free()
    await asyncio.gather(finish(vip), *(finish(other) for other in others))
    names = [name for name, _ in rooms.runs]
    # Both places are taken: the VIP has one of its own. All of its prompt first, then it goes round like the others.
    assert names[:5] == [5, 6, 5, 7, 7]
    assert names[5:9] == [6, 5, 7, 6]


async def test_vips_keep_their_order_among_themselves(rooms):
    generator = Generator("light", rooms, frozenset(), FakeClock(), GenerationLimits(active=4, prefill_piece=4))
    rooms.hold()
    busy = generator.submit(work(5, 1))
    await started(rooms)
    vips = [generator.submit(work(name, 1, Priority.VIP, prompt=9)) for name in (7, 8)]
    rooms.free()
    await asyncio.gather(finish(busy), *(finish(vip) for vip in vips))
    assert [name for name, _ in rooms.runs] == [5, 7, 7, 8, 8]
    await generator.aclose()


async def test_the_queue_goes_by_class_and_then_by_arrival(rooms):
    generator = Generator("light", rooms, frozenset(), FakeClock(), GenerationLimits(active=1, vip_extra=0))
    rooms.hold()
    running = generator.submit(work(5, 1))
    await started(rooms)
    queued = [(9, Priority.BATCH), (6, Priority.NORMAL), (8, Priority.NORMAL), (7, Priority.VIP)]
    waiting = [generator.submit(work(name, 1, priority)) for name, priority in queued]
    rooms.free()
    await asyncio.gather(finish(running), *(finish(sequence) for sequence in waiting))
    assert [name for name, _ in rooms.runs] == [5, 7, 6, 8, 9]
    await generator.aclose()


async def test_too_many_are_refused_with_a_time_to_come_back(generator, rooms):
    rooms.hold()
    taken = [generator.submit(work(name, 2)) for name in (5, 6, 7, 8)]
    with pytest.raises(LimitReached, match="'light'") as refused:
        generator.submit(work(9))
    assert refused.value.retry_after_s is not None
    assert refused.value.retry_after_s >= 1.0
    vip = generator.submit(work(10, 1, Priority.VIP))
    rooms.free()
    await asyncio.gather(finish(vip), *(finish(sequence) for sequence in taken))


async def test_cancelling_frees_the_place_at_once(generator, rooms):
    rooms.hold()
    first, second = generator.submit(work(5, 50)), generator.submit(work(6, 50))
    queued = generator.submit(work(7, 1))
    await started(rooms)  # 5 is running, 6 lines up
    generator.cancel(second)
    rooms.step()
    await started(rooms)
    generator.cancel(first)  # its turn may be running: over after this token
    rooms.free()
    await finish(queued)
    assert [name for name, _ in rooms.runs].count(6) == 0
    assert [name for name, _ in rooms.runs].count(5) <= 2
    async with asyncio.timeout(10):
        while generator.active:
            await asyncio.sleep(0.001)


async def test_cancelling_what_waits_removes_it(generator, rooms):
    rooms.hold()
    running = [generator.submit(work(name, 1)) for name in (5, 6)]
    queued = [generator.submit(work(name, 1)) for name in (7, 8)]
    with pytest.raises(LimitReached):
        generator.submit(work(9, 1))
    generator.cancel(queued[0])
    replacement = generator.submit(work(9, 1))
    rooms.free()
    await asyncio.gather(*(finish(sequence) for sequence in (*running, queued[1], replacement)))
    assert 7 not in [name for name, _ in rooms.runs]


async def test_one_failing_run_hurts_nobody_else(generator, rooms):
    rooms.broken[6] = RuntimeError("no such kernel\nstack trace")
    good, bad = generator.submit(work(5)), generator.submit(work(6))
    with pytest.raises(ModelFailed, match=r"RuntimeError: no such kernel$") as failed:
        await finish(bad)
    assert failed.value.backend == "light"
    assert (await finish(good))[1].finish == "length"
    assert (await finish(generator.submit(work(7))))[1].finish == "length"


async def test_logits_that_are_no_numbers_fail_the_answer(generator, rooms):
    rooms.broken[6] = FloatingPointError("the model's logits are not finite numbers")
    with pytest.raises(ModelFailed, match="not finite"):
        await finish(generator.submit(work(6)))


async def test_closing_fails_what_is_under_way_and_refuses_more(generator, rooms):
    rooms.hold()
    sequences = [generator.submit(work(name, 50)) for name in (5, 6, 7)]
    await started(rooms)
    closing = asyncio.create_task(generator.aclose())
    await asyncio.sleep(0)
    rooms.free()
    await closing
    for sequence in sequences:
        with pytest.raises(ModelNotReady, match="unloaded"):
            await finish(sequence)
    with pytest.raises(ModelNotReady):
        generator.submit(work(9))


async def test_rooms_are_given_back(generator, rooms):
    await asyncio.gather(*(finish(generator.submit(work(name))) for name in (5, 6, 7)))
    await generator.aclose()
    assert rooms.given == 0


@pytest.mark.parametrize("piece", [2, 3, 4, 64])
def test_prompts_are_cut_so_that_no_single_token_is_left(piece):
    for length in range(2, 200):
        left, sizes = length, []
        while left:
            sizes.append(piece_size(left, piece))
            left -= sizes[-1]
        assert min(sizes) >= 2
        assert max(sizes) <= piece + 1


def test_pieces_of_one_token_are_refused(rooms):
    with pytest.raises(ValueError, match="at least 2"):
        Generator("light", rooms, frozenset(), FakeClock(), GenerationLimits(prefill_piece=1))
