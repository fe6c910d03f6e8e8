"""What cannot be served is refused in the surface's own shape, without calling anybody, and the gateway lives on."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.support.gateway import Start
from tests.support.gateway_client import EASY, HARD, JSON, Client, open_raw, question, raw, tensors
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


@pytest.mark.parametrize(
    "path", ["/", "/v1", "/v1/", "/v1/completions", "/v1/chat/completions/", "/v1/models/auto", "/nothing", "/v3/models"]
)
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_an_unknown_path_is_a_404_in_json(client: Client, path: str, method: str) -> None:
    got = await client.send(method, path, {} if method == "POST" else None)
    assert got.status == 404
    assert got.headers["Content-Type"].startswith("application/json")
    assert got.error["code"] == "unknown_path"


@pytest.mark.parametrize("path", ["/v2/nothing", "/v2/models", "/v2/models/recommend/nothing", "/v2/health", "/v2/health/x"])
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


# --------------------------------------------------------------------------------------------------- sizes and forms


@pytest.mark.parametrize("path", [CHAT, INFER, "/v1/embeddings"])
async def test_a_body_over_the_limit_is_a_413(start: Start, up: SettableUpstream, path: str) -> None:
    gateway = await start(limits={"body_bytes": "64KiB"})
    client = gateway.client
    body = json.dumps({**question("x" * 100_000), "input": "x"}).encode()

    async def pieces() -> AsyncIterator[bytes]:
        for at in range(0, len(body), 1000):
            yield body[at : at + 1000]

    for sent in (body, pieces()):
        got = await client.send("POST", path, sent, JSON)
        assert got.status == 413
        assert got.oip_error if path == INFER else got.error["code"] == "body_too_large"
    assert up.total() == 0
    assert (await client.chat("prove " + "y" * 60_000)).status == 200


async def test_the_default_limit_is_four_mebibytes(client: Client, up: SettableUpstream) -> None:
    assert (await client.chat("y" * 4_000_000)).status == 200
    assert (await client.chat("y" * 4_300_000)).status == 413
    assert up.total() == 1


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
async def test_compressed_bodies_are_read(client: Client, up: SettableUpstream, coding: str) -> None:
    squeeze = gzip.compress if coding == "gzip" else zlib.compress
    headers = {**JSON, "Content-Encoding": coding}
    up.play(heavy="echo")
    got = await client.send("POST", CHAT, squeeze(json.dumps(question(HARD)).encode()), headers)
    assert (got.status, got.text) == (200, HARD)
    got = await client.send("POST", INFER, squeeze(json.dumps(tensors([5.0])).encode()), headers)
    assert (got.status, got.json["outputs"][0]["data"]) == (200, [5.0])


async def test_a_gzip_bomb_is_refused_at_the_limit(client: Client, up: SettableUpstream) -> None:
    bomb = gzip.compress(b'{"model":"auto","messages":"' + b"x" * 50_000_000 + b'"}')
    for path in (CHAT, INFER):
        got = await client.send("POST", path, bomb, {**JSON, "Content-Encoding": "gzip"})
        assert got.status == 413
    assert up.total() == 0
    assert (await client.get("/livez")).status == 200


@pytest.mark.parametrize("coding", ["gzip", "br", "unheard-of"])
async def test_a_body_that_cannot_be_unpacked_is_a_client_error(client: Client, up: SettableUpstream, coding: str) -> None:
    got = await client.send("POST", CHAT, b"this is not packed at all", {**JSON, "Content-Encoding": coding})
    assert got.status in (400, 415)
    assert got.error["type"] == "invalid_request_error"
    assert up.total() == 0
    assert (await client.get("/livez")).status == 200


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"auto","messages":' + b"[" * 10_000 + b"]" * 10_000 + b"}",
        b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
        b"[" * 10_000,
        b'{"inputs":[{"name":"x","shape":[1],"datatype":"FP32","data":' + b"[" * 10_000 + b"1" + b"]" * 10_000 + b"}]}",
    ],
    ids=["lists", "objects", "unclosed", "tensor"],
)
async def test_ten_thousand_levels_are_a_400(client: Client, up: SettableUpstream, body: bytes) -> None:
    for path in (CHAT, INFER, "/v1/embeddings"):
        got = await client.send("POST", path, body)
        assert got.status == 400
    assert up.total() == 0
    assert (await client.chat(EASY)).status == 200


async def test_headers_beyond_the_limits_are_refused(client: Client, up: SettableUpstream) -> None:
    body = json.dumps(question(HARD)).encode()
    length = f"Content-Length: {len(body)}\r\n".encode()
    many = b"".join(b"X-H%d: 1\r\n" % number for number in range(200))
    for extra in (b"X-Big: " + b"a" * 20_000 + b"\r\n", many):
        answer = await raw(client.url, b"POST " + CHAT.encode() + b" HTTP/1.1\r\nHost: x\r\n" + extra + length + b"\r\n" + body)
        status = answer.split(b" ", 2)[1]
        assert status in (b"400", b"431")
        assert b"aaaaaaaaaaaaaaaaaaaa" not in answer  # nor is anything of the request sent back
        assert b"application/json" in answer
    assert up.total() == 0
    assert (await client.get("/livez")).status == 200


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GARBAGE\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: abc\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nhello\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
    ids=["no-http", "two-lengths", "length-no-number", "length-and-chunked", "bad-chunk", "tls"],
)
async def test_a_request_that_is_not_http_is_refused_and_the_connection_closed(
    client: Client, up: SettableUpstream, request_bytes: bytes
) -> None:
    answer = await raw(client.url, request_bytes)
    assert answer == b"" or answer.split(b" ", 2)[1] == b"400"
    assert up.total() == 0
    assert (await client.get("/livez")).status == 200


async def test_a_body_that_never_arrives_ends_by_its_time_limit(start: Start, up: SettableUpstream) -> None:
    gateway = await start(limits={"body_time": "200ms"})
    reader, writer = await open_raw(gateway.url, CHAT, {})
    writer.close()
    host, port = gateway.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    async with asyncio.timeout(3):
        head = await reader.readuntil(b"\r\n\r\n")
    assert head.split(b" ", 2)[1] in (b"408", b"504")
    writer.close()
    assert up.total() == 0


async def test_repeated_refusals_leave_the_gateway_as_it_was(client: Client, up: SettableUpstream) -> None:
    async def bad(number: int) -> int:
        return (await client.send("POST", CHAT, NOT_JSON[number % len(NOT_JSON)])).status

    assert set(await asyncio.gather(*(bad(number) for number in range(200)))) == {400}
    assert (await client.chat(HARD)).status == 200
    assert await client.metric("gateway_requests_total", outcome="failed") == 0
