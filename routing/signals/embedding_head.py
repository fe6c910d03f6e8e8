"""How likely it is that only a strong model gets it right, from a sentence embedding (a trained linear head)."""

from __future__ import annotations

from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from policies.language.schema import SignalSpec
from routing.heads import EmbeddingHead, Heads
from routing.reading import Score, neutral
from routing.signals.base import SpecError


class EmbeddingHeadSignal:
    """The head's score, on the same scale as `complexity`."""

    reads: ClassVar[frozenset[str]] = frozenset({"head"})
    needs_embedding: ClassVar[bool] = True
    __slots__ = ("_head", "probe")

    def __init__(self, head: EmbeddingHead) -> None:
        self._head = head
        self.probe = head.probe

    @classmethod
    def compile(cls, spec: SignalSpec, heads: Heads) -> Self:
        if not spec.head:
            raise SpecError("head", "name the trained head file, for example `head: complexity_minilm`")
        head = heads.get(spec.head)
        if not isinstance(head, EmbeddingHead):
            raise SpecError("head", heads.why_not(spec.head, EmbeddingHead.kind))
        return cls(head)

    def read_vector(self, vector: NDArray[np.float32]) -> Score:
        if vector.shape != self._head.weights.shape:
            return neutral("embedder_mismatch", f"the head wants {self._head.weights.shape[0]} dimensions")
        logit = self._head.logit(vector)
        return Score(self._head.calibration.score(logit), "logit", logit)
