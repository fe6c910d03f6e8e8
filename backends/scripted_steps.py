"""Scripts for the scripted upstream: what it does with one request, step by step, down to single bytes on the wire.

The file format is described in `docs/scripted-upstream.md`.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from policies.core.errors import ConfigError


class Head(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Status line and headers. `framing`: chunked, length (a content-length is among the headers) or close."""

    status: int = 200
    headers: dict[str, str] = {}
    framing: str = "chunked"


class Reply(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole response with its content-length. `json` or `text`."""

    status: int = 200
    headers: dict[str, str] = {}
    json: Any = None
    text: str = ""
    gzip: bool = False


class Tokens(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`count` content chunks, `every_s` apart."""

    count: int
    every_s: float = 0.0
    text: str = "tok{i} "


class Step(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Exactly one action; `bytewise` goes with send, send_base64 and sse."""

    #: The good answer with this text: a stream when the request asks for one, else whole.
    answer: str | None = None
    head: Head | None = None
    reply: Reply | None = None
    #: Part of the body.
    send: str | None = None
    send_base64: str | None = None
    #: One event; JSON is encoded, text goes as it is.
    sse: Any = None
    #: Bytes on the wire without any framing.
    raw: str | None = None
    tokens: Tokens | None = None
    wait_s: float | None = None
    #: Never go on.
    hang: bool = False
    #: End the body properly.
    end: bool = False
    #: Close the connection (FIN).
    close: bool = False
    #: Reset the connection (RST).
    reset: bool = False
    #: Close without an answer when the connection has served before: an idle connection closed as we were written to.
    close_if_reused: bool = False
    #: One write a byte.
    bytewise: bool = False

    def action(self) -> str:
        """The name of its one action. Raises ValueError when there is none or more than one."""
        given = [
            name
            for name in self.__struct_fields__
            if name != "bytewise" and getattr(self, name) is not None and getattr(self, name) is not False
        ]
        if len(given) != 1:
            raise ValueError(f"a step has exactly one action, but this one has {given or 'none'}")
        return given[0]

    def payload(self) -> bytes:
        """The bytes of send, send_base64 or sse."""
        if self.send is not None:
            return self.send.encode()
        if self.send_base64 is not None:
            return base64.b64decode(self.send_base64, validate=True)
        return event(self.sse)


class ScriptFile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`scripts` by model name; `default` names the script (or built-in) for every other model."""

    scripts: dict[str, tuple[Step, ...]] = {}
    default: str = "ok"


def load_scripts(path: Path) -> ScriptFile:
    """Read a script file (YAML). Raises ConfigError naming file and step."""
    try:
        parsed = msgspec.yaml.decode(path.read_bytes(), type=ScriptFile)
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read ({error.strerror})"]) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: {error}"]) from None
    problems = []
    for name, steps in parsed.scripts.items():
        for number, step in enumerate(steps):
            try:
                step.action()
                if step.send_base64 is not None:
                    step.payload()  # shows what is no base64
            except ValueError as error:
                problems.append(f"{path}: scripts.{name}[{number}]: {error}")
            if step.head is not None and step.head.framing not in ("chunked", "length", "close"):
                problems.append(f"{path}: scripts.{name}[{number}].head.framing: chunked, length or close")
    if problems:
        raise ConfigError(problems)
    return parsed


def event(value: Any) -> bytes:
    """One server-sent event."""
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return f"data: {text}\n\n".encode()


def chunk(delta: dict[str, Any] | None, finish: str | None = None, *, model: str = "scripted") -> dict[str, Any]:
    """A `chat.completion.chunk`; `delta` None = no choices at all."""
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish}]
    return {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": model, "choices": choices}


def completion(message: dict[str, Any], finish: str | None = "stop", *, model: str = "scripted") -> dict[str, Any]:
    """A `chat.completion`."""
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": model,
        "choices": [{"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish}],
        "usage": USAGE,
    }


USAGE = {"prompt_tokens": 10, "completion_tokens": 8, "total_tokens": 18}
