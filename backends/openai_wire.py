"""OpenAI chat completions as bytes: what a gateway must know of an answer, and nothing more.

Answers and chunks pass through unaltered; these functions decode only the fields that decide something (msgspec skips the
rest), so a chunk costs about a microsecond. Messages of errors never repeat text of the answer: it may hold prompts.
"""

from __future__ import annotations

import re

import msgspec
from msgspec import Raw, Struct

from backends.api import ChatAnswer, Chunk, ChunkKind, Usage
from policies.core.errors import InBandError, MalformedAnswer

_NO_RAW = Raw(b"null")
_EMPTY = (b"null", b"[]", b"{}", b'""')
_PLAIN_CODE = re.compile(r"[A-Za-z0-9_.\-]{1,64}")


class _Usage(Struct, gc=False):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Message(Struct):
    """A message, or the delta of one. `reasoning` and `reasoning_content` are two dialects of the same thing."""

    content: str | list[Raw] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: Raw = _NO_RAW
    function_call: Raw = _NO_RAW
    audio: Raw = _NO_RAW

    def carries_something(self) -> bool:
        return bool(
            self.content
            or self.reasoning_content
            or self.reasoning
            or self.refusal
            or (self.tool_calls is not _NO_RAW and bytes(self.tool_calls) not in _EMPTY)
            or (self.function_call is not _NO_RAW and bytes(self.function_call) not in _EMPTY)
            or (self.audio is not _NO_RAW and bytes(self.audio) not in _EMPTY)
        )


class _Choice(Struct):
    message: _Message | None = None
    finish_reason: str | None = None


class _Completion(Struct):
    choices: list[_Choice] | None = None
    model: str | None = None
    usage: _Usage | None = None
    system_fingerprint: str | None = None
    error: Raw = _NO_RAW


class _ChunkChoice(Struct):
    index: int = 0
    delta: _Message | None = None
    finish_reason: str | None = None


class _ChunkBody(Struct):
    choices: list[_ChunkChoice] | None = None
    usage: Raw = _NO_RAW
    error: Raw = _NO_RAW


class _ErrorBody(Struct):
    type: str | int | None = None
    code: str | int | None = None


_completion = msgspec.json.Decoder(_Completion)
_chunk = msgspec.json.Decoder(_ChunkBody)
_error = msgspec.json.Decoder(_ErrorBody)


def read_completion(body: bytes) -> ChatAnswer:
    """A whole `chat.completion`. Raises MalformedAnswer when it is no usable answer, InBandError when it is an error.

    Usable: valid JSON, at least one choice, every choice with a message and a `finish_reason`, and content (perhaps the
    empty string), reasoning, a refusal or a call in it. Null content is an answer only after `content_filter`.
    """
    if not body:
        raise MalformedAnswer("the backend answered with an empty body")
    try:
        parsed = _completion.decode(body)
        _check_text(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedAnswer(f"the backend's answer is not a chat completion: {error}") from None
    if parsed.error is not _NO_RAW and bytes(parsed.error) != b"null":
        raise _in_band(parsed.error)
    if not parsed.choices:
        raise MalformedAnswer("the backend's answer has no choices")
    finish = ""
    for number, choice in enumerate(parsed.choices):
        message = choice.message
        if message is None:
            raise MalformedAnswer(f"choice {number} of the backend's answer has no message")
        if not choice.finish_reason:
            raise MalformedAnswer(f"choice {number} of the backend's answer has no finish_reason")
        if message.content is None and choice.finish_reason != "content_filter" and not message.carries_something():
            raise MalformedAnswer(f"choice {number} of the backend's answer has neither content nor a tool call")
        # One choice cut short makes the whole answer a cut one: it must not be stored as complete.
        if not finish or choice.finish_reason == "length":
            finish = choice.finish_reason
    usage = parsed.usage
    return ChatAnswer(
        body=body,
        model=parsed.model or "",
        finish_reason=finish,
        usage=Usage(usage.prompt_tokens or 0, usage.completion_tokens or 0) if usage is not None else Usage(),
        system_fingerprint=parsed.system_fingerprint,
    )


def read_chunk(data: bytes) -> Chunk:
    """One `chat.completion.chunk` and its kind. Raises InBandError for an error event, MalformedAnswer for no JSON object.

    With several choices a chunk that finishes one of them is FINISH; `ChunkKinds` says which is the last.
    """
    return _classify(data)[0]


def _classify(data: bytes) -> tuple[Chunk, int, list[_ChunkChoice]]:
    """The chunk, how many choices it finishes, and its choices."""
    try:
        parsed = _chunk.decode(data)
        _check_text(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedAnswer(f"an event of the stream is not a chat completion chunk: {error}") from None
    if parsed.error is not _NO_RAW and bytes(parsed.error) != b"null":
        raise _in_band(parsed.error)
    choices = parsed.choices
    if not choices:
        has_usage = choices is not None and parsed.usage is not _NO_RAW and bytes(parsed.usage) != b"null"
        return Chunk(data, ChunkKind.USAGE if has_usage else ChunkKind.META), 0, []
    finished = 0
    kind = ChunkKind.META
    for choice in choices:
        if choice.finish_reason:
            finished += 1
            kind = ChunkKind.FINISH
        elif kind is ChunkKind.META and choice.delta is not None and choice.delta.carries_something():
            kind = ChunkKind.CONTENT
    return Chunk(data, kind), finished, choices


class ChunkKinds:
    """Reads the chunks of one stream of `choices` answers: exactly the chunk that finishes the last one is FINISH."""

    __slots__ = ("_choices", "_finished", "_seen")

    def __init__(self, choices: int = 1) -> None:
        self._choices = choices
        self._finished = 0
        self._seen: set[int] = set()

    @property
    def finished(self) -> bool:
        """Every choice that was seen has its finish_reason; a backend may give fewer than were asked for."""
        return self._finished > 0 and self._finished >= min(self._choices, len(self._seen) or 1)

    def read(self, data: bytes) -> Chunk:
        chunk, finished, choices = _classify(data)
        if self._choices > 1:
            self._seen.update(choice.index for choice in choices)
        if not finished:
            return chunk
        before = self._finished
        self._finished += finished
        if self._finished < self._choices:
            return Chunk(data, ChunkKind.CONTENT)
        # A second finish_reason for the same choice is passed on as it is, but there is one FINISH chunk in a stream.
        return chunk if before < self._choices else Chunk(data, ChunkKind.META)


def _check_text(data: bytes) -> None:
    """Fields that are skipped are not checked by the decoder, but they reach the client, so they must be UTF-8 too."""
    if not data.isascii():
        data.decode()


def _in_band(error: Raw) -> InBandError:
    """Names type and code when they look like names; the message stays out, it may repeat the prompt."""
    names = []
    try:
        body = _error.decode(error)
        names = [str(name) for name in (body.type, body.code) if name is not None and _PLAIN_CODE.fullmatch(str(name))]
    except (msgspec.DecodeError, RecursionError):
        pass  # an error of another shape is an error all the same
    return InBandError("the backend reported an error inside its answer" + (f" ({', '.join(names)})" if names else ""))
