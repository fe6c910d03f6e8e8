"""How likely it is that only a strong model gets it right, from the words alone (a trained head over hashed n-grams)."""

from __future__ import annotations

from typing import ClassVar, Self

from policies.language.schema import SignalSpec
from routing.heads import Heads, LexicalHead
from routing.reading import EMPTY, Score
from routing.signals.base import SpecError
from routing.view import RequestView


class Complexity:
    """The head's score: 0.5 = as much to gain from the strong model as on an average labelled question."""

    reads: ClassVar[frozenset[str]] = frozenset({"head"})
    needs_embedding: ClassVar[bool] = False
    __slots__ = ("_head",)

    def __init__(self, head: LexicalHead) -> None:
        self._head = head

    @classmethod
    def compile(cls, spec: SignalSpec, heads: Heads) -> Self:
        head = heads.get(spec.head or "complexity")
        if not isinstance(head, LexicalHead):
            raise SpecError("head", heads.why_not(spec.head or "complexity", LexicalHead.kind))
        return cls(head)

    def read(self, view: RequestView) -> Score:
        if not view.text:
            return EMPTY
        logit, words = self._head.logit(view.utf8)
        if not words:
            return EMPTY
        return Score(self._head.calibration.score(logit), "logit", logit)
