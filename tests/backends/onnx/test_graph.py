from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from backends.onnx.build.graph import BLOCK, FLOAT, GraphWriter, check_self_contained, quantise_8bit, save, value
from backends.onnx.manifest import ModelError
from backends.onnx.session import create_session


@given(st.integers(0, 2**32 - 1), st.floats(1e-4, 1e4))
def test_8_bit_is_never_off_by_more_than_half_a_step(seed: int, scale: float) -> None:
    weight = (np.random.default_rng(seed).normal(size=(3, 2 * BLOCK)) * scale).astype(np.float32)
    quantised, scales = quantise_8bit(weight)
    assert quantised.shape == (3, 2, BLOCK) and scales.shape == (3, 2)
    back = (quantised.astype(np.float32) - 128) * scales[..., None]
    assert (np.abs(back.reshape(weight.shape) - weight) <= np.repeat(scales, BLOCK, axis=1) * 0.501).all()


def test_a_layer_of_zeros_stays_zero() -> None:
    quantised, _ = quantise_8bit(np.zeros((1, BLOCK), np.float32))
    assert (quantised == 128).all()


def test_8_bit_needs_whole_blocks() -> None:
    with pytest.raises(ModelError, match="multiple of 32"):
        quantise_8bit(np.ones((2, BLOCK + 1), np.float32))


@pytest.mark.parametrize(("precision", "limit"), [("fp32", 1e-5), ("q8", 0.02)])
def test_a_linear_layer_multiplies_by_the_transposed_weight(tmp_path: Path, precision: str, limit: float) -> None:
    source = np.random.default_rng(1)
    weight = source.normal(size=(8, 64)).astype(np.float32)
    x = source.normal(size=(5, 64)).astype(np.float32)
    writer = GraphWriter(precision)  # type: ignore[arg-type]
    writer.linear("x", weight, "y")
    save(writer.model("m", [value("x", FLOAT, ["n", 64])], [value("y", FLOAT, ["n", 8])]), tmp_path / "m.onnx")
    found = create_session(tmp_path / "m.onnx").run(["y"], {"x": x})[0]
    expected = x @ weight.T
    assert np.abs(found - expected).max() <= limit * np.abs(expected).max()


def test_a_constant_written_twice_stands_once() -> None:
    writer = GraphWriter("fp32")
    writer.constant("c", np.array([1.0], np.float32))
    writer.constant("c", np.array([2.0], np.float32))
    writer.node("Add", ["x", "c"], "y")
    model = writer.model("m", [value("x", FLOAT, [1])], [value("y", FLOAT, [1])])
    assert [numpy_helper.to_array(t).tolist() for t in model.graph.initializer] == [[1.0]]


def model_of(node: onnx.NodeProto, *constants: onnx.TensorProto) -> onnx.ModelProto:
    graph = helper.make_graph([node], "g", [value("x", FLOAT, [1])], [value("y", FLOAT, [1])], list(constants))
    return helper.make_model(graph)


def test_custom_operators_are_refused() -> None:
    with pytest.raises(ModelError, match=r"evil\.Shell"):
        check_self_contained(model_of(helper.make_node("Shell", ["x"], ["y"], domain="evil")))


def test_custom_operators_inside_a_branch_are_refused() -> None:
    inner = model_of(helper.make_node("Shell", ["x"], ["y"], domain="evil")).graph
    with pytest.raises(ModelError, match=r"evil\.Shell"):
        check_self_contained(model_of(helper.make_node("If", ["x"], ["y"], then_branch=inner, else_branch=inner)))


def test_tensors_in_other_files_are_refused(tmp_path: Path) -> None:
    tensor = numpy_helper.from_array(np.ones(1, np.float32), "c")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="../../etc/passwd")
    with pytest.raises(ModelError, match="another file"):
        save(model_of(helper.make_node("Add", ["x", "c"], ["y"]), tensor), tmp_path / "m.onnx")
    assert not (tmp_path / "m.onnx").exists()
