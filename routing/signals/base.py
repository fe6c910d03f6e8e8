"""What a signal is. To add one: a file here, a class with these methods, one line in `routing/registry.py`."""

from __future__ import annotations

from typing import ClassVar, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from policies.language.schema import SignalSpec
from routing.heads import Heads
from routing.reading import Score
from routing.view import RequestView


class SpecError(ValueError):
    """A signal cannot be made from its spec. `key` is the key at fault; the message says what to write instead."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


class Signal(Protocol):
    """Reads one score from a request: no I/O, bounded by the view's text limit, same input same score."""

    #: Keys of the spec that this kind reads, besides `kind`.
    reads: ClassVar[frozenset[str]]
    needs_embedding: ClassVar[bool] = False

    @classmethod
    def compile(cls, spec: SignalSpec, heads: Heads) -> Self:
        """Done once per policy version. Raises SpecError."""
        ...

    def read(self, view: RequestView) -> Score: ...


class EmbeddingSignal(Protocol):
    """Reads one score from the embedding of the request's text; run only when a rule depends on it."""

    #: Keys of the spec that this kind reads, besides `kind`.
    reads: ClassVar[frozenset[str]]
    needs_embedding: ClassVar[bool] = True

    @classmethod
    def compile(cls, spec: SignalSpec, heads: Heads) -> Self:
        """Done once per policy version. Raises SpecError."""
        ...

    @property
    def probe(self) -> tuple[str, NDArray[np.float32]] | None:
        """A sentence and its vector in the space the signal was trained in; None = any embedder will do."""
        ...

    def read_vector(self, vector: NDArray[np.float32]) -> Score:
        """`vector` is float32 [dimensions], length 1."""
        ...
