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


#: A word that occurs this often inside other words is looked for by its pattern from there on.
_CHEAP_LOOKS = 24


class _Word:
    """One keyword. `open_left` / `open_right`: its first / last character joins, so a joining neighbour there hides it."""

    __slots__ = ("_pattern", "length", "open_left", "open_right", "score", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.length = len(text)
        self.open_left = _JOINS(text[0]) is not None
        self.open_right = _JOINS(text[-1]) is not None
        before = rf"(?<!{_JOINING})" if self.open_left else ""
        after = rf"(?!{_JOINING})" if self.open_right else ""
        self._pattern = re.compile(before + re.escape(text) + after)
        self.score = Score(1.0, "keyword", text)

    def stands_alone(self, text: str) -> bool:
        """Given that it occurs in `text`: is one of the occurrences a word of its own?"""
        at = text.find(self.text)
        for _ in range(_CHEAP_LOOKS):
            if at < 0:
                return False
            end = at + self.length
            if not (
                (self.open_left and at and _JOINS(text[at - 1]))
                or (self.open_right and end < len(text) and _JOINS(text[end]))
            ):
                return True
            at = text.find(self.text, at + 1)
        return at >= 0 and self._pattern.search(text, at) is not None


class Keywords:
    """1 when any of `any` occurs, else 0. A search by `in` first (memory speed); boundaries only where it finds something."""

    reads: ClassVar[frozenset[str]] = frozenset({"any"})
    needs_embedding: ClassVar[bool] = False
    __slots__ = ("_words",)

    def __init__(self, words: tuple[str, ...]) -> None:
        bounded = (_Word(folded) for folded in dict.fromkeys(fold_text(word).strip() for word in words))
        self._words = tuple(
            (word.text, word if word.open_left or word.open_right else None, word.score) for word in bounded
        )

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
        for word, bounded, score in self._words:
            if word in text and (bounded is None or bounded.stands_alone(text)):
                return score
        return _NONE
