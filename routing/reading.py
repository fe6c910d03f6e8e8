"""What classification found out about one request: a score a signal, each with its reason."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from backends.api import Surface


class Score(msgspec.Struct, frozen=True, gc=False):
    """One signal's opinion, 0..1. `reason` and `detail` are joined to a sentence only when somebody asks (`text`).

    A neutral score is no opinion: a comparison with it never holds, and neither does its `not`.
    `detail` is a number or a word of the policy; never text of the prompt.
    """

    value: float
    reason: str
    detail: Any = None
    neutral: bool = False

    @property
    def text(self) -> str:
        """The reason for people: "tokens: 212", "keyword: refund"."""
        detail = self.detail
        if detail is None:
            return self.reason
        if isinstance(detail, float):
            return f"{self.reason}: {detail:.3g}"
        return f"{self.reason}: {', '.join(detail) if isinstance(detail, tuple) else detail}"


def neutral(reason: str, detail: Any = None) -> Score:
    """No opinion, and why."""
    return Score(0.0, reason, detail, neutral=True)


#: The score of a signal that has not been read yet; `Router.settled` asks whether reading it could change anything.
UNREAD = neutral("not read: no rule needed it")
NOT_CHAT = neutral("only chat text is classified")
EMPTY = neutral("there is no text to judge")


class Reading:
    """Scores by signal name, in the policy's order. `vector` is the embedding, once one was computed (for later reuse)."""

    __slots__ = ("scores", "surface", "truncated", "vector")

    def __init__(self, surface: Surface, scores: dict[str, Score], *, truncated: bool = False) -> None:
        self.surface = surface
        self.scores = scores
        self.truncated = truncated
        self.vector: NDArray[np.float32] | None = None

    def values(self) -> dict[str, float | None]:
        """Score by signal; None where it is neutral. For logs."""
        return {name: None if score.neutral else round(score.value, 4) for name, score in self.scores.items()}

    def __repr__(self) -> str:
        return (
            f"Reading({', '.join(f'{name}={score.value:.2f} ({score.text})' for name, score in self.scores.items())})"
        )
