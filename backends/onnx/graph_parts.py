"""A graph taken apart: who makes which tensor, who reads it, and graphs of their own made from some of its nodes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import onnx
from onnx import helper

from backends.onnx.manifest import ModelError

_NOTHING: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class SegmentGraph:
    """`inputs` in the order of their first use. `digest` covers everything but names."""

    model: Callable[[], onnx.ModelProto]
    inputs: tuple[str, ...]
    digest: str


class GraphParts:
    """Reads `model` and never changes it."""

    def __init__(self, model: onnx.ModelProto) -> None:
        graph = model.graph
        if graph.sparse_initializer:
            raise ModelError("a graph with sparse constants cannot be split")
        self._model = model
        self.initializers = {tensor.name: tensor for tensor in graph.initializer}
        # Old graphs list their constants among the inputs.
        self.inputs = tuple(value.name for value in graph.input if value.name not in self.initializers)
        self.outputs = tuple(value.name for value in graph.output)
        self.nodes = list(graph.node)
        self._reads = [tuple(dict.fromkeys(_reads(node))) for node in self.nodes]
        self.producer = {name: index for index, node in enumerate(self.nodes) for name in node.output if name}
        self.varying = self._varying()
        self._content: dict[str, bytes] = {}

    def _varying(self) -> frozenset[str]:
        """The tensors that depend on an input of the graph. Nodes are in topological order, as the format demands."""
        varying = set(self.inputs)
        for node, reads in zip(self.nodes, self._reads, strict=True):
            if any(name in varying for name in reads):
                varying.update(name for name in node.output if name)
        return frozenset(varying)

    def ancestors(self, tensors: Iterable[str], stops: Collection[str] = _NOTHING) -> frozenset[int]:
        """The nodes that `tensors` are computed by, not looking beyond `stops`."""
        found: set[int] = set()
        left = [name for name in tensors if name not in stops]
        while left:
            index = self.producer.get(left.pop())
            if index is not None and index not in found:
                found.add(index)
                left += [name for name in self._reads[index] if name not in stops]
        return frozenset(found)

    def frontier(self, nodes: Collection[int]) -> tuple[str, ...]:
        """What `nodes` make of the inputs and others (or the outputs of the graph) read, in the order of the graph."""
        read = set(self.outputs)
        for index, reads in enumerate(self._reads):
            if index not in nodes:
                read.update(reads)
        made = (name for index in sorted(nodes) for name in self.nodes[index].output if name)
        return tuple(name for name in made if name in read and name in self.varying)

    def reader(self, tensor: str, inside: Collection[int]) -> str:
        """Who reads `tensor` outside `inside`, for people."""
        for index, node in enumerate(self.nodes):
            if index not in inside and tensor in self._reads[index]:
                return f"{node.op_type} {node.name or index!r}"
        return "the outputs of the graph"

    def inputs_of(self, nodes: Collection[int], tensors: Collection[str]) -> tuple[str, ...]:
        """The inputs of the graph that `nodes` read."""
        read = {name for index in nodes for name in self._reads[index]} | set(tensors)
        return tuple(name for name in self.inputs if name in read)

    # ---------------------------------------------------------------------------------------------------- segments

    def segment(
        self, name: str, nodes: Sequence[int], outputs: Sequence[str], stops: Collection[str] = _NOTHING
    ) -> SegmentGraph:
        """A model of `nodes` alone (in the order of the graph) that gives `outputs`."""
        made = {tensor for index in nodes for tensor in self.nodes[index].output if tensor and tensor not in stops}
        read = list(dict.fromkeys(tensor for index in nodes for tensor in self._reads[index]))
        inputs = tuple(tensor for tensor in read if tensor not in made and tensor not in self.initializers)
        digest = self._digest(nodes, inputs, outputs, stops)

        def model() -> onnx.ModelProto:
            whole = self._model
            part = onnx.ModelProto(ir_version=whole.ir_version, producer_name=whole.producer_name)
            part.opset_import.extend(whole.opset_import)
            part.functions.extend(whole.functions)
            graph = part.graph
            graph.name = name
            graph.node.extend(self._node(index, stops) for index in nodes)
            graph.initializer.extend(self.initializers[tensor] for tensor in read if tensor in self.initializers)
            graph.input.extend(self.value(tensor) for tensor in inputs)
            graph.output.extend(self.value(tensor) for tensor in outputs)
            graph.value_info.extend(value for value in whole.graph.value_info if value.name in made - set(outputs))
            return part

        return SegmentGraph(model, inputs, digest)

    def _node(self, index: int, stops: Collection[str]) -> onnx.NodeProto:
        """The node, with outputs that come from elsewhere here under another name: a tensor may have one maker only."""
        node = self.nodes[index]
        if not any(name in stops for name in node.output):
            return node
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        copy.output[:] = [f"{name}/unused" if name in stops else name for name in node.output]
        return copy

    def value(self, tensor: str) -> onnx.ValueInfoProto:
        """Name, type and shape of a tensor. Raises ModelError when it is no tensor, or nobody can tell its type."""
        for table in self._tables():
            value = table.get(tensor)
            if value is not None and value.type.HasField("tensor_type") and value.type.tensor_type.elem_type:
                return value
            if value is not None and value.type.WhichOneof("value") not in (None, "tensor_type"):
                break
        raise ModelError(f"{tensor!r} is not a tensor of a known type; the graph cannot be split there")

    def _tables(self) -> Iterator[dict[str, onnx.ValueInfoProto]]:
        """What is known of tensors, cheapest first."""
        yield self._declared
        yield self._inferred
        yield self._loaded

    @cached_property
    def _declared(self) -> dict[str, onnx.ValueInfoProto]:
        graph = self._model.graph
        return {value.name: value for value in (*graph.input, *graph.output, *graph.value_info)}

    @cached_property
    def _inferred(self) -> dict[str, onnx.ValueInfoProto]:
        """What the onnx library infers: nothing beyond the first operator that is not of the standard."""
        graph = onnx.shape_inference.infer_shapes(self._model).graph
        return {value.name: value for value in graph.value_info}

    @cached_property
    def _loaded(self) -> dict[str, onnx.ValueInfoProto]:
        """What ONNX Runtime infers, which knows its own operators: it is asked for every tensor as an output."""
        import onnxruntime as ort

        model = onnx.ModelProto()
        model.CopyFrom(self._model)
        known = {value.name for value in model.graph.output}
        model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in self.producer if name not in known)
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.log_severity_level = 3
        session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return {value.name: _value_of(value.name, value.type, value.shape) for value in session.get_outputs()}

    # ------------------------------------------------------------------------------------------------------ digest

    def _digest(
        self, nodes: Sequence[int], inputs: Sequence[str], outputs: Sequence[str], stops: Collection[str]
    ) -> str:
        """Tensors by the order in which they appear, never by name; constants by their bytes."""
        numbers: dict[str, int] = {"": -1}
        digest = hashlib.blake2b(digest_size=16)

        def put(*values: object) -> None:
            for value in values:
                data = value if isinstance(value, bytes) else str(value).encode()
                digest.update(len(data).to_bytes(8, "little"))
                digest.update(data)

        def number(name: str) -> int:
            if name not in numbers:
                numbers[name] = len(numbers)
                if name in self.initializers:
                    put("constant", self._content_of(name))
                elif name in inputs:
                    put("input", *_type_of(self.value(name)))
            return numbers[name]

        put(*sorted(f"{opset.domain or 'ai.onnx'}:{opset.version}" for opset in self._model.opset_import))
        put(*sorted(function.SerializeToString(deterministic=True) for function in self._model.functions))
        for index in nodes:
            node = self.nodes[index]
            put("node", node.domain or "ai.onnx", node.op_type, *map(number, node.input), "captured")
            put(*(number(name) for name in self._reads[index] if name not in node.input))
            put("makes", *(number("" if name in stops else name) for name in node.output))
            put(*sorted(attribute.SerializeToString(deterministic=True) for attribute in node.attribute))
        put("gives", *map(number, outputs))
        return digest.hexdigest()

    def _content_of(self, name: str) -> bytes:
        if name not in self._content:
            tensor = self.initializers[name]
            if tensor.data_location == onnx.TensorProto.EXTERNAL:
                raise ModelError(f"constant {name!r} lies in another file; such a graph cannot be split")
            digest = hashlib.blake2b(f"{tensor.data_type} {list(tensor.dims)} ".encode(), digest_size=16)
            if tensor.HasField("raw_data"):
                digest.update(tensor.raw_data)
            else:
                digest.update(onnx.numpy_helper.to_array(tensor).tobytes())
            self._content[name] = digest.digest()
        return self._content[name]


def _reads(node: onnx.NodeProto) -> Iterator[str]:
    """What a node reads, what the graphs inside it capture from outside included."""
    yield from (name for name in node.input if name)
    for attribute in node.attribute:
        for graph in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
            inner = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
            for child in graph.node:
                yield from (name for name in _reads(child) if name not in inner)
                inner.update(child.output)
            yield from (value.name for value in graph.output if value.name not in inner)


def _type_of(value: onnx.ValueInfoProto) -> tuple[int, str]:
    """Element type, and the sizes that are fixed."""
    kind = value.type.tensor_type
    if not kind.HasField("shape"):
        return kind.elem_type, "?"
    return kind.elem_type, str([dim.dim_value if dim.HasField("dim_value") else None for dim in kind.shape.dim])


def _value_of(name: str, kind: str, shape: Sequence[int | str | None]) -> onnx.ValueInfoProto:
    """ONNX Runtime's `tensor(float)` as a declaration; anything that is no tensor has no type here."""
    element = kind.removeprefix("tensor(").removesuffix(")")
    if kind != f"tensor({element})":
        return onnx.ValueInfoProto(name=name)
    names = {"float": "FLOAT", "float16": "FLOAT16", "double": "DOUBLE"}
    data_type = onnx.TensorProto.DataType.Value(names.get(element, element.upper()))
    # An empty shape may be a scalar's, or be that nothing is known: it is left open.
    return helper.make_tensor_value_info(name, data_type, list(shape) or None)
