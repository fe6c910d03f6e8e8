from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from backends.api import Role, Surface
from backends.onnx.build import minilm, minilm_reference
from backends.onnx.build.bert_weights import read_weights
from backends.onnx.embedder import MiniLmEmbedder
from backends.onnx.manifest import ModelError, ModelSourceError, backend_info, no_progress
from backends.onnx.session import create_session
from backends.onnx.store import ModelStore
from backends.onnx.tokens import padded
from policies.core.deadline import Deadline
from tests.support.tiny_bert import LAYERS, POSITIONS, WIDTH, write_tiny_bert

ROWS = [[2, 5, 6, 7, 3], [2, 9, 3], [2, 4, 4, 8, 11, 12, 13, 3]]


@pytest.mark.parametrize("variant", ["fp32", "q8"])
def test_the_graph_agrees_with_the_reference(tiny_store: ModelStore, tiny_weights: Path, variant: str) -> None:
    session = create_session(tiny_store.folder("minilm", variant) / "model.onnx")
    found = session.run(["embedding"], padded(ROWS))[0]
    expected = np.stack([minilm_reference.embed(read_weights(tiny_weights), row) for row in ROWS])
    if variant == "fp32":
        assert np.abs(found - expected).max() <= 1e-6
    else:
        assert (found * expected).sum(1).min() >= 0.999
    assert np.abs(np.linalg.norm(found, axis=1) - 1).max() < 1e-6


def test_padding_and_batch_mates_change_nothing(tiny_store: ModelStore) -> None:
    session = create_session(tiny_store.folder("minilm", "fp32") / "model.onnx")
    together = session.run(["embedding"], padded(ROWS))[0]
    for index, row in enumerate(ROWS):
        alone = session.run(["embedding"], padded([row]))[0][0]
        assert np.abs(alone - together[index]).max() < 1e-6


def test_the_manifest_says_what_the_model_is(tiny_store: ModelStore) -> None:
    manifest = tiny_store.manifest("minilm", "q8")
    assert (manifest.kind, manifest.variant, manifest.builder) == ("embedder", "q8", "minilm-1")
    assert manifest.source.startswith("file:")
    assert {f.path for f in manifest.files} == {"model.onnx", "tokenizer.json"}
    assert manifest.capabilities.surfaces == frozenset({Surface.EMBEDDINGS})
    assert manifest.capabilities.context_tokens == POSITIONS
    assert manifest.capabilities.languages == frozenset({"en"})
    assert manifest.outputs[0].shape == (-1, WIDTH)
    assert all(check.ok for check in manifest.checks) and len(manifest.checks) == 4
    info = backend_info(manifest, name="e", role=Role.LIGHT, provider="CPUExecutionProvider")
    assert info.inputs[0].name == "input_ids"


def test_the_same_weights_give_the_same_bytes(tiny_weights: Path, tiny_store: ModelStore, tmp_path: Path) -> None:
    again = minilm.build(tiny_weights, tmp_path, "q8", no_progress)
    assert again.fingerprint == tiny_store.manifest("minilm", "q8").fingerprint


def test_other_weights_give_another_fingerprint_and_fail_verification(tiny_store: ModelStore, tmp_path: Path) -> None:
    other = write_tiny_bert(tmp_path / "weights", seed=1)
    (tmp_path / "out").mkdir()
    assert (
        minilm.build(other, tmp_path / "out", "fp32", no_progress).fingerprint
        != tiny_store.manifest("minilm", "fp32").fingerprint
    )
    checks = minilm.verify(tiny_store.folder("minilm", "fp32"), other)
    assert checks and not any(check.ok for check in checks)


def test_one_wrong_weight_in_the_graph_is_found(tiny_weights: Path, tmp_path: Path) -> None:
    weights = read_weights(tiny_weights)
    model = minilm.graph(weights, "fp32")
    # One weight of the written graph is altered, as a bug in the builder would.
    target = next(t for t in model.graph.initializer if t.name == "layer_1.grown.weight")
    raw = np.frombuffer(target.raw_data, np.float32).copy()
    raw[:64] += 1
    target.raw_data = raw.tobytes()
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    (tmp_path / "tokenizer.json").write_bytes((tiny_weights / "tokenizer.json").read_bytes())
    assert not all(check.ok for check in minilm._compare(tmp_path, weights, "fp32"))


def test_every_layer_is_declared_as_a_cut(tiny_weights: Path) -> None:
    model = minilm.graph(read_weights(tiny_weights), "fp32")
    assert [v.name for v in model.graph.value_info] == [f"hidden_{i}" for i in range(LAYERS + 1)]


@pytest.mark.parametrize(
    ("file", "data", "says"),
    [
        ("config.json", b"{}", "not a BERT configuration"),
        ("config.json", b"", "not a BERT configuration"),
        ("model.safetensors", b"junk", "cannot be read"),
    ],
)
def test_weights_that_are_not_bert_say_so(tmp_path: Path, file: str, data: bytes, says: str) -> None:
    folder = write_tiny_bert(tmp_path)
    (folder / file).write_bytes(data)
    with pytest.raises(ModelSourceError, match=says):
        read_weights(folder)


def test_another_activation_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_bert(tmp_path)
    config = (folder / "config.json").read_text().replace('"gelu"', '"relu"')
    (folder / "config.json").write_text(config)
    with pytest.raises(ModelError, match="only BERT with gelu"):
        read_weights(folder)


@pytest.mark.models
@pytest.mark.parametrize("reference", ["minilm:fp32", "minilm:q8"])
async def test_the_real_model_knows_what_is_alike(
    real_model: Callable[[str], Path], reference: str, soon: Deadline
) -> None:
    embedder = await MiniLmEmbedder.load(real_model(reference))
    assert embedder.dimensions == 384 and all(check.ok for check in embedder.manifest.checks)
    vectors = await embedder.embed(
        ["How do I reset my password?", "I forgot my login.", "A recipe for rye bread."], soon
    )
    alike, other = float(vectors[0] @ vectors[1]), float(vectors[0] @ vectors[2])
    assert alike > 0.4 > 0.2 > other
    # Most Chinese characters are not in the vocabulary: different questions look the same, and the share says so.
    assert await embedder.unknown_share("今天天气怎么样？", soon) > 0.05
    assert await embedder.unknown_share("What is the weather like today?", soon) == 0
    await embedder.aclose()
