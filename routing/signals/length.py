"""How long the deciding text is, in tokens, without a tokenizer."""

from __future__ import annotations

from typing import ClassVar, Self

from policies.language.schema import SignalSpec
from routing.heads import Heads
from routing.reading import EMPTY, Score
from routing.signals.base import SpecError
from routing.view import RequestView

ASCII_CHARS_PER_TOKEN = 4.0
WIDE_TOKENS_PER_CHAR = 0.8


def estimate_tokens(chars: int, utf8_bytes: int) -> float:
    """Tokens of a text from its two sizes: 1 for 4 ASCII characters, .8 for a Chinese character.

    A character takes 1 byte (ASCII) or 3 (Chinese), so (bytes - chars) / 2 of them are wide; letters of two bytes count
    half. A rule of thumb: tokenizers differ by a third on either side.
    """
    wide = (utf8_bytes - chars) / 2
    return max(0.0, chars - wide) / ASCII_CHARS_PER_TOKEN + wide * WIDE_TOKENS_PER_CHAR


class Length:
    """min(1, tokens / spec.tokens)."""

    reads: ClassVar[frozenset[str]] = frozenset({"tokens"})
    needs_embedding: ClassVar[bool] = False
    __slots__ = ("_tokens",)

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens

    @classmethod
    def compile(cls, spec: SignalSpec, heads: Heads) -> Self:  # noqa: ARG003
        if spec.tokens <= 0:
            raise SpecError("tokens", "say at how many tokens the score reaches 1, for example `tokens: 800`")
        return cls(spec.tokens)

    def read(self, view: RequestView) -> Score:
        text = view.text
        if not text:
            return EMPTY
        tokens = estimate_tokens(len(text), len(view.utf8))
        if view.truncated:
            tokens *= view.full_chars / len(text)
        return Score(min(1.0, tokens / self._tokens), "tokens", int(tokens) or 1)
