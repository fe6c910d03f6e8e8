"""The graph of a Llama-family decoder with shared past / present buffers, written node by node.

    input_ids  int64 [b, s]     tokens to read
    seqlens_k  int32 [b]        tokens of each row once they are read, minus 1
    total      int32 scalar     the largest of these lengths
    last_idx   int64 [b, 1]     position in `input_ids` whose logits are wanted
    past_k0 .. past_vN  float32 [b, kv_heads, room, head_width]   bind the same memory as `present_*`
    -> logits  float32 [b, vocabulary], present_* as past_*

The head sees one position a row, so a prompt does not pay for the logits of all of its tokens.
"""

from __future__ import annotations

import numpy as np
import onnx
from numpy.typing import NDArray

from backends.onnx.build.graph import BLOCK, CONTRIB, FLOAT, INT32, INT64, GraphWriter, Precision, quantise_8bit, value
from backends.onnx.build.llama_weights import LlamaSizes, LlamaWeights
from backends.onnx.manifest import Progress


def cache_names(layers: int) -> list[str]:
    """`k0 v0 k1 v1 ...`: the key/value tensors in the graph's order, without `past_` or `present_`."""
    return [f"{kind}{layer}" for layer in range(layers) for kind in "kv"]


def rotary_tables(sizes: LlamaSizes) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """cos and sin of position / base^(2i / head_width), each [context, head_width / 2]."""
    frequencies = sizes.rotary_base ** -(np.arange(0, sizes.head_width, 2) / sizes.head_width)
    angles = np.outer(np.arange(sizes.context_tokens), frequencies)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def write_llama(weights: LlamaWeights, precision: Precision, progress: Progress) -> onnx.ModelProto:
    """The whole model. Takes as much memory as its weights in `precision`."""
    sizes = weights.sizes
    graph = GraphWriter(precision)
    cos, sin = rotary_tables(sizes)
    graph.constant("rotary.cos", cos)
    graph.constant("rotary.sin", sin)
    graph.constant("halves", np.array([sizes.feed_forward, sizes.feed_forward], np.int64))
    embedding = weights.weight("token_embd.weight")
    residual = _embed(graph, embedding, sizes)
    gain = graph.constant("layer0.input_gain", weights.layer(0, "attn_norm"))
    normed = graph.node(
        "SimplifiedLayerNormalization",
        [residual, gain],
        "layer0.input",
        {"axis": -1, "epsilon": sizes.epsilon, "stash_type": 1},
    )
    for layer in range(sizes.layers):
        progress("write the graph", layer, sizes.layers)
        normed, residual = _layer(graph, weights, layer, normed, residual)
    last = graph.node("GatherND", [normed, "last_idx"], "last_hidden", {"batch_dims": 1})
    if precision == "fp32":
        # Gemm reads the embedding as it stands, so that the file holds it once.
        graph.node("Gemm", [last, "embedding"], "logits", {"transB": 1})
    else:
        graph.linear(last, embedding, "logits")
    progress("write the graph", sizes.layers, sizes.layers)
    return _finish(graph, sizes)


def _embed(graph: GraphWriter, embedding: NDArray[np.float32], sizes: LlamaSizes) -> str:
    if graph.precision == "fp32":
        return graph.node("Gather", [graph.constant("embedding", embedding), "input_ids"], "embedded")
    # The head's own 8-bit table serves the embedding too: a quarter of the memory, and no error of its own for weights
    # that come in blocks of 32 with one scale.
    quantised, scales = quantise_8bit(embedding)
    blocks = sizes.width // BLOCK
    graph.constant("logits.q8", quantised)
    graph.constant("logits.scales", scales)
    graph.constant("zero_point", np.array(128.0, np.float32))
    graph.constant("embedded.blocks", np.array([0, 0, blocks, 1], np.int64))
    graph.constant("embedded.width", np.array([0, 0, sizes.width], np.int64))
    rows = graph.node("Gather", ["logits.q8", "input_ids"], "embedded.q8")
    numbers = graph.node("Cast", [rows], "embedded.float", {"to": FLOAT})
    centred = graph.node("Sub", [numbers, "zero_point"], "embedded.centred")
    scale = graph.node("Gather", ["logits.scales", "input_ids"], "embedded.scales")
    scale = graph.node("Reshape", [scale, "embedded.blocks"], "embedded.scales4")
    scaled = graph.node("Mul", [centred, scale], "embedded.scaled")
    return graph.node("Reshape", [scaled, "embedded.width"], "embedded")


def _layer(graph: GraphWriter, weights: LlamaWeights, layer: int, normed: str, residual: str) -> tuple[str, str]:
    """One decoder layer. Returns the normalised input of the next one (or of the head) and the residual stream."""
    sizes, name = weights.sizes, f"layer{layer}"
    packed = np.concatenate([weights.layer(layer, f"attn_{part}") for part in "qkv"])
    qkv = graph.linear(normed, packed, f"{name}.qkv")
    (attention, *_) = graph.nodes(
        "GroupQueryAttention",
        [qkv, "", "", f"past_k{layer}", f"past_v{layer}", "seqlens_k", "total", "rotary.cos", "rotary.sin"],
        [f"{name}.attention", f"present_k{layer}", f"present_v{layer}"],
        # GGUF keeps query and key rows in pairs of neighbours: hence interleaved.
        {"num_heads": sizes.heads, "kv_num_heads": sizes.kv_heads, "do_rotary": 1, "rotary_interleaved": 1},
        CONTRIB,
    )
    projected = graph.linear(attention, weights.layer(layer, "attn_output"), f"{name}.projected")
    epsilon = sizes.epsilon
    gain = graph.constant(f"{name}.middle_gain", weights.layer(layer, "ffn_norm"))
    normed, residual = _add_and_norm(graph, (projected, residual, gain), f"{name}.middle", epsilon)

    packed = np.concatenate([weights.layer(layer, "ffn_gate"), weights.layer(layer, "ffn_up")])
    both = graph.linear(normed, packed, f"{name}.gate_up")
    gate, up = graph.nodes("Split", [both, "halves"], [f"{name}.gate", f"{name}.up"], {"axis": -1})
    sigmoid = graph.node("Sigmoid", [gate], f"{name}.sigmoid")
    silu = graph.node("Mul", [gate, sigmoid], f"{name}.silu")
    product = graph.node("Mul", [silu, up], f"{name}.product")
    down = graph.linear(product, weights.layer(layer, "ffn_down"), f"{name}.down")
    last = layer + 1 == sizes.layers
    gain = graph.constant(
        f"{name}.output_gain", weights.weight("output_norm.weight") if last else weights.layer(layer + 1, "attn_norm")
    )
    return _add_and_norm(graph, (down, residual, gain), f"{name}.output", epsilon, keep_sum=not last)


def _add_and_norm(
    graph: GraphWriter, inputs: tuple[str, str, str], name: str, epsilon: float, *, keep_sum: bool = True
) -> tuple[str, str]:
    """(RMS norm of x + residual, x + residual) of (x, residual, gain) in one fused node; its fourth output is the sum."""
    outputs = [name, "", "", f"{name}.sum"] if keep_sum else [name]
    graph.nodes("SkipSimplifiedLayerNormalization", inputs, outputs, {"epsilon": epsilon}, CONTRIB)
    return name, f"{name}.sum"


def _finish(graph: GraphWriter, sizes: LlamaSizes) -> onnx.ModelProto:
    inputs = [
        value("input_ids", INT64, ["b", "s"]),
        value("seqlens_k", INT32, ["b"]),
        value("total", INT32, []),
        value("last_idx", INT64, ["b", 1]),
    ]
    outputs = [value("logits", FLOAT, ["b", sizes.vocabulary])]
    for name in cache_names(sizes.layers):
        inputs.append(value(f"past_{name}", FLOAT, ["b", sizes.kv_heads, "room", sizes.head_width]))
        outputs.append(value(f"present_{name}", FLOAT, ["b", sizes.kv_heads, "room", sizes.head_width]))
    return graph.model("llama", inputs, outputs)
