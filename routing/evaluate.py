"""How good is a routing score? APGR and CPT, computed as RouteLLM's evaluation does (Ong et al. 2024).

Thresholds are the 11 quantile edges of the scores. At each, a prompt goes to the strong model iff score >= threshold (at
the last: >). A point is (share sent strong, accuracy). With AUC the trapezoid under these points,

    APGR = (AUC - weak accuracy) / (strong accuracy - weak accuracy)
    CPT(x) = the share sent strong at which accuracy first reaches weak + x * (strong - weak)
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from routing.pairs import Pairs

Floats = NDArray[np.float64]
_EDGES = 11


class Quality(msgspec.Struct, frozen=True):
    """One score on one source. Shares and accuracies are 0..1; CPT is None where the curve never gets that far."""

    apgr: float
    cpt50: float | None
    cpt80: float | None


class Report(msgspec.Struct, frozen=True):
    """One source: how many rows, how accurate the two models are, and each score's quality."""

    rows: int
    weak_accuracy: float
    strong_accuracy: float
    scores: dict[str, Quality]


@dataclass(frozen=True, slots=True)
class Curve:
    """Points from "all weak" to "all strong"."""

    share: Floats
    accuracy: Floats
    weak: float
    strong: float

    @property
    def apgr(self) -> float:
        return (float(np.trapezoid(self.accuracy, self.share)) - self.weak) / (self.strong - self.weak)

    def cpt(self, part: float) -> float | None:
        """Share sent strong at the first crossing, linear between points."""
        wanted = self.weak + part * (self.strong - self.weak)
        above = np.flatnonzero(self.accuracy >= wanted)
        if not len(above):
            return None
        at = int(above[0])
        if at == 0:
            return float(self.share[0])
        low, high = self.accuracy[at - 1], self.accuracy[at]
        return float(self.share[at - 1] + (wanted - low) / (high - low) * (self.share[at] - self.share[at - 1]))


def curve(score: Floats, weak: Floats, strong: Floats) -> Curve:
    """Raises ValueError when the two models are equally good: then there is nothing to recover."""
    if weak.mean() == strong.mean():
        raise ValueError("weak and strong model are equally accurate on these rows")
    # Ties are broken by a fixed random order: ranks instead of scores.
    rank = np.empty(len(score))
    rank[np.lexsort((np.random.default_rng(0).permutation(len(score)), score))] = np.arange(len(score))
    edges = np.quantile(rank, np.linspace(0.0, 1.0, _EDGES))
    shares, accuracies = [], []
    for position, edge in enumerate(edges[::-1]):
        sent = rank > edge if position == 0 else rank >= edge
        shares.append(sent.mean())
        accuracies.append(np.where(sent, strong, weak).mean())
    return Curve(np.array(shares), np.array(accuracies), float(weak.mean()), float(strong.mean()))


def evaluate(pairs: Pairs, scores: dict[str, Floats]) -> dict[str, Report]:
    """Each score by source, beside random, length alone and the oracle. Sources where both models are alike are left out."""
    baselines = {
        "random": np.random.default_rng(7).random(len(pairs)),
        "length": np.array([len(prompt) for prompt in pairs.prompts], float),
        "oracle": pairs.strong - pairs.weak,
    }
    reports: dict[str, Report] = {}
    for source in dict.fromkeys(pairs.source.tolist()):
        rows = pairs.source == source
        weak, strong = pairs.weak[rows], pairs.strong[rows]
        if weak.mean() == strong.mean():
            continue
        found = {}
        for name, score in {**scores, **baselines}.items():
            line = curve(score[rows], weak, strong)
            found[name] = Quality(line.apgr, line.cpt(0.5), line.cpt(0.8))
        reports[source] = Report(int(rows.sum()), float(weak.mean()), float(strong.mean()), found)
    return reports
