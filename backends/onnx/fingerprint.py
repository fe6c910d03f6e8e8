"""One short name for everything that decides a model's answers.

Two models with the same fingerprint give the same answers, so cached answers are keyed by it. It covers weights, graph,
tokenizer and chat template (through the digests of the model folder's files), the precision, the version of the code
that prepares inputs and outputs, and, once loaded, the execution provider.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

_CHUNK_BYTES = 1 << 20


def file_sha256(path: Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def digest_parts(parts: Iterable[tuple[str, str]]) -> str:
    """128-bit BLAKE2b, hex, over (tag, value) pairs. Each is length-prefixed, so no two lists can run together."""
    digest = hashlib.blake2b(digest_size=16)
    for tag, value in parts:
        for text in (tag, value):
            data = text.encode()
            digest.update(len(data).to_bytes(8, "little"))
            digest.update(data)
    return digest.hexdigest()


def model_fingerprint(files: dict[str, str], variant: str, processing: str, requires: str = "") -> str:
    """`files` maps a file's name to its SHA-256. `requires` is the fingerprint of a model that this one calls."""
    parts = [("file:" + name, files[name]) for name in sorted(files)]
    parts += [("variant", variant), ("processing", processing), ("requires", requires)]
    return digest_parts(parts)


def loaded_fingerprint(fingerprint: str, provider: str) -> str:
    """The fingerprint of a model as it runs: the same graph gives other bits on another execution provider."""
    return digest_parts([("model", fingerprint), ("provider", provider)])
