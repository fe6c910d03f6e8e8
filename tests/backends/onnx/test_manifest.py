from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.api import Capabilities, Role, Surface
from backends.onnx.fingerprint import digest_parts, loaded_fingerprint, model_fingerprint
from backends.onnx.manifest import (
    Manifest,
    ModelDamaged,
    ModelMissing,
    backend_info,
    check,
    damage,
    inside,
    read_manifest,
    seal,
)


def draft(**changes: object) -> Manifest:
    plain = Manifest(
        name="m",
        kind="embedder",
        source="file:/w",
        variant="fp32",
        builder="b-1",
        processing="p-1",
        fingerprint="",
        files=(),
        capabilities=Capabilities(surfaces=frozenset({Surface.EMBEDDINGS}), languages=frozenset({"en"})),
    )
    return msgspec.structs.replace(plain, **changes)


def sealed(folder: Path, files: dict[str, bytes], **changes: object) -> Manifest:
    folder.mkdir(parents=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return seal(folder, draft(**changes))


FILES = {"model.onnx": b"graph and weights", "tokenizer.json": b"{}"}


def test_what_is_sealed_is_read_back(tmp_path: Path) -> None:
    written = sealed(tmp_path / "m", FILES)
    assert read_manifest(tmp_path / "m") == written
    assert [(f.path, f.size_bytes) for f in written.files] == [("model.onnx", 17), ("tokenizer.json", 2)]
    assert damage(tmp_path / "m", written) == []


def test_a_folder_without_a_manifest_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelMissing, match="gateway models build"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'{"name": "m"}'])
def test_an_unreadable_manifest_is_damage(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "manifest.json").write_bytes(raw)
    with pytest.raises(ModelDamaged, match="cannot be read"):
        read_manifest(tmp_path)


def test_a_manifest_with_an_unknown_field_is_damage(tmp_path: Path) -> None:
    sealed(tmp_path / "m", FILES)
    path = tmp_path / "m" / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b'"variant"', b'"flavour": 1, "variant"', 1))
    with pytest.raises(ModelDamaged, match="flavour"):
        read_manifest(tmp_path / "m")


def test_a_short_or_missing_file_is_seen_without_hashing(tmp_path: Path) -> None:
    sealed(tmp_path / "m", FILES)
    (tmp_path / "m" / "model.onnx").write_bytes(b"graph")
    with pytest.raises(ModelDamaged, match="has 5 bytes, not 17"):
        read_manifest(tmp_path / "m")
    (tmp_path / "m" / "model.onnx").unlink()
    with pytest.raises(ModelDamaged, match="is missing"):
        read_manifest(tmp_path / "m")


def test_changed_bytes_of_the_same_size_are_found_by_digest(tmp_path: Path) -> None:
    manifest = sealed(tmp_path / "m", FILES)
    (tmp_path / "m" / "model.onnx").write_bytes(b"graph and weightz")
    assert read_manifest(tmp_path / "m") == manifest
    assert damage(tmp_path / "m", manifest) == ["model.onnx"]


@pytest.mark.parametrize("path", ["../other/model.onnx", "/etc/hostname", "link"])
def test_paths_that_leave_the_folder_are_refused(tmp_path: Path, path: str) -> None:
    manifest = sealed(tmp_path / "m", FILES)
    (tmp_path / "outside").write_bytes(b"secret")
    (tmp_path / "m" / "link").symlink_to(tmp_path / "outside")
    with pytest.raises(ModelDamaged, match="outside"):
        inside(tmp_path / "m", path)
    entry = msgspec.structs.replace(manifest.files[0], path=path)
    (tmp_path / "m" / "manifest.json").write_bytes(
        msgspec.json.encode(msgspec.structs.replace(manifest, files=(entry,)))
    )
    with pytest.raises(ModelDamaged, match="outside"):
        read_manifest(tmp_path / "m")


def test_everything_that_decides_an_answer_changes_the_fingerprint(tmp_path: Path) -> None:
    variations = {
        "plain": sealed(tmp_path / "0", FILES),
        "weights": sealed(tmp_path / "1", FILES | {"model.onnx": b"graph and weightz"}),
        "tokenizer": sealed(tmp_path / "2", FILES | {"tokenizer.json": b"[]"}),
        "template": sealed(tmp_path / "3", FILES | {"chat_template.jinja": b"{{ x }}"}),
        "precision": sealed(tmp_path / "4", FILES, variant="q8"),
        "processing": sealed(tmp_path / "5", FILES, processing="p-2"),
        "encoder": sealed(tmp_path / "6", FILES, requires_fingerprint="ff"),
    }
    prints = {name: manifest.fingerprint for name, manifest in variations.items()}
    assert len(set(prints.values())) == len(prints)
    assert loaded_fingerprint(prints["plain"], "CPUExecutionProvider") != loaded_fingerprint(
        prints["plain"], "CUDAExecutionProvider"
    )


def test_where_the_weights_came_from_does_not_change_the_fingerprint(tmp_path: Path) -> None:
    first = sealed(tmp_path / "a", FILES)
    second = sealed(tmp_path / "b", FILES, source="hf:x/y/z")
    assert first.fingerprint == second.fingerprint


@given(st.lists(st.tuples(st.text(), st.text())), st.lists(st.tuples(st.text(), st.text())))
def test_different_parts_have_different_digests(first: list[tuple[str, str]], second: list[tuple[str, str]]) -> None:
    assert (digest_parts(first) == digest_parts(second)) == (first == second)


@given(st.permutations(["a", "b", "c"]))
def test_the_order_of_files_does_not_matter(names: list[str]) -> None:
    expected = model_fingerprint({"a": "a", "b": "b", "c": "c"}, "fp32", "p")
    assert model_fingerprint({name: name for name in names}, "fp32", "p") == expected


def test_backend_info_carries_the_provider_in_its_fingerprint(tmp_path: Path) -> None:
    manifest = sealed(tmp_path / "m", FILES)
    info = backend_info(manifest, name="embed", role=Role.LIGHT, provider="CPUExecutionProvider")
    assert (info.name, info.model, info.role) == ("embed", "m", Role.LIGHT)
    assert info.fingerprint == loaded_fingerprint(manifest.fingerprint, "CPUExecutionProvider")
    assert info.capabilities.languages == frozenset({"en"})


def test_a_check_of_nan_is_never_ok() -> None:
    assert not check("x", float("nan"), 1.0).ok
    assert check("x", 1.0, 1.0).ok
