"""The JSON of chat answers made in process: one `chat.completion`, or `chat.completion.chunk` by chunk."""

from __future__ import annotations

from typing import Any

import msgspec

from backends.api import Chunk, ChunkKind, Usage


class AnswerWriter:
    """Writes one answer. What all of its chunks share is encoded once; a token then costs one small JSON string."""

    __slots__ = ("_after_content", "_before_delta", "_head", "model")

    def __init__(self, answer_id: str, created: int, model: str, system_fingerprint: str) -> None:
        self.model = model
        self._head: dict[str, Any] = {
            "id": answer_id,
            "created": created,
            "model": model,
            "system_fingerprint": system_fingerprint,
        }
        head = msgspec.json.encode({"object": "chat.completion.chunk"} | self._head)
        self._before_delta = head[:-1] + b',"choices":[{"index":0,"delta":'
        self._after_content = b'},"logprobs":null,"finish_reason":null}]}'

    def role(self) -> Chunk:
        data = self._before_delta + b'{"role":"assistant","content":""' + self._after_content
        return Chunk(data, ChunkKind.META)

    def content(self, text: str) -> Chunk:
        data = self._before_delta + b'{"content":' + msgspec.json.encode(text) + self._after_content
        return Chunk(data, ChunkKind.CONTENT)

    def finish(self, reason: str) -> Chunk:
        data = self._before_delta + b'{},"logprobs":null,"finish_reason":' + msgspec.json.encode(reason) + b"}]}"
        return Chunk(data, ChunkKind.FINISH)

    def usage(self, usage: Usage) -> Chunk:
        body = {"object": "chat.completion.chunk"} | self._head | {"choices": [], "usage": usage_json(usage)}
        return Chunk(msgspec.json.encode(body), ChunkKind.USAGE)

    def whole(self, text: str, finish_reason: str, usage: Usage) -> bytes:
        """The `chat.completion` body."""
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason}
        body = {"object": "chat.completion"} | self._head | {"choices": [choice], "usage": usage_json(usage)}
        return msgspec.json.encode(body)


def usage_json(usage: Usage) -> dict[str, int]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
