"""The two-tower recommender as one graph, from token ids to one score per item, with the cuts between its towers.

    history_ids, history_mask [n, l] -> encoder -> history_embedding [n, d] -> user_sum [1, d]     user tower
    item_ids, item_mask [m, k]       -> encoder -> item_embedding [m, d]                           item tower
    user = unit(user_sum), user_sum = sum_i w_i history_embedding_i
    w_i = 0.5 ** ((n - 1 - i) / HALF_LIFE): the last entry is the newest and weighs 1
    scores = unit(item_embedding) @ user

Both encoders are the graph of the embedder, which stands in it twice over one set of weights. Split, they are the same
segment, so they share a session, the embedder's own where it is loaded. A precomputed user vector is a `user_sum`, precomputed
item vectors are an `item_embedding`: a caller gives them in place of the tower.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx
from numpy.typing import NDArray

from backends.api import Capabilities, Surface, TensorSpec
from backends.onnx.build import minilm
from backends.onnx.build.graph import FLOAT, INT64, GraphWriter, save, value
from backends.onnx.catalogue import CATALOGUE
from backends.onnx.manifest import Check, CutSpec, Manifest, ModelError, Progress, check, read_manifest, seal
from backends.onnx.split import graph_digest, split
from backends.onnx.tokens import padded

GRAPH_NAME = "model.onnx"
TOWERS = ("history", "item")
#: Rows of history the head can weigh; the backend keeps the newest ones.
MAX_HISTORY = 256
#: Entries after which a row of history counts half.
HALF_LIFE = 8.0
#: Largest difference of a score from the reference. 8 bit rounds a row by what is in it, and a bit of difference from another
#: batch shape can move a number by a whole step.
LIMITS = {"fp32": 1e-5, "q8": 1e-3}

Array = NDArray[np.float64]


def recency_weights(count: int) -> Array:
    """float64 [count], oldest first; the newest is 1."""
    ages = np.arange(count - 1, -1, -1, dtype=np.float64)
    return np.asarray(0.5 ** (ages / HALF_LIFE), np.float64)


def cuts(tolerance: float) -> tuple[CutSpec, ...]:
    """Where the encoder may be cut off (a place to split only), and what is kept: one sum a user, one row an item."""
    rows = {tower: (f"{tower}_ids", f"{tower}_mask") for tower in TOWERS}
    padding = {tower: dict.fromkeys(names, 0) for tower, names in rows.items()}
    encoder = CutSpec(
        name="history_encoder",
        tensors=("history_embedding",),
        rows=rows["history"],
        padding=padding["history"],
        stored=False,
        tolerance=tolerance,
    )
    items = CutSpec(
        name="item_tower", tensors=("item_embedding",), rows=rows["item"], padding=padding["item"], tolerance=tolerance
    )
    return encoder, CutSpec(name="user_tower", tensors=("user_sum",), tolerance=tolerance), items


def graph(encoder: onnx.ModelProto) -> onnx.ModelProto:
    """The whole recommender round `encoder` (`input_ids`, `attention_mask` -> `embedding`)."""
    dimensions: int = encoder.graph.output[0].type.tensor_type.shape.dim[1].dim_value
    head = _head()
    model = onnx.ModelProto(ir_version=encoder.ir_version, producer_name=encoder.producer_name)
    model.opset_import.extend(encoder.opset_import)
    model.graph.name = "two_tower"
    for tower in TOWERS:
        model.graph.node.extend(_tower(encoder, tower))
    model.graph.node.extend(head.nodes_made)
    model.graph.initializer.extend([*encoder.graph.initializer, *head.constants_made])
    for tower, rows in zip(TOWERS, ("history_rows", "item_rows"), strict=True):
        model.graph.input.extend(value(f"{tower}_{kind}", INT64, [rows, f"{tower}_length"]) for kind in ("ids", "mask"))
        model.graph.value_info.append(value(f"{tower}_embedding", FLOAT, [rows, dimensions]))
    model.graph.value_info.append(value("user_sum", FLOAT, [1, dimensions]))
    model.graph.output.append(value("scores", FLOAT, ["item_rows"]))
    return model


def _tower(encoder: onnx.ModelProto, tower: str) -> list[onnx.NodeProto]:
    """The encoder's nodes with tensors of their own; its constants stay the same."""
    constants = {tensor.name for tensor in encoder.graph.initializer}
    ends = {"input_ids": f"{tower}_ids", "attention_mask": f"{tower}_mask", "embedding": f"{tower}_embedding"}

    def renamed(name: str) -> str:
        return name if not name or name in constants else ends.get(name, f"{tower}/{name}")

    nodes = []
    for node in encoder.graph.node:
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        copy.name = f"{tower}/{node.name}"
        copy.input[:] = [renamed(name) for name in node.input]
        copy.output[:] = [renamed(name) for name in node.output]
        nodes.append(copy)
    return nodes


def _head() -> GraphWriter:
    writer = GraphWriter("fp32")
    writer.constant("head.weights", recency_weights(MAX_HISTORY).astype(np.float32)[None, :])
    writer.constant("head.end", np.array([MAX_HISTORY], np.int64))
    writer.constant("head.one", np.array([1], np.int64))
    # The last n weights are those of a history of n rows.
    writer.node("Shape", ["history_embedding"], "count", {"start": 0, "end": 1})
    writer.node("Sub", ["head.end", "count"], "start")
    writer.node("Slice", ["head.weights", "start", "head.end", "head.one"], "recent_weights")
    writer.node("MatMul", ["recent_weights", "history_embedding"], "user_sum")
    writer.node("LpNormalization", ["user_sum"], "user", {"axis": 1, "p": 2})
    writer.node("LpNormalization", ["item_embedding"], "units", {"axis": 1, "p": 2})
    writer.node("Transpose", ["user"], "user_column", {"perm": [1, 0]})
    writer.node("MatMul", ["units", "user_column"], "score_column")
    writer.node("Squeeze", ["score_column", "head.one"], "scores")
    return writer


def reference(history: Array, items: Array) -> Array:
    """The same in numpy float64: scores [m]."""
    user = recency_weights(len(history)) @ history
    units = items / np.linalg.norm(items, axis=1, keepdims=True)
    scores: Array = units @ (user / np.linalg.norm(user))
    return scores


def build(weights_dir: Path, out_dir: Path, variant: str, progress: Progress) -> Manifest:
    """`weights_dir` is the built MiniLM folder of the same variant. Raises ModelError when the head is wrong."""
    encoder = read_manifest(weights_dir)
    if encoder.kind != "embedder" or encoder.variant != variant:
        raise ModelError(
            f"two-tower:{variant} needs an embedder of variant {variant}; {weights_dir} holds {encoder.reference}"
        )
    dimensions: int = encoder.architecture["dimensions"]
    progress("write graph", 0, 2)
    inner = onnx.load(weights_dir / minilm.GRAPH_NAME)
    whole = graph(inner)
    # Refused now rather than at the next load, should the cuts not fit.
    declared = cuts(LIMITS[variant])
    split(whole, {cut.name: cut.tensors for cut in declared})
    digest, inputs = graph_digest(inner)
    save(whole, out_dir / GRAPH_NAME)
    progress("compare with the reference", 1, 2)
    checks = _compare(out_dir, weights_dir)
    if bad := [c for c in checks if not c.ok]:
        raise ModelError(
            f"the graph of two-tower:{variant} is wrong: {bad[0].name} is {bad[0].difference:.2g}, limit {bad[0].limit:.2g}"
        )
    entry = CATALOGUE["two-tower"]
    manifest = Manifest(
        name="two-tower",
        kind="two_tower",
        source=f"model:{encoder.reference}",
        variant=cast(Any, variant),
        builder=entry.builder,
        processing=entry.processing,
        fingerprint="",
        files=(),
        capabilities=Capabilities(surfaces=frozenset({Surface.TENSOR}), languages=encoder.capabilities.languages),
        inputs=(
            TensorSpec("user_history", "BYTES", (-1,), optional=True),
            TensorSpec("user_embedding", "FP32", (dimensions,), optional=True),
            TensorSpec("candidates", "BYTES", (-1,), optional=True),
            TensorSpec("item_embeddings", "FP32", (-1, dimensions), optional=True),
        ),
        outputs=(TensorSpec("scores", "FP32", (-1,)),),
        requires=encoder.reference,
        requires_fingerprint=encoder.fingerprint,
        architecture={
            "dimensions": dimensions,
            "max_history": MAX_HISTORY,
            # A loaded embedder whose graph has this digest can run the encoders of both towers.
            "encoder": {"digest": digest, "inputs": inputs},
        },
        cuts=declared,
        checks=tuple(checks),
    )
    return seal(out_dir, manifest)


def verify(model_dir: Path, weights_dir: Path) -> list[Check]:
    """Compare the built graph with the reference again; the encoder is verified as a model of its own."""
    return _compare(model_dir, weights_dir)


def _compare(folder: Path, weights_dir: Path) -> list[Check]:
    """Random token ids: the whole graph against the encoder alone, each row by itself, and the float64 reference."""
    from backends.onnx.session import create_session

    session = create_session(folder / GRAPH_NAME)
    encoder = create_session(weights_dir / minilm.GRAPH_NAME)
    manifest = read_manifest(weights_dir)
    limit = LIMITS[manifest.variant]
    source = np.random.default_rng(0)

    def rows(count: int) -> list[list[int]]:
        return [source.integers(1, manifest.architecture["vocabulary"], 3 + at % 5).tolist() for at in range(count)]

    def vectors(texts: list[list[int]]) -> Array:
        return np.concatenate([encoder.run(["embedding"], padded([text]))[0] for text in texts]).astype(np.float64)

    checks = []
    for read, offered in ((1, 1), (7, 12), (MAX_HISTORY, 3)):
        history, items = rows(read), rows(offered)
        feeds = {f"{tower}_{kind}": tensor for tower, texts in zip(TOWERS, (history, items), strict=True)
                 for kind, tensor in zip(("ids", "mask"), padded(texts).values(), strict=True)}  # fmt: skip
        found = session.run(["scores"], feeds)[0]
        difference = float(np.abs(found - reference(vectors(history), vectors(items))).max())
        checks.append(check(f"history {read}, items {offered}: largest difference", difference, limit))
    return checks
