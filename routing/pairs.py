"""Labelled pairs: a prompt, and whether the weak and the strong model answered it correctly."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from policies.core.errors import ConfigError
from routing.heads import SHIPPED

EVERYDAY = SHIPPED / "everyday.jsonl"
_MAX_PROBLEMS = 20


class _Line(msgspec.Struct):
    prompt: str
    weak: bool
    strong: bool
    source: str = "all"
    subject: str = ""


@dataclass(frozen=True, slots=True)
class Pairs:
    """Columns of equal length. `weak` and `strong` are 0.0 or 1.0; `weight` counts a row that often in training."""

    prompts: list[str]
    weak: NDArray[np.float64]
    strong: NDArray[np.float64]
    source: NDArray[np.str_]
    weight: NDArray[np.float64]
    #: Hex digest of the file's bytes; "" for pairs from several files.
    digest: str = ""

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def needed(self) -> NDArray[np.float64]:
        """1.0 where only the strong model was right."""
        return self.strong * (1.0 - self.weak)

    def take(self, rows: NDArray[np.intp]) -> Pairs:
        prompts = [self.prompts[row] for row in rows]
        return Pairs(prompts, self.weak[rows], self.strong[rows], self.source[rows], self.weight[rows])

    def with_rows(self, other: Pairs) -> Pairs:
        return Pairs(
            self.prompts + other.prompts,
            np.concatenate([self.weak, other.weak]),
            np.concatenate([self.strong, other.strong]),
            np.concatenate([self.source, other.source]),
            np.concatenate([self.weight, other.weight]),
        )


def read_pairs(path: Path, weight: float = 1.0) -> Pairs:
    """Read a JSONL file of {prompt, weak, strong, source?}. Raises ConfigError naming each bad line (at most 20)."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read ({error.strerror}); give a file of labelled pairs"]) from error
    decoder = msgspec.json.Decoder(_Line)
    rows: list[_Line] = []
    problems: list[str] = []
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        try:
            rows.append(decoder.decode(line))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            problems.append(f"{path}:{number}:1: {error}; a line is {{prompt, weak, strong, source}}")
            if len(problems) == _MAX_PROBLEMS:
                break
    if not rows and not problems:
        problems.append(f"{path}: holds no labelled pairs")
    if problems:
        raise ConfigError(problems)
    return Pairs(
        [row.prompt for row in rows],
        np.array([row.weak for row in rows], float),
        np.array([row.strong for row in rows], float),
        np.array([row.source for row in rows]),
        np.full(len(rows), weight),
        hashlib.blake2b(data, digest_size=16).hexdigest(),
    )


def folds_of(count: int, folds: int, seed: int = 1) -> NDArray[np.intp]:
    """The fold of each row: a fixed random split into `folds` parts of equal size (give or take one)."""
    return np.asarray(np.random.default_rng(seed).permutation(count) % folds)
