"""The Open Inference Protocol v2 over HTTP: `infer`, and the paths about server and models."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from backends.api import Answer, BackendInfo, Priority, TensorAnswer, TensorSpec
from backends.oip_wire import HEADER_LENGTH, ParsedInfer, read_request, write_answer
from gateway.edge.codec import Parsed, Written
from gateway.exchange import Handler
from gateway.readiness import Readiness
from policies.core.errors import ClientFault, GatewayError, InvalidRequest, MethodNotAllowed, UnknownModel, UnknownPath

SERVER_NAME = "hybrid-routing-gateway"
EXTENSIONS = ("binary_tensor_data",)
#: Every model has this one version: what is served is told by its fingerprint.
VERSION = "1"


class OipCodec:
    """`POST /v2/models/{name}[/versions/{version}]/infer`."""

    def parse(self, body: bytes, headers: Mapping[str, str], model: str) -> Parsed:
        parsed = read_request(body, headers.get(HEADER_LENGTH), model)
        # The protocol's priority may only lower the class: 0 = as it is, anything more is one class down.
        asked = parsed.request.parameters.get("priority")
        if asked is not None:
            if type(asked) is not int or asked < 0:
                raise InvalidRequest("`parameters.priority` must be a whole number of 0 or more.", "priority")
            parsed.request.priority = Priority(min(asked, max(Priority)))
        else:
            parsed.request.priority = Priority.VIP
        return Parsed(
            parsed.request, model, hint=parsed, timeout_s=_timeout_s(parsed.request.parameters.get("timeout"))
        )

    def write(self, answer: Answer, parsed: Parsed) -> Written:
        assert isinstance(answer, TensorAnswer)
        assert isinstance(parsed.hint, ParsedInfer)
        headers, body = write_answer(answer, parsed.hint)
        content_type = headers.pop("content-type")
        return Written(body, content_type, headers)

    def error(self, error: GatewayError, type_: str) -> bytes:
        if isinstance(error, ClientFault) and error.body:
            return error.body
        return json.dumps({"error": error.message}, ensure_ascii=False).encode()


def _timeout_s(asked: Any) -> float | None:
    """The protocol's timeout is in microseconds."""
    if asked is None:
        return None
    if type(asked) is not int or not 0 < asked < 10**15:
        raise InvalidRequest("`parameters.timeout` must be a whole number of microseconds, more than 0.", "timeout")
    return asked / 1e6


class OipPaths:
    """Everything under `/v2` except `infer`."""

    def __init__(self, handler: Handler, readiness: Readiness) -> None:
        self._handler = handler
        self._readiness = readiness

    @staticmethod
    def infer_model(path: str) -> str | None:
        """The model's name when `path`, not yet decoded, is an infer path. Raises UnknownPath for a version not there."""
        parts = path.strip("/").split("/")
        if len(parts) in (4, 6) and parts[1] == "models" and parts[-1] == "infer":
            if len(parts) == 6 and parts[3] != "versions":
                return None
            name = unquote(parts[2])
            if len(parts) == 6:
                _check_version(name, parts[4])
            return name
        return None

    async def get(self, method: str, path: str, authorization: str | None) -> tuple[int, bytes]:
        """Status and body of a metadata or health path. Raises UnknownPath, MethodNotAllowed, UnknownModel."""
        parts = path.strip("/").split("/")[1:]
        if method not in ("GET", "HEAD"):
            raise MethodNotAllowed(f"{path[:200]} answers GET only.", ("GET",))
        if not parts:
            return 200, _dump({"name": SERVER_NAME, "version": _version(), "extensions": list(EXTENSIONS)})
        if parts == ["health", "live"]:
            return 200, _dump({"live": True})
        if parts == ["health", "ready"]:
            ready = self._readiness.models_ready() and not self._readiness.draining
            return (200 if ready else 503), _dump({"ready": ready})
        if parts[0] == "models" and len(parts) in (2, 3, 4, 5):
            return self._model(path, unquote(parts[1]), parts[2:], authorization)
        raise UnknownPath(f"There is nothing at {path[:200]!r}.")

    def _model(self, path: str, model: str, rest: list[str], authorization: str | None) -> tuple[int, bytes]:
        info = self._handler.describe(model, authorization)
        if info is None:
            raise UnknownModel(model)
        if len(rest) >= 2 and rest[0] == "versions":
            _check_version(model, rest[1])
            rest = rest[2:]
        if not rest:
            return 200, _dump(model_metadata(model, info))
        if rest == ["ready"]:
            # A remote backend counts as ready: only a call can tell more, and none is made here.
            ready = self._readiness.model_ready(info.name) is not False
            return (200 if ready else 503), _dump({"name": model, "ready": ready})
        raise UnknownPath(f"There is nothing at {path[:200]!r}.")


def _check_version(model: str, version: str) -> None:
    if version != VERSION:
        raise UnknownPath(
            f"The model {model[:100]!r} has no version {unquote(version)[:20]!r}; its only one is {VERSION}."
        )


def model_metadata(model: str, info: BackendInfo) -> dict[str, Any]:
    return {
        "name": model,
        "versions": [VERSION],
        "platform": "onnxruntime_onnx" if info.inputs else "remote",
        "inputs": [_spec(spec) for spec in info.inputs],
        "outputs": [_spec(spec) for spec in info.outputs],
    }


def _spec(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "datatype": spec.datatype, "shape": list(spec.shape)}


def _dump(value: dict[str, Any]) -> bytes:
    return json.dumps(value).encode()


def _version() -> str:
    from importlib.metadata import version

    return version(SERVER_NAME)
