"""Requests, answers and errors as plain values that msgpack can carry, and back, without loss.

    chat          ["chat", body, id, priority, idle_s, total_s]
    embeddings    ["embeddings", body, texts (None = they are the body's `input`), id, priority]
    tensor        ["tensor", model, inputs, outputs, parameters, id, priority]
    a tensor      [name, datatype, shape, numpy type, bytes]; a list of elements in place of bytes for BYTES
    answers       ["chat", body, model, finish_reason, prompt, completion, system_fingerprint]
                  ["embeddings", [shape, numpy type, bytes], model, prompt, completion]
                  ["tensor", model, outputs, version, parameters]
    an error      [class, args, fields, names of the fields that are tuples, causes of a NoAnswer or None]

Both ends are of one build, so a value that cannot be read is a defect and raises whatever it raises. Arrays are copied once,
into the message, and stand on the received bytes at the other end: read-only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from backends.api import (
    Answer,
    BackendInfo,
    ChatAnswer,
    ChatRequest,
    EmbeddingsAnswer,
    EmbeddingsRequest,
    Priority,
    Request,
    StreamLimits,
    Tensor,
    TensorAnswer,
    TensorRequest,
    Usage,
)
from policies.core.errors import GatewayError, ModelFailed

_PRIORITIES = {int(priority): priority for priority in Priority}


# --------------------------------------------------------------------------------------------------------- requests


def request_value(request: Request, *, as_json: bool = False) -> list[Any]:
    """`as_json`: bodies as JSON text, for the rare ones with integers that msgpack cannot carry (beyond 64 bits)."""
    priority = int(request.priority)
    if isinstance(request, ChatRequest):
        limits = request.limits
        return ["chat", _body(request.body, as_json), request.id, priority, limits.idle_s, limits.total_s]
    if isinstance(request, EmbeddingsRequest):
        texts = None if request.body.get("input") == request.texts else request.texts
        return ["embeddings", _body(request.body, as_json), texts, request.id, priority]
    inputs = [_tensor_value(tensor) for tensor in request.inputs]
    parameters = _body(request.parameters, as_json)
    return ["tensor", request.model, inputs, request.outputs, parameters, request.id, priority]


def read_request(value: list[Any]) -> Request:
    kind = value[0]
    if kind == "chat":
        _, body, identity, priority, idle_s, total_s = value
        return ChatRequest(_read_body(body), identity, _PRIORITIES[priority], StreamLimits(idle_s, total_s))
    if kind == "embeddings":
        _, body, texts, identity, priority = value
        body = _read_body(body)
        return EmbeddingsRequest(body, body["input"] if texts is None else texts, identity, _PRIORITIES[priority])
    _, model, inputs, outputs, parameters, identity, priority = value
    tensors = [_read_tensor(tensor) for tensor in inputs]
    return TensorRequest(model, tensors, tuple(outputs), _read_body(parameters), identity, _PRIORITIES[priority])


def _body(body: dict[str, Any], as_json: bool) -> dict[str, Any] | bytes:
    return msgspec.json.encode(body) if as_json else body


def _read_body(value: dict[str, Any] | bytes) -> dict[str, Any]:
    return msgspec.json.decode(value, type=dict[str, Any]) if isinstance(value, bytes) else value


# ---------------------------------------------------------------------------------------------------------- answers


def answer_value(answer: Answer) -> list[Any]:
    if isinstance(answer, ChatAnswer):
        usage = answer.usage
        counts = (usage.prompt_tokens, usage.completion_tokens)
        return ["chat", answer.body, answer.model, answer.finish_reason, *counts, answer.system_fingerprint]
    if isinstance(answer, EmbeddingsAnswer):
        usage = answer.usage
        return ["embeddings", array_value(answer.vectors), answer.model, usage.prompt_tokens, usage.completion_tokens]
    outputs = [_tensor_value(tensor) for tensor in answer.outputs]
    return ["tensor", answer.model, outputs, answer.version, answer.parameters]


def read_answer(value: list[Any]) -> Answer:
    kind = value[0]
    if kind == "chat":
        _, body, model, finish_reason, prompt, completion, system_fingerprint = value
        return ChatAnswer(body, model, finish_reason, Usage(prompt, completion), system_fingerprint)
    if kind == "embeddings":
        _, vectors, model, prompt, completion = value
        return EmbeddingsAnswer(read_array(vectors), model, Usage(prompt, completion))
    _, model, outputs, version, parameters = value
    return TensorAnswer(model, [_read_tensor(tensor) for tensor in outputs], version, parameters)


# ----------------------------------------------------------------------------------------------------------- arrays


def array_value(array: NDArray[Any]) -> list[Any]:
    """[shape, numpy type, contents]."""
    if array.dtype.hasobject:
        return [array.shape, "O", array.ravel().tolist()]
    return [array.shape, array.dtype.str, np.ascontiguousarray(array).reshape(-1).view(np.uint8).data]


def read_array(value: list[Any]) -> NDArray[Any]:
    shape, kind, contents = value
    if kind == "O":
        array = np.empty(len(contents), dtype=object)
        array[:] = contents
    else:
        array = np.frombuffer(contents, dtype=kind)
    return array.reshape(shape)


def _tensor_value(tensor: Tensor) -> list[Any]:
    return [tensor.name, tensor.datatype, *array_value(tensor.data)]


def _read_tensor(value: list[Any]) -> Tensor:
    return Tensor(value[0], value[1], read_array(value[2:]))


# ---------------------------------------------------------------------------------------------------- model and errors


def info_value(info: BackendInfo) -> Any:
    return msgspec.to_builtins(info)


def read_info(value: Any) -> BackendInfo:
    return msgspec.convert(value, BackendInfo)


def error_value(error: BaseException) -> list[Any]:
    """What is no GatewayError is a defect of a model: it goes as ModelFailed, by its class alone."""
    if not isinstance(error, GatewayError):
        error = ModelFailed(f"the model raised {type(error).__name__}")
    fields = dict(error.__dict__)
    told = fields.pop("causes", None)
    causes = None if told is None else [[name, error_value(cause)] for name, cause in told]
    tuples = [name for name, value in fields.items() if isinstance(value, tuple)]
    return [type(error).__name__, error.args, fields, tuples, causes]


def read_error(value: list[Any]) -> GatewayError:
    name, args, fields, tuples, causes = value
    kind = next((kind for kind in _kinds(GatewayError) if kind.__name__ == name), None)
    if kind is None:
        return ModelFailed(f"the model host answered with an error that is not known here: {name}")
    # Not by calling the class: signatures differ.
    error = kind.__new__(kind)
    error.args = tuple(args)
    error.__dict__.update(fields)
    for field in tuples:
        error.__dict__[field] = tuple(fields[field])
    if causes is not None:
        error.__dict__["causes"] = [(rung, read_error(cause)) for rung, cause in causes]
    return error


def _kinds(kind: type[GatewayError]) -> Iterator[type[GatewayError]]:
    yield kind
    for derived in kind.__subclasses__():
        yield from _kinds(derived)
