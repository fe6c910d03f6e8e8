"""A model whose graph is split: what its segments made before is taken from a cache, the rest is run.

    key of a kept tensor = 16 bytes of (everything upstream of the cut, execution provider, the bits that this machine's
    arithmetic gives on the load's probes, name of the cut, the exact inputs upstream with shape and dtype)

A cut whose rows are kept one by one is looked up for each row, equal rows of a request count once, and only the rows that are
not known are run. Cuts upstream of one that is known are neither looked up nor run. A caller may give a cut's tensors in
place of the inputs they come from; then nothing upstream is needed, and what depends on them is not kept.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from backends.api import CutVerdict, TensorCache
from backends.onnx.cut_check import Checked, check_cuts
from backends.onnx.cut_counts import CutCounts
from backends.onnx.manifest import CutSpec, ModelError
from backends.onnx.segments import Array, Bound, Segments, Value, Values
from backends.onnx.session import OneThread, SessionSettings, create_session, first_line
from policies.core.deadline import Deadline
from policies.core.errors import ModelFailed

if TYPE_CHECKING:
    import onnx

_Kept = dict[str, Array]


@dataclass(slots=True)
class _Job:
    """What one request needs from one cut. `at`: row -> its place in `keys` and `found`; a whole cut is one row.

    `keys` None = nothing is kept: all is computed.
    """

    name: str
    keys: list[bytes] | None
    at: list[int] = field(default_factory=list)
    found: list[_Kept | None] = field(default_factory=list)

    @property
    def known(self) -> bool:
        return self.keys is not None and None not in self.found


class SegmentedModel:
    """Made by `load`; belongs to one event loop. `verdicts` say what splitting came to."""

    def __init__(
        self,
        name: str,
        segments: Segments,
        checked: Checked,
        cache: TensorCache | None,
        counts: CutCounts | None = None,
        on_loop_s: float = 0.0,
    ) -> None:
        self.name = name
        self.verdicts: tuple[CutVerdict, ...] = checked.verdicts
        self.counts = counts or CutCounts()
        self.provider = segments.provider
        self._segments = segments
        self._cache = cache
        self._thread = OneThread(name, on_loop_s=on_loop_s)
        self._off = {verdict.name for verdict in checked.verdicts if verdict.label == "off"}
        self._kept = {name for name, spec in segments.specs.items() if spec.stored and name not in self._off}
        self._prefixes = {
            name: _prefix(segments.split.upstream[name], segments.provider, checked.bits[name], name)
            for name in self._kept
        }

    @classmethod
    def load(
        cls,
        graph: Path | onnx.ModelProto,
        cuts: Sequence[CutSpec],
        probes: Sequence[Values],
        *,
        name: str,
        settings: SessionSettings | None = None,
        shared: Mapping[str, Bound] | None = None,
        cache: TensorCache | None = None,
        counts: CutCounts | None = None,
    ) -> SegmentedModel:
        """Split, load and compare with the whole graph on `probes` (inputs that are good ones for the model). Blocks.

        `shared`: sessions that may run a segment with that digest. Raises ModelError (CutRefused for a cut that does not fit).
        """
        import onnx

        from backends.onnx.split import split

        if not probes:
            raise ModelError(f"{name}: a split graph needs at least one probe to be compared with the whole one")
        model = onnx.load(graph) if isinstance(graph, Path) else graph
        parts = split(model, {cut.name: cut.tensors for cut in cuts})
        segments = Segments.load(parts, {cut.name: cut for cut in cuts}, settings, shared or {})
        source = graph if isinstance(graph, Path) else model.SerializeToString()
        del model, parts
        whole = create_session(source, settings, told=name)
        try:
            checked = check_cuts(segments, whole, probes)
        except ModelError:
            raise
        except Exception as error:  # ONNX Runtime's errors share no base below Exception
            raise ModelError(f"{name}: the split graph cannot be run on the probes: {first_line(error)}") from error
        return cls(name, segments, checked, cache, counts, settings.on_loop_s if settings is not None else 0.0)

    async def run(self, feeds: Values, deadline: Deadline) -> dict[str, Array]:
        """The outputs of the whole graph. Arrays from the cache are read-only.

        Raises what `OneThread.run` does; ModelFailed also for feeds that do not fit together.
        """
        try:
            return await self._outputs(dict(feeds), deadline)
        except (ValueError, KeyError) as error:
            # Rows that are not as many everywhere, an input that is not there: a fault of whoever calls this model.
            raise ModelFailed(f"the model was fed wrongly: {error}", self.name) from error

    async def _outputs(self, values: dict[str, Value], deadline: Deadline) -> dict[str, Array]:
        split = self._segments.split
        jobs = await self._look_up_what_is_needed(values)
        for cut in split.cuts:
            job = jobs.get(cut.name)
            if job is not None and not job.known:
                await self._compute(job, values, deadline)
        if split.rest.outputs:
            self.counts.add(self.name, split.rest.name, "runs")
            values.update(await self._thread.run(self._segments.run, deadline, split.rest.name, values))
        return {name: self._segments.array(name, values[name]) for name in split.outputs}

    async def aclose(self) -> None:
        await self._thread.aclose()

    # --------------------------------------------------------------------------------------------------- looking up

    async def _look_up_what_is_needed(self, values: dict[str, Value]) -> dict[str, _Job]:
        """Cut -> what is known of it; from the outputs upwards, one round of look-ups for each level of cuts."""
        jobs: dict[str, _Job] = {}
        level = self._open_needs([self._segments.split.rest.name], values, jobs)
        while level:
            made = [self._job(name, values) for name in level]
            await self._look_up([job for job in made if job.keys is not None])
            for job in made:
                jobs[job.name] = job
                if job.known:
                    values.update(self._assembled(job))
            level = self._open_needs([job.name for job in made if not job.known], values, jobs)
        return jobs

    def _open_needs(self, names: Iterable[str], values: Values, jobs: Mapping[str, _Job]) -> list[str]:
        segments = self._segments
        needs = dict.fromkeys(need for name in names for need in segments.needs(name))
        return [need for need in needs if need not in jobs and not segments.given(need, values)]

    def _job(self, name: str, values: Values) -> _Job:
        segments = self._segments
        reads = segments.split.reads[name]
        if name not in self._kept or not all(tensor in values for tensor in reads):
            return _Job(name, None)
        spec = segments.specs[name]
        prefix = self._prefixes[name].copy()
        if not spec.rows:
            for tensor in reads:
                _put(prefix, values[tensor])
            return _Job(name, [prefix.digest()], [0], [None])
        for tensor in reads:
            if tensor not in spec.rows:
                _put(prefix, values[tensor])
        by_row = [values[tensor] for tensor in reads if tensor in spec.rows]
        places: dict[bytes, int] = {}
        at = [places.setdefault(_row_key(prefix, rows), len(places)) for rows in zip(*by_row, strict=True)]
        return _Job(name, list(places), at, [None] * len(places))

    async def _look_up(self, jobs: Sequence[_Job]) -> None:
        if self._cache is None or not jobs:
            return
        found = iter(await self._cache.get_many([key for job in jobs for key in job.keys or ()]))
        for job in jobs:
            row = bool(self._segments.specs[job.name].rows)
            for place in range(len(job.found)):
                kept = next(found)
                if kept is not None and self._segments.usable(job.name, kept, row=row):
                    job.found[place] = kept
            misses = job.found.count(None)
            self.counts.add(self.name, job.name, "misses", misses)
            self.counts.add(self.name, job.name, "hits", len(job.found) - misses)

    def _assembled(self, job: _Job) -> _Kept:
        """The cut's tensors from what is now known of all rows."""
        found = [kept for kept in job.found if kept is not None]
        if not self._segments.specs[job.name].rows:
            return found[0]
        return {tensor: np.stack([found[place][tensor] for place in job.at]) for tensor in found[0]}

    # ---------------------------------------------------------------------------------------------------- computing

    async def _compute(self, job: _Job, values: dict[str, Value], deadline: Deadline) -> None:
        """Run what is missing, keep it, and add the cut's tensors to `values`."""
        segments = self._segments
        if not segments.specs[job.name].rows or job.name in self._off:
            made = await self._run(job.name, values, None, deadline)
            values.update(made)
            if job.keys is not None:
                await self._keep(job.keys[0], made)
        elif job.keys is None:
            values.update(await self._all_rows(job.name, values, deadline))
        else:
            row_of: dict[int, int] = {}
            for row, place in enumerate(job.at):
                if job.found[place] is None:
                    row_of.setdefault(place, row)
            place_of = {row: place for place, row in row_of.items()}
            for rows in segments.groups(job.name, values, list(place_of)):
                made = await self._run(job.name, values, rows, deadline)
                for index, row in enumerate(rows):
                    kept = {tensor: array[index] for tensor, array in made.items()}
                    place = place_of[row]
                    job.found[place] = kept
                    await self._keep(job.keys[place], kept)
            values.update(self._assembled(job))

    async def _all_rows(self, name: str, values: Values, deadline: Deadline) -> _Kept:
        """All rows as the whole graph would run them, or in parts where that would be one very large run."""
        segments = self._segments
        if segments.fits_one_run(name, values):
            return await self._run(name, values, None, deadline)
        groups = segments.groups(name, values, range(segments.rows(name, values)))
        made = [await self._run(name, values, rows, deadline) for rows in groups]
        order = np.argsort([row for rows in groups for row in rows])
        return {tensor: np.concatenate([one[tensor] for one in made])[order] for tensor in made[0]}

    async def _run(self, name: str, values: Values, rows: list[int] | None, deadline: Deadline) -> _Kept:
        made = await self._thread.run(self._segments.run, deadline, name, values, rows)
        self.counts.add(self.name, name, "runs")
        if rows is not None:
            self.counts.add(self.name, name, "rows", len(rows))
        return made

    async def _keep(self, key: bytes, tensors: _Kept) -> None:
        if self._cache is not None and all(_is_finite(array) for array in tensors.values()):
            await self._cache.put(key, tensors)


def _prefix(upstream: str, provider: str, bits: str, cut: str) -> Any:
    """What all keys of a cut begin with."""
    digest = hashlib.blake2b(digest_size=16, person=b"subgraph-tensor")
    for part in (upstream, provider, bits, cut):
        data = part.encode()
        digest.update(len(data).to_bytes(4, "little"))
        digest.update(data)
    return digest


def _row_key(prefix: Any, row: Sequence[Array]) -> bytes:
    digest = prefix.copy()
    for array in row:
        _put_array(digest, array)
    key: bytes = digest.digest()
    return key


def _put(digest: Any, value: Value) -> None:
    if isinstance(value, np.ndarray):
        _put_array(digest, value)
        return
    digest.update(b"rows" + len(value).to_bytes(4, "little"))
    for row in value:
        _put_array(digest, row)


def _put_array(digest: Any, array: Array) -> None:
    """Dtype, shape and bytes; the first two say how many bytes follow, so no two lists of arrays run together."""
    if array.dtype.kind == "O":
        raise ValueError("texts have no bytes of their own; a cut upstream of which texts are read cannot be kept")
    digest.update(f"{array.dtype.str}{array.shape}".encode())
    digest.update(np.ascontiguousarray(array))


def _is_finite(array: Array) -> bool:
    return array.dtype.kind != "f" or bool(np.isfinite(array).all())
