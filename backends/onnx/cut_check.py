"""A split graph against the whole one, on probes, when a model is loaded.

Splitting changes no bit by itself at the same batch shape, but ONNX Runtime may fuse operators across a cut in the whole
graph and not in the parts, and a row's bits may depend on the rows that share its run. So each cut is tried, never believed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnxruntime as ort

from backends.api import CutVerdict
from backends.onnx.manifest import CutSpec, ModelError
from backends.onnx.segments import Array, Segments, Value, Values


@dataclass(slots=True)
class Checked:
    """`bits`: cut -> digest of its tensors on the probes, so that hosts whose arithmetic differs share nothing."""

    verdicts: tuple[CutVerdict, ...]
    bits: Mapping[str, str]


@dataclass(slots=True)
class _Gap:
    """The largest difference seen, and whether every bit was the same."""

    largest: float = 0.0
    equal: bool = True

    def see(self, found: Sequence[Array], whole: Sequence[Array]) -> None:
        for one, other in zip(found, whole, strict=True):
            if one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes():
                continue
            self.equal = False
            self.largest = max(self.largest, _difference(one, other))


def _difference(one: Array, other: Array) -> float:
    if one.shape != other.shape or one.dtype != other.dtype:
        return float("inf")
    if one.dtype.kind != "f":
        return float("inf") if (one != other).any() else 0.0
    if not np.array_equal(np.isfinite(one), np.isfinite(other)):
        return float("inf")
    gap = np.abs(np.nan_to_num(one.astype(np.float64)) - np.nan_to_num(other.astype(np.float64)))
    return float(gap.max(initial=0.0))


def check_cuts(segments: Segments, whole: ort.InferenceSession, probes: Sequence[Values]) -> Checked:
    """Raises ModelError when even the plain split, all rows in one run, differs by more than every cut's tolerance."""
    return _Check(segments, whole).check(probes)


@dataclass(slots=True)
class _Check:
    segments: Segments
    whole: ort.InferenceSession
    plain: _Gap = field(default_factory=_Gap)
    parts: dict[str, _Gap] = field(default_factory=dict)

    def check(self, probes: Sequence[Values]) -> Checked:
        split, specs = self.segments.split, self.segments.specs
        digests = {name: hashlib.blake2b(digest_size=16) for name in specs}
        for probe in probes:
            feeds = {name: self.segments.array(name, probe[name]) for name in split.inputs}
            expected = self.whole.run(list(split.outputs), feeds)
            values = self._run(probe, None)
            self.plain.see([np.asarray(values[name]) for name in split.outputs], expected)
            for name, spec in specs.items():
                for tensor in spec.tensors:
                    digests[name].update(np.ascontiguousarray(values[tensor]).tobytes())
                if spec.rows:
                    self._try_parts(name, probe, expected)
        if specs and self.plain.largest > max(spec.tolerance for spec in specs.values()):
            raise ModelError(
                f"the split graph differs from the whole one by {self.plain.largest:.2g}, more than any of its cuts allows; "
                "move the cuts, or raise their tolerance if that is good enough"
            )
        return Checked(
            tuple(self._verdict(spec) for spec in specs.values()), {name: d.hexdigest() for name, d in digests.items()}
        )

    def _try_parts(self, name: str, probe: Values, expected: Sequence[Array]) -> None:
        gap = self.parts.setdefault(name, _Gap())
        try:
            values = self._run(probe, name)
        except ValueError:
            # Rows whose tensors differ in size cannot be put together again.
            gap.equal, gap.largest = False, float("inf")
        else:
            gap.see([np.asarray(values[output]) for output in self.segments.split.outputs], expected)

    def _run(self, probe: Values, in_parts: str | None) -> dict[str, Value]:
        """All values of the split graph; the rows of cut `in_parts` in runs of one, and once more all but the first."""
        segments = self.segments
        values: dict[str, Value] = dict(probe)
        for cut in segments.split.cuts:
            if cut.name != in_parts:
                values.update(segments.run(None, cut.name, values))
                continue
            count = segments.rows(cut.name, values)
            # The first row alone; the others in the runs that they would share.
            runs = [[0], *(segments.groups(cut.name, values, range(1, count)) if count > 1 else [])]
            made = [segments.run(None, cut.name, values, rows) for rows in runs]
            order = np.argsort([row for rows in runs for row in rows])
            values.update({tensor: np.concatenate([one[tensor] for one in made])[order] for tensor in cut.outputs})
        if segments.split.rest.outputs:
            values.update(segments.run(None, segments.split.rest.name, values))
        return values

    def _verdict(self, spec: CutSpec) -> CutVerdict:
        plain = self.plain
        by_parts = self.parts.get(spec.name)
        if by_parts is not None and spec.stored:
            # Which rows share a run depends on which are known: what it can come to is what counts.
            exact = plain.equal and by_parts.equal
            difference = parts = max(plain.largest, by_parts.largest)
        else:
            exact, difference = plain.equal, plain.largest
            parts = max((self.parts[name].largest for name in self._row_cuts(spec.name)), default=0.0)
        if max(difference, parts) > spec.tolerance:
            return CutVerdict(spec.name, "off", difference, parts)
        return CutVerdict(spec.name, "exact" if exact else "within tolerance", difference, parts)

    def _row_cuts(self, name: str) -> set[str]:
        """The cuts with rows among this one and those upstream of it."""
        found = {name} & self.parts.keys()
        for need in self.segments.needs(name):
            found |= self._row_cuts(need)
        return found
