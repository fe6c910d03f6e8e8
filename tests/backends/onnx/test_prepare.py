from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from backends.onnx.build.builders import BUILDERS
from backends.onnx.catalogue import CATALOGUE, resolve
from backends.onnx.demo.items import sample_items
from backends.onnx.manifest import ModelDamaged, ModelMissing, write_manifest
from backends.onnx.prepare import prepare, verify
from backends.onnx.sources import PACKAGES
from backends.onnx.store import ModelStore
from tests.support.tiny_bert import write_tiny_bert


class Tiny:
    """A store of its own with random weights, and what was done to get them."""

    def __init__(self, root: Path) -> None:
        self.weights = write_tiny_bert(root / "weights")
        self.store = ModelStore(root / "models")
        self.sources = {"minilm": f"file:{self.weights}"}

    def prepare(self, *names: str, force: bool = False) -> list[str]:
        """The stages that were gone through: empty when all was there."""
        stages: list[str] = []
        prepare(self.store, names, lambda stage, *_: stages.append(stage), sources=self.sources, force=force)
        return stages


@pytest.fixture
def tiny(tmp_path: Path) -> Tiny:
    return Tiny(tmp_path)


def test_the_first_variant_is_the_default() -> None:
    assert resolve("minilm").reference == "minilm:q8"
    assert resolve("two-tower:fp32").source == "model:minilm:fp32"
    assert resolve("minilm", "file:/a{b}").source == "file:/a{b}"


@pytest.mark.parametrize(
    ("name", "says"), [("gpt", "no model 'gpt'; the catalogue has minilm"), ("minilm:q4", "no variant 'q4'")]
)
def test_unknown_names_list_the_known_ones(tmp_path: Path, name: str, says: str) -> None:
    with pytest.raises(ModelMissing, match=says):
        prepare(ModelStore(tmp_path), [name])


def test_every_model_of_the_catalogue_has_a_builder_and_a_known_source() -> None:
    assert set(BUILDERS) == set(CATALOGUE)
    for entry in CATALOGUE.values():
        scheme, _, rest = entry.source.partition(":")
        assert scheme == "model" or rest in PACKAGES


def test_what_is_required_is_built_first(tiny: Tiny) -> None:
    tiny.prepare("two-tower")
    assert [m.reference for m in tiny.store.list()] == ["minilm:q8", "two-tower:q8"]


def test_preparing_again_does_nothing(tiny: Tiny) -> None:
    assert tiny.prepare("minilm", "two-tower")
    assert tiny.prepare("minilm", "two-tower") == []


def test_a_model_from_another_source_is_built_anew_only_when_asked_for(tiny: Tiny, tmp_path: Path) -> None:
    tiny.prepare("two-tower")
    assert prepare(tiny.store, ["two-tower"])[0].reference == "two-tower:q8", "its encoder is taken as it is"
    tiny.sources = {"minilm": f"file:{write_tiny_bert(tmp_path / 'other', seed=1)}"}
    assert tiny.prepare("two-tower"), "another encoder needs another head"
    assert (
        tiny.store.manifest("two-tower", "q8").requires_fingerprint == tiny.store.manifest("minilm", "q8").fingerprint
    )


@pytest.mark.parametrize("changed", ["builder", "processing"])
def test_what_older_code_built_is_built_anew(tiny: Tiny, changed: str) -> None:
    tiny.prepare("minilm")
    manifest = tiny.store.manifest("minilm", "q8")
    write_manifest(tiny.store.folder("minilm", "q8"), msgspec.structs.replace(manifest, **{changed: "older-0"}))
    assert tiny.prepare("minilm")
    assert tiny.store.manifest("minilm", "q8") == manifest


def test_a_damaged_model_is_built_anew(tiny: Tiny) -> None:
    tiny.prepare("minilm")
    (tiny.store.folder("minilm", "q8") / "tokenizer.json").unlink()
    assert tiny.prepare("minilm")
    assert tiny.prepare("minilm") == []


def test_force_builds_what_is_there(tiny: Tiny) -> None:
    tiny.prepare("minilm")
    assert tiny.prepare("minilm", force=True)


def test_verify_compares_bytes_and_answers(tiny: Tiny) -> None:
    tiny.prepare("two-tower:fp32")
    for name in ("minilm:fp32", "two-tower:fp32"):
        manifest, checks = verify(tiny.store, name)
        assert manifest.reference == name and checks and all(check.ok for check in checks)
    path = tiny.store.folder("minilm", "fp32") / "model.onnx"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(ModelDamaged, match=r"model\.onnx changed"):
        verify(tiny.store, "minilm:fp32")


def test_the_sample_catalogue_is_whole() -> None:
    items = sample_items()
    assert len(items) == 200 == len({item.id for item in items}) == len({item.title for item in items})
    assert len({item.category for item in items}) == 20
    assert all(item.description.endswith(".") and item.text.startswith(item.title) for item in items)
