"""Reads a chat stream as a client does: when did content begin, how much came, did it end as it must."""

from __future__ import annotations

from typing import Any

import msgspec

from backends.sse import SseReader
from policies.core.errors import MalformedAnswer


class _Delta(msgspec.Struct, gc=False):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: Any = None


class _Choice(msgspec.Struct, gc=False):
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Event(msgspec.Struct, gc=False):
    choices: list[_Choice] = []
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


class StreamReader:
    """Fed with the bytes of a `text/event-stream` body, in any pieces.

    `chunks` counts chunks with content; `committed` = at least one; `complete` = content, a finish reason, `[DONE]`, and
    no error event. `error` names the first thing that was wrong.
    """

    __slots__ = ("_events", "chunks", "done", "error", "finished")

    def __init__(self) -> None:
        self._events = SseReader()
        self.chunks = 0
        self.finished = False
        self.done = False
        self.error = ""

    @property
    def committed(self) -> bool:
        return self.chunks > 0

    @property
    def complete(self) -> bool:
        return self.done and self.finished and self.chunks > 0 and not self.error

    def feed(self, data: bytes) -> bool:
        """Take more bytes; true when they held content."""
        before = self.chunks
        try:
            for event in self._events.feed(data):
                self._event(event)
        except MalformedAnswer:
            self.error = self.error or "event_too_large"
        return self.chunks > before

    def why_incomplete(self) -> str:
        """One word for what is missing; empty when the stream is complete."""
        if self.error or self.complete:
            return self.error
        if not self.chunks:
            return "stream_without_content"
        return "stream_not_finished" if not self.finished else "stream_without_done"

    def _event(self, data: bytes) -> None:
        if data == b"[DONE]":
            self.done = True
            return
        try:
            event = _decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError):
            self.error = self.error or "event_not_understood"
            return
        if event.error is not None:
            self.error = self.error or "error_event"
        for choice in event.choices:
            delta = choice.delta
            if delta is not None and (delta.content or delta.reasoning_content or delta.tool_calls):
                self.chunks += 1
            if choice.finish_reason is not None:
                self.finished = True
