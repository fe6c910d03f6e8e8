"""MiniLM (a small BERT sentence encoder) from safetensors to ONNX, without torch.

Graph: `input_ids`, `attention_mask` int64 [batch, length] -> `embedding` float32 [batch, width], rows of length 1.
The hidden state after each layer is declared as `hidden_0` ... `hidden_N`, so that the graph can be cut there.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx
from numpy.typing import NDArray

from backends.api import Capabilities, Surface, TensorSpec
from backends.onnx.build import minilm_reference
from backends.onnx.build.bert_weights import BertWeights, read_weights
from backends.onnx.build.graph import CONTRIB, FLOAT, INT32, INT64, GraphWriter, Precision, save, value
from backends.onnx.catalogue import CATALOGUE
from backends.onnx.manifest import Check, Manifest, ModelError, Progress, check, read_manifest, seal
from backends.onnx.tokens import padded, read_tokenizer

GRAPH_NAME = "model.onnx"
TOKENIZER_NAME = "tokenizer.json"

#: fp32: largest difference of any number from the float64 reference. q8: one minus the cosine. On 200 real sentences 8 bit
#: has a mean of .9996 and a worst of .998, one-word texts being the worst.
FP32_LIMIT = 1e-5
Q8_MEAN_LIMIT = 0.002
Q8_WORST_LIMIT = 0.01

_PROBES = (
    "How do I reset my password?",
    "A sturdy tent for two people that packs small and stands in strong wind.",
    "Explain the difference between a mutex and a semaphore, with an example in C.",
    "ok",
    "The parcel has not arrived although it was sent two weeks ago, and nobody answers the phone.",
    "SELECT name, COUNT(*) FROM orders GROUP BY name;",
    "Which of these films would you recommend for a rainy evening with children?",
    "bread",
)


def graph(weights: BertWeights, precision: Precision) -> onnx.ModelProto:
    """The whole encoder in one graph."""
    sizes = weights.sizes
    writer = GraphWriter(precision)
    hidden = _embeddings(writer, weights)
    for index in range(sizes.layers):
        hidden = _layer(writer, weights, index, hidden)
    _pool(writer, hidden)
    shape: tuple[int | str, ...] = ("batch", "length", sizes.width)
    return writer.model(
        "minilm",
        inputs=[value(name, INT64, ["batch", "length"]) for name in ("input_ids", "attention_mask")],
        outputs=[value("embedding", FLOAT, ["batch", sizes.width])],
        cuts=[value(f"hidden_{index}", FLOAT, shape) for index in range(sizes.layers + 1)],
    )


def _embeddings(writer: GraphWriter, weights: BertWeights) -> str:
    """Word, position and segment embeddings, normalised. The segment is always 0, so it is added to the positions."""
    positions = weights("embeddings.position_embeddings.weight") + weights("embeddings.token_type_embeddings.weight")[0]
    writer.constant("words", weights("embeddings.word_embeddings.weight"))
    writer.constant("positions", positions)
    writer.constant("zero", np.array([0], np.int64))
    writer.constant("one", np.array([1], np.int64))
    writer.node("Gather", ["words", "input_ids"], "word_rows")
    writer.node("Shape", ["input_ids"], "shape")
    writer.node("Gather", ["shape", "one"], "length")
    writer.node("Slice", ["positions", "zero", "length", "zero"], "position_rows")
    writer.node("Add", ["word_rows", "position_rows"], "embedded")
    gain = writer.constant("embedded.gain", weights("embeddings.LayerNorm.weight"))
    bias = writer.constant("embedded.bias", weights("embeddings.LayerNorm.bias"))
    attributes = {"epsilon": weights.sizes.epsilon, "axis": -1}
    writer.node("Cast", ["attention_mask"], "mask_int", {"to": INT32})
    writer.node("Cast", ["attention_mask"], "mask", {"to": FLOAT})
    return writer.node("LayerNormalization", ["embedded", gain, bias], "hidden_0", attributes)


def _layer(writer: GraphWriter, weights: BertWeights, index: int, hidden: str) -> str:
    """One encoder layer. Biases cost nothing: the fused operators take them."""
    prefix = f"layer_{index}"

    def weight(name: str) -> NDArray[np.float32]:
        return weights.layer(index, name + ".weight")

    def constant(name: str) -> str:
        return writer.constant(f"{prefix}.{name}", weights.layer(index, name))

    parts = [f"attention.self.{part}" for part in ("query", "key", "value")]
    packed = writer.linear(hidden, np.concatenate([weight(part) for part in parts]), f"{prefix}.qkv")
    width = weights.sizes.width
    writer.constant("thirds", np.array([width] * 3, np.int64))
    qkv = writer.nodes("Split", [packed, "thirds"], [f"{prefix}.{p}" for p in ("query", "key", "value")], {"axis": -1})
    bias = np.concatenate([weights.layer(index, part + ".bias") for part in parts])
    attention = [*qkv, writer.constant(f"{prefix}.qkv.bias", bias), "mask_int"]
    heads = {"num_heads": weights.sizes.heads}
    attended = writer.node("MultiHeadAttention", attention, f"{prefix}.attended", heads, CONTRIB)
    output = writer.linear(attended, weight("attention.output.dense"), f"{prefix}.output")

    def add_and_norm(x: str, skip: str, name: str, made: str) -> str:
        inputs = [
            x,
            skip,
            constant(f"{name}.LayerNorm.weight"),
            constant(f"{name}.LayerNorm.bias"),
            constant(f"{name}.dense.bias"),
        ]
        return writer.node("SkipLayerNormalization", inputs, made, {"epsilon": weights.sizes.epsilon}, CONTRIB)

    middle = add_and_norm(output, hidden, "attention.output", f"{prefix}.middle")
    grown = writer.linear(middle, weight("intermediate.dense"), f"{prefix}.grown")
    gelu = writer.node("BiasGelu", [grown, constant("intermediate.dense.bias")], f"{prefix}.gelu", {}, CONTRIB)
    shrunk = writer.linear(gelu, weight("output.dense"), f"{prefix}.shrunk")
    return add_and_norm(shrunk, middle, "output", f"hidden_{index + 1}")


def _pool(writer: GraphWriter, hidden: str) -> None:
    """Mean over the tokens that the mask keeps, then length 1."""
    writer.constant("last", np.array([-1], np.int64))
    writer.constant("tiny", np.array(1e-9, np.float32))
    writer.node("Unsqueeze", ["mask", "last"], "mask_column")
    writer.node("Mul", [hidden, "mask_column"], "kept")
    writer.node("ReduceSum", ["kept", "one"], "kept_sum", {"keepdims": 0})
    writer.node("ReduceSum", ["mask", "one"], "count", {"keepdims": 1})
    writer.node("Max", ["count", "tiny"], "count_or_tiny")
    writer.node("Div", ["kept_sum", "count_or_tiny"], "mean")
    writer.node("LpNormalization", ["mean"], "embedding", {"axis": 1, "p": 2})


def build(weights_dir: Path, out_dir: Path, variant: str, progress: Progress) -> Manifest:
    """Write graph, tokenizer and manifest to `out_dir`, once the graph agrees with the reference (else ModelError)."""
    progress("read weights", 0, 3)
    weights = read_weights(weights_dir)
    progress("write graph", 1, 3)
    save(graph(weights, cast(Precision, variant)), out_dir / GRAPH_NAME)
    shutil.copyfile(weights_dir / TOKENIZER_NAME, out_dir / TOKENIZER_NAME)
    progress("compare with the reference", 2, 3)
    checks = _compare(out_dir, weights, variant)
    if bad := [check for check in checks if not check.ok]:
        raise ModelError(
            f"the graph of minilm:{variant} is wrong: {bad[0].name} is {bad[0].difference:.2g}, limit {bad[0].limit:.2g}"
        )
    entry = CATALOGUE["minilm"]
    sizes = weights.sizes
    manifest = Manifest(
        name="minilm",
        kind="embedder",
        source=entry.source,
        variant=cast(Any, variant),
        builder=entry.builder,
        processing=entry.processing,
        fingerprint="",
        files=(),
        # The vocabulary holds 244 Chinese characters: other scripts become [UNK] and mean nothing.
        capabilities=Capabilities(
            surfaces=frozenset({Surface.EMBEDDINGS}), context_tokens=sizes.positions, languages=frozenset({"en"})
        ),
        inputs=(TensorSpec("input_ids", "INT64", (-1, -1)), TensorSpec("attention_mask", "INT64", (-1, -1))),
        outputs=(TensorSpec("embedding", "FP32", (-1, sizes.width)),),
        architecture={"dimensions": sizes.width, "layers": sizes.layers, "vocabulary": sizes.vocabulary},
        checks=tuple(checks),
    )
    return seal(out_dir, manifest)


def verify(model_dir: Path, weights_dir: Path) -> list[Check]:
    """Compare a built model with the float64 reference again."""
    return _compare(model_dir, read_weights(weights_dir), read_manifest(model_dir).variant)


def _compare(folder: Path, weights: BertWeights, variant: str) -> list[Check]:
    """Fixed sentences and random token ids, each run as one padded batch."""
    from backends.onnx.session import create_session

    session = create_session(folder / GRAPH_NAME)
    checks: list[Check] = []
    for name, rows in (
        ("sentences", _sentences(folder / TOKENIZER_NAME)),
        ("random tokens", _random_tokens(weights.sizes.vocabulary)),
    ):
        found = session.run(["embedding"], padded(rows))[0].astype(np.float64)
        expected = np.stack([minilm_reference.embed(weights, row) for row in rows])
        if variant == "fp32":
            checks.append(check(f"{name}: largest difference", float(np.abs(found - expected).max()), FP32_LIMIT))
        else:
            cosines = (found * expected).sum(1)
            checks.append(check(f"{name}: 1 - mean cosine", float(1 - cosines.mean()), Q8_MEAN_LIMIT))
            checks.append(check(f"{name}: 1 - worst cosine", float(1 - cosines.min()), Q8_WORST_LIMIT))
    return checks


def _sentences(tokenizer_path: Path) -> list[list[int]]:
    tokenizer = read_tokenizer(tokenizer_path)
    return [tokenizer.encode(text).ids for text in _PROBES]


def _random_tokens(vocabulary: int) -> list[list[int]]:
    source = np.random.default_rng(0)
    return [source.integers(1, vocabulary, length).tolist() for length in (24, 10, 5, 1)]
