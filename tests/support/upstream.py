"""A scripted upstream on a real socket, and backends that call it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from backends.api import BackendInfo, Capabilities, ChatRequest, Role, StreamLimits, Surface
from backends.http_transport import HttpOptions
from backends.oip_http import OipBackend
from backends.openai_http import OpenAIBackend
from backends.scripted_server import ScriptedServer, serve_scripts
from backends.scripted_steps import ScriptFile, Step
from policies.core.clock import Clock, SystemClock
from policies.core.deadline import Deadline


@asynccontextmanager
async def scripted_upstream(**scripts: tuple[Step, ...]) -> AsyncIterator[ScriptedServer]:
    """A server on a free port of 127.0.0.1; `scripts` add to the built-in models."""
    server = await serve_scripts("127.0.0.1", 0, ScriptFile(scripts=scripts))
    try:
        yield server
    finally:
        await server.close()


def info(model: str, *, surface: Surface = Surface.CHAT, name: str = "heavy") -> BackendInfo:
    return BackendInfo(
        name=name,
        role=Role.HEAVY,
        model=model,
        fingerprint=f"{name}@1",
        capabilities=Capabilities(surfaces=frozenset({surface})),
    )


#: Both ends share one loop in a test: many calls at once make each of them slow to connect.
_CONNECT_S = 2.0


def openai_backend(base: str, model: str = "ok", clock: Clock | None = None, **options: object) -> OpenAIBackend:
    """A backend that asks the upstream at `base` for `model` (the name of the fault)."""
    options = {"connect_s": _CONNECT_S, **options}
    return OpenAIBackend(info(model), HttpOptions(f"{base}/v1", **options), clock or SystemClock())  # type: ignore[arg-type]


def oip_backend(base: str, model: str = "ok", **options: object) -> OipBackend:
    options = {"connect_s": _CONNECT_S, **options}
    return OipBackend(info(model, surface=Surface.TENSOR), HttpOptions(base, **options), SystemClock())  # type: ignore[arg-type]


def question(
    text: str = "What are your opening hours?", *, idle_s: float = 5.0, total_s: float = 60.0, **body: object
) -> ChatRequest:
    messages = [{"role": "user", "content": text}]
    return ChatRequest(
        {"model": "auto", "messages": messages, **body}, id="req-1", limits=StreamLimits(idle_s, total_s)
    )


def soon(seconds: float = 5.0) -> Deadline:
    return Deadline.after(seconds, SystemClock())
