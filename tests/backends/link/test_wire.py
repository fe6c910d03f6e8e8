"""Everything that crosses to the model host and back arrives as it was."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from backends.api import (
    BackendInfo,
    Capabilities,
    ChatAnswer,
    ChatRequest,
    EmbeddingsAnswer,
    EmbeddingsRequest,
    Priority,
    Role,
    StreamLimits,
    Surface,
    Tensor,
    TensorAnswer,
    TensorRequest,
    TensorSpec,
    Usage,
)
from backends.link import wire
from backends.oip_tensors import DTYPES
from policies.core import errors as er
from policies.core.errors import GatewayError

text = st.text(st.characters(codec="utf-8"), max_size=20)
numbers = st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False)
json_value = st.recursive(
    st.none() | st.booleans() | numbers | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=8,
)
body = st.dictionaries(text, json_value, max_size=4)
priorities = st.sampled_from(Priority)
shapes = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)
#: BF16 is held as float32 values.
KINDS = {**DTYPES, "BF16": np.dtype("<f4")}


@st.composite
def tensors(draw):
    datatype = draw(st.sampled_from([*KINDS, "BYTES"]))
    if datatype == "BYTES":
        data = draw(hnp.arrays(object, shapes, elements=st.binary(max_size=9), fill=st.nothing()))
    else:
        data = draw(hnp.arrays(KINDS[datatype], shapes))
        if draw(st.booleans()):
            data = data[::2] if data.ndim == 1 else data.T  # not contiguous
    return Tensor(draw(text), datatype, data)


def crossed(value):
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value))


def same(one, other):
    """Equal, with arrays and types compared to the bit."""
    assert type(one) is type(other)
    if isinstance(one, np.ndarray):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.tolist() == other.tolist() if one.dtype == object else one.tobytes() == other.tobytes()
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            same(*pair)
    elif isinstance(one, Tensor | TensorRequest | TensorAnswer | EmbeddingsAnswer):
        for field in one.__dataclass_fields__:
            same(getattr(one, field), getattr(other, field))
    else:
        assert one == other


chats = st.builds(ChatRequest, body, text, priorities, st.builds(StreamLimits, st.floats(0, 99), st.floats(0, 99)))
embeddings = st.builds(EmbeddingsRequest, body, st.lists(text, max_size=3), text, priorities)
tensor_requests = st.builds(
    TensorRequest, text, st.lists(tensors(), max_size=3), st.lists(text, max_size=2).map(tuple), body, text, priorities
)
usages = st.builds(Usage, st.integers(0, 99), st.integers(0, 99))
vectors = hnp.arrays(np.float32, hnp.array_shapes(min_dims=2, max_dims=2, min_side=0))
answers = (
    st.builds(ChatAnswer, st.binary(max_size=30), text, text, usages, st.none() | text)
    | st.builds(EmbeddingsAnswer, vectors, text, usages)
    | st.builds(TensorAnswer, text, st.lists(tensors(), max_size=3), text, body)
)


@given(chats | embeddings | tensor_requests)
def test_requests(request):
    same(wire.read_request(crossed(wire.request_value(request))), request)


@given(answers)
def test_answers(answer):
    same(wire.read_answer(crossed(wire.answer_value(answer))), answer)


def test_texts_that_are_the_bodys_input_are_sent_once():
    texts = ["one text", "another"]
    request = EmbeddingsRequest({"input": texts, "model": "embed"}, texts)
    data = msgspec.msgpack.encode(wire.request_value(request))
    assert data.count(b"another") == 1
    same(wire.read_request(msgspec.msgpack.decode(data)), request)


@pytest.mark.parametrize("number", [2**64, -(2**63) - 1, 10**40])
def test_integers_beyond_64_bits_go_as_json(number):
    for request in (
        ChatRequest({"messages": [], "seed": number}),
        EmbeddingsRequest({"input": "x", "n": number}, ["x"]),
        TensorRequest("m", [], parameters={"n": number}),
    ):
        with pytest.raises(OverflowError):
            crossed(wire.request_value(request))
        same(wire.read_request(crossed(wire.request_value(request, as_json=True))), request)


def test_arrays_stand_on_the_received_bytes():
    array = wire.read_array(crossed(wire.array_value(np.arange(6, dtype=np.float32).reshape(2, 3))))
    assert array.base is not None
    assert not array.flags.writeable
    assert not array.flags.owndata


ERRORS = [
    er.InvalidRequest("bad", param="input", code="context_length_exceeded"),
    er.InvalidRequest("bad"),
    er.UnknownModel("m"),
    er.MethodNotAllowed("no", ("GET", "HEAD")),
    er.Unauthenticated("who?"),
    er.ConnectFailed("refused", "heavy"),
    er.UpstreamStatus(503, "heavy", 1.5),
    er.ClientFault(400, b"\xff{}", "application/json", "heavy"),
    er.ContextTooLong(400, b"{}", "application/json", "heavy"),
    er.UpstreamMisconfigured(401, "heavy"),
    er.FirstTokenTimeout("late", "light"),
    er.IdleTimeout("idle", "light"),
    er.TotalTimeout("total", "light"),
    er.TruncatedAnswer("cut", "light"),
    er.InBandError("in band", "light"),
    er.ModelFailed("no", "light"),
    er.LimitReached("full", retry_after_s=1.0),
    er.BreakerOpen("open", retry_after_s=9.0),
    er.ModelNotReady("loading"),
    er.Draining("bye"),
    er.CannotServe("not here"),
    er.DeadlineExceeded(),
    er.NoAnswer([("light", er.ModelFailed("no", "light")), ("heavy", er.UpstreamStatus(500, "heavy", 3.0))]),
    er.NoAnswer([]),
    er.ConfigError(["a", "b"]),
]


def told(error):
    fields = dict(error.__dict__)
    fields["causes"] = [(name, told(cause)) for name, cause in fields.get("causes", [])]
    return type(error), error.args, error.code, error.retry_after_s, error.message, fields


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_arrive_as_what_they_are(error):
    assert told(wire.read_error(crossed(wire.error_value(error)))) == told(error)


def test_every_class_of_error_arrives_as_itself():
    def kinds(kind):
        return {kind}.union(*(kinds(derived) for derived in kind.__subclasses__()))

    for kind in kinds(GatewayError):
        error = kind.__new__(kind)
        error.args = ("why",)
        assert type(wire.read_error(crossed(wire.error_value(error)))) is kind


def test_what_is_no_error_of_ours_is_a_failed_model_without_its_words():
    error = wire.read_error(crossed(wire.error_value(KeyError("a prompt"))))
    assert type(error) is er.ModelFailed
    assert "KeyError" in error.message
    assert "prompt" not in error.message


def test_an_error_of_an_unknown_class_is_a_failed_model():
    error = wire.read_error(["NeverHeardOf", ["x"], {}, [], None])
    assert type(error) is er.ModelFailed
    assert "NeverHeardOf" in error.message


def test_what_is_known_of_a_model():
    info = BackendInfo(
        name="items",
        role=Role.LIGHT,
        model="two-tower",
        fingerprint="abc",
        capabilities=Capabilities(
            surfaces=frozenset({Surface.TENSOR}),
            context_tokens=512,
            features=frozenset({"tools"}),
            languages=frozenset({"en", "de"}),
        ),
        inputs=(TensorSpec("user", "BYTES", (-1,), optional=True),),
        outputs=(TensorSpec("scores", "FP32", (-1, 3)),),
        substitutes="bigger",
    )
    assert wire.read_info(crossed(wire.info_value(info))) == info
