"""OpenAI's wire format: chat completions and embeddings."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import orjson

from backends.api import Answer, ChatAnswer, ChatRequest, EmbeddingsAnswer, EmbeddingsRequest
from backends.json_codec import decode_object
from gateway.edge.codec import Parsed, Written, require
from policies.core.errors import ClientFault, GatewayError, InvalidRequest, UnknownModel

_NUMBER: tuple[type, ...] = (int, float)
#: Field -> (accepted JSON types, what to say). null is accepted everywhere, as OpenAI does.
_CHAT_FIELDS: dict[str, tuple[tuple[type, ...], str]] = {
    "temperature": (_NUMBER, "a number"),
    "top_p": (_NUMBER, "a number"),
    "presence_penalty": (_NUMBER, "a number"),
    "frequency_penalty": (_NUMBER, "a number"),
    "max_tokens": ((int,), "an integer"),
    "max_completion_tokens": ((int,), "an integer"),
    "n": ((int,), "an integer"),
    "seed": ((int,), "an integer"),
    "stream": ((bool,), "true or false"),
    "stream_options": ((dict,), "an object"),
    "stop": ((str, list), "a string or a list of strings"),
    "tools": ((list,), "a list"),
    "response_format": ((dict,), "an object"),
    "logit_bias": ((dict,), "an object"),
    "user": ((str,), "a string"),
    "logprobs": ((bool,), "true or false"),
}
#: Field -> lowest and highest value.
_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "max_tokens": (1, 1 << 31),
    "max_completion_tokens": (1, 1 << 31),
    "n": (1, 128),
}
_MOST_TEXTS = 2048


def model_of(body: dict[str, Any]) -> str:
    model = body.get("model")
    require(type(model) is str and model != "", "`model` must be a non-empty string.", "model")
    assert isinstance(model, str)
    return model


class ChatCodec:
    """`POST /v1/chat/completions`."""

    def parse(self, body: bytes, headers: Mapping[str, str], model: str) -> Parsed:
        fields = decode_object(body)
        model = model_of(fields)
        _check_messages(fields.get("messages"))
        for name, value in fields.items():
            expected = _CHAT_FIELDS.get(name)
            if expected is not None and value is not None:
                _check_field(name, value, expected)
        stream = fields.get("stream") is True
        include_usage = False
        if stream:
            options = fields.get("stream_options")
            include_usage = bool(options and options.get("include_usage"))
        return Parsed(ChatRequest(fields), model, stream, include_usage)

    def write(self, answer: Answer, parsed: Parsed) -> Written:
        assert isinstance(answer, ChatAnswer)
        return Written(answer.body)

    def error(self, error: GatewayError, type_: str) -> bytes:
        return openai_error(error, type_)


def _check_messages(messages: Any) -> None:
    if type(messages) is not list or not messages:
        raise InvalidRequest("`messages` must be a non-empty list.", "messages")
    for message in messages:
        # Sentences are made only for a fault; this runs for every message of every request.
        if type(message) is dict:
            role, content = message.get("role"), message.get("content")
            if type(role) is str and role and (type(content) is str or content is None or _are_parts(content)):
                continue
        raise _message_fault(messages.index(message), message)


def _are_parts(content: Any) -> bool:
    return type(content) is list and all(type(part) is dict and type(part.get("type")) is str for part in content)


def _message_fault(index: int, message: Any) -> InvalidRequest:
    where = f"messages[{index}]"
    if type(message) is not dict:
        return InvalidRequest(f"`{where}` must be an object.", where)
    role = message.get("role")
    if type(role) is not str or not role:
        return InvalidRequest(f"`{where}.role` must be a non-empty string.", f"{where}.role")
    return InvalidRequest(
        f"`{where}.content` must be a string, null, or a list of parts, each an object with a `type`.",
        f"{where}.content",
    )


def _check_field(name: str, value: Any, expected: tuple[tuple[type, ...], str]) -> None:
    types, meant = expected
    # bool is an int in Python, never in JSON.
    if (type(value) is bool and bool not in types) or not isinstance(value, types):
        raise InvalidRequest(f"`{name}` must be {meant}.", name)
    bounds = _RANGES.get(name)
    if bounds is not None and not bounds[0] <= cast(float, value) <= bounds[1]:
        raise InvalidRequest(f"`{name}` must be between {bounds[0]} and {bounds[1]}.", name)
    if name == "stop" and type(value) is list and not all(type(item) is str for item in value):
        raise InvalidRequest("`stop` must be a string or a list of strings.", name)


class EmbeddingsCodec:
    """`POST /v1/embeddings`."""

    def parse(self, body: bytes, headers: Mapping[str, str], model: str) -> Parsed:
        fields = decode_object(body)
        model = model_of(fields)
        texts = fields.get("input")
        if type(texts) is str:
            texts = [texts]
        require(
            type(texts) is list and len(texts) > 0 and all(type(text) is str for text in texts),
            "`input` must be a string or a non-empty list of strings (token ids are not accepted).",
            "input",
        )
        assert isinstance(texts, list)
        require(len(texts) <= _MOST_TEXTS, f"`input` may hold at most {_MOST_TEXTS} texts.", "input")
        require(all(texts), "`input` must not hold empty texts.", "input")
        encoding = fields.get("encoding_format") or "float"
        require(encoding in ("float", "base64"), "`encoding_format` must be `float` or `base64`.", "encoding_format")
        require(
            fields.get("dimensions") is None,
            "`dimensions` is not supported: the model's vectors have one size.",
            "dimensions",
        )
        return Parsed(EmbeddingsRequest(fields, texts), model, hint=encoding)

    def write(self, answer: Answer, parsed: Parsed) -> Written:
        assert isinstance(answer, EmbeddingsAnswer)
        rows: list[Any]
        if parsed.hint == "base64":
            rows = [base64.b64encode(row.astype("<f4").tobytes()).decode() for row in answer.vectors]
        else:
            rows = list(np.ascontiguousarray(answer.vectors))
        tokens = answer.usage.prompt_tokens
        body = {
            "object": "list",
            "data": [{"object": "embedding", "index": index, "embedding": row} for index, row in enumerate(rows)],
            "model": answer.model,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }
        return Written(orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY))

    def error(self, error: GatewayError, type_: str) -> bytes:
        return openai_error(error, type_)


def openai_error(error: GatewayError, type_: str) -> bytes:
    """`{"error": {message, type, param, code}}`; an upstream's refusal of the client's request passes unaltered."""
    if isinstance(error, ClientFault) and error.body:
        return error.body
    detail = {
        "message": error.message,
        "type": type_,
        "param": getattr(error, "param", None),
        "code": error.code,
    }
    return json.dumps({"error": detail}, ensure_ascii=False).encode()


def models_list(names: list[tuple[str, str]], created: int) -> bytes:
    """`GET /v1/models`."""
    data = [_model(name, owner, created) for name, owner in names]
    return json.dumps({"object": "list", "data": data}, ensure_ascii=False).encode()


def one_model(names: list[tuple[str, str]], wanted: str, created: int) -> bytes:
    """`GET /v1/models/{name}`. Raises UnknownModel."""
    for name, owner in names:
        if name == wanted:
            return json.dumps(_model(name, owner, created), ensure_ascii=False).encode()
    raise UnknownModel(wanted)


def _model(name: str, owner: str, created: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": owner}
