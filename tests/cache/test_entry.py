"""Entries survive the way to bytes and back; nothing else gets in."""

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.api import ChatAnswer, EmbeddingsAnswer, Surface, Tensor, TensorAnswer, Usage
from cache.api import MISS
from cache.entry import Entry, EntryCodec, Header, answer_bytes, owned
from tests.support.cache_samples import chat_answer

CHECK = b"01234567"


def header(surface: Surface, **fields: Any) -> Header:
    return Header(fingerprint="F1", backend="heavy", rule="hard", surface=surface, life_s=3600.0, **fields)


def through_bytes(entry: Entry) -> Entry:
    codec = EntryCodec()
    data = codec.encode(entry)
    assert data is not MISS
    assert data[:4] == b"GWC\x01"
    assert data[4:12] == CHECK
    decoded = codec.decode(data)
    assert decoded is not MISS
    assert codec.unreadable == 0
    return decoded


@pytest.mark.parametrize("text", ["short", "long " * 5000])
def test_chat_answers_come_back_as_they_were(text: str) -> None:
    answer = chat_answer(text)
    facts = {"first_choice": False, "compute_ms": 12.5, "epochs": {"policy:x": 3}, "tags": ("a",), "jitter": 0.95}
    entry = through_bytes(Entry(CHECK, header(Surface.CHAT, **facts), answer))
    assert entry.answer == answer
    assert entry.check == CHECK
    assert {name: getattr(entry.header, name) for name in facts} == facts
    assert entry.header.compressed == (len(text) > 4096)


def test_embeddings_come_back_bit_by_bit() -> None:
    answer = EmbeddingsAnswer(np.random.default_rng(1).normal(size=(3, 384)).astype(np.float32), "m", Usage(9, 0))
    decoded = through_bytes(Entry(CHECK, header(Surface.EMBEDDINGS), answer)).answer
    assert isinstance(decoded, EmbeddingsAnswer)
    assert np.array_equal(decoded.vectors, answer.vectors)
    assert (decoded.model, decoded.usage) == ("m", Usage(9, 0))


@pytest.mark.parametrize(
    ("datatype", "data"),
    [
        ("FP32", np.array([[1.5, np.nan, -0.0]], np.float32)),
        ("FP64", np.zeros((0, 4))),
        ("FP16", np.ones((2, 1, 2), np.float16)),
        ("INT8", np.array([-1, 2], np.int8)),
        ("UINT64", np.array(2**64 - 1, np.uint64)),
        ("BOOL", np.array([True, False])),
        ("BF16", np.array([1.0, 2.0], np.float32)),
        ("INT32", np.array([1, 2], ">i4")),
        ("BYTES", np.array([[b"a", b""], ["中文".encode(), b"\x00\xff"]], dtype=object)),
    ],
)
def test_tensors_come_back_bit_by_bit(datatype: str, data: Any) -> None:
    answer = TensorAnswer("m", [Tensor("y", datatype, data)], "3", {"k": [1, {"a": "b"}]})
    decoded = through_bytes(Entry(CHECK, header(Surface.TENSOR), answer)).answer
    assert isinstance(decoded, TensorAnswer)
    output = decoded.outputs[0]
    assert (output.name, output.datatype, output.shape) == ("y", datatype, data.shape)
    assert output.data.tolist() == data.tolist() or output.data.tobytes() == data.tobytes()
    assert (decoded.model, decoded.version, decoded.parameters) == ("m", "3", {"k": [1, {"a": "b"}]})


def test_every_byte_string_is_an_entry_or_a_miss() -> None:
    codec = EntryCodec()
    good = codec.encode(Entry(CHECK, header(Surface.CHAT), chat_answer("x" * 6000)))
    assert good is not MISS
    bad = [
        b"",
        b"GWC",
        b"GWC\x01",
        b"PK\x03\x04" + good[4:],
        b"GWC\x02" + good[4:],
        good[:-1],
        good + b"x",
        good[:12] + b"\xff\xff\xff\xff" + good[16:],
        good[:16] + b"\xc1" * 50,
        b"\x80\x04\x95" + b"x" * 100,
    ]
    assert all(codec.decode(data) is MISS for data in bad)
    assert codec.unreadable == len(bad)


@given(st.binary(max_size=200), st.integers(0, 400), st.binary(min_size=1, max_size=8))
def test_garbage_never_raises(junk: bytes, at: int, patch: bytes) -> None:
    codec = EntryCodec()
    good = codec.encode(
        Entry(CHECK, header(Surface.TENSOR), TensorAnswer("m", [Tensor("y", "INT8", np.zeros(3, np.int8))]))
    )
    assert good is not MISS
    for data in (junk, b"GWC\x01" + junk, good[:at] + patch + good[at + len(patch) :]):
        assert codec.decode(data) is MISS or isinstance(codec.decode(data), Entry)


def test_a_small_value_does_not_become_a_large_surprise() -> None:
    import zlib

    codec = EntryCodec()
    bomb = zlib.compress(b"\x00" * (80 << 20), 9)
    encoded = msgspec.msgpack.encode(header(Surface.CHAT, compressed=True, payload_bytes=len(bomb)))
    assert codec.decode(b"GWC\x01" + CHECK + len(encoded).to_bytes(4, "little") + encoded + bomb) is MISS


def test_only_plain_numbers_are_read_as_arrays() -> None:
    codec = EntryCodec()
    for dtype in ("|O8", "O", "<M8[s]", "|V8", "<U2", "<i4,<i4", "(2,2)i4", "__import__('os')"):
        payload = msgspec.msgpack.encode([[["y", "FP32", dtype, [1], b"01234567"]], "m", "", {}])
        encoded = msgspec.msgpack.encode(header(Surface.TENSOR, payload_bytes=len(payload)))
        assert codec.decode(b"GWC\x01" + CHECK + len(encoded).to_bytes(4, "little") + encoded + payload) is MISS


def test_what_msgpack_cannot_carry_is_kept_out() -> None:
    codec = EntryCodec()
    answer = TensorAnswer("m", [], parameters={"x": object()})
    assert codec.encode(Entry(CHECK, header(Surface.TENSOR), answer)) is MISS
    assert codec.unwritable == 1


def test_stored_arrays_are_our_own_and_cannot_be_changed() -> None:
    batch = np.ones((32, 4), np.float32)
    mine = owned(EmbeddingsAnswer(batch[:1], "m"))
    assert isinstance(mine, EmbeddingsAnswer)
    batch[:] = 0
    assert mine.vectors.base is None
    assert mine.vectors.sum() == 4
    with pytest.raises(ValueError, match="read-only"):
        mine.vectors[0, 0] = 5
    chat = ChatAnswer(b"{}", "m", "stop")
    assert owned(chat) is chat
    assert answer_bytes(mine) == 16
