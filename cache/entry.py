"""A stored answer, in memory and as bytes. Nothing here ever unpickles, and nothing that is read is trusted.

bytes    0  "GWC"            magic
         3  version          one byte; another version is a miss
         4  check            8 bytes, the keyed digest of the request
        12  header length    4 bytes, little endian
        16  header           msgpack map (Header)
         .  payload          msgpack of the answer, zlib when over 4 KiB
"""

from __future__ import annotations

import zlib
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from backends.api import Answer, ChatAnswer, EmbeddingsAnswer, Surface, Tensor, TensorAnswer, Usage
from cache.api import MISS, Missing

MAGIC = b"GWC"
VERSION = 1
#: Payloads over this are compressed.
COMPRESS_BYTES = 4096
#: No payload may unpack to more: a small value must not become a large surprise.
MAX_PAYLOAD_BYTES = 64 << 20

_FIXED_BYTES = 16
#: Plain numbers only: NumPy would read far more than that out of a dtype's text.
_DTYPES = frozenset(
    {"|b1", "|i1", "|u1", *(f"<{kind}{size}" for kind in "iu" for size in (2, 4, 8)), "<f2", "<f4", "<f8"}
)
#: What an entry costs in memory besides its payload: objects, key and the cache's own nodes.
_OVERHEAD_BYTES = 1536


class Header(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is known about a stored answer.

    `life_s`: what it was stored for (age = life_s - time left); `jitter`: this entry's share of its policy's ttl.
    `epochs`: purge epochs at the time of writing, by what they stand for.
    """

    fingerprint: str
    backend: str
    rule: str
    surface: Surface
    life_s: float
    first_choice: bool = True
    compute_ms: float = 0.0
    jitter: float = 1.0
    epochs: dict[str, int] = {}
    tags: tuple[str, ...] = ()
    compressed: bool = False
    payload_bytes: int = 0


class Entry(msgspec.Struct, frozen=True):
    """A stored answer, decoded. `check`: 8 bytes."""

    check: bytes
    header: Header
    answer: Answer


class _ChatPayload(msgspec.Struct, array_like=True, frozen=True):
    body: bytes
    model: str
    finish_reason: str
    usage: tuple[int, int]
    system_fingerprint: str | None


class _TensorPayload(msgspec.Struct, array_like=True, frozen=True):
    """`data`: raw little-endian bytes, or the elements of a BYTES tensor."""

    name: str
    datatype: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes | list[bytes]


class _EmbeddingsPayload(msgspec.Struct, array_like=True, frozen=True):
    vectors: _TensorPayload
    model: str
    usage: tuple[int, int]


class _TensorsPayload(msgspec.Struct, array_like=True, frozen=True):
    outputs: list[_TensorPayload]
    model: str
    version: str
    parameters: dict[str, Any]


_to_msgpack = msgspec.msgpack.Encoder().encode
_read_header = msgspec.msgpack.Decoder(Header).decode
_read_chat = msgspec.msgpack.Decoder(_ChatPayload).decode
_read_embeddings = msgspec.msgpack.Decoder(_EmbeddingsPayload).decode
_read_tensors = msgspec.msgpack.Decoder(_TensorsPayload).decode


class EntryCodec:
    """Entries as bytes and back. What cannot be read is a miss and counted in `unreadable`."""

    def __init__(self) -> None:
        self.unreadable = 0
        self.unwritable = 0

    def encode(self, entry: Entry) -> bytes | Missing:
        """MISS when the answer holds something msgpack cannot carry; then it is kept in memory only."""
        try:
            payload = _to_msgpack(_pack(entry.answer))
        except (TypeError, ValueError, OverflowError, RecursionError):
            self.unwritable += 1
            return MISS
        compressed = len(payload) > COMPRESS_BYTES
        if compressed:
            payload = zlib.compress(payload, 1)
        header = msgspec.structs.replace(entry.header, compressed=compressed, payload_bytes=len(payload))
        encoded = _to_msgpack(header)
        return b"".join((MAGIC, bytes((VERSION,)), entry.check, len(encoded).to_bytes(4, "little"), encoded, payload))

    def decode(self, data: bytes) -> Entry | Missing:
        try:
            return _decode(data)
        except (msgspec.MsgspecError, zlib.error, ValueError, TypeError, OverflowError, RecursionError, MemoryError):
            # Garbage, another version, a truncated value, a dtype we do not allow: all the same to the caller.
            self.unreadable += 1
            return MISS

    def size_bytes(self, entry: Entry) -> int:
        return _OVERHEAD_BYTES + answer_bytes(entry.answer)


def _decode(data: bytes) -> Entry:
    if data[:3] != MAGIC or len(data) < _FIXED_BYTES or data[3] != VERSION:
        raise ValueError
    start = _FIXED_BYTES + int.from_bytes(data[12:16], "little")
    header = _read_header(data[_FIXED_BYTES:start])
    payload = data[start:]
    if len(payload) != header.payload_bytes:
        raise ValueError
    if header.compressed:
        unpack = zlib.decompressobj()
        payload = unpack.decompress(payload, MAX_PAYLOAD_BYTES)
        if not unpack.eof:
            raise ValueError
    return Entry(data[4:12], header, _unpack(header.surface, payload))


def answer_bytes(answer: Answer) -> int:
    """About what the answer itself holds in memory."""
    if isinstance(answer, ChatAnswer):
        return len(answer.body)
    if isinstance(answer, EmbeddingsAnswer):
        return answer.vectors.nbytes
    return sum(_array_bytes(output.data) for output in answer.outputs)


def owned(answer: Answer) -> Answer:
    """The answer with arrays of its own: a view would keep a whole batch alive, or change under the store's hands."""
    if isinstance(answer, ChatAnswer):
        return answer
    if isinstance(answer, EmbeddingsAnswer):
        return EmbeddingsAnswer(_frozen(answer.vectors), answer.model, answer.usage)
    outputs = [Tensor(output.name, output.datatype, _frozen(output.data)) for output in answer.outputs]
    return TensorAnswer(answer.model, outputs, answer.version, dict(answer.parameters))


def surface_of(answer: Answer) -> Surface:
    if isinstance(answer, ChatAnswer):
        return Surface.CHAT
    return Surface.EMBEDDINGS if isinstance(answer, EmbeddingsAnswer) else Surface.TENSOR


def _frozen(data: NDArray[Any]) -> NDArray[Any]:
    copy = data.copy()
    copy.flags.writeable = False
    return copy


def _array_bytes(data: NDArray[Any]) -> int:
    if data.dtype.kind == "O":
        return sum(len(element) + 48 for element in data.ravel().tolist())
    return data.nbytes


def _pack(answer: Answer) -> msgspec.Struct:
    if isinstance(answer, ChatAnswer):
        usage = (answer.usage.prompt_tokens, answer.usage.completion_tokens)
        return _ChatPayload(answer.body, answer.model, answer.finish_reason, usage, answer.system_fingerprint)
    if isinstance(answer, EmbeddingsAnswer):
        usage = (answer.usage.prompt_tokens, answer.usage.completion_tokens)
        return _EmbeddingsPayload(_pack_tensor(Tensor("", "FP32", answer.vectors)), answer.model, usage)
    outputs = [_pack_tensor(output) for output in answer.outputs]
    return _TensorsPayload(outputs, answer.model, answer.version, answer.parameters)


def _unpack(surface: Surface, payload: bytes) -> Answer:
    if surface is Surface.CHAT:
        chat = _read_chat(payload)
        return ChatAnswer(chat.body, chat.model, chat.finish_reason, Usage(*chat.usage), chat.system_fingerprint)
    if surface is Surface.EMBEDDINGS:
        embeddings = _read_embeddings(payload)
        return EmbeddingsAnswer(_unpack_tensor(embeddings.vectors).data, embeddings.model, Usage(*embeddings.usage))
    tensors = _read_tensors(payload)
    outputs = [_unpack_tensor(output) for output in tensors.outputs]
    return TensorAnswer(tensors.model, outputs, tensors.version, tensors.parameters)


def _pack_tensor(tensor: Tensor) -> _TensorPayload:
    data = tensor.data
    if data.dtype.kind == "O":
        return _TensorPayload(tensor.name, tensor.datatype, "O", data.shape, [bytes(item) for item in data.ravel()])
    little = data.astype(data.dtype.newbyteorder("<"), copy=False)
    return _TensorPayload(tensor.name, tensor.datatype, little.dtype.str, data.shape, little.tobytes())


def _unpack_tensor(packed: _TensorPayload) -> Tensor:
    if isinstance(packed.data, list):
        data = np.empty(len(packed.data), dtype=object)
        data[:] = packed.data
    elif packed.dtype in _DTYPES:
        data = np.frombuffer(packed.data, packed.dtype)
    else:
        raise ValueError
    return Tensor(packed.name, packed.datatype, data.reshape(packed.shape))
