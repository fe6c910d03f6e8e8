"""The head of the two-tower recommender: from embeddings to one score per item.

The towers are the MiniLM encoder, which the embedder runs; so the encoder stands in memory once and embeddings of items
can be kept. The head is a small graph of its own:

    history [n, d], items [m, d] -> scores [m]
    user = unit(sum_i w_i history_i),  w_i = 0.5 ** ((n - 1 - i) / HALF_LIFE): the last entry is the newest and weighs 1
    scores = unit(items) @ user

A precomputed user vector is a history of one row.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx
from numpy.typing import NDArray

from backends.api import Capabilities, Surface, TensorSpec
from backends.onnx.build.graph import FLOAT, GraphWriter, save, value
from backends.onnx.catalogue import CATALOGUE
from backends.onnx.manifest import Check, Manifest, ModelError, Progress, check, read_manifest, seal

HEAD_NAME = "head.onnx"
#: Rows of history the head can weigh; the backend keeps the newest ones.
MAX_HISTORY = 256
#: Entries after which a row of history counts half.
HALF_LIFE = 8.0
LIMIT = 1e-6

Array = NDArray[np.float64]


def recency_weights(count: int) -> Array:
    """float64 [count], oldest first; the newest is 1."""
    ages = np.arange(count - 1, -1, -1, dtype=np.float64)
    return np.asarray(0.5 ** (ages / HALF_LIFE), np.float64)


def graph(dimensions: int) -> onnx.ModelProto:
    writer = GraphWriter("fp32")
    writer.constant("weights", recency_weights(MAX_HISTORY).astype(np.float32)[None, :])
    writer.constant("end", np.array([MAX_HISTORY], np.int64))
    writer.constant("one", np.array([1], np.int64))
    # The last n weights are those of a history of n rows.
    writer.node("Shape", ["history"], "count", {"start": 0, "end": 1})
    writer.node("Sub", ["end", "count"], "start")
    writer.node("Slice", ["weights", "start", "end", "one"], "recent_weights")
    writer.node("MatMul", ["recent_weights", "history"], "user_sum")
    writer.node("LpNormalization", ["user_sum"], "user", {"axis": 1, "p": 2})
    writer.node("LpNormalization", ["items"], "units", {"axis": 1, "p": 2})
    writer.node("Transpose", ["user"], "user_column", {"perm": [1, 0]})
    writer.node("MatMul", ["units", "user_column"], "score_column")
    writer.node("Squeeze", ["score_column", "one"], "scores")
    return writer.model(
        "two_tower_head",
        inputs=[
            value("history", FLOAT, ["history_rows", dimensions]),
            value("items", FLOAT, ["item_rows", dimensions]),
        ],
        outputs=[value("scores", FLOAT, ["item_rows"])],
        cuts=[value("user", FLOAT, [1, dimensions])],
    )


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
    save(graph(dimensions), out_dir / HEAD_NAME)
    progress("compare with the reference", 1, 2)
    checks = _compare(out_dir, dimensions)
    if bad := [c for c in checks if not c.ok]:
        raise ModelError(
            f"the head of two-tower:{variant} is wrong: {bad[0].name} is {bad[0].difference:.2g}, limit {LIMIT:.2g}"
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
        architecture={"dimensions": dimensions, "max_history": MAX_HISTORY},
        checks=tuple(checks),
    )
    return seal(out_dir, manifest)


def verify(model_dir: Path, weights_dir: Path) -> list[Check]:
    """Compare the built head with the float64 reference again; the encoder is verified as a model of its own."""
    return _compare(model_dir, read_manifest(weights_dir).architecture["dimensions"])


def _compare(folder: Path, dimensions: int) -> list[Check]:
    from backends.onnx.session import create_session

    session = create_session(folder / HEAD_NAME)
    source = np.random.default_rng(0)
    checks = []
    for rows, items in ((1, 1), (7, 50), (MAX_HISTORY, 3)):
        history = source.normal(size=(rows, dimensions))
        candidates = source.normal(size=(items, dimensions)) * 3
        feed = {"history": history.astype(np.float32), "items": candidates.astype(np.float32)}
        found = session.run(["scores"], feed)[0]
        difference = float(np.abs(found - reference(history, candidates)).max())
        checks.append(check(f"history {rows}, items {items}: largest difference", difference, LIMIT))
    return checks
