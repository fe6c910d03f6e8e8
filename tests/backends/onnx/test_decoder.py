from __future__ import annotations

import numpy as np
import pytest

from backends.onnx.build.smollm2 import GRAPH_NAME
from backends.onnx.decoder import FIRST_ROOM, Rooms, decoder_shape
from backends.onnx.manifest import ModelError
from backends.onnx.session import create_session
from tests.support.tiny_llama import CONTEXT, KV_HEADS, LAYERS


@pytest.fixture(scope="module", params=["fp32", "q8"])
def rooms(request, tiny_chat_store) -> Rooms:
    session = create_session(tiny_chat_store.folder("smollm2", request.param) / GRAPH_NAME)
    return Rooms(session, decoder_shape(session, CONTEXT))


def tokens(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(4, 250, size=count).tolist()


def greedy(rooms: Rooms, prompt: list[int], steps: int, cuts: tuple[int, ...] = (), size: int = 0) -> list[np.ndarray]:
    """Logits after the prompt and each of `steps` greedy tokens; the prompt is read in pieces ending at `cuts`."""
    room, length = rooms.take(max(size, len(prompt))), 0
    for end in (*cuts, len(prompt)):
        logits, length = room.run(prompt[length:end], length), end
    rows = [logits.copy()]
    for _ in range(steps):
        room = rooms.grown(room, length, length + 1)
        rows.append(room.run([int(rows[-1].argmax())], length).copy())
        length += 1
    rooms.give_back(room)
    return rows


def test_a_prompt_read_in_pieces_gives_the_same_bits(rooms):
    prompt = tokens(100)
    whole = greedy(rooms, prompt, 5)
    for cuts in [(2,), (64,), (98,), (20, 40, 60, 80), (3, 50, 97)]:
        assert np.array_equal(whole, greedy(rooms, prompt, 5, cuts))


def test_neither_the_bucket_nor_what_lies_beyond_the_length_changes_a_bit(rooms):
    prompt = tokens(50)
    whole = greedy(rooms, prompt, 5)
    assert np.array_equal(whole, greedy(rooms, prompt, 5, size=4 * FIRST_ROOM))
    room = rooms.take(60)
    room.memory[:] = np.random.default_rng(0).normal(size=room.memory.shape) * 50
    rooms.give_back(room)
    assert np.array_equal(whole, greedy(rooms, prompt, 5))


def test_growing_in_the_middle_of_an_answer_changes_nothing(rooms):
    prompt = tokens(FIRST_ROOM - 3)
    grown = greedy(rooms, prompt, 8)
    assert np.array_equal(grown, greedy(rooms, prompt, 8, size=FIRST_ROOM * 2))


def test_two_rooms_do_not_touch_each_other(rooms):
    first, second = tokens(30, 1), tokens(40, 2)
    alone = [greedy(rooms, prompt, 0)[0] for prompt in (first, second)]
    a, b = rooms.take(60), rooms.take(60)
    a.run(first, 0)
    b.run(second, 0)
    next_a = a.run([9], 30).copy()
    again = rooms.take(60)
    again.run(first, 0)
    assert np.array_equal(next_a, again.run([9], 30))
    assert not np.array_equal(alone[0], alone[1])
    for room in (a, b, again):
        rooms.give_back(room)


def test_buckets_double_up_to_the_context(rooms):
    assert [rooms.bucket(n) for n in (1, FIRST_ROOM, FIRST_ROOM + 1, CONTEXT)] == [256, 256, 512, CONTEXT]
    with pytest.raises(ValueError, match="context"):
        rooms.bucket(CONTEXT + 1)


def test_memory_in_use_is_counted(rooms):
    before = rooms.bytes_in_use
    room = rooms.take(10)
    assert rooms.bytes_in_use - before == room.memory.nbytes == FIRST_ROOM * LAYERS * 2 * KV_HEADS * 16 * 4
    larger = rooms.grown(room, 10, FIRST_ROOM + 1)
    assert rooms.bytes_in_use - before == larger.memory.nbytes
    rooms.give_back(larger)
    assert rooms.bytes_in_use == before


def test_the_smallest_rooms_are_used_again(rooms):
    room = rooms.take(10)
    rooms.give_back(room)
    assert rooms.take(20) is room
    rooms.give_back(room)


@pytest.mark.parametrize(
    ("bad", "length"), [([-1, 5], 0), ([5, 100_000], 0), ([], 0), ([5], FIRST_ROOM), ([5] * 3, FIRST_ROOM - 2)]
)
def test_what_would_read_or_write_elsewhere_is_refused_before_the_run(rooms, bad, length):
    room = rooms.take(10)
    with pytest.raises(ValueError, match=r"fit a room|outside the vocabulary"):
        room.run(bad, length)
    rooms.give_back(room)


def test_another_graph_is_refused(tiny_store):
    session = create_session(tiny_store.folder("minilm", "fp32") / "model.onnx")
    with pytest.raises(ModelError, match="past_k0"):
        decoder_shape(session, 100)
