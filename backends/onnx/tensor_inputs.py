"""Checks a tensor request against a model's declared inputs before anything runs.

ONNX Runtime finds wrong names and shapes only inside the run, accepts zero rows, and lets NaN through to every score.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from backends.api import Tensor, TensorRequest, TensorSpec
from policies.core.errors import InvalidRequest

#: Vectors shorter or longer than this have no usable direction in float32.
_SHORTEST = 1e-6
_LONGEST = 1e6


def named_inputs(request: TensorRequest, specs: Sequence[TensorSpec]) -> dict[str, Tensor]:
    """The request's tensors by name, once each one is declared, there once, and of the declared datatype and shape.

    Raises InvalidRequest that names the input. Which optional ones belong together is the model's own business.
    """
    known = {spec.name: spec for spec in specs}
    found: dict[str, Tensor] = {}
    for tensor in request.inputs:
        spec = known.get(tensor.name)
        if spec is None:
            raise InvalidRequest(
                f"unknown input {tensor.name[:100]!r}; the model reads {', '.join(known)}", param=tensor.name[:100]
            )
        if tensor.name in found:
            raise InvalidRequest(f"input {tensor.name!r} is there twice", param=tensor.name)
        if tensor.datatype != spec.datatype:
            raise InvalidRequest(
                f"input {tensor.name!r} must be {spec.datatype}, not {tensor.datatype[:20]}", param=tensor.name
            )
        if not _fits(tensor.shape, spec.shape):
            raise InvalidRequest(
                f"input {tensor.name!r} must have shape {_written(spec.shape)}, not {list(tensor.shape)}",
                param=tensor.name,
            )
        if 0 in tensor.shape:
            raise InvalidRequest(f"input {tensor.name!r} is empty: shape {list(tensor.shape)}", param=tensor.name)
        found[tensor.name] = tensor
    for spec in specs:
        if not spec.optional and spec.name not in found:
            raise InvalidRequest(f"input {spec.name!r} is missing", param=spec.name)
    return found


def check_outputs(request: TensorRequest, specs: Sequence[TensorSpec]) -> None:
    """Raise InvalidRequest for an output that the model does not have."""
    known = {spec.name for spec in specs}
    for name in request.outputs:
        if name not in known:
            raise InvalidRequest(
                f"unknown output {name[:100]!r}; the model gives {', '.join(sorted(known))}", param=name[:100]
            )


def exactly_one(found: dict[str, Tensor], first: str, second: str) -> Tensor:
    """Of two ways to say the same thing, the one that was used. Raises InvalidRequest for none or both."""
    if (first in found) == (second in found):
        state = "both are given" if first in found else "neither is given"
        raise InvalidRequest(f"give exactly one of {first!r} and {second!r}; {state}", param=first)
    return found.get(first) or found[second]


def texts_of(tensor: Tensor, limit: int) -> list[str]:
    """The texts of a BYTES tensor [n], 1 to `limit` of them, UTF-8 and not blank. Raises InvalidRequest."""
    if len(tensor.data) > limit:
        raise InvalidRequest(
            f"input {tensor.name!r} has {len(tensor.data)} texts; at most {limit} are allowed", param=tensor.name
        )
    texts = []
    for index, raw in enumerate(tensor.data):
        try:
            text = raw.decode() if type(raw) is bytes else str(raw)
        except UnicodeDecodeError as error:
            raise InvalidRequest(f"input {tensor.name!r}[{index}] is not UTF-8 text", param=tensor.name) from error
        if not text.strip():
            raise InvalidRequest(f"input {tensor.name!r}[{index}] is empty", param=tensor.name)
        texts.append(text)
    return texts


def vectors_of(tensor: Tensor, limit: int) -> NDArray[np.float32]:
    """The rows of an FP32 tensor [d] or [n, d] as float32 [n, d], each with a direction. Raises InvalidRequest."""
    rows = np.atleast_2d(np.asarray(tensor.data, np.float32))
    if len(rows) > limit:
        raise InvalidRequest(
            f"input {tensor.name!r} has {len(rows)} rows; at most {limit} are allowed", param=tensor.name
        )
    lengths = np.sqrt(np.einsum("nd,nd->n", rows, rows, dtype=np.float64))
    bad = np.flatnonzero(~((lengths >= _SHORTEST) & (lengths <= _LONGEST)))
    if bad.size:
        row = int(bad[0])
        what = "holds NaN or infinity" if not np.isfinite(rows[row]).all() else f"has length {lengths[row]:.3g}"
        raise InvalidRequest(
            f"input {tensor.name!r}, row {row}, {what}; vectors of length {_SHORTEST:g} to {_LONGEST:g} have a direction",
            param=tensor.name,
        )
    return rows


def _fits(shape: Sequence[int], wanted: Sequence[int]) -> bool:
    return len(shape) == len(wanted) and all(want in (-1, have) for have, want in zip(shape, wanted, strict=True))


def _written(shape: Sequence[int]) -> str:
    return "[" + ", ".join("n" if size == -1 else str(size) for size in shape) + "]"
