"""Messages over one connection, however the bytes are cut."""

from __future__ import annotations

import asyncio
import socket

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.frames import FrameConnection
from tests.support.waiting import until


class Ends:
    """Two connected ends in one loop, and what they received."""

    def __init__(self) -> None:
        self.received: list[object] = []
        self.lost: list[Exception | None] = []

    async def open(self, most_bytes: int = 1 << 20, most_sent: int = 1 << 20) -> Ends:
        first, second = socket.socketpair()
        loop = asyncio.get_running_loop()
        _, self.sender = await loop.create_connection(
            lambda: FrameConnection(lambda _: None, lambda _: None, most_sent), sock=first
        )
        _, self.receiver = await loop.create_connection(
            lambda: FrameConnection(self.received.append, self.lost.append, most_bytes), sock=second
        )
        return self

    async def close(self) -> None:
        self.sender.close()
        self.receiver.close()
        await until(lambda: self.lost)


@pytest.fixture
async def ends():
    ends = await Ends().open()
    yield ends
    await ends.close()


async def test_messages_arrive_whole_and_in_order(ends):
    sent = [["beat", {"n": n, "data": b"x" * n}] for n in (0, 1, 200, 100_000, 3)]
    for message in sent:
        assert ends.sender.send(message)
    await until(lambda: len(ends.received) == len(sent))
    assert ends.received == sent


def feed(connection, data):
    """What a transport does with bytes that have arrived."""
    while data:
        buffer = connection.get_buffer(-1)
        size = min(len(buffer), len(data))
        buffer[:size] = data[:size]
        connection.buffer_updated(size)
        data = data[size:]


message = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=10,
)


@given(st.lists(message, max_size=6), st.lists(st.integers(1, 40), min_size=1, max_size=30))
def test_bytes_may_be_cut_anywhere(messages, cuts):
    received: list[object] = []
    connection = FrameConnection(received.append, lambda _: None)
    frames = [msgspec.msgpack.encode(item) for item in messages]
    data = b"".join(len(frame).to_bytes(4, "big") + frame for frame in frames)
    turn = 0
    while data:
        size = cuts[turn % len(cuts)]
        feed(connection, data[:size])
        data, turn = data[size:], turn + 1
    assert received == messages


@given(st.lists(st.integers(0, 100) | st.integers(200_000, 600_000), max_size=5), st.integers(1, 300_000))
def test_large_and_small_frames_follow_each_other(sizes, cut):
    received: list[object] = []
    connection = FrameConnection(received.append, lambda _: None)
    sent = [[number, bytes(size)] for number, size in enumerate(sizes)]
    frames = [msgspec.msgpack.encode(item) for item in sent]
    data = b"".join(len(frame).to_bytes(4, "big") + frame for frame in frames)
    for start in range(0, len(data), cut if len(data) < 200 * cut else len(data)):
        feed(connection, data[start : start + cut] if len(data) < 200 * cut else data)
    assert received == sent
    assert len(connection.get_buffer(-1)) == 256 << 10  # the room for a large frame is given back


async def test_a_frame_that_is_too_large_ends_the_connection():
    small = await Ends().open(most_bytes=100)
    small.sender.send("x" * 1000)
    await until(lambda: small.lost)
    assert "a frame of 1003 bytes; at most 100 are read" in str(small.lost[0])
    assert small.received == []
    assert len(small.lost) == 1
    await until(lambda: not small.sender.open)
    assert small.sender.send("more") is False
    small.sender.close()


async def test_a_message_that_is_too_large_is_not_sent():
    small = await Ends().open(most_sent=10)
    with pytest.raises(ValueError, match="at most 10 are sent"):
        small.sender.send("x" * 100)
    assert small.sender.open
    await small.close()


async def test_what_is_no_msgpack_ends_the_connection(ends):
    ends.sender.transport.write((3).to_bytes(4, "big") + b"\xc1\xc1\xc1")
    await until(lambda: ends.lost)
    assert ends.received == []


async def test_who_does_not_read_is_behind(ends):
    ends.receiver.transport.pause_reading()
    while not ends.sender.behind:
        ends.sender.send(b"x" * 60_000)
        await asyncio.sleep(0)
    waiting = asyncio.create_task(ends.sender.room())
    ends.receiver.transport.resume_reading()
    await asyncio.wait_for(waiting, 2.0)
    assert not ends.sender.behind


async def test_a_connection_that_is_over_holds_no_buffers():
    """What refers to it is a cycle, as a rule, and a supervisor collects seldom: each worker it has had would stay."""
    ends = await Ends().open()
    ends.sender.send("x" * 300_000)
    await until(lambda: ends.received)
    await ends.close()
    assert len(ends.receiver.get_buffer(-1)) == 0
    assert (len(ends.receiver._small), len(ends.receiver._view)) == (0, 0)
