"""Do words or phrases of a list occur? Chinese anywhere, English on word boundaries, width and case normalised."""

from __future__ import annotations

import re
from typing import ClassVar, Self

from policies.language.schema import SignalSpec
from routing.heads import Heads
from routing.reading import Score
from routing.signals.base import SpecError
from routing.view import RequestView, fold_text

# Scripts written without blanks between words: from here on (CJK, kana, Hangul, wide forms) letters do not join.
_JOINING = r"[^\W\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\U0010ffff]"
_JOINS = re.compile(_JOINING).match

_NONE = Score(0.0, "no keyword")


def _pattern(word: str) -> re.Pattern[str] | None:
    """The word with a boundary at each end that is a joining letter; None when neither is (a plain search will do)."""
    before = rf"(?<!{_JOINING})" if _JOINS(word[0]) else ""
    after = rf"(?!{_JOINING})" if _JOINS(word[-1]) else ""
    return re.compile(before + re.escape(word) + after) if before or after else None


class Keywords:
    """1 when any of `any` occurs, else 0. A search by `in` first (memory speed); boundaries only where it finds something."""

    needs_embedding: ClassVar[bool] = False
    __slots__ = ("_words",)

    def __init__(self, words: tuple[str, ...]) -> None:
        folded = dict.fromkeys(fold_text(word).strip() for word in words)
        self._words = tuple((word, _pattern(word), Score(1.0, "keyword", word)) for word in folded)

    @classmethod
    def compile(cls, spec: SignalSpec, heads: Heads) -> Self:  # noqa: ARG003
        if not spec.any:
            raise SpecError("any", "list at least one word or phrase, for example `any: [refund, 退款]`")
        for word in spec.any:
            if not fold_text(word).strip():
                raise SpecError("any", "a keyword is empty; remove it")
        return cls(spec.any)

    def read(self, view: RequestView) -> Score:
        text = view.folded
        for word, pattern, score in self._words:
            if word in text and (pattern is None or pattern.search(text)):
                return score
        return _NONE
