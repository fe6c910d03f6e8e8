"""What cannot be served is refused in the surface's own shape, without calling anybody, and the gateway lives on."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.gateway_client import HARD, Client, question, tensors
from tests.support.settable_upstream import SettableUpstream

CHAT = "/v1/chat/completions"
INFER = "/v2/models/recommend/infer"
BOTH = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


@BOTH
async def test_an_unknown_chat_model_is_one_404(client: Client, up: SettableUpstream, stream: bool) -> None:
    for model in ("gpt-nobody", "AUTO", "recommend", "heavy-model", "x" * 5000, "auto\n", "模型"):
        got = await client.chat(HARD, model=model, stream=stream)
        assert got.status == 404
        assert got.error["code"] == "model_not_found"
        assert got.error["type"] == "invalid_request_error"
        assert len(got.error["message"]) < 500
    assert up.total() == 0


async def test_an_unknown_embeddings_model_is_one_404(client: Client, up: SettableUpstream) -> None:
    got = await client.send("POST", "/v1/embeddings", {"model": "auto", "input": "text"})
    assert got.status == 404
    assert got.error["code"] == "model_not_found"
    assert up.total() == 0


@pytest.mark.parametrize("path", ["infer", "versions/1/infer"])
async def test_an_unknown_tensor_model_is_one_404(client: Client, up: SettableUpstream, path: str) -> None:
    for model in ("nobody", "auto", "scorer-model"):
        got = await client.send("POST", f"/v2/models/{model}/{path}", tensors([1.0]))
        assert got.status == 404
        assert model in got.oip_error
    assert up.total() == 0


async def test_metadata_of_an_unknown_tensor_model_is_404(client: Client) -> None:
    for path in ("", "/ready", "/versions/1", "/versions/1/ready", "/stats"):
        got = await client.get(f"/v2/models/nobody{path}")
        assert got.status == 404
        assert got.oip_error


@pytest.mark.parametrize("version", ["2", "0", "01", "latest", "1%20", "x" * 3000])
async def test_a_version_that_is_not_there_is_a_404(client: Client, up: SettableUpstream, version: str) -> None:
    at = f"/v2/models/recommend/versions/{version}"
    answers = [
        await client.get(at),
        await client.get(f"{at}/ready"),
        await client.send("POST", f"{at}/infer", tensors([1.0])),
    ]
    for got in answers:
        assert got.status == 404
        assert "version" in got.oip_error
        assert len(got.oip_error) < 500
    assert up.total() == 0
    assert (await client.send("POST", "/v2/models/recommend/versions/1/infer", tensors([1.0]))).status == 200


@pytest.mark.parametrize(
    "path",
    ["/", "/v1", "/v1/", "/v1/completions", "/v1/chat/completions/", "/v1/model", "/nothing", "/v3/models"],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_an_unknown_path_is_a_404_in_json(client: Client, path: str, method: str) -> None:
    got = await client.send(method, path, {} if method == "POST" else None)
    assert got.status == 404
    assert got.headers["Content-Type"].startswith("application/json")
    assert got.error["code"] == "unknown_path"


@pytest.mark.parametrize(
    "path", ["/v2/nothing", "/v2/models", "/v2/models/recommend/nothing", "/v2/health", "/v2/health/x"]
)
async def test_an_unknown_path_of_the_inference_protocol_has_its_error_shape(client: Client, path: str) -> None:
    got = await client.get(path)
    assert got.status == 404
    assert got.oip_error


@pytest.mark.parametrize(
    "path",
    ["/metrics", "/policies", "/policies/reload", "/debug/requests", "/debug/requests/x", "/backends", "/models", "/cache",
     "/dashboard", "/chaos", "/usage", "/diagnose"],
)  # fmt: skip
async def test_admin_paths_do_not_exist_on_the_data_port(client: Client, path: str) -> None:
    for method in ("GET", "POST"):
        assert (await client.send(method, path, {} if method == "POST" else None)).status == 404


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", CHAT, "POST"), ("PUT", CHAT, "POST"), ("DELETE", CHAT, "POST"), ("GET", "/v1/embeddings", "POST"),
        ("POST", "/v1/models", "GET"), ("POST", "/livez", "GET"), ("POST", "/readyz", "GET"),
    ],
)  # fmt: skip
async def test_a_wrong_method_says_the_right_one(client: Client, method: str, path: str, allowed: str) -> None:
    got = await client.send(method, path, {} if method != "GET" else None)
    assert got.status == 405
    assert got.headers["Allow"] == allowed
    assert got.error["code"] == "method_not_allowed"


@pytest.mark.parametrize(("method", "path", "allowed"), [("GET", INFER, "POST"), ("POST", "/v2", "GET"), ("POST", "/v2/health/ready", "GET")])  # fmt: skip
async def test_a_wrong_method_of_the_inference_protocol(client: Client, method: str, path: str, allowed: str) -> None:
    got = await client.send(method, path, {} if method == "POST" else None)
    assert got.status == 405
    assert got.headers["Allow"] == allowed
    assert got.oip_error


NOT_JSON = [b"", b"   ", b"{", b"[]", b'"text"', b"null", b"{'model': 1}", b'{"model": NaN}', b'{"a":1}x', b"\xff\xfe{}", b'{"a": 1e999}', b'{"\xc3": 1}']  # fmt: skip


@pytest.mark.parametrize("body", NOT_JSON)
async def test_what_is_no_json_object_is_a_400_of_the_surface(
    client: Client, up: SettableUpstream, body: bytes
) -> None:
    for path in (CHAT, "/v1/embeddings"):
        got = await client.send("POST", path, body)
        assert got.status == 400
        assert got.error["type"] == "invalid_request_error"
    got = await client.send("POST", INFER, body)
    assert got.status == 400
    assert got.oip_error
    assert up.total() == 0


def _chat(**changes: Any) -> dict[str, Any]:
    return {**question(HARD), **changes}


def _message(**message: Any) -> dict[str, Any]:
    return {"model": "auto", "messages": [message]}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": [{"role": "user", "content": "x"}]}, "model"),
        (_chat(model=7), "model"),
        (_chat(model=""), "model"),
        (_chat(model=None), "model"),
        (_chat(model=["auto"]), "model"),
        ({"model": "auto"}, "messages"),
        (_chat(messages="hello"), "messages"),
        (_chat(messages=[]), "messages"),
        (_chat(messages={}), "messages"),
        (_chat(messages=["hello"]), "messages[0]"),
        (_message(content="x"), "messages[0].role"),
        (_message(role=1, content="x"), "messages[0].role"),
        (_message(role="user", content=1), "messages[0].content"),
        (_message(role="user", content=["x"]), "messages[0].content"),
        (_message(role="user", content=[{"text": "x"}]), "messages[0].content"),
        (_message(role="user", content={"type": "text", "text": "x"}), "messages[0].content"),
        (_chat(temperature="warm"), "temperature"),
        (_chat(temperature=True), "temperature"),
        (_chat(temperature=2.5), "temperature"),
        (_chat(temperature=-0.1), "temperature"),
        (_chat(top_p=1.1), "top_p"),
        (_chat(max_tokens="10"), "max_tokens"),
        (_chat(max_tokens=1.5), "max_tokens"),
        (_chat(max_tokens=0), "max_tokens"),
        (_chat(max_completion_tokens=-1), "max_completion_tokens"),
        (_chat(n=0), "n"),
        (_chat(n="2"), "n"),
        (_chat(seed="x"), "seed"),
        (_chat(stream="yes"), "stream"),
        (_chat(stream=1), "stream"),
        (_chat(stream=True, stream_options=[]), "stream_options"),
        (_chat(stop=5), "stop"),
        (_chat(stop=[1]), "stop"),
        (_chat(tools={}), "tools"),
        (_chat(response_format="json"), "response_format"),
        (_chat(logit_bias=[]), "logit_bias"),
        (_chat(user=5), "user"),
        (_chat(logprobs=1), "logprobs"),
        (_chat(presence_penalty=3), "presence_penalty"),
    ],
)  # fmt: skip
async def test_a_chat_field_of_the_wrong_type_is_named(
    client: Client, up: SettableUpstream, body: dict[str, Any], param: str
) -> None:
    got = await client.send("POST", CHAT, body)
    assert got.status == 400
    assert got.error["type"] == "invalid_request_error"
    assert got.error["param"] == param
    assert up.total() == 0


@pytest.mark.parametrize(
    "changes",
    [{"temperature": None, "stop": None, "n": None, "tools": None, "user": None}, {"temperature": 1}, {"stop": ["a"]}],
)
async def test_null_and_the_other_accepted_forms_pass(client: Client, changes: dict[str, Any]) -> None:
    assert (await client.send("POST", CHAT, _chat(**changes))).status == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"), ({"input": None}, "input"), ({"input": []}, "input"), ({"input": [1, 2]}, "input"),
        ({"input": ""}, "input"), ({"input": ["a", ""]}, "input"), ({"input": {"a": 1}}, "input"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"), ({"input": "a", "encoding_format": 1}, "encoding_format"),
        ({"input": "a", "dimensions": 8}, "dimensions"), ({"input": ["a"] * 3000}, "input"),
    ],
)  # fmt: skip
async def test_an_embeddings_field_of_the_wrong_type_is_named(
    client: Client, fields: dict[str, Any], param: str
) -> None:
    got = await client.send("POST", "/v1/embeddings", {"model": "embed", **fields})
    assert got.status == 400
    assert got.error["param"] == param


def _input(**changes: Any) -> dict[str, Any]:
    return {"inputs": [{"name": "x", "shape": [2], "datatype": "FP32", "data": [1, 2], **changes}]}


@pytest.mark.parametrize(
    "body",
    [
        {}, {"inputs": []}, {"inputs": {}}, {"inputs": [1]}, {"inputs": [{}]},
        _input(name=1), _input(shape="2"), _input(shape=[3]), _input(shape=[-2]), _input(shape=[1 << 40, 1 << 40]),
        _input(shape=[2.5]), _input(datatype="FP99"), _input(datatype=None), _input(data=None), _input(data=["a", "b"]),
        _input(data=[1, [2]]), _input(data=[1, 2, 3]), _input(parameters={"binary_data_size": 8}), _input(parameters=[]),
        {"inputs": [*_input()["inputs"], *_input()["inputs"]]},
        {**_input(), "outputs": [{"name": "x"}, {"name": "x"}]}, {**_input(), "outputs": "x"},
        {**_input(), "parameters": {"priority": -1}}, {**_input(), "parameters": {"priority": "vip"}},
        {**_input(), "parameters": {"timeout": 0}}, {**_input(), "parameters": {"timeout": "fast"}},
        {**_input(), "parameters": {"timeout": True}}, {**_input(), "id": 7},
    ],
)  # fmt: skip
async def test_a_wrong_inference_request_is_a_400_with_a_sentence(
    client: Client, up: SettableUpstream, body: dict[str, Any]
) -> None:
    got = await client.send("POST", INFER, body)
    assert got.status == 400
    assert got.oip_error
    assert up.total() == 0


@pytest.mark.parametrize("length", ["-1", "abc", "999999", "1e3", ""])
async def test_a_wrong_length_of_the_json_part_is_a_400(client: Client, length: str) -> None:
    got = await client.send("POST", INFER, tensors([1.0]), {"Inference-Header-Content-Length": length})
    assert got.status == 400
    assert got.oip_error


@pytest.mark.parametrize("digits", [20, 30, 400])
@pytest.mark.parametrize("name", ["timeout", "priority", "anything"])
async def test_an_enormous_number_among_the_parameters_is_no_defect(client: Client, name: str, digits: int) -> None:
    got = await client.infer(parameters={name: 10**digits})
    assert got.status in (200, 400), got.body


@pytest.mark.parametrize("digits", [20, 30, 400])
@BOTH
async def test_an_enormous_number_in_a_chat_body_is_no_defect(client: Client, digits: int, stream: bool) -> None:
    for fields in ({"seed": -(10**digits)}, {"metadata": {"n": 10**digits}}, {"logit_bias": {"50256": 10**digits}}):
        got = await client.chat(HARD, stream=stream, **fields)
        assert got.status in (200, 400), got.body
