"""From a stream of chunks to the whole answer, and back: a stored answer serves `stream` true and false alike.

`assemble(chunk.data for chunk in replay(answer, include_usage=True))` gives an answer equal to `answer` as JSON.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from backends.api import ChatAnswer, Chunk, ChunkKind
from backends.openai_wire import read_chunk, read_completion
from policies.core.errors import MalformedAnswer, TruncatedAnswer

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(dict[str, Any]).decode

#: Message fields that stream piece by piece, in the order in which a replay sends them.
_TEXTS = ("reasoning_content", "reasoning", "content", "refusal")


def assemble(chunks: Iterable[bytes]) -> ChatAnswer:
    """The `chat.completion` that these `chat.completion.chunk` bodies add up to.

    Texts are joined, tool calls merged by index, lists (log probabilities) extended; of other fields the last value that
    is not null stands. Raises MalformedAnswer without any choice, TruncatedAnswer when a choice lacks `finish_reason`.
    """
    try:
        whole, choices = _merge(chunks)
    except (msgspec.DecodeError, RecursionError, AttributeError, TypeError):
        # Chunks are checked one by one only for what classifies them; parts of other types show here.
        raise MalformedAnswer("the chunks of the backend's stream do not add up to a chat completion") from None
    if not choices:
        raise MalformedAnswer("the backend's stream held no choice")
    for choice in choices.values():
        if not choice["finish_reason"]:
            raise TruncatedAnswer("the backend's stream ended without a finish_reason")
        choice["message"].setdefault("role", "assistant")
    whole["object"] = "chat.completion"
    whole["choices"] = [choices[index] for index in sorted(choices)]
    return read_completion(_encode(whole))


def _merge(chunks: Iterable[bytes]) -> tuple[dict[str, Any], dict[int, dict[str, Any]]]:
    """The fields beside `choices`, and the choices by index."""
    whole: dict[str, Any] = {}
    choices: dict[int, dict[str, Any]] = {}
    for data in chunks:
        chunk = _decode(data)
        for key, value in chunk.items():
            if key != "choices" and (value is not None or key not in whole):
                whole[key] = value
        for part in chunk.get("choices") or ():
            index = part.get("index") or 0
            _add_choice(choices.setdefault(index, {"index": index, "message": {}, "finish_reason": None}), part)
    for choice in choices.values():
        found = choice["message"].get("tool_calls")
        if found:
            found.sort(key=lambda call: call.get("index", len(found)))
        for call in found or ():
            call.pop("index", None)
    return whole, choices


def _add_choice(choice: dict[str, Any], part: dict[str, Any]) -> None:
    message = choice["message"]
    for key, value in part.items():
        if key == "delta":
            for name, piece in (value or {}).items():
                if name == "tool_calls" and piece:
                    _add_calls(message, piece)
                else:
                    _add(message, name, piece)
        elif key == "finish_reason":
            choice[key] = value or choice[key]
        elif key != "index":
            _add(choice, key, value)


def _add(into: dict[str, Any], key: str, piece: Any) -> None:
    """Merge one value: null never erases, texts and lists grow, objects merge, anything else replaces."""
    held = into.get(key)
    if piece is None or held is None:
        if piece is not None or key not in into:
            into[key] = dict(piece) if isinstance(piece, dict) else piece
    elif isinstance(held, str) and isinstance(piece, str):
        # An answer has one role, type and id, however often a backend repeats it.
        into[key] = held if key in ("role", "type", "id") else held + piece
    elif isinstance(held, list) and isinstance(piece, list):
        into[key] = held + piece
    elif isinstance(held, dict) and isinstance(piece, dict):
        for inner, value in piece.items():
            _add(held, inner, value)
    else:
        into[key] = piece


def _add_calls(message: dict[str, Any], pieces: list[dict[str, Any]]) -> None:
    """Tool calls of several indexes may be interleaved. A backend that sends no index starts a call with each new id."""
    if message.get("tool_calls") is None:
        message["tool_calls"] = []
    calls: list[dict[str, Any]] = message["tool_calls"]
    for piece in pieces:
        index = piece.get("index")
        if index is not None:
            found = next((call for call in calls if call.get("index") == index), None)
        else:
            found = calls[-1] if calls and piece.get("id") in (None, "", calls[-1].get("id")) else None
        if found is None:
            found = {}
            calls.append(found)
        for key, value in piece.items():
            if key == "index":
                found[key] = value
            else:
                _add(found, key, value)


def replay(answer: ChatAnswer, *, include_usage: bool) -> list[Chunk]:
    """A whole answer as the chunks of a stream: for each choice the role, its texts, its tool calls and its finish; then
    usage, when it is asked for and known."""
    body = _decode(answer.body)
    usage = body.pop("usage", None)
    choices: list[dict[str, Any]] = body.pop("choices")
    envelope = {**body, "object": "chat.completion.chunk"}
    pieces: list[dict[str, Any]] = []
    for choice in choices:
        pieces += _choice_pieces(choice)
    chunks = [read_chunk(_encode({**envelope, "choices": [piece]})) for piece in pieces]
    last = max(number for number, chunk in enumerate(chunks) if chunk.kind is ChunkKind.FINISH)
    chunks = [
        Chunk(chunk.data, ChunkKind.CONTENT) if chunk.kind is ChunkKind.FINISH and number != last else chunk
        for number, chunk in enumerate(chunks)
    ]
    if include_usage and usage is not None:
        chunks.append(Chunk(_encode({**envelope, "choices": [], "usage": usage}), ChunkKind.USAGE))
    return chunks


def _choice_pieces(choice: dict[str, Any]) -> list[dict[str, Any]]:
    """The `choices` entries, one a chunk, that stream this choice."""
    message: dict[str, Any] = choice["message"]
    extras = {k: v for k, v in choice.items() if k not in ("index", "message", "finish_reason", "logprobs")}
    start = {k: v for k, v in message.items() if k not in (*_TEXTS, "tool_calls")}
    # Null and empty texts go with the role, as they do upstream, so that absent, null and "" stay apart.
    start |= {k: message[k] for k in (*_TEXTS, "tool_calls") if k in message and not message[k]}
    deltas = [start]
    deltas += [{k: message[k]} for k in _TEXTS if message.get(k)]
    deltas += [{"tool_calls": [{"index": i, **call}]} for i, call in enumerate(message.get("tool_calls") or ())]
    index = choice.get("index", 0)
    pieces: list[dict[str, Any]] = [{"index": index, "delta": delta, "finish_reason": None} for delta in deltas]
    pieces.append({"index": index, "delta": {}, "finish_reason": choice["finish_reason"], **extras})
    if "logprobs" in choice:
        pieces[-2 if len(pieces) > 2 else -1]["logprobs"] = choice["logprobs"]
    return pieces
