"""The sessions of a split graph, and how a segment is run: as the whole graph would, or row by row in several runs.

A value is an array, or a list of arrays: rows of unlike length, each without its first axis. A list becomes an array by
padding, as the graph's cuts declare it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from backends.onnx.manifest import CutSpec, ModelError
from backends.onnx.session import SessionSettings, create_session, provider_of
from backends.onnx.split import Segment, Split
from backends.onnx.tokens import group_by_length

Array = NDArray[Any]
Value = Array | list[Array]
Values = Mapping[str, Value]

#: Rows x padded length up to which rows that need not be looked up one by one share one run, as in the whole graph.
WHOLE_LIMIT = 2_048
#: Rows in one run.
_MOST_ROWS = 1_024


@dataclass(frozen=True, slots=True)
class Bound:
    """A session with the names, in order, that its graph's inputs and outputs have in it."""

    session: ort.InferenceSession
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def run(self, arrays: Sequence[Array], options: ort.RunOptions | None) -> list[Array]:
        found: list[Array] = self.session.run(self.outputs, dict(zip(self.inputs, arrays, strict=True)), options)
        return found


class Segments:
    """Runs the segments of `split`, each on its session. May be used from one thread at a time."""

    def __init__(self, split: Split, specs: Mapping[str, CutSpec], bound: Mapping[str, Bound]) -> None:
        # The models hold the weights once more; the sessions have theirs.
        self.split = replace(split, models={})
        self.specs = specs
        self._bound = bound
        #: What runs the segments: numbers made elsewhere differ in their bits.
        self.provider = "+".join(
            sorted({provider_of(bound[part.digest].session) for part in self._parts() if part.outputs})
        )
        self._segments = {segment.name: segment for segment in self._parts()}
        self._padding = {name: value for spec in specs.values() for name, value in spec.padding.items()}
        self._row_inputs = {name: self._row_wise(self._segments[name], spec) for name, spec in specs.items()}
        self._shapes = {
            name: _shapes(bound[segment.digest], segment) for name, segment in self._segments.items() if segment.outputs
        }

    @classmethod
    def load(
        cls, split: Split, specs: Mapping[str, CutSpec], settings: SessionSettings | None, shared: Mapping[str, Bound]
    ) -> Segments:
        """Equal segments get one session; `shared` brings sessions that are there already, by digest. Raises ModelError."""
        bound = dict(shared)
        for segment in (*split.cuts, split.rest):
            if segment.outputs and segment.digest not in bound:
                graph = split.models[segment.name]().SerializeToString()
                session = create_session(graph, settings, told=f"segment {segment.name!r}")
                bound[segment.digest] = Bound(session, segment.inputs, segment.outputs)
        return cls(split, specs, bound)

    def _parts(self) -> tuple[Segment, ...]:
        return (*self.split.cuts, self.split.rest)

    def _row_wise(self, segment: Segment, spec: CutSpec) -> tuple[str, ...]:
        """The segment's inputs that are split by rows: the graph's own that are declared so, and tensors of such cuts."""
        if not spec.rows:
            return ()
        if wrong := set(spec.rows) - set(self.split.reads[spec.name]):
            raise ModelError(f"cut {spec.name!r} does not read {', '.join(sorted(wrong))}; its `rows` are wrong")
        upstream = {name for other in self.specs.values() if other.rows for name in other.tensors}
        found = tuple(name for name in segment.inputs if name in spec.rows or name in upstream)
        if not found:
            raise ModelError(f"no input of cut {spec.name!r} has rows")
        return found

    def needs(self, name: str) -> tuple[str, ...]:
        """The cuts whose tensors this one's segment reads."""
        return self._segments[name].needs

    def given(self, name: str, values: Values) -> bool:
        """Are all tensors of the cut among `values`?"""
        return all(tensor in values for tensor in self._segments[name].outputs)

    def rows(self, name: str, values: Values) -> int:
        """How many rows the cut's inputs have."""
        counts = {len(values[tensor]) for tensor in self._row_inputs[name]}
        if len(counts) != 1:
            raise ValueError(f"the inputs of cut {name!r} have {sorted(counts)} rows; they must have as many each")
        return counts.pop()

    def groups(self, name: str, values: Values, rows: Sequence[int]) -> list[list[int]]:
        """`rows` in runs of like length."""
        ragged = [values[tensor] for tensor in self._row_inputs[name] if tensor in self._padding]
        if not ragged:
            return [list(rows[at : at + _MOST_ROWS]) for at in range(0, len(rows), _MOST_ROWS)]
        lengths = [max(value[row].shape[0] for value in ragged) for row in rows]
        return [[rows[at] for at in group] for group in group_by_length(lengths)]

    def fits_one_run(self, name: str, values: Values) -> bool:
        """May all rows share one run without much waste or a run that is too long?"""
        if not self._row_inputs[name]:
            return True
        count = self.rows(name, values)
        ragged = [values[tensor] for tensor in self._row_inputs[name] if tensor in self._padding]
        longest = max((row.shape[0] for value in ragged for row in value), default=1)
        return count * longest <= WHOLE_LIMIT if ragged else count <= _MOST_ROWS

    def run(
        self, options: ort.RunOptions | None, name: str, values: Values, rows: Sequence[int] | None = None
    ) -> dict[str, Array]:
        """What the segment gives for all of `values`, or for some of their `rows` only. One run."""
        segment = self._segments[name]
        row_wise = self._row_inputs.get(name, ()) if rows is not None else ()
        arrays = [self.array(tensor, values[tensor], rows if tensor in row_wise else None) for tensor in segment.inputs]
        return dict(zip(segment.outputs, self._bound[segment.digest].run(arrays, options), strict=True))

    def array(self, tensor: str, value: Value, rows: Sequence[int] | None = None) -> Array:
        """`value`, or some rows of it, as one array; shorter rows are filled up."""
        if isinstance(value, np.ndarray):
            return value if rows is None else value[list(rows)]
        picked = value if rows is None else [value[row] for row in rows]
        first = picked[0]
        if all(row.shape == first.shape for row in picked):
            return np.stack(picked)
        if tensor not in self._padding:
            raise ValueError(f"rows of {tensor!r} differ in shape, and no cut says how to fill them up")
        longest = max(row.shape[0] for row in picked)
        filled = np.full((len(picked), longest, *first.shape[1:]), self._padding[tensor], first.dtype)
        for index, row in enumerate(picked):
            filled[index, : row.shape[0]] = row
        return filled

    def usable(self, name: str, tensors: Mapping[str, Array], *, row: bool) -> bool:
        """Could these be the cut's tensors (or one row of them)? Names, types and fixed sizes; what was kept is not trusted."""
        expected = self._shapes[name]
        if tensors.keys() != expected.keys():
            return False
        for tensor, (dtype, shape) in expected.items():
            found, wanted = tensors[tensor], shape[1:] if row else shape
            if found.dtype != dtype or len(found.shape) != len(wanted):
                return False
            if any(want is not None and want != have for want, have in zip(wanted, found.shape, strict=True)):
                return False
        return True


_DTYPES = {"float": "float32", "double": "float64", "bool": "bool"}


def _shapes(bound: Bound, segment: Segment) -> dict[str, tuple[np.dtype[Any], tuple[int | None, ...]]]:
    """The dtype and shape (None = any size) of each of the segment's outputs. Raises ModelError for texts."""
    declared = {value.name: value for value in bound.session.get_outputs()}
    found = {}
    for tensor, name in zip(segment.outputs, bound.outputs, strict=True):
        value = declared[name]
        kind = value.type.removeprefix("tensor(").removesuffix(")")
        try:
            dtype = np.dtype(_DTYPES.get(kind, kind))
        except TypeError:
            raise ModelError(f"tensor {tensor!r} of segment {segment.name!r} holds {value.type}, no numbers") from None
        found[tensor] = (dtype, tuple(size if isinstance(size, int) else None for size in value.shape))
    return found
