"""Splitting a graph at declared tensors, so that what lies upstream of them can be kept instead of being run again.

    cut        a name and the tensors at it; upstream of a cut is everything that its tensors are computed from
    frontier   the tensors that cross from upstream to the rest of the graph, computed here and never believed
    segment    a graph of its own: what computes a cut's tensors from the graph's inputs and from earlier cuts

A cut is refused unless its frontier is what was declared: a tensor that crosses unnamed would have to be computed twice, and
a kept tensor that nothing reads is a mistake in the declaration. What depends on no input of the graph is no crossing: such
nodes go into each segment that reads them.

Nothing here knows what a graph computes. Segments that are the same graph but for their names have the same `digest`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import onnx

from backends.onnx.fingerprint import digest_parts
from backends.onnx.graph_parts import GraphParts, SegmentGraph
from backends.onnx.manifest import ModelError

#: Keeping what these give would freeze one draw for ever.
_RANDOM = frozenset(
    {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial", "Bernoulli"}
)


#: The name of what lies beyond all cuts.
REST = "rest"


class CutRefused(ModelError):
    """A declared cut does not fit its graph."""


@dataclass(frozen=True, slots=True)
class Segment:
    """`inputs` are in the order of their first use, `outputs` as declared. `needs`: the cuts whose tensors are read.

    A rest may compute nothing (no `outputs`): then all outputs of the whole graph are inputs or cut tensors.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    needs: tuple[str, ...]
    digest: str


@dataclass(frozen=True, slots=True)
class Split:
    """`cuts` in an order in which they can be run; then `rest`. Together they compute what the whole graph computes."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    cuts: tuple[Segment, ...]
    rest: Segment
    #: Cut -> the inputs of the whole graph that its tensors depend on, in the graph's order.
    reads: Mapping[str, tuple[str, ...]]
    #: Cut -> digest of everything upstream of it.
    upstream: Mapping[str, str]
    #: Segment -> makes its own model: a copy of its weights, so not made before it is needed.
    models: Mapping[str, Callable[[], onnx.ModelProto]]


def split(model: onnx.ModelProto, cuts: Mapping[str, Sequence[str]]) -> Split:
    """Cut `model` at `cuts` (name -> tensors). Raises CutRefused, naming the cut and the tensor."""
    return _Splitter(GraphParts(model), cuts).split()


def graph_digest(model: onnx.ModelProto) -> tuple[str, tuple[str, ...]]:
    """The digest that a segment which is all of `model` would have, and the order of its inputs."""
    parts = GraphParts(model)
    made = parts.segment("whole", range(len(parts.nodes)), parts.outputs)
    return made.digest, made.inputs


@dataclass(slots=True)
class _Splitter:
    parts: GraphParts
    declared: Mapping[str, Sequence[str]]
    owner: dict[str, str] = field(default_factory=dict)
    models: dict[str, Callable[[], onnx.ModelProto]] = field(default_factory=dict)

    def split(self) -> Split:
        parts = self.parts
        for name, tensors in self.declared.items():
            self._check_names(name, tensors)
        upstream = {name: parts.ancestors(tensors) for name, tensors in self.declared.items()}
        for name, nodes in upstream.items():
            self._check_frontier(name, nodes)
        segments = {name: self._segment(name, tensors) for name, tensors in self.declared.items()}
        order = self._order(segments)
        outside = [name for name in parts.outputs if name not in self.owner and name not in parts.inputs]
        rest = self._segment(REST, outside)
        return Split(
            parts.inputs,
            parts.outputs,
            tuple(segments[name] for name in order),
            rest,
            {name: parts.inputs_of(nodes, self.declared[name]) for name, nodes in upstream.items()},
            self._digests(segments, order),
            self.models,
        )

    def _check_names(self, name: str, tensors: Sequence[str]) -> None:
        if name == REST:
            raise CutRefused(f"no cut may be named {REST!r}: that is what lies beyond all cuts")
        if not tensors:
            raise CutRefused(f"cut {name!r} names no tensor")
        for tensor in tensors:
            if tensor in self.owner:
                raise CutRefused(f"cut {name!r}: tensor {tensor!r} is also at cut {self.owner[tensor]!r}")
            if tensor not in self.parts.producer:
                known = tensor in self.parts.inputs or tensor in self.parts.initializers
                state = "is an input or a constant: nothing lies upstream of it" if known else "is not in the graph"
                raise CutRefused(f"cut {name!r}: tensor {tensor!r} {state}")
            if tensor not in self.parts.varying:
                raise CutRefused(f"cut {name!r}: tensor {tensor!r} depends on no input; it is a constant")
            self.owner[tensor] = name

    def _check_frontier(self, name: str, nodes: frozenset[int]) -> None:
        parts = self.parts
        frontier = parts.frontier(nodes)
        for tensor in frontier:
            if tensor not in self.owner:
                raise CutRefused(
                    f"cut {name!r}: tensor {tensor!r} also crosses it (read by {parts.reader(tensor, nodes)}); "
                    f"declare it at this cut or at one upstream. The frontier is {', '.join(frontier)}"
                )
        for tensor in self.declared[name]:
            if tensor not in frontier:
                raise CutRefused(f"cut {name!r}: nothing beyond the cut reads tensor {tensor!r}; leave it out")
        for index in sorted(nodes):
            if parts.nodes[index].op_type in _RANDOM:
                raise CutRefused(
                    f"cut {name!r}: {parts.nodes[index].op_type} lies upstream; its draws must not be kept"
                )

    def _segment(self, name: str, tensors: Sequence[str]) -> Segment:
        """What computes `tensors`, from inputs of the graph and from the tensors of other cuts."""
        parts = self.parts
        stops = {tensor for tensor in self.owner if tensor not in tensors}
        nodes = parts.ancestors(tensors, stops)
        made: SegmentGraph = parts.segment(name, sorted(nodes), tensors, stops)
        needs = tuple(dict.fromkeys(self.owner[tensor] for tensor in made.inputs if tensor in self.owner))
        if name == REST:
            # Outputs of the whole graph that are cut tensors are passed on.
            passed = [self.owner[tensor] for tensor in parts.outputs if tensor in self.owner]
            needs = tuple(dict.fromkeys([*needs, *passed]))
        self.models[name] = made.model
        return Segment(name, made.inputs, tuple(tensors), needs, made.digest)

    def _order(self, segments: Mapping[str, Segment]) -> list[str]:
        order: list[str] = []
        left = dict(segments)
        while left:
            ready = [name for name, segment in left.items() if not any(need in left for need in segment.needs)]
            if not ready:
                raise CutRefused(f"cuts {', '.join(sorted(left))} need each other's tensors; declare them as one cut")
            order += ready
            for name in ready:
                del left[name]
        return order

    def _digests(self, segments: Mapping[str, Segment], order: Iterable[str]) -> dict[str, str]:
        found: dict[str, str] = {}
        for name in order:
            segment = segments[name]
            pairs = [("segment", segment.digest), *(("reads", self._read(tensor, found)) for tensor in segment.inputs)]
            found[name] = digest_parts(pairs)
        return found

    def _read(self, tensor: str, found: Mapping[str, str]) -> str:
        """An input as what it is: the graph's n-th, or a cut's n-th tensor. Names do not count."""
        owner = self.owner.get(tensor)
        if owner is None:
            return f"input {self.parts.inputs.index(tensor)}"
        return f"{found[owner]} {list(self.declared[owner]).index(tensor)}"
