"""Running a split model with a cache, on a graph that is unlike our own models."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import onnx
import pytest
from msgspec.structs import replace
from onnx import TensorProto, helper

from backends.onnx.manifest import CutSpec, ModelError
from backends.onnx.segmented import SegmentedModel
from backends.onnx.segments import Values
from backends.onnx.session import create_session
from policies.core.deadline import Deadline
from policies.core.errors import ModelFailed
from tests.support.foreign_graph import CUTS, foreign_feeds, foreign_graph
from tests.support.tensor_store import TensorDict

PROBES = [foreign_feeds(5), foreign_feeds(1)]
Make = Callable[..., SegmentedModel]


@pytest.fixture
def store() -> TensorDict:
    return TensorDict()


@pytest.fixture
async def make(store: TensorDict) -> AsyncIterator[Make]:
    made: list[SegmentedModel] = []

    def load(graph: onnx.ModelProto | None = None, cuts: tuple[CutSpec, ...] = CUTS, **more: Any) -> SegmentedModel:
        more.setdefault("cache", store)
        made.append(SegmentedModel.load(graph or foreign_graph(), cuts, more.pop("probes", PROBES), name="m", **more))
        return made[-1]

    yield load
    for model in made:
        await model.aclose()


def whole(feeds: Values, graph: onnx.ModelProto | None = None) -> dict[str, np.ndarray]:
    session = create_session((graph or foreign_graph()).SerializeToString())
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def counts(model: SegmentedModel, cut: str) -> dict[str, int]:
    return {what: count for (_, name, what), count in model.counts.values.items() if name == cut}


async def test_a_foreign_graph_is_split_and_gives_the_same_bits(make: Make, soon: Deadline) -> None:
    model = make()
    assert [(verdict.name, verdict.label) for verdict in model.verdicts] == [("seen", "exact"), ("asked", "exact")]
    feeds = foreign_feeds(7, seed=3)
    for _ in range(2):
        found = await model.run(feeds, soon)
        for name, expected in whole(feeds).items():
            assert np.array_equal(found[name], expected) and found[name].dtype == expected.dtype
    assert counts(model, "asked") == {"misses": 1, "runs": 1, "hits": 1}
    assert counts(model, "seen") == {"misses": 7, "runs": 1, "rows": 7, "hits": 7}
    assert counts(model, "rest") == {"runs": 2}


async def test_only_rows_that_are_not_known_are_run_and_equal_ones_once(
    make: Make, store: TensorDict, soon: Deadline
) -> None:
    model = make()
    feeds = foreign_feeds(4)
    await model.run(feeds, soon)
    images = np.concatenate([feeds["image"][[2, 0]], foreign_feeds(2, seed=9)["image"][[1, 0, 1]]])
    feeds = {**feeds, "image": images}
    found = await model.run(feeds, soon)
    assert np.allclose(found["ranks"], whole(feeds)["ranks"], atol=1e-6)
    seen = counts(model, "seen")
    assert (seen["hits"], seen["misses"], seen["rows"]) == (2, 4 + 2, 4 + 2)
    # One round of look-ups a request, whatever it needs.
    assert [len(keys) for keys in store.asked] == [5, 5]


async def test_each_input_upstream_counts_and_no_other(make: Make, store: TensorDict, soon: Deadline) -> None:
    model = make()
    feeds = foreign_feeds(2)
    await model.run(feeds, soon)
    known = len(store.kept)
    await model.run({**feeds, "boost": np.array(2.5, np.float32)}, soon)
    assert len(store.kept) == known + 1, "what was asked is new, the images are not"
    await model.run({**feeds, "words": feeds["words"].reshape(3, 5)[:2]}, soon)
    assert len(store.kept) == known + 2


def test_shape_and_dtype_are_in_the_key() -> None:
    from backends.onnx.segmented import _prefix, _put

    def key(*values: Any) -> bytes:
        digest = _prefix("u", "p", "b", "c")
        for one in values:
            _put(digest, one)
        made: bytes = digest.digest()
        return made

    zeros = np.zeros(4, np.float32)
    arrays = [
        (zeros,),
        (zeros.reshape(2, 2),),
        (zeros.view(np.int32),),
        (zeros.view(np.float64),),
        (zeros[:2], zeros[:2]),
        ([zeros],),
        ([zeros[:2], zeros[:2]],),
        (np.zeros(0, np.float32),),
        (),
    ]
    assert len({key(*each) for each in arrays}) == len(arrays)
    assert key(np.asfortranarray(np.arange(6.0).reshape(2, 3))) == key(np.arange(6.0).reshape(2, 3))
    assert (
        len({_prefix(*parts).digest() for parts in (("a", "b", "c", "d"), ("ab", "", "c", "d"), ("a", "b", "d", "c"))})
        == 3
    )
    with pytest.raises(ValueError, match="texts"):
        key(np.array([b"x"], object))


async def test_other_weights_have_other_keys(make: Make, store: TensorDict, soon: Deadline) -> None:
    feeds = foreign_feeds(2)
    await make().run(feeds, soon)
    other = make(foreign_graph(seed=8))
    found = await other.run(feeds, soon)
    assert np.array_equal(found["ranks"], whole(feeds, foreign_graph(seed=8))["ranks"])
    assert len(store.kept) == 6


async def test_what_a_store_gives_is_not_trusted(make: Make, store: TensorDict, soon: Deadline) -> None:
    model = make()
    feeds = foreign_feeds(1)
    expected = (await model.run(feeds, soon))["ranks"]
    for spoiled in (
        {"seen": np.zeros(5, np.float32)},
        {"seen": np.zeros(6, np.float64)},
        {"seen": np.zeros((1, 6), np.float32)},
        {"other": np.zeros(6, np.float32)},
        {},
    ):
        for key, kept in list(store.kept.items()):
            store.kept[key] = spoiled if "seen" in kept else kept
        assert np.array_equal((await model.run(feeds, soon))["ranks"], expected)


async def test_numbers_that_are_not_finite_are_not_kept(make: Make, store: TensorDict, soon: Deadline) -> None:
    model = make()
    feeds = foreign_feeds(2)
    feeds["image"][1] = np.nan
    await model.run(feeds, soon)
    assert len(store.kept) == 2, "the good image and what was asked"


async def test_a_cuts_tensors_may_be_given_in_place_of_its_inputs(
    make: Make, store: TensorDict, soon: Deadline
) -> None:
    model = make()
    feeds = foreign_feeds(3)
    expected = await model.run(feeds, soon)
    (asked,) = [kept["asked"] for kept in store.kept.values() if "asked" in kept]
    before = dict(model.counts.values)
    found = await model.run({"image": feeds["image"], "asked": asked}, soon)
    assert np.array_equal(found["ranks"], expected["ranks"])
    assert model.counts.values["m", "asked", "runs"] == before["m", "asked", "runs"]
    assert len(store.asked[-1]) == 3


async def test_without_a_cache_equal_rows_still_count_once(make: Make, soon: Deadline) -> None:
    model = make(cache=None)
    feeds = foreign_feeds(2)
    feeds["image"] = feeds["image"][[0, 1, 0, 0]]
    await model.run(feeds, soon)
    assert counts(model, "seen") == {"runs": 1, "rows": 2}


@pytest.mark.parametrize(
    "wrong",
    [
        {"image": np.zeros((2, 1, 8, 8), np.float32)},
        {"words": np.zeros((1, 5), np.float32), "boost": np.array(1, np.float32)},
    ],
)
async def test_missing_inputs_are_a_failure_of_the_model(make: Make, soon: Deadline, wrong: Values) -> None:
    with pytest.raises(ModelFailed):
        await make().run(wrong, soon)


# ------------------------------------------------------------------------------------------------- checked at load


def mixing_rows() -> onnx.ModelProto:
    """Its rows are declared independent and are not: each is divided by the sum of all."""
    nodes = [
        helper.make_node("ReduceSum", ["x"], ["total"], keepdims=1),
        helper.make_node("Div", ["x", "total"], ["share"]),
        helper.make_node("Mul", ["share", "y"], ["out"]),
    ]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 2]) for name in ("x", "y", "out")]
    graph = helper.make_graph(nodes, "g", values[:2], values[2:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


async def test_rows_that_depend_on_each_other_are_found_out(make: Make, store: TensorDict, soon: Deadline) -> None:
    source = np.random.default_rng(0)
    feeds = {name: source.uniform(1, 2, size=(4, 2)).astype(np.float32) for name in ("x", "y")}
    cut = CutSpec(name="share", tensors=("share",), rows=("x",), tolerance=1e-5)
    model = make(mixing_rows(), (cut,), probes=[feeds])
    (verdict,) = model.verdicts
    assert verdict.label == "off" and verdict.difference > 0.01
    for _ in range(2):
        found = await model.run(feeds, soon)
        assert np.array_equal(found["out"], whole(feeds, mixing_rows())["out"])
    assert store.kept == {} and store.asked == []
    # Without `rows` the same cut is a good one.
    model = make(mixing_rows(), (replace(cut, rows=(), tolerance=0.0),), probes=[feeds])
    assert model.verdicts[0].label == "exact"


def fused() -> onnx.ModelProto:
    """ONNX Runtime folds the factor into the convolution's weights; cut between them, it cannot."""
    source = np.random.default_rng(0)
    nodes = [helper.make_node("Conv", ["x", "kernel"], ["map"]), helper.make_node("Mul", ["map", "factor"], ["out"])]
    constants = [
        onnx.numpy_helper.from_array(source.normal(size=shape).astype(np.float32), name)
        for name, shape in (("kernel", (6, 3, 3, 3)), ("factor", (6, 1, 1)))
    ]
    values = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, 9, 9]),
        helper.make_tensor_value_info("out", TensorProto.FLOAT, ["n", 6, 7, 7]),
    ]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


async def test_a_fusion_across_the_cut_is_within_tolerance_or_refused(make: Make) -> None:
    probes = [{"x": np.random.default_rng(1).normal(size=(5, 3, 9, 9)).astype(np.float32)}]
    cut = CutSpec(name="half", tensors=("map",), tolerance=1e-3)
    (verdict,) = make(fused(), (cut,), probes=probes).verdicts
    assert verdict.label == "within tolerance" and 0 < verdict.difference < 1e-4
    with pytest.raises(ModelError, match=r"differs from the whole one by .*more than any of its cuts allows"):
        make(fused(), (replace(cut, tolerance=0.0),), probes=probes)


def test_rows_must_be_inputs_that_the_cut_reads() -> None:
    cut = CutSpec(name="seen", tensors=("seen",), rows=("words",))
    with pytest.raises(ModelError, match="'seen' does not read words; its `rows` are wrong"):
        SegmentedModel.load(foreign_graph(), (cut,), PROBES, name="m")


async def test_of_cuts_in_a_row_the_last_known_one_is_enough(make: Make, store: TensorDict, soon: Deadline) -> None:
    cuts = (
        CutSpec(name="pooled", tensors=("pooled",), rows=("image",), tolerance=1e-5),
        CutSpec(name="fit", tensors=("fit",), tolerance=1e-5),
        CutSpec(name="asked", tensors=("asked",)),
    )
    model = make(cuts=cuts)
    feeds = foreign_feeds(3)
    expected = whole(feeds)["ranks"]
    assert np.array_equal((await model.run(feeds, soon))["ranks"], expected)
    assert [len(keys) for keys in store.asked] == [1, 4], "the last cut, then what it lacks"
    assert np.array_equal((await model.run(feeds, soon))["ranks"], expected)
    assert [len(keys) for keys in store.asked] == [1, 4, 1]
    # Other words: the images are known all the same.
    await model.run({**feeds, "words": feeds["words"] + 1}, soon)
    assert counts(model, "pooled") == {"misses": 3, "runs": 1, "rows": 3, "hits": 3}
    assert counts(model, "fit") == {"misses": 2, "hits": 1, "runs": 2}


def test_a_split_needs_probes_that_run() -> None:
    with pytest.raises(ModelError, match="at least one probe"):
        SegmentedModel.load(foreign_graph(), CUTS, [], name="m")
    with pytest.raises(ModelError, match="cannot be run on the probes"):
        SegmentedModel.load(
            foreign_graph(), CUTS, [{**foreign_feeds(1), "words": np.zeros((1, 4), np.float32)}], name="m"
        )
