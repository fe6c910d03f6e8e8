"""Fitting linear heads with numpy alone: logistic regression over hashed n-grams, ridge regression over embeddings."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from routing import ngrams
from routing.heads import LOG_WORDS_CENTRE, LOG_WORDS_SHORT
from routing.view import HEAD_CHARS, TAIL_CHARS

Floats = NDArray[np.float64]

#: Scale of the two length columns beside the n-gram columns; the penalty on their weights follows from it.
LENGTH_SCALE = 0.3
LENGTHS = 2


class HashedRows:
    """Texts as rows of a sparse matrix [texts, 2**bits + 2]: n-gram counts / sqrt(n-grams) and two length columns.

    Columns are scaled by inverse document frequency, log(N / df) / log(N), so that common words do not drown rare ones.
    The scale is a matter of fitting alone: `weights` folds it into the table.
    """

    def __init__(self, texts: Sequence[str], bits: int, idf: Floats | None = None) -> None:
        """`idf` of the training rows; None = these are the training rows."""
        found = [ngrams.indices(ngrams.fold(_as_served(text)), bits) for text in texts]
        counts = np.array([len(indices) for indices, _ in found])
        words = np.array([count for _, count in found])
        self.size = 1 << bits
        self._columns = np.concatenate([indices for indices, _ in found])
        self._rows = np.repeat(np.arange(len(found)), counts)
        self._norm = 1.0 / np.sqrt(np.maximum(counts, 1))
        log_words = np.log1p(words)
        lengths = np.stack([log_words - LOG_WORDS_CENTRE, np.minimum(0.0, log_words - LOG_WORDS_SHORT)], 1)
        self._lengths = lengths * LENGTH_SCALE
        self.idf = self._document_frequency(len(found)) if idf is None else idf

    def _document_frequency(self, texts: int) -> Floats:
        present = np.unique(self._rows * self.size + self._columns) % self.size
        frequency = np.bincount(present, minlength=self.size)
        idf = np.log(texts / np.maximum(frequency, 1)) / math.log(max(texts, 2))
        return np.where(frequency > 0, idf, 0.0)

    def __len__(self) -> int:
        return len(self._norm)

    def times(self, weights: Floats) -> Floats:
        """rows @ weights: [texts] for `weights` [2**bits + 2]."""
        table = weights[:-LENGTHS] * self.idf
        sums = np.bincount(self._rows, table[self._columns], minlength=len(self))
        return np.asarray(sums * self._norm + self._lengths @ weights[-LENGTHS:])

    def transposed_times(self, values: Floats) -> Floats:
        """rows.T @ values: [2**bits + 2] for `values` [texts]."""
        table = np.bincount(self._columns, (values * self._norm)[self._rows], minlength=self.size) * self.idf
        return np.concatenate([table, values @ self._lengths])


def _as_served(text: str) -> bytes:
    """The text as a request's view would show it."""
    if len(text) > HEAD_CHARS + TAIL_CHARS:
        text = f"{text[:HEAD_CHARS]}\n{text[-TAIL_CHARS:]}"
    return text.encode("utf-8", "replace")


def sigmoid(logits: Floats) -> Floats:
    return np.asarray(1.0 / (1.0 + np.exp(-np.clip(logits, -40.0, 40.0))))


def fit_logistic(rows: HashedRows, labels: Floats, weight: Floats, l2: float, iterations: int) -> tuple[Floats, float]:
    """Weights and bias that minimise mean log loss + l2 / 2 |weights|**2 (the bias is not penalised).

    Accelerated gradient descent (Beck and Teboulle 2009, FISTA) with the step 1 / L; L, the largest curvature, comes
    from a few power iterations.
    """
    share = weight / weight.sum()
    positive = float(np.clip(share @ labels, 0.01, 0.99))
    bias = math.log(positive / (1.0 - positive))
    weights = np.zeros(rows.size + LENGTHS)
    ahead = weights
    momentum = 1.0
    curvature = _largest_curvature(rows, share) / 4.0 + l2
    for _ in range(iterations):
        residual = (sigmoid(rows.times(ahead) + bias) - labels) * share
        stepped = ahead - (rows.transposed_times(residual) + l2 * ahead) / curvature
        following = (1.0 + math.sqrt(1.0 + 4.0 * momentum * momentum)) / 2.0
        ahead = stepped + (momentum - 1.0) / following * (stepped - weights)
        weights, momentum = stepped, following
        bias -= 4.0 * float(residual.sum())
    return weights, bias


def fit_correction(
    rows: HashedRows, offset: Floats, labels: Floats, share: Floats, quiet: Floats, penalty: tuple[float, int]
) -> Floats:
    """Weights c that move some rows to their labels and leave others where they are. The column of L is not used.

    Minimises sum of share * log loss(offset + rows @ c, labels) + sum of quiet * (rows @ c)**2 / 2 + l2 / 2 |c|**2.
    `share` and `quiet` are [texts], each zero where the other counts; `penalty` = (l2, iterations).
    """
    l2, iterations = penalty
    weights = np.zeros(rows.size + LENGTHS)
    fixed = rows.size  # the weight of L belongs to the labelled pairs alone
    ahead = weights
    momentum = 1.0
    curvature = _largest_curvature(rows, share / 4.0 + quiet) + l2
    for _ in range(iterations):
        moved = rows.times(ahead)
        slope = (sigmoid(offset + moved) - labels) * share + moved * quiet
        stepped = ahead - (rows.transposed_times(slope) + l2 * ahead) / curvature
        stepped[fixed] = 0.0
        following = (1.0 + math.sqrt(1.0 + 4.0 * momentum * momentum)) / 2.0
        ahead = stepped + (momentum - 1.0) / following * (stepped - weights)
        weights, momentum = stepped, following
    return weights


def _largest_curvature(rows: HashedRows, share: Floats) -> float:
    """Largest eigenvalue of rows.T diag(share) rows, from below within a few per cent, with a margin on top."""
    vector = np.random.default_rng(0).normal(size=rows.size + LENGTHS)
    for _ in range(20):
        vector /= np.linalg.norm(vector)
        vector = rows.transposed_times(rows.times(vector) * share)
    return float(np.linalg.norm(vector)) * 1.1


def fit_ridge(vectors: Floats, target: Floats, weight: Floats, penalty: float) -> tuple[Floats, float]:
    """Weights and bias that minimise sum of weight * (vectors @ w + b - target)**2 + penalty |w|**2."""
    total = weight.sum()
    middle, level = weight @ vectors / total, float(weight @ target / total)
    centred = vectors - middle
    gram = centred.T @ (centred * weight[:, None]) + penalty * np.eye(vectors.shape[1])
    fitted = np.linalg.solve(gram, centred.T @ (weight * (target - level)))
    return fitted, level - float(middle @ fitted)


def fit_calibration(logits: Floats, needed: Floats, weight: Floats) -> tuple[float, float]:
    """(scale, centre) of Platt's scaling with both classes weighted alike (Platt 1999): Newton's method in two unknowns.

    At `centre` the odds that the strong model is needed are those of the labelled pairs as a whole.
    """
    balance = weight * np.where(needed > 0, 0.5 / (weight @ needed), 0.5 / (weight @ (1.0 - needed)))
    spread = float(np.std(logits)) or 1.0
    columns = np.stack([logits / spread, np.ones_like(logits)], 1)
    fitted = np.zeros(2)
    for _ in range(30):
        chance = sigmoid(columns @ fitted)
        gradient = columns.T @ (balance * (chance - needed)) + 1e-6 * fitted
        hessian = columns.T @ (columns * (balance * chance * (1.0 - chance))[:, None]) + 1e-6 * np.eye(2)
        fitted -= np.linalg.solve(hessian, gradient)
    scale = float(fitted[0])
    if scale <= 0:  # the head has learnt nothing that orders these pairs
        return 1.0 / spread, float(np.median(logits))
    return scale / spread, float(-fitted[1] / scale) * spread
