"""The same decoder in plain numpy, float64, straight from the weights' file: what the graph is compared with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from backends.onnx.build.llama_weights import LlamaSizes, LlamaWeights

Array = NDArray[np.float64]


def logits(weights: LlamaWeights, tokens: Sequence[int]) -> Array:
    """Logits [len(tokens), vocabulary] after each token of one row.

    Llama: x += attention(norm(x)); x += down(silu(gate(norm(x))) * up(norm(x))); the head is the embedding.
    """
    sizes = weights.sizes
    embedding = weights.weight("token_embd.weight")
    x: Array = embedding[np.asarray(tokens)].astype(np.float64)
    for layer in range(sizes.layers):
        x = x + _attention(weights, layer, x)
        x = x + _feed_forward(weights, layer, x)
    normed = _norm(x, weights.weight("output_norm.weight"), sizes.epsilon)
    result: Array = normed @ embedding.T.astype(np.float64)
    return result


def _norm(x: Array, gain: NDArray[np.float32], epsilon: float) -> Array:
    """Root-mean-square normalisation of each row."""
    result: Array = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + epsilon) * gain
    return result


def _attention(weights: LlamaWeights, layer: int, x: Array) -> Array:
    sizes = weights.sizes
    length, groups = len(x), sizes.heads // sizes.kv_heads
    normed = _norm(x, weights.layer(layer, "attn_norm"), sizes.epsilon)
    query = _rotate(_linear(weights, layer, "attn_q", normed), sizes)
    key = _rotate(_linear(weights, layer, "attn_k", normed), sizes).repeat(groups, axis=1)
    value = _linear(weights, layer, "attn_v", normed).reshape(length, -1, sizes.head_width).repeat(groups, axis=1)
    scores = np.einsum("qhd,khd->hqk", query, key) / np.sqrt(sizes.head_width)
    scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    shares /= shares.sum(axis=-1, keepdims=True)
    mixed = np.einsum("hqk,khd->qhd", shares, value).reshape(length, -1)
    return _linear(weights, layer, "attn_output", mixed)


def _feed_forward(weights: LlamaWeights, layer: int, x: Array) -> Array:
    normed = _norm(x, weights.layer(layer, "ffn_norm"), weights.sizes.epsilon)
    gate = _linear(weights, layer, "ffn_gate", normed)
    up = _linear(weights, layer, "ffn_up", normed)
    return _linear(weights, layer, "ffn_down", gate / (1 + np.exp(-gate)) * up)


def _linear(weights: LlamaWeights, layer: int, part: str, x: Array) -> Array:
    result: Array = x @ weights.layer(layer, part).T.astype(np.float64)
    return result


def _rotate(x: Array, sizes: LlamaSizes) -> Array:
    """Rotary embedding of pairs of neighbours (GGUF's order): [length, heads * width] -> [length, heads, width]."""
    rows = x.reshape(len(x), -1, sizes.head_width)
    frequencies = sizes.rotary_base ** -(np.arange(0, sizes.head_width, 2) / sizes.head_width)
    angles = np.outer(np.arange(len(x)), frequencies)[:, None, :]
    even, odd = rows[..., 0::2], rows[..., 1::2]
    turned = np.empty_like(rows)
    turned[..., 0::2] = even * np.cos(angles) - odd * np.sin(angles)
    turned[..., 1::2] = even * np.sin(angles) + odd * np.cos(angles)
    return turned
