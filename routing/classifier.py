"""A policy's signals, compiled once per policy version and read once per request."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from backends.api import Embedder, Surface
from policies.core.deadline import Deadline
from policies.core.errors import ConfigError, DeadlineExceeded, GatewayError
from policies.core.events import Observer, Observers, SignalFailed
from policies.language.schema import Condition, Policy
from routing.heads import Heads
from routing.reading import EMPTY, NOT_CHAT, UNREAD, Reading, Score, neutral
from routing.registry import SIGNALS
from routing.signals.base import EmbeddingSignal, Signal, SpecError
from routing.view import RequestView

#: Above this share of unknown tokens an embedding says nothing about the text (Chinese with an English vocabulary).
MAX_UNKNOWN_SHARE = 0.05
#: A head belongs to the embedder when the embedder's vector of the head's probe sentence is as close as this (cosine).
MIN_PROBE_SIMILARITY = 0.97
#: Longest wait for an embedding (seconds); classification must never cost more than it can save.
EMBED_LIMIT_S = 0.25


class Classifier:
    """Reads every cheap signal of a policy at once, and the embedding signals when a rule depends on them.

    No method raises for anything a request holds: a signal that fails is neutral and says why.
    """

    __slots__ = (
        "_cheap",
        "_embedder",
        "_embedding",
        "_fits",
        "_fitted",
        "_needs_embedding",
        "_neutral",
        "_observer",
        "_policy",
    )

    def __init__(
        self, policy: Policy, heads: Heads, embedder: Embedder | None = None, observer: Observer | None = None
    ) -> None:
        """Raises ConfigError with every signal that cannot be made. `observer` hears of signals that break."""
        self._policy = policy.policy
        self._observer: Observer = observer or Observers()
        cheap: list[tuple[str, Signal]] = []
        embedding: list[tuple[str, EmbeddingSignal]] = []
        problems: list[str] = []
        for name, spec in policy.classify.signals.items():
            where = f"policy {policy.policy}: classify.signals.{name}"
            kind = SIGNALS.get(spec.kind)
            if kind is None:
                close = difflib.get_close_matches(spec.kind, SIGNALS, 1)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                problems.append(f"{where}.kind: {spec.kind!r} is not one of {', '.join(SIGNALS)}{hint}")
                continue
            try:
                signal = kind.compile(spec, heads)
            except SpecError as error:
                problems.append(f"{where}.{error.key}: {error}")
                continue
            if signal.needs_embedding:
                embedding.append((name, signal))  # type: ignore[arg-type]  # the flag tells the two protocols apart
            else:
                cheap.append((name, signal))  # type: ignore[arg-type]
        if problems:
            raise ConfigError(problems)
        used = {name for route in policy.routes if route.when for name in signals_of(route.when)}
        self._cheap = tuple((name, signal.read) for name, signal in cheap)
        self._embedding = tuple(embedding)
        self._embedder = embedder
        #: By signal: does the embedder's space fit the head? Found out with the first embedding.
        self._fits: dict[str, bool] = {}
        #: Fingerprint of the embedder that they were found out for: it may be loaded anew.
        self._fitted = ""
        self._needs_embedding = any(name in used for name, _ in embedding)
        self._neutral = dict.fromkeys(policy.classify.signals, NOT_CHAT)

    @property
    def needs_embedding(self) -> bool:
        """Does any rule mention an embedding signal?"""
        return self._needs_embedding

    def read(self, view: RequestView) -> Reading:
        """All cheap signals. Embedding signals are left UNREAD."""
        if view.surface is not Surface.CHAT:
            return Reading(view.surface, self._neutral)
        scores = {}
        for name, read in self._cheap:
            try:
                scores[name] = read(view)
            except Exception as error:
                scores[name] = self._broken(name, error)
        for name, _ in self._embedding:
            scores[name] = UNREAD
        return Reading(view.surface, scores, truncated=view.truncated)

    async def read_embedding(self, view: RequestView, reading: Reading, deadline: Deadline) -> None:
        """Fill in the embedding signals of `reading`; neutral when there is no embedder, or it is late or fails."""
        pending = [(name, signal) for name, signal in self._embedding if reading.scores[name] is UNREAD]
        if not pending:
            return
        vector, reason = await self._embed(view, deadline)
        if vector is None:
            score = EMPTY if reason == "" else neutral(reason)
            for name, _ in pending:
                reading.scores[name] = score
            return
        reading.vector = vector
        for name, signal in pending:
            try:
                fits = self._fits.get(name, True)
                reading.scores[name] = signal.read_vector(vector) if fits else neutral("embedder_mismatch")
            except Exception as error:
                reading.scores[name] = self._broken(name, error)

    def _broken(self, name: str, error: Exception) -> Score:
        """A defect in a signal must not cost the answer, and must not go unseen either."""
        self._observer.on_event(SignalFailed(policy=self._policy, signal=name, error=type(error).__name__))
        return neutral("signal failed", type(error).__name__)

    async def _embed(self, view: RequestView, deadline: Deadline) -> tuple[NDArray[np.float32] | None, str]:
        """The text's vector, or None and the reason."""
        embedder = self._embedder
        if embedder is None:
            return None, "embedder_missing"
        text = view.passage
        if not text:
            return None, ""
        try:
            limit = deadline.within(EMBED_LIMIT_S)
            async with limit.timeout():
                if await embedder.unknown_share(text, limit) > MAX_UNKNOWN_SHARE:
                    return None, "embedder_vocabulary"
                if embedder.fingerprint != self._fitted or len(self._fits) < len(self._embedding):
                    await self._check_fit(embedder, limit)
                return (await embedder.embed([text], limit))[0], ""
        except DeadlineExceeded:
            return None, "embedder_late"
        except GatewayError as error:
            return None, f"embedder_failed: {error.code}"
        except Exception as error:
            self._broken("embedder", error)
            return None, f"embedder_failed: {type(error).__name__}"

    async def _check_fit(self, embedder: Embedder, limit: Deadline) -> None:
        """Does each head belong to this embedder? Compare the vector of the head's probe sentence."""
        if embedder.fingerprint != self._fitted:
            self._fits, self._fitted = {}, embedder.fingerprint
        fits = self._fits
        for name, signal in self._embedding:
            if name not in fits:
                fits[name] = signal.probe is None or await _fits(embedder, signal.probe, limit)


async def _fits(embedder: Embedder, probe: tuple[str, NDArray[np.float32]], limit: Deadline) -> bool:
    text, expected = probe
    if embedder.dimensions != len(expected):
        return False
    got = (await embedder.embed([text], limit))[0]
    return float(got @ expected) >= MIN_PROBE_SIMILARITY * float(np.linalg.norm(expected))


def signals_of(condition: Condition) -> Iterator[str]:
    """Names of the signals that a condition mentions."""
    if condition.signal:
        yield condition.signal
    for part in (*condition.all, *condition.any):
        yield from signals_of(part)
    if condition.not_ is not None:
        yield from signals_of(condition.not_)
