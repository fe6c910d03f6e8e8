"""Asking an in-process chat model in tests, and reading what it says."""

from __future__ import annotations

from typing import Any

import msgspec

from backends.api import ChatRequest, Chunk, ChunkKind
from backends.onnx.chat import ChatSettings, OnnxChatBackend
from backends.onnx.generation import GenerationLimits
from policies.core.deadline import Deadline
from policies.core.errors import ClientFault

SETTINGS = ChatSettings(
    limits=GenerationLimits(active=2, vip_extra=1, waiting=4),
    context_tokens=600,
    default_max_tokens=20,
    seeds=lambda: 7,
)
GREEDY = {"temperature": 0}


def ask(text: Any = "Hello", **fields: Any) -> ChatRequest:
    return ChatRequest({"model": "auto", "messages": [{"role": "user", "content": text}], **fields}, id="r1")


async def chunks(backend: OnnxChatBackend, request: ChatRequest, deadline: Deadline) -> list[Chunk]:
    return [chunk async for chunk in backend.stream(request, deadline)]


def content(body: bytes) -> str:
    return msgspec.json.decode(body)["choices"][0]["message"]["content"]


def said(stream: list[Chunk]) -> str:
    return "".join(
        msgspec.json.decode(chunk.data)["choices"][0]["delta"]["content"]
        for chunk in stream
        if chunk.kind is ChunkKind.CONTENT
    )


def refused(error: ClientFault) -> dict[str, Any]:
    return msgspec.json.decode(error.body)["error"]
