import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.api import ChatRequest, EmbeddingsAnswer, EmbeddingsRequest, Usage
from gateway.edge.openai_codec import ChatCodec, EmbeddingsCodec, models_list, one_model, openai_error
from policies.core.errors import ClientFault, GatewayError, InvalidRequest, UnknownModel

MESSAGES = [{"role": "user", "content": "hi"}]


def parse(**fields: object):
    body = {"model": "auto", "messages": MESSAGES, **fields}
    return ChatCodec().parse(json.dumps({k: v for k, v in body.items() if v is not ...}).encode(), {}, "")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": ...}, "model"),
        ({"model": 3}, "model"),
        ({"model": ""}, "model"),
        ({"messages": ...}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [*MESSAGES, {"content": "x"}]}, "messages[1].role"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": 2.5}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"stream": "yes"}, "stream"),
        ({"stop": [1]}, "stop"),
        ({"stop": {}}, "stop"),
        ({"tools": {}}, "tools"),
    ],
)
def test_wrong_fields_are_named(fields: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(**fields)
    assert caught.value.param == param
    assert param.rsplit(".", maxsplit=1)[-1].split("[", maxsplit=1)[0] in str(caught.value)


def test_what_openai_accepts_passes() -> None:
    parsed = parse(temperature=None, stop=["a"], n=1, unknown_field={"x": 1}, max_tokens=1, stream=None)
    assert isinstance(parsed.request, ChatRequest)
    assert parsed.request.body["unknown_field"] == {"x": 1}
    assert not parsed.stream


def test_usage_is_wanted_only_when_asked_for_in_a_stream() -> None:
    assert parse(stream=True, stream_options={"include_usage": True}).include_usage
    assert not parse(stream=True).include_usage
    assert not parse(stream_options={"include_usage": True}).include_usage


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_or_parsed(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        ChatCodec().parse(body, {}, "")


def test_embeddings_as_numbers_and_as_base64() -> None:
    codec = EmbeddingsCodec()
    vectors = np.array([[1.0, -0.5], [0.25, 3.0]], np.float32)
    answer = EmbeddingsAnswer(vectors, "m", Usage(prompt_tokens=4))
    floats = codec.parse(b'{"model":"m","input":["a","b"]}', {}, "")
    assert isinstance(floats.request, EmbeddingsRequest)
    assert floats.request.texts == ["a", "b"]
    told = json.loads(codec.write(answer, floats).body)
    assert [item["embedding"] for item in told["data"]] == vectors.tolist()
    assert told["usage"] == {"prompt_tokens": 4, "total_tokens": 4}
    packed = codec.parse(b'{"model":"m","input":"a","encoding_format":"base64"}', {}, "")
    assert json.loads(codec.write(answer, packed).body)["data"][0]["embedding"] == "AACAPwAAAL8="


@pytest.mark.parametrize(
    "body", ['{"model":"m","input":[]}', '{"model":"m","input":[1,2]}', '{"model":"m","input":""}']
)
def test_embeddings_without_texts(body: str) -> None:
    with pytest.raises(InvalidRequest):
        EmbeddingsCodec().parse(body.encode(), {}, "")


def test_errors_in_openais_shape() -> None:
    told = json.loads(openai_error(InvalidRequest("bad", "stop"), "invalid_request_error"))
    assert told == {
        "error": {"message": "bad", "type": "invalid_request_error", "param": "stop", "code": "invalid_request"}
    }
    assert json.loads(openai_error(GatewayError(), "server_error"))["error"]["message"] == "internal error"
    passed = ClientFault(422, b'{"theirs": 1}', "application/json")
    assert openai_error(passed, "x") == b'{"theirs": 1}'


def test_models() -> None:
    names = [("auto", "gateway"), ("embed", "gateway")]
    assert [m["id"] for m in json.loads(models_list(names, 7))["data"]] == ["auto", "embed"]
    assert json.loads(one_model(names, "embed", 7))["id"] == "embed"
    with pytest.raises(UnknownModel):
        one_model(names, "other", 7)
