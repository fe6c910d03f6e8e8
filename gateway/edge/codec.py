"""What an edge needs of a wire format: bytes to a request, an answer to bytes, an error to bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from backends.api import Answer, Request
from policies.core.errors import GatewayError, InvalidRequest


class Parsed(msgspec.Struct):
    """A request as its wire format said it. `hint` is what the codec needs again to write the answer."""

    request: Request
    model: str
    stream: bool = False
    include_usage: bool = False
    hint: Any = None
    #: What the pipeline found out about this very body; only kept for bodies that are asked again and again.
    prepared: Any = None
    #: A time limit that the wire format itself carries.
    timeout_s: float | None = None


class Written(msgspec.Struct):
    """A body ready to be sent; `headers` are those that only this format knows."""

    body: bytes
    content_type: str = "application/json"
    headers: dict[str, str] = {}


class Codec(Protocol):
    """One wire format of one surface."""

    def parse(self, body: bytes, headers: Mapping[str, str], model: str) -> Parsed:
        """Raises InvalidRequest, naming the field. `model` is the name in the path, where the format has it there."""
        ...

    def write(self, answer: Answer, parsed: Parsed) -> Written: ...

    def error(self, error: GatewayError, type_: str) -> bytes:
        """The error's body. `type_` is the error table's type, which only some formats show."""
        ...


def require(condition: bool, message: str, param: str) -> None:
    """Raise InvalidRequest unless `condition` holds."""
    if not condition:
        raise InvalidRequest(message, param)
