"""The signals by the `kind` a policy names them with."""

from __future__ import annotations

from routing.signals.base import EmbeddingSignal, Signal
from routing.signals.complexity import Complexity
from routing.signals.embedding_head import EmbeddingHeadSignal
from routing.signals.keywords import Keywords
from routing.signals.length import Length
from routing.signals.structure import Structure

SIGNALS: dict[str, type[Signal] | type[EmbeddingSignal]] = {
    "complexity": Complexity,
    "embedding_head": EmbeddingHeadSignal,
    "keywords": Keywords,
    "length": Length,
    "structure": Structure,
}
