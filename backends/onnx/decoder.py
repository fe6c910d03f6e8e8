"""A decoder graph at work on one row at a time: key/value rooms, reading a prompt, one step. Synchronous; one thread.

The key/value memory of a sequence is one block that the graph reads as past and writes as present through the same
pointers, so a step copies nothing. Its size grows in buckets: a short chat does not pay for the whole context.
Verdicts that hold here (checked by tests): a row's bits do not depend on the bucket, on what lies beyond its length,
or on how a prompt is cut into pieces, as long as each piece has at least two tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from backends.onnx.manifest import ModelError

#: Positions in the smallest room; each larger one doubles.
FIRST_ROOM = 256


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """What of the architecture the runner must know."""

    layers: int
    kv_heads: int
    head_width: int
    vocabulary: int
    context_tokens: int

    @property
    def token_bytes(self) -> int:
        """Bytes of key/value memory a position takes."""
        return self.layers * 2 * self.kv_heads * self.head_width * 4


class Room:
    """Key/value memory for `size` positions, with everything a one-token step needs bound to it once."""

    __slots__ = ("_step", "ids", "last", "logits", "memory", "session", "shape", "size", "total", "valid")

    def __init__(self, session: ort.InferenceSession, shape: DecoderShape, size: int) -> None:
        self.session = session
        self.shape = shape
        self.size = size
        # What lies beyond a row's length is never read: no clearing.
        self.memory = np.empty((shape.layers * 2, 1, shape.kv_heads, size, shape.head_width), np.float32)
        self.ids = np.zeros((1, 1), np.int64)
        self.valid = np.zeros(1, np.int32)
        self.total = np.zeros((), np.int32)
        self.last = np.zeros((1, 1), np.int64)
        self.logits = np.zeros((1, shape.vocabulary), np.float32)
        self._step = self._bind(self.ids)

    def _bind(self, ids: NDArray[np.int64]) -> Any:
        """All inputs and outputs by address. The arrays must outlive the binding."""
        binding = self.session.io_binding()
        for name, array in (
            ("input_ids", ids),
            ("seqlens_k", self.valid),
            ("total", self.total),
            ("last_idx", self.last),
        ):
            binding.bind_input(name, "cpu", 0, array.dtype, list(array.shape), array.ctypes.data)
        block_shape, address, stride = list(self.memory.shape[1:]), self.memory.ctypes.data, self.memory.strides[0]
        for place in range(self.shape.layers * 2):
            name = f"{'kv'[place % 2]}{place // 2}"
            pointer = address + place * stride
            binding.bind_input(f"past_{name}", "cpu", 0, np.float32, block_shape, pointer)
            binding.bind_output(f"present_{name}", "cpu", 0, np.float32, block_shape, pointer)
        binding.bind_output("logits", "cpu", 0, np.float32, list(self.logits.shape), self.logits.ctypes.data)
        return binding

    def run(self, tokens: Sequence[int], length: int) -> NDArray[np.float32]:
        """Read `tokens` after the `length` ones that the room holds. Returns the logits [V] after the last of them.

        The result is the room's own buffer: it may be changed, and the next run overwrites it. Raises ValueError for
        what does not fit (negative ids would silently be legal to the graph).
        """
        count = len(tokens)
        if not 0 < count <= self.size - length:
            raise ValueError(f"{count} tokens after {length} do not fit a room of {self.size}")
        if min(tokens) < 0 or max(tokens) >= self.shape.vocabulary:
            raise ValueError(f"a token is outside the vocabulary of {self.shape.vocabulary}")
        self.valid[0] = length + count - 1
        self.total[...] = length + count
        self.last[0, 0] = count - 1
        if count == 1:
            self.ids[0, 0] = tokens[0]
            self.session.run_with_iobinding(self._step)
        else:
            ids = np.array([tokens], np.int64)
            self.session.run_with_iobinding(self._bind(ids))
        logits: NDArray[np.float32] = self.logits[0]
        return logits


class Rooms:
    """Makes, enlarges and keeps rooms. A few of the smallest are kept for the next sequences; larger ones are freed."""

    __slots__ = ("_free", "_keep", "bytes_in_use", "session", "shape")

    def __init__(self, session: ort.InferenceSession, shape: DecoderShape, keep: int = 4) -> None:
        self.session = session
        self.shape = shape
        self._keep = keep
        self._free: list[Room] = []
        #: Bytes of key/value memory of the rooms given out.
        self.bytes_in_use = 0

    def bucket(self, tokens: int) -> int:
        """The smallest size that holds `tokens` positions. Raises ValueError past the context."""
        if tokens > self.shape.context_tokens:
            raise ValueError(f"{tokens} tokens are more than the context of {self.shape.context_tokens}")
        size = FIRST_ROOM
        while size < tokens:
            size *= 2
        return min(size, self.shape.context_tokens)

    def take(self, tokens: int) -> Room:
        """A room for at least `tokens` positions, holding nothing."""
        size = self.bucket(tokens)
        self.bytes_in_use += size * self.shape.token_bytes
        if self._free and self._free[-1].size == size:
            return self._free.pop()
        return Room(self.session, self.shape, size)

    def grown(self, room: Room, length: int, tokens: int) -> Room:
        """`room` if it holds `tokens` positions, else a larger one with its first `length` positions copied."""
        if tokens <= room.size:
            return room
        larger = self.take(tokens)
        larger.memory[:, :, :, :length] = room.memory[:, :, :, :length]
        self.give_back(room)
        return larger

    def give_back(self, room: Room) -> None:
        self.bytes_in_use -= room.size * self.shape.token_bytes
        if room.size == min(FIRST_ROOM, self.shape.context_tokens) and len(self._free) < self._keep:
            self._free.append(room)


def decoder_shape(session: ort.InferenceSession, context_tokens: int) -> DecoderShape:
    """Read from the graph's own inputs and outputs. Raises ModelError when it is no decoder graph of ours."""
    shapes = {tensor.name: tensor.shape for tensor in (*session.get_inputs(), *session.get_outputs())}
    layers = sum(name.startswith("past_k") for name in shapes)
    try:
        _, kv_heads, _, head_width = shapes["past_k0"]
        _, vocabulary = shapes["logits"]
        shape = DecoderShape(layers, int(kv_heads), int(head_width), int(vocabulary), context_tokens)
    except (KeyError, ValueError, TypeError):
        raise ModelError("the graph has no past_k0 and logits with fixed sizes; rebuild the model") from None
    return shape
