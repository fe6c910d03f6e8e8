"""What a process of the gateway is given at its start, through the hub: it reads neither files nor the environment itself.

So a process that is started again in the middle of somebody's edit begins with what the others have, and not with half a file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from gateway.config_sections import Config
from gateway.secret import Secret
from policies.language.schema import Policy


class KeysInForce(msgspec.Struct, frozen=True):
    """The keys file as it was last read in good order. `data` None = there is no file."""

    data: bytes | None = None
    #: Why the file on disk is not in force; empty when it is.
    problem: str = ""


class Standing(msgspec.Struct, frozen=True):
    """What all workers must agree on. `generation` counts the changes of the policies."""

    generation: int = 0
    policies: list[Policy] = []
    notices: list[str] = []
    keys: KeysInForce = KeysInForce()


class Start(msgspec.Struct, frozen=True):
    """Everything that one process begins with."""

    config: Config
    standing: Standing = Standing()
    #: Where the model host listens; empty = models run in this process.
    models_at: str = ""
    #: What other workers have told: (teller, key, fact).
    facts: list[tuple[str, str, dict[str, Any]]] = []


def to_payload(start: Start) -> dict[str, Any]:
    """As plain values; secrets are in clear, for they travel between two processes of one user only."""
    payload: dict[str, Any] = msgspec.to_builtins(start, enc_hook=_plain, builtin_types=(bytes,))
    return payload


def from_payload(payload: dict[str, Any]) -> Start:
    return msgspec.convert(payload, Start, dec_hook=_rich)


def _plain(value: Any) -> Any:
    if isinstance(value, Secret):
        return value.reveal()
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} cannot be sent")


def _rich(kind: type, value: Any) -> Any:
    if kind is Secret or kind is Path:
        return kind(value)
    raise TypeError(f"{kind.__name__} cannot be read")
