"""What classification sees of a request: each thing computed at most once, and only when a signal asks for it."""

from __future__ import annotations

import re
import unicodedata
from typing import Any

from backends.api import ChatRequest, Request, Surface

#: Text beyond this is judged by its two ends (characters each). Bounds the work of every signal.
HEAD_CHARS = 2_048
TAIL_CHARS = 2_048
#: What an embedder gets: about its window of 512 tokens. Embedders cut what is still too long.
PASSAGE_CHARS = 800

#: Blocks that coding agents and editors put round a person's words. They say nothing about how hard the question is.
HARNESS_TAGS = (
    "system-reminder",
    "system_reminder",
    "environment_details",
    "environment_context",
    "additional_data",
    "editorContext",
    "reminderInstructions",
    "local-command-stdout",
    "local-command-stderr",
    "command-name",
    "command-message",
)
_HARNESS = re.compile(rf"<(/?)({'|'.join(map(re.escape, HARNESS_TAGS))})(?:\s[^<>]{{0,200}})?>")


class RequestView:
    """The deciding text and the facts of a conversation.

    The deciding text is that of the last user message that has any once harness blocks are gone. Embeddings and tensor
    requests have none.
    """

    __slots__ = ("_folded", "_passage", "_text", "_utf8", "full_chars", "request", "surface", "truncated")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.surface: Surface = request.surface
        self._text: str | None = None
        self._utf8: bytes | None = None
        self._folded: str | None = None
        self._passage: str | None = None
        #: Characters of the deciding text before it was cut; valid once `text` was read.
        self.full_chars = 0
        #: Was the deciding text cut to its two ends? Valid once `text` was read.
        self.truncated = False

    @property
    def text(self) -> str:
        """The deciding text, at most HEAD_CHARS + TAIL_CHARS + 1 characters; "" when there is none."""
        text = self._text
        if text is None:
            text = last_user_text(self._body().get("messages"))
            self.full_chars = len(text)
            if len(text) > HEAD_CHARS + TAIL_CHARS:
                self.truncated = True
                text = f"{text[:HEAD_CHARS]}\n{text[-TAIL_CHARS:]}"
            self._text = text
        return text

    @property
    def utf8(self) -> bytes:
        """`text` in UTF-8; lone surrogates become question marks."""
        utf8 = self._utf8
        if utf8 is None:
            self._utf8 = utf8 = self.text.encode("utf-8", "replace")
        return utf8

    @property
    def folded(self) -> str:
        """`text` with width and case normalised (NFKC, casefold) and each run of blanks as one blank."""
        folded = self._folded
        if folded is None:
            self._folded = folded = fold_text(self.text)
        return folded

    @property
    def passage(self) -> str:
        """The deciding text for an embedder: its two ends when it is long."""
        passage = self._passage
        if passage is None:
            passage = self.text
            if len(passage) > 2 * PASSAGE_CHARS:
                passage = f"{passage[:PASSAGE_CHARS]}\n{passage[-PASSAGE_CHARS:]}"
            self._passage = passage
        return passage

    @property
    def turns(self) -> int:
        """User messages in the conversation."""
        return sum(1 for message in self._messages() if message.get("role") == "user")

    @property
    def has_tool_messages(self) -> bool:
        return any(message.get("role") in ("tool", "function") for message in self._messages())

    @property
    def has_tools(self) -> bool:
        """Does the client offer tools or functions?"""
        body = self._body()
        return bool(body.get("tools") or body.get("functions"))

    @property
    def wants_json(self) -> bool:
        """response_format json_object or json_schema."""
        wanted = self._body().get("response_format")
        return isinstance(wanted, dict) and wanted.get("type") in ("json_object", "json_schema")

    @property
    def images(self) -> int:
        """Image parts in all messages."""
        return sum(
            1
            for message in self._messages()
            if isinstance(content := message.get("content"), list)
            for part in content
            if isinstance(part, dict) and part.get("type") in ("image_url", "input_image", "image")
        )

    def _body(self) -> dict[str, Any]:
        return self.request.body if isinstance(self.request, ChatRequest) else {}

    def _messages(self) -> list[dict[str, Any]]:
        messages = self._body().get("messages")
        return [message for message in messages if isinstance(message, dict)] if isinstance(messages, list) else []


def last_user_text(messages: Any) -> str:
    """Text of the last user message that has any beside harness blocks; "" when there is none."""
    if not isinstance(messages, list):
        return ""
    for message in reversed(messages):
        if isinstance(message, dict) and message.get("role") == "user":
            text = without_harness(message_text(message.get("content")))
            if text:
                return text
    return ""


def message_text(content: Any) -> str:
    """A message's text: the string, or the text parts of a list joined by line breaks."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    parts = (part.get("text") if isinstance(part, dict) else part for part in content)
    return "\n".join(part for part in parts if isinstance(part, str))


def without_harness(text: str) -> str:
    """`text` without harness blocks, trimmed. A block that is never closed is left as it stands."""
    if "</" not in text:
        return text.strip()
    opened: list[tuple[str, int]] = []
    blocks: list[tuple[int, int]] = []
    for mark in _HARNESS.finditer(text):
        closing, tag = mark.groups()
        if not closing:
            opened.append((tag, mark.start()))
            continue
        while opened:
            name, start = opened.pop()
            if name == tag:
                while blocks and blocks[-1][0] > start:
                    blocks.pop()  # it lies inside this one
                blocks.append((start, mark.end()))
                break
    kept: list[str] = []
    position = 0
    for start, end in blocks:
        kept.append(text[position:start])
        position = end
    kept.append(text[position:])
    return "".join(kept).strip()


# NFKC would do the same, but takes its slow path (21 us for a line of Chinese, else 1) as soon as one of these is there.
_WIDE_MARKS = (("，", ","), ("？", "?"), ("！", "!"), ("：", ":"), ("；", ";"), ("（", "("), ("）", ")"), ("…", "..."))


def fold_text(text: str) -> str:
    """Width and case normalised (NFKC, then casefold); runs of blanks become one."""
    if text.isascii():
        folded = text.lower()
    else:
        for wide, narrow in _WIDE_MARKS:
            if wide in text:
                text = text.replace(wide, narrow)
        folded = unicodedata.normalize("NFKC", text).casefold()
    if "  " in folded or "\n" in folded or "\t" in folded:
        folded = " ".join(folded.split())
    return folded
