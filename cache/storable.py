"""Which answers must never be stored, whatever a policy says."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from backends.api import Answer, ChatAnswer, EmbeddingsAnswer

#: How an answer ends when it is whole. `length` is cut off; `content_filter` may be decided otherwise next time.
_WHOLE = frozenset({"stop", "tool_calls", "function_call"})


class _Message(msgspec.Struct, frozen=True):
    content: Any = None
    refusal: Any = None
    tool_calls: Any = None
    function_call: Any = None


class _Choice(msgspec.Struct, frozen=True):
    message: _Message = _Message()
    finish_reason: str | None = None


class _Completion(msgspec.Struct, frozen=True):
    choices: list[_Choice] = []


_read = msgspec.json.Decoder(_Completion).decode


def refusal(answer: Answer) -> str:
    """Why `answer` must not be stored: truncated, empty, malformed or not_finite; "" when it may be."""
    if isinstance(answer, ChatAnswer):
        return _chat_refusal(answer)
    if isinstance(answer, EmbeddingsAnswer):
        if answer.vectors.size == 0:
            return "empty"
        return "" if bool(np.isfinite(answer.vectors).all()) else "not_finite"
    return "" if answer.outputs else "empty"


def _chat_refusal(answer: ChatAnswer) -> str:
    if answer.finish_reason not in _WHOLE:
        return "truncated"
    try:
        choices = _read(answer.body).choices
    except msgspec.DecodeError:
        return "malformed"
    if not choices:
        return "empty"
    for choice in choices:
        if choice.finish_reason not in _WHOLE:
            return "truncated"
        message = choice.message
        if not (message.content or message.tool_calls or message.function_call or message.refusal):
            return "empty"
    return ""
