"""A graph that is unlike the models of this project: a small convolutional scorer with a shared temperature.

image [n, 1, 8, 8] -> Conv, Relu, GlobalAveragePool -> seen [n, 6]             (rows)
words [k, 5] float, boost [] -> ReduceMean, MatMul, * boost -> asked [1, 6]    (whole)
ranks = Softmax(seen @ asked.T / 2), best = ArgMax(ranks)
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from backends.onnx.manifest import CutSpec

CUTS = (
    CutSpec(name="seen", tensors=("seen",), rows=("image",), tolerance=1e-5),
    CutSpec(name="asked", tensors=("asked",), tolerance=0.0),
)


def foreign_graph(seed: int = 0) -> onnx.ModelProto:
    source = np.random.default_rng(seed)

    def constant(name: str, *shape: int) -> onnx.TensorProto:
        return numpy_helper.from_array(source.normal(size=shape).astype(np.float32), name)

    def value(name: str, kind: int, *shape: Any) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, kind, shape)

    nodes = [
        helper.make_node("Conv", ["image", "kernel", "offset"], ["map"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["map"], ["lit"]),
        helper.make_node("GlobalAveragePool", ["lit"], ["pooled"]),
        helper.make_node("Flatten", ["pooled"], ["seen"], axis=1),
        helper.make_node("ReduceMean", ["words", "zero"], ["mean"], keepdims=1),
        helper.make_node("MatMul", ["mean", "table"], ["plain"]),
        helper.make_node("Mul", ["plain", "boost"], ["asked"]),
        helper.make_node("Transpose", ["asked"], ["column"], perm=[1, 0]),
        helper.make_node("MatMul", ["seen", "column"], ["fit"]),
        helper.make_node("Div", ["fit", "two"], ["cool"]),
        helper.make_node("Softmax", ["cool"], ["ranks"], axis=0),
        helper.make_node("ArgMax", ["ranks"], ["best"], axis=0, keepdims=0),
    ]
    constants = [
        constant("kernel", 6, 1, 3, 3),
        constant("offset", 6),
        constant("table", 5, 6),
        numpy_helper.from_array(np.array([0], np.int64), "zero"),
        numpy_helper.from_array(np.array(2, np.float32), "two"),
    ]
    graph = helper.make_graph(
        nodes,
        "foreign",
        [
            value("image", TensorProto.FLOAT, "n", 1, 8, 8),
            value("words", TensorProto.FLOAT, "k", 5),
            value("boost", TensorProto.FLOAT),
        ],
        [value("ranks", TensorProto.FLOAT, "n", 1), value("best", TensorProto.INT64, 1)],
        constants,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def foreign_feeds(images: int, seed: int = 1) -> dict[str, np.ndarray]:
    source = np.random.default_rng(seed)
    return {
        "image": source.normal(size=(images, 1, 8, 8)).astype(np.float32),
        "words": source.normal(size=(3, 5)).astype(np.float32),
        "boost": np.array(1.5, np.float32),
    }
