"""Open Inference Protocol v2 `infer`, as bytes: both sides, JSON and the binary tensor extension.

    server side   read_request(body, header) -> ParsedInfer;  write_answer(answer, parsed) -> headers, body
    client side   write_request(request) -> headers, body;    read_answer(body, header) -> TensorAnswer

With the extension the body is JSON of `Inference-Header-Content-Length` bytes followed by the tensors that have
`parameters.binary_data_size`, in order. What a client sent wrongly is InvalidRequest with `param` naming the input; what a
backend sent wrongly is MalformedAnswer. An output with NaN or infinity is never written as JSON: it is refused with
InvalidRequest (code `output_not_json`) that says to ask for binary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import orjson
from msgspec import Raw, Struct

from backends.api import Tensor, TensorAnswer, TensorRequest
from backends.oip_tensors import TensorError, from_binary, from_json, to_binary, to_json
from policies.core.errors import InBandError, InvalidRequest, MalformedAnswer

HEADER_LENGTH = "Inference-Header-Content-Length"
_NO_RAW = Raw(b"null")


class _TensorBody(Struct):
    name: str
    shape: list[int]
    datatype: str
    parameters: dict[str, Any] = {}
    data: Raw = _NO_RAW


class _OutputBody(Struct):
    name: str
    parameters: dict[str, Any] = {}


class _RequestBody(Struct):
    inputs: list[_TensorBody]
    id: str | None = None
    parameters: dict[str, Any] = {}
    outputs: list[_OutputBody] = []


class _AnswerBody(Struct):
    outputs: list[_TensorBody] = []
    error: Raw = _NO_RAW
    model_name: str = ""
    model_version: str | None = None
    parameters: dict[str, Any] = {}


_request = msgspec.json.Decoder(_RequestBody)
_answer = msgspec.json.Decoder(_AnswerBody)


@dataclass(frozen=True, slots=True)
class ParsedInfer:
    """A request and how its answer is to be written."""

    request: TensorRequest
    #: The client's `id`, echoed when it sent one (even an empty one).
    client_id: str | None
    #: Requested output -> as binary; empty when the client left the choice to us.
    binary: dict[str, bool]
    #: For outputs that are not named in `binary`.
    binary_default: bool


def read_request(body: bytes, header_length: str | int | None, model: str) -> ParsedInfer:
    """The request of an `infer` body; `header_length` is the extension's header as it came. Raises InvalidRequest."""
    head, tail = _split(body, header_length, InvalidRequest)
    try:
        parsed = _request.decode(head)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not an inference request: {error}") from None
    if not parsed.inputs:
        raise InvalidRequest("`inputs` is empty", param="inputs")
    try:
        inputs = _tensors(parsed.inputs, tail)
    except TensorError as error:
        raise InvalidRequest(str(error), param=error.name) from None
    binary: dict[str, bool] = {}
    parameters = dict(parsed.parameters)
    for name, value in parameters.items():
        if type(value) is int and not -(1 << 63) <= value < 1 << 64:
            raise InvalidRequest(f"parameter {name[:100]!r} is beyond 64 bits", param=name[:100])
    binary_default = _flag(parameters.pop("binary_data_output", False), "binary_data_output")
    for output in parsed.outputs:
        if output.name in binary:
            raise InvalidRequest(f"output {output.name[:100]!r} is asked for twice", param=output.name)
        for unknown in ("classification", "shared_memory_region"):
            if output.parameters.get(unknown):
                raise InvalidRequest(f"output {output.name[:100]!r}: `{unknown}` is not supported", param=output.name)
        binary[output.name] = _flag(output.parameters.get("binary_data", binary_default), output.name)
    request = TensorRequest(model=model, inputs=inputs, outputs=tuple(binary), parameters=parameters)
    return ParsedInfer(request, parsed.id, binary, binary_default)


def write_answer(answer: TensorAnswer, parsed: ParsedInfer) -> tuple[dict[str, str], bytes]:
    """Headers and body for the client: the outputs it asked for, in its order, each as it asked."""
    outputs = answer.outputs
    if parsed.binary:
        by_name = {tensor.name: tensor for tensor in outputs}
        for name in parsed.binary:
            if name not in by_name:
                raise InvalidRequest(f"the model {answer.model!r} has no output {name[:100]!r}", param=name)
        outputs = [by_name[name] for name in parsed.binary]
    head: dict[str, Any] = {"model_name": answer.model, "model_version": answer.version}
    if not answer.version:
        del head["model_version"]
    if parsed.client_id is not None:
        head["id"] = parsed.client_id
    if answer.parameters:
        head["parameters"] = answer.parameters
    try:
        specs, tail = _specs(outputs, [parsed.binary.get(tensor.name, parsed.binary_default) for tensor in outputs])
    except TensorError as error:
        raise InvalidRequest(f"output {error}", param=error.name, code="output_not_json") from None
    head["outputs"] = specs
    return _join(head, tail)


def write_request(request: TensorRequest) -> tuple[dict[str, str], bytes]:
    """A request in the binary extension that asks for binary outputs."""
    specs, tail = _specs(request.inputs, [True] * len(request.inputs))
    head: dict[str, Any] = {"inputs": specs, "parameters": {**request.parameters, "binary_data_output": True}}
    if request.id:
        head["id"] = request.id
    if request.outputs:
        head["outputs"] = [{"name": name, "parameters": {"binary_data": True}} for name in request.outputs]
    return _join(head, tail)


def read_answer(body: bytes, header_length: str | int | None, model: str) -> TensorAnswer:
    """The answer of a backend to `infer`. Raises MalformedAnswer or InBandError. `model` stands in for a missing `model_name`."""
    head, tail = _split(body, header_length, MalformedAnswer)
    try:
        parsed = _answer.decode(head)
        if parsed.error is not _NO_RAW and bytes(parsed.error) != b"null":
            raise InBandError("the backend reported an error inside its answer")
        outputs = _tensors(parsed.outputs, tail)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedAnswer(f"the backend's answer is not an inference answer: {error}") from None
    except TensorError as error:
        raise MalformedAnswer(f"output {error}") from None
    if not outputs:
        raise MalformedAnswer("the backend's answer has no outputs")
    return TensorAnswer(parsed.model_name or model, outputs, parsed.model_version or "", parsed.parameters)


def _split(
    body: bytes, header_length: str | int | None, kind: type[InvalidRequest] | type[MalformedAnswer]
) -> tuple[bytes | memoryview, memoryview]:
    """JSON and binary part of a body."""
    view = memoryview(body)
    if header_length is None:
        return body, view[len(body) :]
    text = str(header_length)
    if not (text.isascii() and text.isdigit()) or len(text) > 12:
        raise kind(f"{HEADER_LENGTH} is {text[:30]!r}, not a number of bytes")
    length = int(text)
    if length > len(body):
        raise kind(f"{HEADER_LENGTH} is {length}, but the body has only {len(body)} bytes")
    return view[:length], view[length:]


def _tensors(specs: list[_TensorBody], tail: memoryview) -> list[Tensor]:
    tensors: list[Tensor] = []
    names: set[str] = set()
    at = 0
    for spec in specs:
        name = spec.name
        if name in names:
            raise TensorError(name, "appears twice")
        names.add(name)
        size = spec.parameters.get("binary_data_size")
        has_data = spec.data is not _NO_RAW and bytes(spec.data) != b"null"
        if size is None:
            if not has_data:
                raise TensorError(name, "has neither `data` nor `parameters.binary_data_size`")
            tensors.append(from_json(name, spec.datatype, spec.shape, spec.data))
            continue
        if has_data:
            raise TensorError(name, "has both `data` and `parameters.binary_data_size`")
        if type(size) is not int or size < 0:
            raise TensorError(name, "`parameters.binary_data_size` is not a number of bytes")
        if at + size > len(tail):
            raise TensorError(name, f"says {size} bytes of binary data, but only {len(tail) - at} are left in the body")
        tensors.append(from_binary(name, spec.datatype, spec.shape, tail[at : at + size]))
        at += size
    if at != len(tail):
        last = specs[-1].name if specs else ""
        raise TensorError(last, f"{len(tail) - at} bytes of the body are left over after the last binary tensor")
    return tensors


def _specs(tensors: list[Tensor], binary: list[bool]) -> tuple[list[dict[str, Any]], list[bytes]]:
    specs: list[dict[str, Any]] = []
    tail: list[bytes] = []
    for tensor, as_binary in zip(tensors, binary, strict=True):
        spec: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}
        if as_binary:
            data = to_binary(tensor)
            spec["parameters"] = {"binary_data_size": len(data)}
            tail.append(data)
        else:
            spec["data"] = to_json(tensor)
        specs.append(spec)
    return specs, tail


def _join(head: dict[str, Any], tail: list[bytes]) -> tuple[dict[str, str], bytes]:
    data = orjson.dumps(head, option=orjson.OPT_SERIALIZE_NUMPY)
    if not tail:
        return {"content-type": "application/json"}, data
    return {"content-type": "application/octet-stream", HEADER_LENGTH: str(len(data))}, b"".join((data, *tail))


def _flag(value: object, name: str) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequest(f"the binary setting of {name[:100]!r} must be true or false", param=name)
    return value
