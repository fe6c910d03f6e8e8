"""Have the models that are needed: fetch and build what is missing or was made by older code, leave the rest alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path

import msgspec

from backends.onnx.catalogue import ModelSpec, resolve
from backends.onnx.manifest import Check, Manifest, ModelError, Progress, no_progress, write_manifest
from backends.onnx.store import ModelStore


def prepare(
    store: ModelStore,
    names: Iterable[str],
    progress: Progress = no_progress,
    *,
    sources: Mapping[str, str] | None = None,
    force: bool = False,
) -> list[Manifest]:
    """Build each of `names` (`name` or `name:variant`) and what it requires, and return the manifests of `names`.

    Does next to nothing when all is there. `sources` replaces the catalogue's source of a model, by its name. Raises
    ModelError (ModelMissing for an unknown name, ModelSourceError when weights cannot be had).
    """
    own = sources or {}
    specs = [resolve(name, own.get(name.partition(":")[0])) for name in names]
    return [_have(store, spec, own, progress, force) for spec in specs]


def _have(store: ModelStore, spec: ModelSpec, sources: Mapping[str, str], progress: Progress, force: bool) -> Manifest:
    required = _required(store, spec, sources, progress)
    usable = partial(current, store, spec, required.fingerprint if required else "")
    manifest = None if force else usable()
    if manifest is not None:
        return manifest
    # The builders and the onnx library are slow to import; most starts do not need them.
    from backends.onnx.build.builders import BUILDERS

    weights = store.pull(spec.source, progress)

    def make(folder: Path) -> Manifest:
        made = BUILDERS[spec.entry.name].build(weights, folder, spec.variant, progress)
        made = msgspec.structs.replace(made, source=spec.source)
        write_manifest(folder, made)
        return made

    if force:
        return store.build(spec.entry.name, spec.variant, make, progress)
    return store.build(spec.entry.name, spec.variant, make, progress, usable=usable)


def _required(store: ModelStore, spec: ModelSpec, sources: Mapping[str, str], progress: Progress) -> Manifest | None:
    """The model that `spec` calls, built if missing. One that is there is taken from whatever source it came."""
    name = spec.entry.requires
    if name is None:
        return None
    source = sources.get(name)
    if source is None:
        with contextlib.suppress(ModelError):
            source = store.manifest(name, spec.variant).source
    return _have(store, resolve(f"{name}:{spec.variant}", source), sources, progress, force=False)


def current(store: ModelStore, spec: ModelSpec, requires_fingerprint: str) -> Manifest | None:
    """The built model's manifest, if today's code would build the same from the same."""
    try:
        manifest = store.manifest(spec.entry.name, spec.variant)
    except ModelError:
        return None
    found = (manifest.builder, manifest.processing, manifest.source, manifest.requires_fingerprint)
    wanted = (spec.entry.builder, spec.entry.processing, spec.source, requires_fingerprint)
    return manifest if found == wanted else None


def verify(store: ModelStore, name: str, progress: Progress = no_progress) -> tuple[Manifest, list[Check]]:
    """Digests of all files, then the built model against its reference. Fetches the weights again if they are gone."""
    spec = resolve(name)
    manifest = store.verify(spec.entry.name, spec.variant)
    from backends.onnx.build.builders import BUILDERS

    weights = store.pull(manifest.source, progress)
    return manifest, BUILDERS[spec.entry.name].verify(store.folder(spec.entry.name, spec.variant), weights)
