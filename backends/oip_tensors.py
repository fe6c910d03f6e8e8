"""Tensors of the Open Inference Protocol v2 as bytes: JSON `data` and the binary tensor extension.

Binary layout (little endian, row-major): fixed-size elements as they are; BOOL one byte each; BYTES each element as a
4-byte length and its bytes; BF16 the upper half of a float32 (held as float32 values here). Every refusal is a TensorError
that names the tensor; the caller decides whose fault it is.
"""

from __future__ import annotations

import math
import struct
from typing import Any

import msgspec
import numpy as np
from msgspec import Raw
from numpy.typing import NDArray

from backends.api import Tensor

_MAX_RANK = 8
_MAX_ELEMENTS = 1 << 31

#: Datatype -> numpy type on the wire (BYTES has none).
DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype("bool"),
    "INT8": np.dtype("<i1"),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "UINT8": np.dtype("<u1"),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "FP16": np.dtype("<f2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
    "BF16": np.dtype("<u2"),
}
DATATYPES = frozenset(DTYPES) | {"BYTES"}


class TensorError(ValueError):
    """A tensor that is not what it says; `name` is the tensor's."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(f"tensor {name[:100]!r}: {message}")
        self.name = name


def _decoders(item: Any) -> tuple[msgspec.json.Decoder[Any], ...]:
    """Decoders of flat lists, lists of lists, and so on: typed, so that 1.5 is no integer and true is no number."""
    made = []
    kind = item
    for _ in range(_MAX_RANK):
        kind = list[kind]  # type: ignore[valid-type]  # built at run time, for msgspec
        made.append(msgspec.json.Decoder(kind))
    return tuple(made)


_INTS, _FLOATS, _BOOLS, _TEXTS = _decoders(int), _decoders(float), _decoders(bool), _decoders(str)
_BY_KIND = {"b": _BOOLS, "i": _INTS, "u": _INTS, "f": _FLOATS}


def _show(shape: list[int]) -> str:
    text = str(shape)
    return text if len(text) < 100 else text[:100] + "..."


def element_count(name: str, datatype: str, shape: list[int]) -> int:
    """Elements of a tensor of this shape. Raises TensorError for an unknown datatype and an impossible shape."""
    if datatype not in DATATYPES:
        raise TensorError(name, f"datatype {datatype[:30]!r} is not one of {', '.join(sorted(DATATYPES))}")
    if len(shape) > _MAX_RANK:
        raise TensorError(name, f"{len(shape)} dimensions; at most {_MAX_RANK} are allowed")
    if any(size < 1 for size in shape):
        raise TensorError(name, f"shape {_show(shape)} has a dimension below 1: there is nothing to compute")
    count = math.prod(shape)
    if count > _MAX_ELEMENTS:
        raise TensorError(name, f"shape {_show(shape)} asks for {count} elements; at most {_MAX_ELEMENTS} are allowed")
    return count


def from_json(name: str, datatype: str, shape: list[int], data: Raw) -> Tensor:
    """A tensor from its JSON `data`, flat or nested like its shape."""
    count = element_count(name, datatype, shape)
    if datatype == "BF16":
        raise TensorError(name, "BF16 has no JSON form; send it as binary (parameters.binary_data_size)")
    rank = _nesting(bytes(data))
    if rank not in (1, len(shape)):
        raise TensorError(name, f"data is nested {rank} deep, but the shape {_show(shape)} has {len(shape)} dimensions")
    decoders = _TEXTS if datatype == "BYTES" else _BY_KIND[DTYPES[datatype].kind]
    try:
        rows = decoders[rank - 1].decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise TensorError(name, f"data does not fit {datatype}: {error}") from None
    flat = rows if rank == 1 else _flatten(name, rows, shape)
    if len(flat) != count:
        raise TensorError(name, f"{len(flat)} elements in data, but the shape {_show(shape)} needs {count}")
    if datatype == "BYTES":
        values = np.empty(count, dtype=object)
        values[:] = [text.encode() for text in flat]
        return Tensor(name, datatype, values.reshape(shape))
    try:
        with np.errstate(over="ignore"):
            numbers = np.array(flat, dtype=DTYPES[datatype])
    except OverflowError:
        raise TensorError(name, f"data has a number outside the range of {datatype}") from None
    if numbers.dtype.kind == "f" and not np.isfinite(numbers).all():
        raise TensorError(name, f"data has a number outside the range of {datatype}")
    return Tensor(name, datatype, numbers.reshape(shape))


def _nesting(data: bytes) -> int:
    """How many brackets open before the first element."""
    depth = 0
    for byte in data[:64]:
        if byte == 0x5B:
            depth += 1
        elif byte not in b" \t\r\n":
            break
    return min(max(depth, 1), _MAX_RANK)


def _flatten(name: str, rows: list[Any], shape: list[int]) -> list[Any]:
    level = rows
    for axis, size in enumerate(shape[1:], start=1):
        if any(len(row) != size for row in level):
            raise TensorError(
                name, f"data has a row whose length is not {size}, as axis {axis} of the shape {_show(shape)} says"
            )
        level = [item for row in level for item in row]
    return level


def from_binary(name: str, datatype: str, shape: list[int], data: memoryview) -> Tensor:
    """A tensor from exactly its bytes."""
    count = element_count(name, datatype, shape)
    if datatype == "BYTES":
        return Tensor(name, datatype, _split_bytes(name, data, count).reshape(shape))
    dtype = DTYPES[datatype]
    if len(data) != count * dtype.itemsize:
        raise TensorError(
            name, f"{len(data)} bytes of data; {datatype} of shape {_show(shape)} needs {count * dtype.itemsize}"
        )
    if datatype == "BOOL":
        return Tensor(name, datatype, (np.frombuffer(data, dtype=np.uint8) != 0).reshape(shape))
    if datatype == "BF16":
        wide = np.frombuffer(data, dtype=dtype).astype(np.uint32) << 16
        return Tensor(name, datatype, wide.view(np.float32).reshape(shape))
    values = np.frombuffer(data, dtype=dtype).reshape(shape)
    # Runtimes want aligned memory; a tensor that happens to lie aligned is used where it is.
    return Tensor(name, datatype, values if values.flags.aligned else values.copy())


def _split_bytes(name: str, data: memoryview, count: int) -> NDArray[Any]:
    if 4 * count > len(data):  # before memory is taken for what a shape merely claims
        raise TensorError(name, f"{len(data)} bytes of data are too few for {count} elements")
    values = np.empty(count, dtype=object)
    at = 0
    for index in range(count):
        if at + 4 > len(data):
            raise TensorError(name, f"the binary data ends after {index} of {count} elements")
        size = int.from_bytes(data[at : at + 4], "little")
        at += 4
        if at + size > len(data):
            raise TensorError(name, f"element {index} says {size} bytes, but only {len(data) - at} are left")
        values[index] = bytes(data[at : at + size])
        at += size
    if at != len(data):
        raise TensorError(name, f"{len(data) - at} bytes are left over after {count} elements")
    return values


def to_binary(tensor: Tensor) -> bytes:
    """The bytes of a tensor in the binary extension."""
    if tensor.datatype == "BYTES":
        pack = struct.Struct("<I").pack
        return b"".join(piece for value in tensor.data.ravel() for piece in (pack(len(value)), value))
    if tensor.datatype == "BF16":
        bits = np.ascontiguousarray(tensor.data, dtype="<f4").view(np.uint32)
        # Round to nearest even on the dropped half (NaN stays NaN: its top bits are kept as they are).
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return np.where(np.isnan(tensor.data), (bits >> 16) | 0x40, rounded).astype("<u2").tobytes()
    return np.ascontiguousarray(tensor.data, dtype=DTYPES[tensor.datatype]).tobytes()


def to_json(tensor: Tensor) -> Any:
    """What orjson (with numpy) writes as the flat `data`. Raises TensorError where JSON cannot hold the values."""
    if tensor.datatype == "BYTES":
        try:
            return [value.decode() for value in tensor.data.ravel()]
        except UnicodeDecodeError:
            raise TensorError(tensor.name, "holds bytes that are not UTF-8; ask for it as binary") from None
    if tensor.datatype == "BF16":
        raise TensorError(tensor.name, "BF16 has no JSON form; ask for it as binary")
    values = np.ascontiguousarray(tensor.data, dtype=DTYPES[tensor.datatype]).ravel()
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise TensorError(tensor.name, "holds NaN or infinite values, which JSON cannot; ask for it as binary")
    return values
