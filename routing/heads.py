"""Trained heads and their files.

    offset  bytes
    0       4      magic "GWHD"
    4       1      version, 1
    5       4      n, length of the header (little endian)
    9       n      header, JSON: kind, calibration, what it was trained on, and the arrays in order (name, dtype, shape)
    9+n     ...    the arrays, one after the other, C order, little endian
    end-16  16     BLAKE2b-128 of all before it: the file's fingerprint

Nothing in a head file is ever executed: only numbers of declared size are read. Half-precision arrays are widened to
float32 on reading (half the file, faster look-ups).
"""

from __future__ import annotations

import difflib
import hashlib
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from policies.core.errors import ConfigError
from routing import ngrams

MAGIC = b"GWHD"
VERSION = 1
SUFFIX = ".head"
MAX_FILE_BYTES = 16 * 1024 * 1024
#: Heads that come with the gateway.
SHIPPED = Path(__file__).parent / "data"

#: The length terms of the lexical head, in L = log(1 + words): `length_weight` counts from 54 words on in both
#: directions, `short_weight` only below 14 words, where the words themselves say little.
LOG_WORDS_CENTRE = 4.0
LOG_WORDS_SHORT = 2.7


class ArraySpec(msgspec.Struct, frozen=True):
    name: str
    dtype: str
    shape: tuple[int, ...]


class Calibration(msgspec.Struct, frozen=True):
    """score = 1 / (1 + exp(-scale * (logit - centre))), so 0.5 is at `centre`."""

    scale: float = 1.0
    centre: float = 0.0

    def score(self, logit: float) -> float:
        return 1.0 / (1.0 + math.exp(-max(-40.0, min(40.0, self.scale * (logit - self.centre)))))


class Header(msgspec.Struct, frozen=True, kw_only=True):
    kind: str
    arrays: tuple[ArraySpec, ...]
    calibration: Calibration
    bias: float
    #: Weights of L - LOG_WORDS_CENTRE and of min(0, L - LOG_WORDS_SHORT); lexical heads only.
    length_weight: float = 0.0
    short_weight: float = 0.0
    #: The sentence whose vector is in the array `probe`; embedding heads only.
    probe_text: str = ""
    #: Where it comes from, for people: rows, sources, figures of the evaluation.
    about: dict[str, Any] = {}


class HeadFileError(ValueError):
    """A head file cannot be used; the message names the file, what is wrong and what to do."""


class LexicalHead:
    """logit = bias + length_weight * (L - 4) + short_weight * min(0, L - 2.7) + sum of table[index] / sqrt(indices).

    L = log(1 + words); the indices are those of `ngrams`, 2 * words - 1 of them.
    """

    kind: ClassVar[str] = "lexical"
    __slots__ = ("_bits", "_cells", "_table", "calibration", "fingerprint", "header")

    def __init__(self, header: Header, arrays: Mapping[str, NDArray[np.float32]], fingerprint: bytes) -> None:
        table = arrays["table"]
        self._bits = len(table).bit_length() - 1
        if table.ndim != 1 or not 8 <= self._bits <= 22 or len(table) != 1 << self._bits:
            raise HeadFileError("the table's length must be a power of two from 2**8 to 2**22")
        self._table = table
        self._cells = memoryview(table.data)  # item access is twice as quick as an array's
        self.header = header
        self.calibration = header.calibration
        self.fingerprint = fingerprint

    def logit(self, utf8: bytes) -> tuple[float, int]:
        """The logit of a text and its number of words; (0, 0) for a text without words."""
        folded = ngrams.fold(utf8)
        total = 0.0
        if len(folded) <= ngrams.LOOP_BYTES:
            cells = self._cells
            found, words = ngrams.indices_loop(folded, self._bits)
            for index in found:
                total += cells[index]
        else:
            many, words = ngrams.indices(folded, self._bits)
            total = float(self._table.take(many).sum())
        if not words:
            return 0.0, 0
        header, log_words = self.header, math.log1p(words)
        logit = header.bias + header.length_weight * (log_words - LOG_WORDS_CENTRE) + total / math.sqrt(2 * words - 1)
        if log_words < LOG_WORDS_SHORT:
            logit += header.short_weight * (log_words - LOG_WORDS_SHORT)
        return logit, words


class EmbeddingHead:
    """logit = bias + weights . vector."""

    kind: ClassVar[str] = "embedding"
    __slots__ = ("calibration", "fingerprint", "header", "probe", "weights")

    def __init__(self, header: Header, arrays: Mapping[str, NDArray[np.float32]], fingerprint: bytes) -> None:
        self.weights = arrays["weights"]
        if self.weights.ndim != 1 or arrays["probe"].shape != self.weights.shape:
            raise HeadFileError("weights and probe must be vectors of the same length")
        self.probe = (header.probe_text, arrays["probe"])
        self.header = header
        self.calibration = header.calibration
        self.fingerprint = fingerprint

    def logit(self, vector: NDArray[np.float32]) -> float:
        return self.header.bias + float(self.weights @ vector)


Head = LexicalHead | EmbeddingHead
_KINDS: dict[str, type[LexicalHead] | type[EmbeddingHead]] = {
    LexicalHead.kind: LexicalHead,
    EmbeddingHead.kind: EmbeddingHead,
}
_DTYPES: dict[str, np.dtype[Any]] = {"float16": np.dtype("<f2"), "float32": np.dtype("<f4")}


def write_head(path: Path, header: Header, arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """Write a head file in one step (rename); `header.arrays` is filled in here. Returns its fingerprint."""
    specs = tuple(ArraySpec(name, array.dtype.name, array.shape) for name, array in arrays.items())
    head = msgspec.json.encode(msgspec.structs.replace(header, arrays=specs))
    body = b"".join(
        [MAGIC, bytes([VERSION]), len(head).to_bytes(4, "little"), head]
        + [array.astype(_DTYPES[array.dtype.name]).tobytes() for array in arrays.values()]
    )
    fingerprint = hashlib.blake2b(body, digest_size=16).digest()
    part = path.with_suffix(path.suffix + ".part")
    part.write_bytes(body + fingerprint)
    part.replace(path)
    return fingerprint


def read_head(path: Path) -> Head:
    """Read one head file. Raises HeadFileError."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise HeadFileError(f"it is larger than {MAX_FILE_BYTES >> 20} MiB")
        return _parse(path.read_bytes())
    except (HeadFileError, OSError) as error:
        raise HeadFileError(f"{path}: {error}; train it again with `gateway route train`") from error


def _parse(data: bytes) -> Head:
    if len(data) < 25 or data[:4] != MAGIC:
        raise HeadFileError("this is not a head file")
    if data[4] != VERSION:
        raise HeadFileError(f"it has format version {data[4]}; this gateway reads version {VERSION}")
    body, fingerprint = data[:-16], data[-16:]
    if hashlib.blake2b(body, digest_size=16).digest() != fingerprint:
        raise HeadFileError("it is damaged or cut off (its checksum does not fit)")
    start = 9 + int.from_bytes(data[5:9], "little")
    try:
        header = msgspec.json.decode(body[9:start], type=Header)
    except msgspec.MsgspecError as error:
        raise HeadFileError(f"its header cannot be read ({error})") from error
    arrays: dict[str, NDArray[np.float32]] = {}
    for spec in header.arrays:
        dtype = _DTYPES.get(spec.dtype)
        size = math.prod(spec.shape) * (dtype.itemsize if dtype else 0)
        if dtype is None or min(spec.shape, default=0) < 1 or start + size > len(body):
            raise HeadFileError(f"its array {spec.name!r} has an unknown type or does not fit the file")
        values = np.frombuffer(body, dtype, math.prod(spec.shape), start).astype(np.float32).reshape(spec.shape)
        if not np.isfinite(values).all():
            raise HeadFileError(f"its array {spec.name!r} holds numbers that are not finite")
        arrays[spec.name] = values
        start += size
    if start != len(body):
        raise HeadFileError("it is longer than its header says")
    if header.kind not in _KINDS:
        raise HeadFileError(f"it is of kind {header.kind!r}; known kinds are {', '.join(_KINDS)}")
    try:
        return _KINDS[header.kind](header, arrays, fingerprint)
    except KeyError as error:
        raise HeadFileError(f"it lacks the array {error}") from error


class Heads:
    """Heads by name. A head's name is its file's name without `.head`; later folders win over earlier ones."""

    __slots__ = ("_heads",)

    def __init__(self, paths: Iterable[Path] = (SHIPPED,)) -> None:
        """`paths`: files, or folders whose *.head files are read. Raises ConfigError with every file that is bad."""
        self._heads: dict[str, Head] = {}
        problems: list[str] = []
        for path in paths:
            for file in sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else [path]:
                try:
                    self._heads[file.stem] = read_head(file)
                except HeadFileError as error:
                    problems.append(str(error))
        if problems:
            raise ConfigError(problems)

    @classmethod
    def shipped(cls) -> Heads:
        """The heads that come with the gateway."""
        return cls((SHIPPED,))

    def get(self, name: str) -> Head | None:
        return self._heads.get(name)

    def names(self) -> tuple[str, ...]:
        return tuple(self._heads)

    def why_not(self, name: str, kind: str) -> str:
        """Why `name` cannot serve as a head of `kind`, with a suggestion."""
        head = self._heads.get(name)
        if head is not None:
            return f"the head {name!r} is of kind {head.kind}; this signal needs one of kind {kind}"
        fitting = [other for other, known in self._heads.items() if known.kind == kind]
        close = difflib.get_close_matches(name, fitting, 1)
        hint = f"did you mean {close[0]!r}?" if close else f"there is {', '.join(map(repr, fitting)) or 'none'}"
        return f"there is no trained head {name!r} of kind {kind}; {hint}"
