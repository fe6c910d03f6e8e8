"""Tensors survive both encodings, and every wrong request names its input."""

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from backends.api import Tensor, TensorAnswer, TensorRequest
from backends.oip_tensors import DTYPES
from backends.oip_wire import HEADER_LENGTH, read_answer, read_request, write_answer, write_request
from policies.core.errors import InBandError, InvalidRequest, MalformedAnswer


def encode(value: object) -> bytes:
    return msgspec.json.encode(value)


def spec(**changes: Any) -> dict[str, Any]:
    return {"name": "x", "shape": [2], "datatype": "FP32", "data": [1.0, 2.0], **changes}


def request(*inputs: dict[str, Any], **more: Any) -> bytes:
    return encode({"inputs": list(inputs) or [spec()], **more})


@st.composite
def tensors(draw: st.DrawFn, name: str = "x") -> Tensor:
    datatype = draw(st.sampled_from([*DTYPES, "BYTES"]))
    shape = draw(hnp.array_shapes(max_dims=3, max_side=4))
    if datatype == "BYTES":
        values = draw(st.lists(st.binary(max_size=8), min_size=math.prod(shape), max_size=math.prod(shape)))
        data: NDArray[Any] = np.empty(len(values), dtype=object)
        data[:] = values
        return Tensor(name, datatype, data.reshape(shape))
    if datatype == "BF16":
        halves = draw(hnp.arrays(np.uint16, shape))
        return Tensor(name, datatype, (halves.astype(np.uint32) << 16).view(np.float32))
    return Tensor(name, datatype, draw(hnp.arrays(DTYPES[datatype], shape)))


def same(a: Tensor, b: Tensor) -> bool:
    nan = a.data.dtype.kind == "f"
    return (a.name, a.datatype, a.shape) == (b.name, b.datatype, b.shape) and np.array_equal(
        a.data, b.data, equal_nan=nan
    )


@given(tensors("a"), tensors("b"))
def test_binary_there_and_back(a: Tensor, b: Tensor) -> None:
    sent = TensorRequest("m", [a, b], outputs=("b", "a"), parameters={"k": 1}, id="7")
    headers, body = write_request(sent)
    parsed = read_request(body, headers[HEADER_LENGTH], "m")
    assert all(map(same, parsed.request.inputs, [a, b]))
    assert parsed.request.parameters == {"k": 1}
    assert parsed.client_id == "7"
    headers, body = write_answer(TensorAnswer("m", [a, b], "1"), parsed)
    answer = read_answer(body, headers.get(HEADER_LENGTH), "other")
    assert all(map(same, answer.outputs, [b, a]))
    assert (answer.model, answer.version) == ("m", "1")


@given(tensors())
def test_json_there_and_back_or_a_refusal_never_invalid_json(tensor: Tensor) -> None:
    parsed = read_request(request(), None, "m")
    try:
        headers, body = write_answer(TensorAnswer("m", [tensor]), parsed)
    except InvalidRequest as error:
        assert error.param == "x"
        assert "binary" in str(error)
        unsayable = tensor.datatype == "BF16" or tensor.datatype == "BYTES" or not np.isfinite(tensor.data).all()
        assert unsayable
        return
    assert headers == {"content-type": "application/json"}
    assert msgspec.json.decode(body)["outputs"][0]["name"] == "x"
    assert same(read_answer(body, None, "m").outputs[0], tensor)


def test_nested_data_and_a_mix_of_json_and_binary() -> None:
    ids = np.arange(3, dtype=np.int64)
    head = request(
        spec(shape=[2, 2], data=[[1, 2.5], [3, 4]]),
        {"name": "ids", "shape": [3], "datatype": "INT64", "parameters": {"binary_data_size": 24}},
        {"name": "words", "shape": [2, 1], "datatype": "BYTES", "data": [["é"], ["b"]]},
        outputs=[{"name": "o", "parameters": {"binary_data": True}}, {"name": "p"}],
    )
    parsed = read_request(head + ids.tobytes(), len(head), "m")
    x, read_ids, words = parsed.request.inputs
    assert x.data.tolist() == [[1, 2.5], [3, 4]]
    assert read_ids.data.tolist() == [0, 1, 2]
    assert read_ids.data.flags.aligned
    assert words.data.tolist() == [["é".encode()], [b"b"]]
    assert parsed.binary == {"o": True, "p": False}
    outputs = [Tensor(name, "FP32", np.float32([1.5])) for name in ("p", "o", "unasked")]
    headers, body = write_answer(TensorAnswer("m", outputs), parsed)
    answer = msgspec.json.decode(body[: int(headers[HEADER_LENGTH])])
    assert [output["name"] for output in answer["outputs"]] == ["o", "p"]
    assert answer["outputs"][1]["data"] == [1.5]
    assert body[int(headers[HEADER_LENGTH]) :] == np.float32([1.5]).tobytes()


@pytest.mark.parametrize("client_id", [None, "", "abc"])
def test_the_id_is_echoed_when_there_was_one(client_id: str | None) -> None:
    body = request() if client_id is None else request(id=client_id)
    _, answer = write_answer(TensorAnswer("m", [Tensor("y", "FP32", np.float32([1]))]), read_request(body, None, "m"))
    assert msgspec.json.decode(answer).get("id") == client_id


@pytest.mark.parametrize(
    "wrong",
    [
        spec(datatype="FLOAT"),
        spec(datatype="INT32"),
        spec(datatype="INT32", data=[1.5, 2]),
        spec(datatype="INT8", data=[1, 128]),
        spec(datatype="UINT64", data=[-1, 0]),
        spec(datatype="BOOL", data=[1, 0]),
        spec(datatype="FP32", data=[True, False]),
        spec(datatype="FP32", data=["1", "2"]),
        spec(datatype="FP32", data=[1e39, 0]),
        spec(datatype="FP16", data=[1e6, 0]),
        spec(datatype="FP32", data=[None, 1]),
        spec(datatype="BYTES", data=[1, 2]),
        spec(datatype="BF16"),
        spec(data=5),
        spec(data="ab"),
        spec(data={}),
        spec(data=None),
        spec(data=[]),
        spec(data=[[1, 2]]),
        spec(shape=[3]),
        spec(shape=[0], data=[]),
        spec(shape=[-1]),
        spec(shape=[1 << 40, 1 << 40]),
        spec(shape=[10**30]),
        spec(shape=[1] * 9),
        spec(shape=[2, 2], data=[[1, 2], [3]]),
        spec(shape=[2, 2], data=[[1, 2, 3], [4]]),
        spec(shape=[2, 1], data=[[[1]], [[2]]]),
        spec(parameters={"binary_data_size": 8}),
        {"name": "x", "shape": [2], "datatype": "FP32"},
        {"name": "x", "shape": [2], "datatype": "FP32", "parameters": {"binary_data_size": 8}},
        {"name": "x", "shape": [2], "datatype": "FP32", "parameters": {"binary_data_size": -1}},
        {"name": "x", "shape": [2], "datatype": "FP32", "parameters": {"binary_data_size": True}},
        {"name": "x", "shape": [2], "datatype": "FP32", "parameters": {"binary_data_size": "8"}},
    ],
)
def test_a_wrong_input_is_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_request(request(spec(name="fine"), wrong), None, "m")
    assert caught.value.param == "x"
    assert "'x'" in str(caught.value)


def test_duplicate_names_are_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"'x'.*twice"):
        read_request(request(spec(), spec()), None, "m")
    with pytest.raises(InvalidRequest, match=r"'o'.*twice"):
        read_request(request(outputs=[{"name": "o"}, {"name": "o"}]), None, "m")


@pytest.mark.parametrize("length", ["-1", "abc", "", "1.5", "999999", "9" * 5000, "²", 10_000])
def test_a_wrong_header_length(length: str | int) -> None:
    with pytest.raises(InvalidRequest, match=HEADER_LENGTH):
        read_request(request(), length, "m")


@pytest.mark.parametrize(
    ("declared", "datatype", "tail"),
    [
        (8, "FP32", b"1234567"),
        (8, "FP32", b"123456789"),
        (7, "FP32", b"1234567"),
        (12, "FP32", b"123456789012"),
        (10, "BYTES", b"\x01\x00\x00\x00a\x01\x00\x00\x00bc"),
        (11, "BYTES", b"\x01\x00\x00\x00a\x01\x00\x00\x00bc"),
        (9, "BYTES", b"\x01\x00\x00\x00a\xff\xff\xff\xffb"),
        (5, "BYTES", b"\x01\x00\x00\x00a"),
        (8, "BYTES", b"\x04\x00\x00\x00\x01\x00\x00\x00"),
    ],
)
def test_short_and_surplus_binary_data(declared: int, datatype: str, tail: bytes) -> None:
    head = request({"name": "x", "shape": [2], "datatype": datatype, "parameters": {"binary_data_size": declared}})
    with pytest.raises(InvalidRequest) as caught:
        read_request(head + tail, str(len(head)), "m")
    assert caught.value.param == "x"


def test_a_shape_that_merely_claims_takes_no_memory() -> None:
    head = request({"name": "x", "shape": [1 << 31], "datatype": "BYTES", "parameters": {"binary_data_size": 4}})
    with pytest.raises(InvalidRequest, match="too few"):
        read_request(head + b"\0\0\0\0", len(head), "m")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b'{"inputs": []}',
        b'{"inputs": [{}]}',
        b'{"inputs": [{"name": 1}]}',
        b'{"inputs": ' + b"[" * 100_000,
        request(parameters={"binary_data_output": "yes"}),
        request(outputs=[{"name": "o", "parameters": {"binary_data": 1}}]),
        request(outputs=[{"name": "o", "parameters": {"classification": 3}}]),
    ],
)
def test_bodies_that_are_no_request(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        read_request(body, None, "m")


def test_an_output_that_the_model_lacks() -> None:
    parsed = read_request(request(outputs=[{"name": "nope"}]), None, "m")
    with pytest.raises(InvalidRequest, match="no output 'nope'"):
        write_answer(TensorAnswer("m", [Tensor("y", "FP32", np.float32([1]))]), parsed)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_an_output_that_json_cannot_hold(value: float) -> None:
    answer = TensorAnswer("m", [Tensor("y", "FP32", np.float32([1, value]))])
    with pytest.raises(InvalidRequest, match="ask for it as binary") as caught:
        write_answer(answer, read_request(request(), None, "m"))
    assert (caught.value.param, caught.value.code) == ("y", "output_not_json")
    as_binary = read_request(request(parameters={"binary_data_output": True}), None, "m")
    headers, body = write_answer(answer, as_binary)
    assert same(read_answer(body, headers[HEADER_LENGTH], "m").outputs[0], answer.outputs[0])


@pytest.mark.parametrize(
    "body", [b"", b"{}", b"[", b'{"outputs": [{"name": "x"}]}', encode({"outputs": [spec(shape=[5])]})]
)
def test_answers_that_are_none(body: bytes) -> None:
    with pytest.raises(MalformedAnswer):
        read_answer(body, None, "m")
    with pytest.raises(MalformedAnswer):
        read_answer(body, "-3", "m")


def test_an_error_inside_a_200() -> None:
    with pytest.raises(InBandError):
        read_answer(b'{ "error": "no"}', None, "m")


def test_tritonclient_and_this_codec_agree() -> None:
    import tritonclient.http as triton
    from tritonclient.http import InferenceServerClient, InferResult

    x = triton.InferInput("x", [2, 2], "FP32").set_data_from_numpy(np.float32([[1, 2], [3, 4]]))
    words = triton.InferInput("w", [2], "BYTES")
    words.set_data_from_numpy(np.array([b"a", "é".encode()], dtype=object), binary_data=False)
    body, length = InferenceServerClient.generate_request_body([x, words], request_id="9")
    parsed = read_request(bytes(body), length, "m")
    assert parsed.request.inputs[0].data.tolist() == [[1, 2], [3, 4]]
    assert parsed.request.inputs[1].data.tolist() == [b"a", "é".encode()]
    headers, answer = write_answer(TensorAnswer("m", parsed.request.inputs), parsed)
    result = InferResult.from_response_body(answer, header_length=int(headers[HEADER_LENGTH]))
    assert result.as_numpy("x").tolist() == [[1, 2], [3, 4]]
    assert result.as_numpy("w").tolist() == [b"a", "é".encode()]
