"""What a request needs of a model, and whether a model has it: the reason a rung is skipped, or None."""

from __future__ import annotations

import unicodedata
from typing import Any

from backends.api import BackendInfo, ChatRequest, EmbeddingsRequest, Request, TensorRequest
from policies.core.errors import InvalidRequest

#: Scripts that only some languages use; Latin text is taken as English unless the operator declares more.
_SCRIPT_LANGUAGES = {
    "CJK": "zh",
    "HIRAGANA": "ja",
    "KATAKANA": "ja",
    "HANGUL": "ko",
    "CYRILLIC": "ru",
    "ARABIC": "ar",
    "HEBREW": "he",
    "GREEK": "el",
    "DEVANAGARI": "hi",
    "THAI": "th",
}
#: A language counts as needed when at least this share of the sampled letters is of its script.
_SCRIPT_SHARE = 0.2
_SAMPLE = 400


def missing(request: Request, info: BackendInfo) -> str | None:
    """Why `info`'s model cannot serve `request`, as a short reason for people; None when it can."""
    if request.surface not in info.capabilities.surfaces:
        return f"does not serve {request.surface} traffic"
    if isinstance(request, ChatRequest):
        return _missing_chat(request, info)
    if isinstance(request, TensorRequest):
        return _missing_tensors(request, info)
    return None


def same_answer_space(first: BackendInfo, other: BackendInfo, request: Request) -> str | None:
    """Why `other` may not stand in for `first`: embeddings never change model, tensors only with `substitutes`."""
    if isinstance(request, ChatRequest) or first.fingerprint == other.fingerprint:
        return None
    if isinstance(request, EmbeddingsRequest):
        return "embeddings never change model"
    if other.substitutes in (first.model, first.name):
        return None
    return f"is no declared substitute for {first.name}"


def _missing_chat(request: ChatRequest, info: BackendInfo) -> str | None:
    capabilities = info.capabilities
    for feature in chat_features(request.body):
        if feature not in capabilities.features:
            return f"has no {feature}"
    if capabilities.languages is not None or capabilities.context_tokens is not None:
        texts = message_texts(request.body["messages"])
        if capabilities.languages is not None:
            language = script_language(texts[-1] if texts else "")
            if language not in capabilities.languages:
                return f"does not know the language {language}"
        if capabilities.context_tokens is not None:
            tokens = sum(estimated_tokens(text) for text in texts)
            if tokens > capabilities.context_tokens:
                return f"its context of {capabilities.context_tokens} tokens is too small for about {tokens}"
    return None


def _missing_tensors(request: TensorRequest, info: BackendInfo) -> str | None:
    unknown = _unknown_tensor(request, info)
    return None if unknown is None else f"has no {unknown[0]} {unknown[1]!r}"


def check_tensor_names(request: TensorRequest, info: BackendInfo) -> None:
    """Raise InvalidRequest, naming the tensor, when the model has no such input or output."""
    unknown = _unknown_tensor(request, info)
    if unknown is not None:
        kind, name = unknown
        known = ", ".join(spec.name for spec in (info.inputs if kind == "input" else info.outputs))
        raise InvalidRequest(f"the model {info.model!r} has no {kind} {name[:100]!r}; it has {known}", name[:100])


def _unknown_tensor(request: TensorRequest, info: BackendInfo) -> tuple[str, str] | None:
    """("input" or "output", name) that the model does not have; a model that declares nothing has everything."""
    if not info.inputs:
        return None
    known = {spec.name for spec in info.inputs}
    produced = {spec.name for spec in info.outputs}
    for tensor in request.inputs:
        if tensor.name not in known:
            return "input", tensor.name
    for output in request.outputs:
        if output not in produced:
            return "output", output
    return None


def chat_features(body: dict[str, Any]) -> list[str]:
    """The optional features a chat body uses: tools, json_schema, images, audio, n, logprobs."""
    used = []
    if body.get("tools") or body.get("functions"):
        used.append("tools")
    response_format = body.get("response_format")
    if isinstance(response_format, dict) and response_format.get("type") in ("json_schema", "json_object"):
        used.append("json_schema")
    if (body.get("n") or 1) != 1:
        used.append("n")
    if body.get("logprobs"):
        used.append("logprobs")
    for message in body["messages"]:
        content = message.get("content")
        if type(content) is list:
            for part in content:
                kind = part.get("type") if isinstance(part, dict) else None
                if kind == "image_url" and "images" not in used:
                    used.append("images")
                elif kind == "input_audio" and "audio" not in used:
                    used.append("audio")
    return used


def message_texts(messages: list[dict[str, Any]]) -> list[str]:
    """The text of each message, parts joined; messages without text are left out."""
    texts = []
    for message in messages:
        content = message.get("content")
        if type(content) is str:
            texts.append(content)
        elif type(content) is list:
            texts.append("".join(p["text"] for p in content if isinstance(p, dict) and type(p.get("text")) is str))
    return texts


def estimated_tokens(text: str) -> int:
    """Tokens of a text without a tokenizer: about 4 ASCII letters a token, other characters one each (rounded up)."""
    if text.isascii():
        return (len(text) + 3) // 4
    ascii_count = sum(1 for c in text if c < "\x80")
    return (ascii_count + 3) // 4 + len(text) - ascii_count


def script_language(text: str) -> str:
    """ISO 639-1 code guessed from the script alone, over a bounded sample; "en" for Latin or no letters."""
    if text.isascii():
        return "en"
    sample = text if len(text) <= _SAMPLE else text[: _SAMPLE // 2] + text[-_SAMPLE // 2 :]
    counts: dict[str, int] = {}
    letters = 0
    for char in sample:
        if not char.isalpha():
            continue
        letters += 1
        if char > "\u02af":
            script = unicodedata.name(char, "").split(" ", 1)[0]
            language = _SCRIPT_LANGUAGES.get(script)
            if language:
                counts[language] = counts.get(language, 0) + 1
    if not letters:
        return "en"
    # Kana marks Japanese even among many Chinese characters.
    if counts.get("ja", 0) > 0.05 * letters:
        return "ja"
    language, count = max(counts.items(), key=lambda item: item[1], default=("en", 0))
    return language if count >= _SCRIPT_SHARE * letters else "en"
