"""Writing an ONNX graph by hand: constants, nodes, linear layers in FP32 or 8 bit, and the model round them.

The operators of domain `com.microsoft` are ONNX Runtime's own fused ones; they run on CPU and CUDA and need no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from backends.onnx.manifest import ModelError

Precision = Literal["fp32", "q8"]

CONTRIB = "com.microsoft"
FLOAT = TensorProto.FLOAT
INT32 = TensorProto.INT32
INT64 = TensorProto.INT64

#: Weights that share one scale in 8 bit.
BLOCK = 32
OPSET = 21
IR_VERSION = 10
_KNOWN_DOMAINS = frozenset({"", "ai.onnx", CONTRIB})
_NOTHING: Mapping[str, Any] = {}


class GraphWriter:
    """Collects nodes in the order in which they are written. Every method returns the name of what it made."""

    def __init__(self, precision: Precision) -> None:
        self.precision = precision
        self._nodes: list[onnx.NodeProto] = []
        self._constants: dict[str, onnx.TensorProto] = {}

    def constant(self, name: str, value: NDArray[Any]) -> str:
        """A named tensor inside the graph. Writing the same name again keeps the first value."""
        if name not in self._constants:
            self._constants[name] = numpy_helper.from_array(np.ascontiguousarray(value), name)
        return name

    def node(
        self,
        operator: str,
        inputs: Sequence[str],
        output: str,
        attributes: Mapping[str, Any] = _NOTHING,
        domain: str = "",
    ) -> str:
        """A node with one output."""
        self.nodes(operator, inputs, (output,), attributes, domain)
        return output

    def nodes(
        self,
        operator: str,
        inputs: Sequence[str],
        outputs: Sequence[str],
        attributes: Mapping[str, Any] = _NOTHING,
        domain: str = "",
    ) -> Sequence[str]:
        """A node with several outputs; "" leaves an optional input or output out."""
        made = helper.make_node(operator, inputs, outputs, name=f"{operator}_{len(self._nodes)}", domain=domain)
        made.attribute.extend(helper.make_attribute(key, value) for key, value in attributes.items())
        self._nodes.append(made)
        return outputs

    def linear(self, x: str, weight: NDArray[np.float32], output: str) -> str:
        """`x @ weight.T` without bias; `weight` is [outputs, inputs], `inputs` a multiple of BLOCK in 8 bit."""
        if self.precision == "fp32":
            return self.node("MatMul", [x, self.constant(f"{output}.weight", weight.T)], output)
        quantised, scales = quantise_8bit(weight)
        rows, columns = weight.shape
        # accuracy_level 4 = int8 arithmetic; 0 and 1 are thirty times slower on a CPU.
        attributes = {"K": columns, "N": rows, "bits": 8, "block_size": BLOCK, "accuracy_level": 4}
        inputs = [x, self.constant(f"{output}.q8", quantised), self.constant(f"{output}.scales", scales)]
        return self.node("MatMulNBits", inputs, output, attributes, CONTRIB)

    @property
    def nodes_made(self) -> Sequence[onnx.NodeProto]:
        return self._nodes

    @property
    def constants_made(self) -> Sequence[onnx.TensorProto]:
        return list(self._constants.values())

    def model(
        self,
        name: str,
        inputs: Sequence[onnx.ValueInfoProto],
        outputs: Sequence[onnx.ValueInfoProto],
        cuts: Sequence[onnx.ValueInfoProto] = (),
    ) -> onnx.ModelProto:
        """The finished model. `cuts` declares inner tensors where it may be split (their types are not inferred)."""
        graph = helper.make_graph(self._nodes, name, inputs, outputs, list(self._constants.values()), value_info=cuts)
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(CONTRIB, 1)]
        return helper.make_model(
            graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="hybrid-routing-gateway"
        )


def value(name: str, kind: int, shape: Sequence[int | str]) -> onnx.ValueInfoProto:
    """Declares an input, output or cut; a string in `shape` is a dimension that may vary."""
    return helper.make_tensor_value_info(name, kind, shape)


def quantise_8bit(weight: NDArray[np.float32]) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Symmetric round-to-nearest of [N, K] in blocks of 32 along K, as MatMulNBits reads it.

    Returns uint8 [N, K / 32, 32] with zero point 128, and float32 scales [N, K / 32].
    """
    rows, columns = weight.shape
    if columns % BLOCK:
        raise ModelError(f"8 bit needs a multiple of {BLOCK} inputs; this layer has {columns}")
    blocks = weight.reshape(rows, columns // BLOCK, BLOCK)
    scales = np.abs(blocks).max(axis=-1, keepdims=True) / 127 + 1e-12
    quantised = np.clip(np.round(blocks / scales) + 128, 0, 255).astype(np.uint8)
    return quantised, scales[..., 0].astype(np.float32)


def check_self_contained(model: onnx.ModelProto) -> None:
    """Raise ModelError if the graph reads other files or needs operators that ONNX Runtime does not bring."""
    for graph in _graphs(model.graph):
        for tensor in graph.initializer:
            if tensor.data_location == TensorProto.EXTERNAL:
                raise ModelError(f"tensor {tensor.name!r} lies in another file; such a model is refused")
        for node in graph.node:
            if node.domain not in _KNOWN_DOMAINS:
                raise ModelError(f"operator {node.domain}.{node.op_type} is a custom one; such a model is refused")


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """`graph` and those inside its nodes."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs) if attribute.HasField("g") else attribute.graphs:
                yield from _graphs(inner)


def save(model: onnx.ModelProto, path: Path) -> None:
    """Write the model as one file, the same bytes for the same graph."""
    check_self_contained(model)
    path.write_bytes(model.SerializeToString(deterministic=True))
