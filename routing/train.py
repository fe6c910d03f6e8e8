"""Training the heads that say how likely it is that only the strong model gets a prompt right.

What orders prompts best is not "the weak model fails" (both may fail) but how much the strong one adds:

* lexical: logit P(strong right) - logit P(weak right), two logistic regressions over the same hashed n-grams. Both are
  linear, so their difference is one table: one look-up a word when serving.
* embedding: ridge regression of (strong right - weak right) on the sentence vector.

Either is calibrated on out-of-fold logits (`fit_calibration`): 0.5 = the odds of the labelled pairs as a whole.
Labelled pairs are exam questions and know nothing of greetings. So the lexical head has a second stage: a correction that
moves a few everyday and hard prompts of our own (`data/everyday.jsonl`, English and Chinese) to their side of 0.5, while
the exam questions are held where they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routing.fit import (
    LENGTH_SCALE,
    LENGTHS,
    Floats,
    HashedRows,
    fit_calibration,
    fit_correction,
    fit_logistic,
    fit_ridge,
)
from routing.heads import SUFFIX, Calibration, EmbeddingHead, Header, LexicalHead, write_head
from routing.pairs import Pairs, folds_of

#: Embedded once and stored in an embedding head, to recognise the embedder it was trained with.
PROBE = "The parcel arrived on Tuesday, two days later than the shop had promised."

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """`bits`: log2 of the table's length. Penalties and iterations were chosen by 5-fold APGR on the labelled pairs."""

    bits: int = 16
    l2: float = 3e-4
    iterations: int = 80
    ridge: float = 30.0
    folds: int = 5
    #: How often each everyday prompt counts in the embedding head.
    everyday_weight: float = 2.0
    #: Second stage of the lexical head: how strongly labelled pairs are held, and how many of them.
    hold: float = 100.0
    held_rows: int = 2_000
    correction_l2: float = 1e-4
    correction_iterations: int = 100


@dataclass(frozen=True, slots=True)
class Trained:
    """A head, not yet written. `out_of_fold` are its logits for rows it was not trained on, in the order of the pairs."""

    header: Header
    arrays: dict[str, NDArray[Any]]
    out_of_fold: Floats

    def write(self, folder: Path, name: str) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name}{SUFFIX}"
        write_head(path, self.header, self.arrays)
        return path


@dataclass(frozen=True, slots=True)
class LinearFit:
    """A linear function of hashed n-grams, as fitted: weights for columns scaled by `idf`, and a bias."""

    idf: Floats
    weights: Floats
    bias: float

    def logits(self, texts: list[str], bits: int) -> Floats:
        return HashedRows(texts, bits, self.idf).times(self.weights) + self.bias

    def table(self) -> tuple[Floats, Floats]:
        """float64 [2**bits] and the two length weights, as a head stores them."""
        return self.weights[:-LENGTHS] * self.idf, self.weights[-LENGTHS:] * LENGTH_SCALE


def fit_gain(pairs: Pairs, options: TrainOptions) -> LinearFit:
    """First stage: logit P(strong right) - logit P(weak right)."""
    rows = HashedRows(pairs.prompts, options.bits)
    weak, weak_bias = fit_logistic(rows, pairs.weak, pairs.weight, options.l2, options.iterations)
    strong, strong_bias = fit_logistic(rows, pairs.strong, pairs.weight, options.l2, options.iterations)
    return LinearFit(rows.idf, strong - weak, strong_bias - weak_bias)


def fit_everyday(
    gain: LinearFit, calibration: Calibration, pairs: Pairs, everyday: Pairs, options: TrainOptions
) -> LinearFit:
    """Second stage: what to add to `gain` so that everyday prompts come out on their side of 0.5."""
    held = pairs.take(np.arange(len(pairs))[: options.held_rows])
    both = held.with_rows(everyday)
    own = np.arange(len(both)) >= len(held)
    needed = both.needed
    offset = calibration.scale * (gain.logits(both.prompts, options.bits) - calibration.centre)
    # Simple and hard prompts weigh alike in sum.
    share = own * np.where(needed > 0, 0.5 / max(1.0, needed[own].sum()), 0.5 / max(1.0, (1.0 - needed[own]).sum()))
    quiet = np.where(own, 0.0, options.hold / len(held))
    rows = HashedRows(both.prompts, options.bits)
    penalty = (options.correction_l2, options.correction_iterations)
    weights = fit_correction(rows, offset, needed, share, quiet, penalty)
    return LinearFit(rows.idf, weights / calibration.scale, 0.0)


def train_lexical(
    pairs: Pairs, everyday: Pairs | None, options: TrainOptions, about: dict[str, Any], progress: Progress
) -> Trained:
    """The lexical head of `pairs`, corrected for `everyday`; its table is stored in half precision.

    `out_of_fold` has the logits of `pairs`, then those of `everyday`.
    """
    bits, count = options.bits, len(pairs)
    both = pairs.with_rows(everyday) if everyday is not None else pairs
    fold = np.concatenate([folds_of(count, options.folds), folds_of(len(both) - count, options.folds)])
    logits = np.zeros(len(both))
    gains = []
    for part in range(options.folds):
        progress(f"lexical head: fold {part + 1} of {options.folds}")
        test = np.flatnonzero(fold == part)
        gains.append(fit_gain(pairs.take(np.flatnonzero(fold[:count] != part)), options))
        logits[test] = gains[-1].logits([both.prompts[row] for row in test], bits)
    calibration = _calibrate(logits[:count], pairs)
    if everyday is not None:
        for part, gain in enumerate(gains):
            test = np.flatnonzero(fold == part)
            exam, own = pairs.take(np.flatnonzero(fold[:count] != part)), np.flatnonzero(fold[count:] != part)
            correction = fit_everyday(gain, calibration, exam, everyday.take(own), options)
            logits[test] += correction.logits([both.prompts[row] for row in test], bits)
    progress("lexical head: all rows")
    gain = fit_gain(pairs, options)
    table, lengths = gain.table()
    if everyday is not None:
        more_table, more_lengths = fit_everyday(gain, calibration, pairs, everyday, options).table()
        table, lengths = table + more_table, lengths + more_lengths
    header = Header(
        kind=LexicalHead.kind,
        arrays=(),
        calibration=calibration,
        bias=gain.bias,
        length_weight=float(lengths[0]),
        short_weight=float(lengths[1]),
        about=about,
    )
    return Trained(header, {"table": table.astype(np.float16)}, logits)


@dataclass(frozen=True, slots=True)
class Vectors:
    """Sentence vectors, float32 [rows, dimensions], of labelled pairs, of everyday prompts, and of PROBE [dimensions].

    Rows of `everyday` that the embedder's vocabulary does not hold are all zero, and are left out.
    """

    pairs: NDArray[np.float32]
    everyday: NDArray[np.float32]
    probe: NDArray[np.float32]


def train_embedding(
    pairs: Pairs, everyday: Pairs | None, vectors: Vectors, options: TrainOptions, about: dict[str, Any]
) -> Trained:
    """The embedding head. Everyday prompts are simply further rows here: a vector has no words to keep apart.

    `out_of_fold` has the logits of `pairs` alone.
    """
    count, matrix, both = len(pairs), vectors.pairs.astype(float), pairs
    if everyday is not None:
        known = np.flatnonzero(vectors.everyday.any(axis=1))
        more = everyday.take(known)
        both = pairs.with_rows(replace(more, weight=more.weight * options.everyday_weight))
        matrix = np.concatenate([matrix, vectors.everyday[known].astype(float)])
    gain = both.strong - both.weak
    fold = np.concatenate([folds_of(count, options.folds), folds_of(len(both) - count, options.folds)])
    logits = np.zeros(len(both))
    for part in range(options.folds):
        train, test = fold != part, fold == part
        weights, bias = fit_ridge(matrix[train], gain[train], both.weight[train], options.ridge)
        logits[test] = matrix[test] @ weights + bias
    weights, bias = fit_ridge(matrix, gain, both.weight, options.ridge)
    header = Header(
        kind=EmbeddingHead.kind,
        arrays=(),
        calibration=_calibrate(logits[:count], pairs),
        bias=bias,
        probe_text=PROBE,
        about=about,
    )
    arrays = {"weights": weights.astype(np.float32), "probe": vectors.probe.astype(np.float32)}
    return Trained(header, arrays, logits[:count])


def _calibrate(logits: Floats, pairs: Pairs) -> Calibration:
    scale, centre = fit_calibration(logits, pairs.needed, pairs.weight)
    return Calibration(scale=scale, centre=centre)
