"""The MiniLM sentence encoder in plain numpy float64: slow, short, and what the ONNX graph is compared with.

BERT as in Devlin et al. 2018 (post-norm, exact gelu), then the mean of the last layer over the text's tokens, then
length 1, as sentence-transformers/all-MiniLM-L6-v2 does. It reads one text at a time and knows no padding, so comparing a
padded batch with it also shows that padding changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from backends.onnx.build.bert_weights import BertWeights

Array = NDArray[np.float64]
_erf = np.frompyfunc(math.erf, 1, 1)


def embed(weights: BertWeights, ids: Sequence[int]) -> Array:
    """One text's token ids -> its unit vector, float64 [width]."""
    words = weights("embeddings.word_embeddings.weight")[list(ids)].astype(np.float64)
    positions = weights("embeddings.position_embeddings.weight")[: len(ids)]
    first_segment = weights("embeddings.token_type_embeddings.weight")[0]
    hidden = _norm(words + positions + first_segment, weights, "embeddings.LayerNorm")
    for index in range(weights.sizes.layers):
        hidden = _layer(hidden, weights, f"encoder.layer.{index}")
    mean = hidden.mean(0)
    unit: Array = mean / np.linalg.norm(mean)
    return unit


def _layer(hidden: Array, weights: BertWeights, name: str) -> Array:
    attended = _linear(_attention(hidden, weights, name), weights, f"{name}.attention.output.dense")
    middle = _norm(attended + hidden, weights, f"{name}.attention.output.LayerNorm")
    grown = _linear(middle, weights, f"{name}.intermediate.dense")
    gelu: Array = 0.5 * grown * (1 + np.asarray(_erf(grown / math.sqrt(2)), np.float64))
    return _norm(_linear(gelu, weights, f"{name}.output.dense") + middle, weights, f"{name}.output.LayerNorm")


def _attention(hidden: Array, weights: BertWeights, name: str) -> Array:
    length, width = hidden.shape
    heads = weights.sizes.heads

    def split(part: str) -> Array:
        projected = _linear(hidden, weights, f"{name}.attention.self.{part}")
        return np.transpose(projected.reshape(length, heads, width // heads), (1, 0, 2))

    scores = split("query") @ split("key").transpose(0, 2, 1) / math.sqrt(width // heads)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    gathered: Array = (shares @ split("value")).transpose(1, 0, 2).reshape(length, width)
    return gathered


def _linear(x: Array, weights: BertWeights, name: str) -> Array:
    result: Array = x @ weights(f"{name}.weight").T.astype(np.float64) + weights(f"{name}.bias")
    return result


def _norm(x: Array, weights: BertWeights, name: str) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + weights.sizes.epsilon)
    result: Array = scaled * weights(f"{name}.weight") + weights(f"{name}.bias")
    return result
