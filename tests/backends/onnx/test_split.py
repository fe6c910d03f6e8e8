"""The splitter knows no model: it is tried on random graphs, and on small ones with one trap each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from backends.onnx.manifest import ModelError
from backends.onnx.split import CutRefused, Split, graph_digest, split

WIDTH = 4
FLOAT = TensorProto.FLOAT


def value(name: str, *shape: int | str) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, FLOAT, shape or ["rows", WIDTH])


def model_of(
    nodes: Sequence[onnx.NodeProto],
    outputs: Sequence[str],
    inputs: Sequence[str] = ("x", "y"),
    constants: dict[str, Any] | None = None,
) -> onnx.ModelProto:
    made = [numpy_helper.from_array(np.asarray(array, np.float32), name) for name, array in (constants or {}).items()]
    graph = helper.make_graph(nodes, "g", [value(n) for n in inputs], [value(n) for n in outputs], made)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def run(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    # Whether an optimiser fuses across a cut is the load check's question; here only the split is tried.
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def run_split(parts: Split, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    values = dict(feeds)
    for segment in (*parts.cuts, parts.rest):
        if segment.outputs:
            model = parts.models[segment.name]()
            assert [i.name for i in model.graph.input] == list(segment.inputs)
            values.update(run(model, {name: values[name] for name in segment.inputs}))
    return {name: values[name] for name in parts.outputs}


# ------------------------------------------------------------------------------------------------------ random graphs


@dataclass
class Drawn:
    """A random graph: node i makes tensor `t{i}` (node `split` makes two)."""

    nodes: list[onnx.NodeProto]
    constants: dict[str, np.ndarray]

    def makers(self) -> dict[str, int]:
        return {name: index for index, node in enumerate(self.nodes) for name in node.output}

    def upstream(self, tensors: Sequence[str]) -> set[int]:
        makers, found, left = self.makers(), set(), list(tensors)
        while left:
            index = makers.get(left.pop())
            if index is not None and index not in found:
                found.add(index)
                left += self.nodes[index].input
        return found

    def varying(self) -> set[str]:
        made = {"x", "y"}
        for node in self.nodes:
            if made & set(node.input):
                made.update(node.output)
        return made

    def sinks(self) -> list[str]:
        read = {name for node in self.nodes for name in node.input}
        return [name for node in self.nodes for name in node.output if name not in read]

    def crossing(self, inside: set[int], outputs: Sequence[str]) -> list[str]:
        beyond = {name for index, node in enumerate(self.nodes) if index not in inside for name in node.input}
        made = [name for index in sorted(inside) for name in self.nodes[index].output]
        return [name for name in made if name in beyond | set(outputs) and name in self.varying()]


@st.composite
def drawn_graphs(draw: st.DrawFn) -> Drawn:
    source = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    constants = {f"w{i}": source.normal(size=(WIDTH, WIDTH)).astype(np.float32) for i in range(2)}
    constants["b"] = source.normal(size=(1, WIDTH)).astype(np.float32)
    known = ["x", "y"]
    nodes: list[onnx.NodeProto] = []
    for index in range(draw(st.integers(2, 14))):
        kind = draw(
            st.sampled_from(["Add", "Mul", "Sub", "Tanh", "Relu", "Neg", "MatMul", "Bias", "Constant", "Split"])
        )
        one, other = (known[draw(st.integers(0, len(known) - 1))] for _ in range(2))
        name = f"t{index}"
        if kind in ("Tanh", "Relu", "Neg"):
            nodes.append(helper.make_node(kind, [one], [name]))
        elif kind == "MatMul":
            nodes.append(helper.make_node(kind, [one, draw(st.sampled_from(["w0", "w1"]))], [name]))
        elif kind == "Bias":
            nodes.append(helper.make_node("Add", [one, "b"], [name]))
        elif kind == "Constant":
            # Depends on no input: it belongs to every part that reads it.
            nodes.append(helper.make_node("Sub", ["b", "w0"], [name]))
        elif kind == "Split":
            halves = [f"{name}a", f"{name}b"]
            nodes.append(helper.make_node("Split", [one], halves, axis=1, num_outputs=2))
            nodes.append(helper.make_node("Concat", [halves[1], halves[0]], [name], axis=1))
        else:
            nodes.append(helper.make_node(kind, [one, other], [name]))
        if kind != "Constant":
            known.append(name)
        elif draw(st.booleans()):
            nodes.append(helper.make_node("MatMul", [one, name], [f"{name}m"]))
            known.append(f"{name}m")
    return Drawn(nodes, constants)


def whole_of(drawn: Drawn) -> tuple[onnx.ModelProto, list[str]]:
    outputs = drawn.sinks()
    used = {name for node in drawn.nodes for name in node.input}
    constants = {name: array for name, array in drawn.constants.items() if name in used}
    model = model_of(drawn.nodes, outputs, constants=constants)
    model.graph.output.clear()
    model.graph.output.extend(value(name, f"{name}_rows", f"{name}_columns") for name in outputs)
    return model, outputs


@settings(max_examples=120, deadline=None)
@given(drawn_graphs(), st.data())
def test_a_split_random_graph_gives_every_bit_of_the_whole_one(drawn: Drawn, data: st.DataObject) -> None:
    model, outputs = whole_of(drawn)
    candidates = sorted(drawn.varying() - {"x", "y"})
    assume(candidates)
    cuts: dict[str, list[str]] = {}
    for name in ("one", "two")[: data.draw(st.integers(1, 2))]:
        targets = data.draw(st.lists(st.sampled_from(candidates), min_size=1, max_size=3))
        declared = drawn.crossing(drawn.upstream(targets), outputs)
        cuts[name] = [tensor for tensor in declared if not any(tensor in other for other in cuts.values())]
    if data.draw(st.booleans()):
        # A tensor is forgotten: refused, unless what is left is a cut of its own.
        name = data.draw(st.sampled_from(sorted(cuts)))
        cuts[name] = cuts[name][1:]
    cuts = {name: tensors for name, tensors in cuts.items() if tensors}
    assume(cuts)
    every = {tensor for tensors in cuts.values() for tensor in tensors}
    sound = True
    for tensors in cuts.values():
        crossing = set(drawn.crossing(drawn.upstream(tensors), outputs))
        sound = sound and crossing <= every and set(tensors) <= crossing
    source = np.random.default_rng(1)
    feeds = {name: source.normal(size=(3, WIDTH)).astype(np.float32) for name in ("x", "y")}
    try:
        parts = split(model, cuts)
    except CutRefused as refused:
        assert not sound or "need each other" in str(refused)
        return
    assert sound
    expected = run(model, feeds)
    found = run_split(parts, feeds)
    for name in outputs:
        assert np.array_equal(found[name], expected[name], equal_nan=True), name


# ------------------------------------------------------------------------------------------------------------- traps


def chain() -> onnx.ModelProto:
    """x -> a -> b -> out, where out also reads a."""
    nodes = [
        helper.make_node("Tanh", ["x"], ["a"]),
        helper.make_node("Neg", ["a"], ["b"]),
        helper.make_node("Mul", ["b", "y"], ["c"]),
        helper.make_node("Add", ["c", "a"], ["out"]),
    ]
    return model_of(nodes, ["out"])


def test_a_tensor_that_crosses_unnamed_is_named_in_the_refusal() -> None:
    with pytest.raises(CutRefused, match=r"cut 'half': tensor 'a' also crosses it \(read by Add.*frontier is a, b"):
        split(chain(), {"half": ["b"]})
    parts = split(chain(), {"half": ["b", "a"]})
    assert parts.reads == {"half": ("x",)}
    assert [segment.inputs for segment in (*parts.cuts, parts.rest)] == [("x",), ("b", "y", "a")]


def test_a_crossing_tensor_may_belong_to_a_cut_upstream() -> None:
    parts = split(chain(), {"later": ["b"], "first": ["a"]})
    assert [(segment.name, segment.needs) for segment in parts.cuts] == [("first", ()), ("later", ("first",))]
    assert parts.rest.needs == ("later", "first")
    assert parts.reads == {"later": ("x",), "first": ("x",)}


@pytest.mark.parametrize(
    ("cuts", "says"),
    [
        ({"c": ["nowhere"]}, "'nowhere' is not in the graph"),
        ({"c": ["x"]}, "'x' is an input or a constant"),
        ({"c": []}, "names no tensor"),
        ({"rest": ["a"]}, "no cut may be named 'rest'"),
        ({"c": ["a"], "d": ["a"]}, "'a' is also at cut 'c'"),
        ({"c": ["c", "a", "b"]}, "nothing beyond the cut reads tensor 'b'"),
        ({"c": ["a", "c"], "d": ["b"]}, "need each other's tensors"),
    ],
)
def test_what_is_declared_wrongly_is_refused(cuts: dict[str, list[str]], says: str) -> None:
    with pytest.raises(CutRefused, match=says):
        split(chain(), cuts)


def test_a_constant_and_a_random_draw_cannot_be_cut_off() -> None:
    nodes = [
        helper.make_node("Neg", ["w"], ["fixed"]),
        helper.make_node("RandomNormalLike", ["x"], ["noise"]),
        helper.make_node("Add", ["x", "noise"], ["noisy"]),
        helper.make_node("Add", ["noisy", "fixed"], ["moved"]),
        helper.make_node("Add", ["moved", "y"], ["out"]),
    ]
    model = model_of(nodes, ["out"], constants={"w": np.ones((1, WIDTH))})
    with pytest.raises(CutRefused, match="'fixed' depends on no input"):
        split(model, {"c": ["fixed"]})
    with pytest.raises(CutRefused, match="RandomNormalLike lies upstream"):
        split(model, {"c": ["moved"]})


def test_outputs_may_be_cut_tensors() -> None:
    nodes = [helper.make_node("Tanh", ["x"], ["a"]), helper.make_node("Neg", ["y"], ["b"])]
    feeds = {name: np.ones((2, WIDTH), np.float32) for name in ("x", "y")}
    parts = split(model_of(nodes, ["a", "b"]), {"c": ["a"], "d": ["b"]})
    assert parts.rest.outputs == () and parts.rest.needs == ("c", "d")
    assert np.array_equal(run_split(parts, feeds)["a"], np.tanh(feeds["x"]))


def test_types_that_only_the_runtime_knows_are_found() -> None:
    """`BiasGelu` is not of the standard: the onnx library infers nothing beyond it."""
    nodes = [
        helper.make_node("BiasGelu", ["x", "w"], ["a"], domain="com.microsoft"),
        helper.make_node("Greater", ["a", "y"], ["more"]),
        helper.make_node("Where", ["more", "a", "y"], ["out"]),
    ]
    model = model_of(nodes, ["out"], constants={"w": np.ones(WIDTH)})
    parts = split(model, {"c": ["a"], "d": ["more"]})
    made = parts.models["rest"]().graph.input
    assert {i.name: i.type.tensor_type.elem_type for i in made} == {"more": TensorProto.BOOL, "a": FLOAT, "y": FLOAT}
    feeds = {name: np.random.default_rng(2).normal(size=(2, WIDTH)).astype(np.float32) for name in ("x", "y")}
    assert np.array_equal(run_split(parts, feeds)["out"], run(model, feeds)["out"])


def test_a_sequence_cannot_be_kept() -> None:
    nodes = [
        helper.make_node("SplitToSequence", ["x"], ["rows"], axis=0),
        helper.make_node("ConcatFromSequence", ["rows"], ["out"], axis=0),
    ]
    with pytest.raises(ModelError, match="'rows' is not a tensor"):
        split(model_of(nodes, ["out"]), {"c": ["rows"]})


def branching() -> onnx.ModelProto:
    """Inner graphs read tensors of the outer one without naming them as inputs of their node."""
    yes = helper.make_graph([helper.make_node("Neg", ["a"], ["p"])], "yes", [], [value("p")])
    no = helper.make_graph([helper.make_node("Add", ["a", "y"], ["q"])], "no", [], [value("q")])
    nodes = [
        helper.make_node("Tanh", ["x"], ["a"]),
        helper.make_node("ReduceSum", ["a"], ["sum"], keepdims=0),
        helper.make_node("Greater", ["sum", "zero"], ["more"]),
        helper.make_node("If", ["more"], ["out"], then_branch=yes, else_branch=no),
    ]
    return model_of(nodes, ["out"], constants={"zero": np.float32(0)})


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_what_inner_graphs_capture_crosses_too(sign: float) -> None:
    model = branching()
    with pytest.raises(CutRefused, match="tensor 'a' also crosses it"):
        split(model, {"c": ["more"]})
    parts = split(model, {"c": ["more", "a"]})
    assert set(parts.rest.inputs) == {"more", "a", "y"}
    feeds = {"x": np.full((2, WIDTH), sign, np.float32), "y": np.ones((2, WIDTH), np.float32)}
    assert np.array_equal(run_split(parts, feeds)["out"], run(model, feeds)["out"])


# ----------------------------------------------------------------------------------------------------------- digests


def twins(weight: float = 1.0, other: str = "Tanh") -> onnx.ModelProto:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["one"], name="first"),
        helper.make_node("Tanh", ["one"], ["a"]),
        helper.make_node("MatMul", ["y", "w"], ["two"], name="second"),
        helper.make_node(other, ["two"], ["b"]),
        helper.make_node("Add", ["a", "b"], ["out"]),
    ]
    return model_of(nodes, ["out"], constants={"w": np.eye(WIDTH) * weight})


def test_segments_that_differ_in_names_only_have_one_digest() -> None:
    a, b = split(twins(), {"a": ["a"], "b": ["b"]}).cuts
    assert a.digest == b.digest
    alone = model_of(
        [helper.make_node("MatMul", ["in", "k"], ["m"]), helper.make_node("Tanh", ["m"], ["gives"])],
        ["gives"],
        ["in"],
        {"k": np.eye(WIDTH)},
    )
    assert graph_digest(alone) == (a.digest, ("in",))


def test_a_digest_covers_weights_operators_attributes_and_what_lies_upstream() -> None:
    def digests(model: onnx.ModelProto) -> tuple[str, str]:
        parts = split(model, {"a": ["a"], "b": ["b"]})
        return parts.cuts[1].digest, parts.upstream["b"]

    base = digests(twins())
    assert digests(twins()) == base
    assert digests(twins(weight=2.0))[0] != base[0]
    assert digests(twins(other="Neg"))[0] != base[0]
    # Of equal segments, what their keys begin with still says which input they read.
    parts = split(twins(), {"a": ["a"], "b": ["b"]})
    assert parts.upstream["a"] != parts.upstream["b"]
    # A cut beyond another one: its own segment is the same, what lies upstream is not.
    one, two = (split(_deep(weight), {"near": ["a"], "far": ["b"]}) for weight in (1.0, 2.0))
    assert one.cuts[1].digest == two.cuts[1].digest and one.upstream["far"] != two.upstream["far"]


def _deep(weight: float) -> onnx.ModelProto:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("Tanh", ["a"], ["b"]),
        helper.make_node("Add", ["b", "y"], ["out"]),
    ]
    return model_of(nodes, ["out"], constants={"w": np.eye(WIDTH) * weight})
