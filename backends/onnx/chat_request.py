"""What a chat body asks of a small text model: turns, length, stop strings, sampling. Wrong values are the client's fault."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from backends.api import ChatRequest
from backends.needs import chat_features
from backends.onnx.chat_prompt import ROLES
from backends.onnx.manifest import ModelDamaged
from backends.onnx.sampling import Sampling
from policies.core.errors import CannotServe, ClientFault, ContextTooLong

DEFAULTS_NAME = "generation.json"
_MAX_STOPS = 16
_MAX_STOP_CHARACTERS = 500


class GenerationDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """How the model's makers want it used; a file of the model folder, so part of its fingerprint.

    `temperature` and `top_p` hold where a request says nothing (OpenAI's own default, 1, makes small models babble).
    """

    stop_tokens: tuple[int, ...]
    temperature: float
    top_p: float


def read_defaults(folder: Path) -> GenerationDefaults:
    try:
        return msgspec.json.decode((folder / DEFAULTS_NAME).read_bytes(), type=GenerationDefaults)
    except (OSError, msgspec.MsgspecError) as error:
        raise ModelDamaged(f"{folder / DEFAULTS_NAME} cannot be read ({error}); build the model again") from error


@dataclass(frozen=True, slots=True)
class ChatCall:
    """A checked chat body. `max_tokens` and `seed` None = the client did not say."""

    turns: list[dict[str, str]]
    max_tokens: int | None
    stops: tuple[str, ...]
    temperature: float
    top_p: float
    frequency_penalty: float
    presence_penalty: float
    seed: int | None

    def sampling(self, seed: int) -> Sampling:
        """`seed` is used where the client gave none."""
        return Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            seed=seed if self.seed is None else self.seed,
        )


def read_call(request: ChatRequest, defaults: GenerationDefaults, backend: str) -> ChatCall:
    """Raises ClientFault (400) for wrong values, CannotServe for what a text model without extras cannot do."""
    body = request.body
    read = _Fields(body, backend)
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise read.fault("messages", "must be a list of at least one message")
    turns = [_turn(message, f"messages.{place}", read) for place, message in enumerate(messages)]
    wanted = chat_features(body)
    if body.get("logit_bias"):
        wanted.append("logit_bias")
    if wanted:
        raise CannotServe(f"the model of {backend!r} has no {', '.join(wanted)}")
    name = "max_tokens" if body.get("max_completion_tokens") is None else "max_completion_tokens"
    top_p = read.number("top_p", (0.0, 1.0), defaults.top_p)
    return ChatCall(
        turns=turns,
        max_tokens=read.integer(name, at_least=1),
        stops=read.stops(),
        temperature=read.number("temperature", (0.0, 2.0), defaults.temperature),
        # 0 is legal and means: only the most probable token.
        top_p=top_p if top_p > 0 else 1e-9,
        frequency_penalty=read.number("frequency_penalty", (-2.0, 2.0), 0.0),
        presence_penalty=read.number("presence_penalty", (-2.0, 2.0), 0.0),
        seed=read.integer("seed", at_least=None),
    )


def context_too_long(tokens: int, context_tokens: int, backend: str, *, at_least: bool = False) -> ContextTooLong:
    """OpenAI's `context_length_exceeded`. `at_least`: `tokens` is only a lower bound."""
    message = (
        f"This model's maximum context length is {context_tokens} tokens. However, your messages resulted in "
        f"{'at least ' if at_least else ''}{tokens} tokens. Please reduce the length of the messages."
    )
    body = _error_body(message, "messages", ContextTooLong.code)
    return ContextTooLong(400, body, "application/json", backend)


def client_fault(message: str, param: str, backend: str) -> ClientFault:
    """400 in OpenAI's shape."""
    return ClientFault(400, _error_body(message, param, None), "application/json", backend)


def _error_body(message: str, param: str, code: str | None) -> bytes:
    error = {"message": message, "type": "invalid_request_error", "param": param, "code": code}
    return msgspec.json.encode({"error": error})


def _turn(message: Any, param: str, read: _Fields) -> dict[str, str]:
    """{role, content} with one text, as templates expect it."""
    if not isinstance(message, dict):
        raise read.fault(param, "must be an object with role and content")
    # A role is written into the prompt as it stands: only known ones may pass.
    role = ROLES.get(message["role"]) if isinstance(message.get("role"), str) else None
    if role is None:
        raise read.fault(f"{param}.role", f"must be one of {', '.join(ROLES)}")
    content = message.get("content")
    if content is None:
        return {"role": role, "content": ""}
    if isinstance(content, str):
        return {"role": role, "content": content}
    if not isinstance(content, list):
        raise read.fault(f"{param}.content", "must be a string or a list of parts")
    texts = []
    for place, part in enumerate(content):
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise read.fault(f"{param}.content.{place}", "must be an object with a type")
        if part["type"] in ("image_url", "input_audio"):
            continue  # `chat_features` says that these cannot be served
        if part["type"] not in ("text", "refusal") or not isinstance(part.get(part["type"]), str):
            raise read.fault(f"{param}.content.{place}", 'must be {"type": "text", "text": string}')
        texts.append(part[part["type"]])
    return {"role": role, "content": "".join(texts)}


class _Fields:
    """Reads optional fields of one body; null is the same as absent."""

    def __init__(self, body: dict[str, Any], backend: str) -> None:
        self._body = body
        self._backend = backend

    def fault(self, param: str, problem: str) -> ClientFault:
        return client_fault(f"Invalid value for {param!r}: it {problem}.", param, self._backend)

    def number(self, name: str, limits: tuple[float, float], default: float) -> float:
        found = self._body.get(name)
        if found is None:
            return default
        if isinstance(found, bool) or not isinstance(found, int | float) or not limits[0] <= found <= limits[1]:
            raise self.fault(name, f"must be a number from {limits[0]:g} to {limits[1]:g}")
        return float(found)

    def integer(self, name: str, at_least: int | None) -> int | None:
        found = self._body.get(name)
        if found is None:
            return None
        whole = isinstance(found, int) or (isinstance(found, float) and found.is_integer())
        if isinstance(found, bool) or not whole or (at_least is not None and found < at_least):
            raise self.fault(name, "must be an integer" + ("" if at_least is None else f" of at least {at_least}"))
        return int(found)

    def stops(self) -> tuple[str, ...]:
        found = self._body.get("stop")
        if found is None:
            return ()
        stops = [found] if isinstance(found, str) else found
        if not isinstance(stops, list) or len(stops) > _MAX_STOPS:
            raise self.fault("stop", f"must be a string or a list of at most {_MAX_STOPS} strings")
        for stop in stops:
            if not isinstance(stop, str) or not 0 < len(stop) <= _MAX_STOP_CHARACTERS:
                raise self.fault("stop", f"must hold strings of 1 to {_MAX_STOP_CHARACTERS} characters")
        return tuple(stops)
