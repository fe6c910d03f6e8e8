from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import onnx
import pytest

from backends.api import EmbeddingsRequest, Role, Tensor, TensorRequest
from backends.onnx.build import two_tower as head
from backends.onnx.demo.items import sample_items
from backends.onnx.embedder import MiniLmEmbedder
from backends.onnx.manifest import ModelError, no_progress
from backends.onnx.session import create_session
from backends.onnx.split import graph_digest, split
from backends.onnx.store import ModelStore
from backends.onnx.tokens import padded
from backends.onnx.two_tower import MAX_CANDIDATES, Keep, TwoTowerBackend
from cache.subgraph import SubgraphCache
from policies.core.clock import SystemClock
from policies.core.deadline import Deadline
from policies.core.errors import CannotServe, InvalidRequest, ModelNotReady
from tests.support.tensor_store import TensorDict
from tests.support.tiny_bert import WIDTH

#: Scores of the whole graph, in one run: (history, items).
Whole = Callable[[list[str], list[str]], np.ndarray]

HISTORY = ["warm tent", "boots rain"]
ITEMS = ["coffee bread knife", "tent lamp", "song train", "tent lamp"]


def texts(name: str, values: Sequence[str | bytes]) -> Tensor:
    raw = [value.encode() if isinstance(value, str) else value for value in values]
    data = np.empty(len(raw), object)
    data[:] = raw
    return Tensor(name, "BYTES", data)


def vectors(name: str, values: Any) -> Tensor:
    return Tensor(name, "FP32", np.asarray(values, np.float32))


def request(*inputs: Tensor, outputs: tuple[str, ...] = ()) -> TensorRequest:
    return TensorRequest("two-tower", list(inputs), outputs)


@pytest.fixture
async def embedder(tiny_store: ModelStore) -> AsyncIterator[MiniLmEmbedder]:
    embedder = await MiniLmEmbedder.load(tiny_store.folder("minilm", "fp32"))
    yield embedder
    await embedder.aclose()


@pytest.fixture
async def backend(tiny_store: ModelStore, embedder: MiniLmEmbedder) -> AsyncIterator[TwoTowerBackend]:
    backend = await TwoTowerBackend.load(tiny_store.folder("two-tower", "fp32"), embedder, name="reco", role=Role.LIGHT)
    yield backend
    await backend.aclose()


async def scores(backend: TwoTowerBackend, soon: Deadline, *inputs: Tensor) -> np.ndarray:
    answer = await backend.infer(request(*inputs), soon)
    (output,) = answer.outputs
    assert (answer.model, output.name, output.datatype) == ("two-tower", "scores", "FP32")
    return output.data


async def test_texts_are_scored_as_the_reference_does(
    backend: TwoTowerBackend, embedder: MiniLmEmbedder, soon: Deadline
) -> None:
    found = await scores(backend, soon, texts("user_history", HISTORY), texts("candidates", ITEMS))
    history, items = [np.asarray(await embedder.embed(part, soon), np.float64) for part in (HISTORY, ITEMS)]
    assert found.shape == (len(ITEMS),) and found.dtype == np.float32
    assert np.abs(found - head.reference(history, items)).max() < 1e-6
    assert found[1] == found[3], "the same text has the same score"


async def test_precomputed_vectors_give_the_same_scores(
    backend: TwoTowerBackend, embedder: MiniLmEmbedder, soon: Deadline
) -> None:
    items = await embedder.embed(ITEMS, soon)
    (user,) = await embedder.embed(["warm tent"], soon)
    expected = await scores(backend, soon, texts("user_history", ["warm tent"]), texts("candidates", ITEMS))
    for user_input in (texts("user_history", ["warm tent"]), vectors("user_embedding", user * 3)):
        for item_input in (texts("candidates", ITEMS), vectors("item_embeddings", items * 7)):
            assert np.abs(await scores(backend, soon, user_input, item_input) - expected).max() < 1e-6


async def test_newer_history_counts_more(backend: TwoTowerBackend, embedder: MiniLmEmbedder, soon: Deadline) -> None:
    items = texts("candidates", ["tent", "coffee"])
    tent_last = await scores(backend, soon, texts("user_history", ["coffee"] * 8 + ["tent"] * 8), items)
    coffee_last = await scores(backend, soon, texts("user_history", ["tent"] * 8 + ["coffee"] * 8), items)
    assert tent_last[0] > coffee_last[0] and tent_last[1] < coffee_last[1]


def test_weights_halve_over_the_half_life() -> None:
    weights = head.recency_weights(17)
    assert weights[-1] == 1 and weights[-1 - 8] == pytest.approx(0.5) and weights[0] == pytest.approx(0.25)


def counts(backend: TwoTowerBackend, what: str) -> dict[str, int]:
    """Cut -> how often, since the backend was loaded."""
    return {cut: count for (_, cut, said), count in backend.counts.values.items() if said == what}


async def test_each_distinct_item_is_run_once_and_towers_only_for_texts(
    backend: TwoTowerBackend, soon: Deadline
) -> None:
    await scores(backend, soon, texts("user_history", ["tent", "boots"]), texts("candidates", ["tent", "a", "a"]))
    assert counts(backend, "rows") == {"item_tower": 2}
    assert counts(backend, "runs") == {"history_encoder": 1, "user_tower": 1, "item_tower": 1, "rest": 1}
    await scores(
        backend, soon, vectors("user_embedding", np.ones(WIDTH)), vectors("item_embeddings", np.ones((2, WIDTH)))
    )
    assert counts(backend, "runs") == {"history_encoder": 1, "user_tower": 1, "item_tower": 1, "rest": 2}


# ------------------------------------------------------------------------------------------------- subgraph cache

#: Of one length in tokens, so that the rows of a request share one run, as they do in the whole graph.
FRESH = [["coffee bread", "tent lamp", "song train"], ["warm coffee", "lamp song", "bread boots"]]


@pytest.fixture(params=["fp32", "q8"])
async def keeping(
    request: pytest.FixtureRequest, tiny_store: ModelStore
) -> AsyncIterator[tuple[TwoTowerBackend, TensorDict, Whole]]:
    """A recommender with a subgraph cache, that cache, and the whole graph for comparison."""
    folders = [tiny_store.folder(name, request.param) for name in ("minilm", "two-tower")]
    embedder, store = await MiniLmEmbedder.load(folders[0]), TensorDict()
    keep = Keep(store)
    backend = await TwoTowerBackend.load(folders[1], embedder, name="reco", role=Role.LIGHT, keep=keep)
    session = create_session(folders[1] / "model.onnx")

    def whole(history: list[str], items: list[str]) -> np.ndarray:
        feeds = {}
        for tower, said in (("history", history), ("item", items)):
            ids, mask = padded([embedder.tokenize(text) for text in said]).values()
            feeds |= {f"{tower}_ids": ids, f"{tower}_mask": mask}
        found: np.ndarray = session.run(["scores"], feeds)[0]
        return found

    yield backend, store, whole
    await backend.aclose()
    await embedder.aclose()


async def test_a_user_tower_is_not_run_again_and_changes_no_bit(
    keeping: tuple[TwoTowerBackend, TensorDict, Whole], soon: Deadline
) -> None:
    backend, _, whole = keeping
    labels = {verdict.name: verdict.label for verdict in backend.info.cuts}
    assert (labels["history_encoder"], labels["user_tower"]) == ("exact", "exact")
    assert labels["item_tower"] != "off", "whether a row's last bits depend on its batch is the machine's business"
    for history in (HISTORY, ["song"], ["lamp", "coffee bread knife tent lamp song train", "a"]):
        for items in FRESH:
            found = await scores(backend, soon, texts("user_history", history), texts("candidates", items))
            if history == HISTORY:
                # No item is known yet, so all are run as in the whole graph.
                assert found.tobytes() == whole(history, items).tobytes()
            assert np.abs(found - whole(history, items)).max() < 1e-6
    assert counts(backend, "runs") == {"history_encoder": 3, "user_tower": 3, "item_tower": 2, "rest": 6}
    assert counts(backend, "hits") == {"user_tower": 3, "item_tower": 12}


async def test_items_known_from_another_user_are_not_run_again(
    keeping: tuple[TwoTowerBackend, TensorDict, Whole], soon: Deadline
) -> None:
    backend, store, whole = keeping
    await scores(backend, soon, texts("user_history", HISTORY), texts("candidates", ITEMS))
    ran = counts(backend, "rows")["item_tower"]
    assert ran == len(set(ITEMS))
    other = [*ITEMS[::-1], "a boat"]
    found = await scores(backend, soon, texts("user_history", ["train"]), texts("candidates", other))
    assert counts(backend, "rows")["item_tower"] == ran + 1
    (verdict,) = [verdict for verdict in backend.info.cuts if verdict.name == "item_tower"]
    assert np.abs(found - whole(["train"], other)).max() <= max(10 * verdict.difference, 1e-6)
    assert all(array.dtype == np.float32 for kept in store.kept.values() for array in kept.values())


async def test_the_encoder_stands_in_memory_once(tiny_store: ModelStore, embedder: MiniLmEmbedder) -> None:
    """Both towers' encoders are the embedder's own graph, found by its digest."""
    folder = tiny_store.folder("two-tower", "fp32")
    manifest = tiny_store.manifest("two-tower", "fp32")
    parts = split(onnx.load(folder / "model.onnx"), {cut.name: cut.tensors for cut in manifest.cuts})
    digests = {segment.name: segment.digest for segment in parts.cuts}
    assert digests["history_encoder"] == digests["item_tower"] == manifest.architecture["encoder"]["digest"]
    assert graph_digest(onnx.load(tiny_store.folder("minilm", "fp32") / "model.onnx"))[0] == digests["item_tower"]
    backend = await TwoTowerBackend.load(folder, embedder, name="reco", role=Role.LIGHT)
    assert any(bound.session is embedder.session for bound in backend._model._segments._bound.values())
    await backend.aclose()


GOOD_USER = texts("user_history", HISTORY)
GOOD_ITEMS = texts("candidates", ITEMS)
ONES = np.ones((3, WIDTH), np.float32)


def spoiled(value: float) -> np.ndarray:
    rows = ONES.copy()
    rows[1, 5] = value
    return rows


@pytest.mark.parametrize(
    ("inputs", "param", "says"),
    [
        ([GOOD_USER, GOOD_ITEMS, texts("history", ["x"])], "history", "unknown input 'history'"),
        ([GOOD_USER, GOOD_USER, GOOD_ITEMS], "user_history", "is there twice"),
        ([GOOD_ITEMS], "user_history", "neither is given"),
        ([GOOD_USER], "candidates", "neither is given"),
        ([], "user_history", "neither is given"),
        ([GOOD_USER, vectors("user_embedding", ONES[0]), GOOD_ITEMS], "user_history", "both are given"),
        ([GOOD_USER, GOOD_ITEMS, vectors("item_embeddings", ONES)], "candidates", "both are given"),
        ([Tensor("user_history", "INT64", np.array([1])), GOOD_ITEMS], "user_history", "must be BYTES, not INT64"),
        ([GOOD_USER, Tensor("item_embeddings", "FP64", ONES)], "item_embeddings", "must be FP32, not FP64"),
        (
            [Tensor("user_history", "BYTES", GOOD_USER.data.reshape(1, 2)), GOOD_ITEMS],
            "user_history",
            r"shape \[n\], not \[1, 2\]",
        ),
        ([GOOD_USER, vectors("item_embeddings", ONES[0])], "item_embeddings", r"shape \[n, 64\], not \[64\]"),
        ([GOOD_USER, vectors("item_embeddings", ONES[:, :3])], "item_embeddings", r"shape \[n, 64\], not \[3, 3\]"),
        ([vectors("user_embedding", ONES), GOOD_ITEMS], "user_embedding", r"shape \[64\], not \[3, 64\]"),
        ([GOOD_USER, texts("candidates", [])], "candidates", r"is empty: shape \[0\]"),
        ([GOOD_USER, vectors("item_embeddings", ONES[:0])], "item_embeddings", "is empty"),
        ([texts("user_history", ["tent", "  "]), GOOD_ITEMS], "user_history", r"\[1\] is empty"),
        ([GOOD_USER, texts("candidates", [b"a", b"\xff\xfe"])], "candidates", r"\[1\] is not UTF-8"),
        ([texts("user_history", ["a"] * 257), GOOD_ITEMS], "user_history", "at most 256"),
        ([GOOD_USER, texts("candidates", ["a"] * (MAX_CANDIDATES + 1))], "candidates", "at most 1024"),
        (
            [GOOD_USER, vectors("item_embeddings", np.ones((MAX_CANDIDATES + 1, WIDTH)))],
            "item_embeddings",
            "at most 1024",
        ),
        ([GOOD_USER, vectors("item_embeddings", spoiled(np.nan))], "item_embeddings", "row 1, holds NaN"),
        ([GOOD_USER, vectors("item_embeddings", spoiled(np.inf))], "item_embeddings", "row 1, holds NaN or infinity"),
        ([GOOD_USER, vectors("item_embeddings", spoiled(1e30))], "item_embeddings", r"row 1, has length 1e\+30"),
        ([vectors("user_embedding", np.zeros(WIDTH)), GOOD_ITEMS], "user_embedding", "row 0, has length 0"),
    ],
)
async def test_bad_inputs_are_named_before_anything_runs(
    backend: TwoTowerBackend, soon: Deadline, inputs: list[Tensor], param: str, says: str
) -> None:
    with pytest.raises(InvalidRequest, match=says) as refused:
        await backend.infer(request(*inputs), soon)
    assert refused.value.param == param
    assert backend.counts.values == {}


async def test_an_unknown_output_is_refused(backend: TwoTowerBackend, soon: Deadline) -> None:
    assert (await backend.infer(request(GOOD_USER, GOOD_ITEMS, outputs=("scores",)), soon)).outputs[0].name == "scores"
    with pytest.raises(InvalidRequest, match="unknown output 'ranks'; the model gives scores"):
        await backend.infer(request(GOOD_USER, GOOD_ITEMS, outputs=("ranks",)), soon)


async def test_the_fingerprint_covers_head_and_encoder(
    backend: TwoTowerBackend, embedder: MiniLmEmbedder, tiny_store: ModelStore
) -> None:
    manifest = tiny_store.manifest("two-tower", "fp32")
    assert manifest.requires == "minilm:fp32"
    assert manifest.requires_fingerprint == embedder.manifest.fingerprint
    assert backend.info.fingerprint not in {manifest.fingerprint, embedder.fingerprint}
    assert [spec.name for spec in backend.info.inputs] == [
        "user_history",
        "user_embedding",
        "candidates",
        "item_embeddings",
    ]


async def test_another_encoder_is_refused(tiny_store: ModelStore, embedder: MiniLmEmbedder) -> None:
    with pytest.raises(ModelError, match=r"built for another encoder than minilm:q8"):
        await TwoTowerBackend.load(tiny_store.folder("two-tower", "q8"), embedder, name="reco", role=Role.LIGHT)


async def test_a_folder_of_another_kind_is_refused(tiny_store: ModelStore, embedder: MiniLmEmbedder) -> None:
    with pytest.raises(ModelError, match="kind embedder, not a two-tower"):
        await TwoTowerBackend.load(tiny_store.folder("minilm", "fp32"), embedder, name="reco", role=Role.LIGHT)


async def test_other_traffic_is_not_served(backend: TwoTowerBackend, soon: Deadline) -> None:
    with pytest.raises(CannotServe, match="embeddings"):
        await backend.infer(EmbeddingsRequest({}, ["a"]), soon)


async def test_a_closed_model_is_not_ready_and_leaves_the_encoder_open(
    tiny_store: ModelStore, embedder: MiniLmEmbedder, soon: Deadline
) -> None:
    backend = await TwoTowerBackend.load(tiny_store.folder("two-tower", "fp32"), embedder, name="reco", role=Role.LIGHT)
    assert (await backend.health()).ready
    await backend.aclose()
    assert not (await backend.health()).ready
    with pytest.raises(ModelNotReady):
        await scores(backend, soon, GOOD_USER, GOOD_ITEMS)
    assert (await embedder.embed(["tent"], soon)).shape == (1, WIDTH)


def test_a_recommender_needs_an_encoder_of_its_variant(tiny_store: ModelStore, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="needs an embedder of variant q8"):
        head.build(tiny_store.folder("minilm", "fp32"), tmp_path, "q8", no_progress)


def test_the_built_graph_is_verified(tiny_store: ModelStore) -> None:
    checks = head.verify(tiny_store.folder("two-tower", "q8"), tiny_store.folder("minilm", "q8"))
    assert len(checks) == 3 and all(check.ok for check in checks)


@pytest.mark.models
async def test_the_real_model_recommends_what_fits(real_model: Callable[[str], Path], soon: Deadline) -> None:
    embedder = await MiniLmEmbedder.load(real_model("minilm"))
    backend = await TwoTowerBackend.load(real_model("two-tower"), embedder, name="reco", role=Role.LIGHT)
    items = sample_items()
    by_category = {
        category: [i for i in items if i.category == category]
        for category in ("camping", "coffee and tea", "crime and mystery")
    }
    candidates = [item for group in by_category.values() for item in group[4:]]
    for category, group in by_category.items():
        history = texts("user_history", [item.text for item in group[:4]])
        found = await scores(backend, soon, history, texts("candidates", [item.text for item in candidates]))
        best = [candidates[index].category for index in np.argsort(-found)[:4]]
        assert best.count(category) >= 3, best
    await backend.aclose()
    await embedder.aclose()


@pytest.mark.models
async def test_returning_users_are_served_three_times_as_often(
    real_model: Callable[[str], Path], soon: Deadline
) -> None:
    """Against the same split model without a cache; the items are those of a catalogue, in new combinations."""
    embedder = await MiniLmEmbedder.load(real_model("minilm"))
    items = [item.text for item in sample_items()]
    seconds = {}
    for kept in (False, True):
        keep = Keep(SubgraphCache(64 << 20, SystemClock(), lambda: 0.5)) if kept else None
        backend = await TwoTowerBackend.load(real_model("two-tower"), embedder, name="reco", role=Role.LIGHT, keep=keep)
        await scores(backend, soon, texts("user_history", items[:12]), texts("candidates", items[40:52]))
        began = perf_counter()
        for first in range(41, 44):
            candidates = texts("candidates", items[first : first + 8])
            await scores(backend, soon, texts("user_history", items[:12]), candidates)
        seconds[kept] = perf_counter() - began
        await backend.aclose()
    await embedder.aclose()
    assert seconds[False] >= 3 * seconds[True], seconds
