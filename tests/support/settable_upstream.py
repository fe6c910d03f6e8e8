"""A scripted upstream whose models can be told, at any moment, what to be next."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from backends.scripted_models import MODELS, TENSOR_MODELS, Script
from backends.scripted_server import ScriptedServer, Seen, _Connection
from backends.scripted_steps import ScriptFile, Step
from policies.core.clock import SystemClock

#: The name of a built-in model, the steps themselves, or a function of what was asked.
Part = str | tuple[Step, ...] | Callable[[Seen], "str | tuple[Step, ...]"]


class SettableUpstream(ScriptedServer):
    """`up.play(heavy="never")`: from now on the backend `heavy` (its upstream model `heavy-model`) never answers."""

    def __init__(self) -> None:
        super().__init__(ScriptFile(), SystemClock())
        self.parts: dict[str, Part] = {}

    async def start(self, host: str, port: int) -> None:
        """With room for a burst of connections that have not been accepted yet."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), host, port, backlog=2048)

    def play(self, **parts: Part) -> None:
        """Backend -> what it is from now on; `ok` until told otherwise."""
        self.parts.update({f"{name}-model": part for name, part in parts.items()})

    def calls(self, backend: str) -> int:
        """How many requests have come for a backend."""
        return self.requests[f"{backend}-model"]

    def last_seen(self, backend: str) -> Seen:
        return self.last(f"{backend}-model")

    def total(self) -> int:
        return sum(self.requests.values())

    def script(self, seen: Seen) -> Script:
        part: Any = self.parts.get(seen.model, "ok")
        if callable(part):
            part = part(seen)
        if isinstance(part, str):
            return (TENSOR_MODELS if seen.path.startswith("/v2/") else MODELS)[part](seen.stream, seen.body)
        return tuple(part)
