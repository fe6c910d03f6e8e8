"""Who builds which model of the catalogue."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from backends.onnx.build import minilm, smollm2, two_tower
from backends.onnx.manifest import Check, Manifest, Progress


@dataclass(frozen=True, slots=True)
class Builder:
    """`build(weights_dir, out_dir, variant, progress)` fills `out_dir` and seals it; `verify(model_dir, weights_dir)`
    compares a built model with its reference again."""

    build: Callable[[Path, Path, str, Progress], Manifest]
    verify: Callable[[Path, Path], list[Check]]


BUILDERS: dict[str, Builder] = {
    "minilm": Builder(minilm.build, minilm.verify),
    "smollm2": Builder(smollm2.build, smollm2.verify),
    "two-tower": Builder(two_tower.build, two_tower.verify),
}
