"""From logits to the next token. Pure functions of (logits, settings, random number); a `Sampler` adds the state of one answer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Logits = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen.

    `temperature` 0 = greedy. `top_p` in (0, 1]: draw only from the smallest set of most probable tokens that together hold
    that much probability. `frequency_penalty` and `presence_penalty` follow OpenAI's formula: a token that the answer
    already holds c times loses `c * frequency + presence` from its logit. `seed` is any integer.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int = 0

    @property
    def greedy(self) -> bool:
        """One token is always the most probable; no random number is drawn."""
        return self.temperature < 1e-5


def softmax(logits: Logits, temperature: float) -> NDArray[np.float64]:
    """Probabilities [V] of `logits` [V] / `temperature`; safe against overflow."""
    scaled = logits.astype(np.float64)
    scaled -= scaled.max()
    scaled /= temperature
    np.exp(scaled, out=scaled)
    scaled /= scaled.sum()
    return scaled


def nucleus(probabilities: NDArray[np.float64], top_p: float) -> NDArray[np.intp]:
    """Indices of the smallest set of most probable tokens with mass >= `top_p`, most probable first, ties by index.

    All tokens below (1 - top_p) / V hold less than 1 - top_p together, so none of them can be part of the set: only the
    few others are sorted.
    """
    floor = (1.0 - top_p) / len(probabilities)
    candidates = np.flatnonzero(probabilities >= floor)
    order = candidates[np.argsort(-probabilities[candidates], kind="stable")]
    mass = np.cumsum(probabilities[order])
    size = int(np.searchsorted(mass, top_p * (1 - 1e-12))) + 1
    return order[:size]


def draw(probabilities: NDArray[np.float64], uniform: float) -> int:
    """The index at which the running sum of (not necessarily normalised) `probabilities` passes `uniform` in [0, 1)."""
    mass = np.cumsum(probabilities)
    index = int(np.searchsorted(mass, uniform * mass[-1], side="right"))
    if index < len(mass):
        return index
    return int(np.flatnonzero(probabilities)[-1])  # rounding put the point at the very end


def choose(logits: Logits, settings: Sampling, uniform: float) -> int:
    """The token for `logits` [V]; `uniform` in [0, 1) is the only randomness. Greedy ties go to the smallest index."""
    if settings.greedy:
        return int(logits.argmax())
    probabilities = softmax(logits, settings.temperature)
    if settings.top_p >= 1.0:
        return draw(probabilities, uniform)
    kept = nucleus(probabilities, settings.top_p)
    return int(kept[draw(probabilities[kept], uniform)])


class Sampler:
    """Chooses the tokens of one answer: its seeded generator and what it has said so far. Not thread-safe."""

    __slots__ = ("_counts", "_generator", "_penalised", "settings")

    def __init__(self, settings: Sampling) -> None:
        self.settings = settings
        # PCG64 takes no negative seed; masking keeps every 64-bit integer apart.
        self._generator = None if settings.greedy else np.random.Generator(np.random.PCG64(settings.seed & (2**64 - 1)))
        self._penalised = settings.frequency_penalty != 0.0 or settings.presence_penalty != 0.0
        self._counts: dict[int, int] = {}

    def next(self, logits: Logits) -> int:
        """The next token. `logits` [V] may be changed in place. Raises FloatingPointError when they are not numbers."""
        if self._counts:
            said = np.fromiter(self._counts.keys(), np.int64, len(self._counts))
            times = np.fromiter(self._counts.values(), np.float32, len(self._counts))
            logits[said] -= times * self.settings.frequency_penalty + self.settings.presence_penalty
        # NaN wins argmax and +inf is the maximum: one look finds both.
        if not np.isfinite(logits[logits.argmax()]):
            raise FloatingPointError("the model's logits are not finite numbers")
        token = choose(logits, self.settings, 0.0 if self._generator is None else self._generator.random())
        if self._penalised:
            self._counts[token] = self._counts.get(token, 0) + 1
        return token
