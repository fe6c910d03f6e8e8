"""Training the heads that say how likely it is that only the strong model gets a prompt right.

What orders prompts best is not "the weak model fails" (both may fail) but how much the strong one adds:

* lexical: logit P(strong right) - logit P(weak right), two logistic regressions over the same hashed n-grams. Both are
  linear, so their difference is one table: one look-up a word when serving.
* embedding: ridge regression of (strong right - weak right) on the sentence vector.

Either is calibrated on out-of-fold logits (`fit_calibration`): 0.5 = the odds of the labelled pairs as a whole.
A few everyday and hard prompts of our own (`data/everyday.jsonl`, English and Chinese) are mixed in, since labelled pairs
are exam questions and know nothing of greetings.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routing.fit import Floats, HashedRows, fit_calibration, fit_logistic, fit_ridge
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
class LexicalFit:
    """The difference of the two logistic regressions: table float64 [2**bits], and the two numbers beside it."""

    table: Floats
    length_weight: float
    bias: float


def fit_lexical(pairs: Pairs, options: TrainOptions, held_out: list[str] | None = None) -> tuple[LexicalFit, Floats]:
    """Fit on `pairs`; returns the fit and the logits of `held_out`."""
    rows = HashedRows(pairs.prompts, options.bits)
    weak, weak_bias = fit_logistic(rows, pairs.weak, pairs.weight, options.l2, options.iterations)
    strong, strong_bias = fit_logistic(rows, pairs.strong, pairs.weight, options.l2, options.iterations)
    gain, bias = strong - weak, strong_bias - weak_bias
    table, length_weight = rows.weights(gain)
    logits = HashedRows(held_out, options.bits, rows.idf).times(gain) + bias if held_out else np.empty(0)
    return LexicalFit(table, length_weight, bias), logits


def train_lexical(pairs: Pairs, options: TrainOptions, about: dict[str, Any], progress: Progress) -> Trained:
    """The lexical head of `pairs`, its table stored in half precision."""
    fold = folds_of(len(pairs), options.folds)
    logits = np.zeros(len(pairs))
    for part in range(options.folds):
        progress(f"lexical head: fold {part + 1} of {options.folds}")
        test = np.flatnonzero(fold == part)
        train = pairs.take(np.flatnonzero(fold != part))
        logits[test] = fit_lexical(train, options, [pairs.prompts[row] for row in test])[1]
    progress("lexical head: all rows")
    fit, _ = fit_lexical(pairs, options)
    header = Header(
        kind=LexicalHead.kind,
        arrays=(),
        calibration=_calibrate(logits, pairs),
        bias=fit.bias,
        length_weight=fit.length_weight,
        about=about,
    )
    return Trained(header, {"table": fit.table.astype(np.float16)}, logits)


def train_embedding(
    pairs: Pairs, vectors: NDArray[np.float32], probe: NDArray[np.float32], options: TrainOptions, about: dict[str, Any]
) -> Trained:
    """The embedding head. `vectors` float32 [pairs, dimensions], `probe` the vector of PROBE from the same embedder."""
    matrix, gain = vectors.astype(float), pairs.strong - pairs.weak
    fold = folds_of(len(pairs), options.folds)
    logits = np.zeros(len(pairs))
    for part in range(options.folds):
        train, test = fold != part, fold == part
        weights, bias = fit_ridge(matrix[train], gain[train], pairs.weight[train], options.ridge)
        logits[test] = matrix[test] @ weights + bias
    weights, bias = fit_ridge(matrix, gain, pairs.weight, options.ridge)
    header = Header(
        kind=EmbeddingHead.kind,
        arrays=(),
        calibration=_calibrate(logits, pairs),
        bias=bias,
        probe_text=PROBE,
        about=about,
    )
    arrays = {"weights": weights.astype(np.float32), "probe": probe.astype(np.float32)}
    return Trained(header, arrays, logits)


def _calibrate(logits: Floats, pairs: Pairs) -> Calibration:
    scale, centre = fit_calibration(logits, pairs.needed, pairs.weight)
    return Calibration(scale=scale, centre=centre)
