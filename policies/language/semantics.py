"""What a policy must make sense of beyond types: names that exist, routes that can be reached, a ladder without a circle.

Parts that already have a problem are left alone, so that one mistake is reported once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from policies.language.problems import Path, Problems, suggestion
from policies.language.schema import Canned, Condition, Policy, Route, SignalSpec
from policies.language.yaml_reader import Node, key_position, lookup, position

CANNED = "canned"
ROLES = ("light", "heavy")


@dataclass(frozen=True, slots=True)
class KnownBackend:
    """What a policy needs to know of a configured backend: its role (light, heavy) and the surfaces it serves."""

    role: str
    surfaces: frozenset[str]


@dataclass(frozen=True, slots=True)
class Known:
    """The names that policies may use. A None leaves that kind of name unchecked.

    signal_kinds
        kind -> the SignalSpec keys it reads (besides `kind`)
    signal_fault
        what is wrong with a signal of a known kind, as (key, message); None = nothing
    """

    backends: Mapping[str, KnownBackend] | None = None
    signal_kinds: Mapping[str, frozenset[str]] | None = None
    heads: frozenset[str] | None = None
    signal_fault: Callable[[SignalSpec], tuple[str, str] | None] | None = None


def check_policy(policy: Policy, root: Node, problems: Problems, known: Known) -> None:
    """Add every mistake of sense in `policy`, read from `root`, to `problems`."""
    _Sense(policy, root, problems, known).check()


@dataclass(slots=True)
class _Sense:
    policy: Policy
    root: Node
    problems: Problems
    known: Known
    _seen: list[tuple[str, Condition]] = field(default_factory=list)

    def check(self) -> None:
        self._match()
        self._tensors_and_vectors()
        for name, spec in self.policy.classify.signals.items():
            self._signal(spec, ("classify", "signals", name))
        self._routes()
        self._ladder()
        self._default_answer()
        self._cache()

    def _say(self, path: Path, message: str, at_key: bool = False) -> None:
        at = key_position(self.root, path) if at_key else position(self.root, path)
        self.problems.add(at, message, path)

    # -------------------------------------------------------------------------------------------------------- match

    def _match(self) -> None:
        match = self.policy.match
        for key in ("aliases", "surfaces", "tenants", "backends"):
            self._twice(getattr(match, key), ("match", key))
        for index, name in enumerate(match.backends):
            path = ("match", "backends", index)
            if name and not self.problems.touches(path) and self.known.backends is not None:
                if name not in self.known.backends:
                    self._say(path, f"there is no backend `{name}`{suggestion(name, self.known.backends, 'backends')}")
                elif name in match.aliases:
                    self._say(path, f"`{name}` is an alias of this policy too; leave it out of one of the two")
        if "embeddings" in match.surfaces and len(match.surfaces) > 1:
            self._say(("match", "surfaces"), "embeddings never change model: give that surface a policy of its own")
        elif "embeddings" in match.surfaces:
            for index, route in enumerate(self.policy.routes):
                if route.when is not None:
                    said = "embeddings never change model: such a policy has one route, without `when`"
                    self._say(("routes", index, "when"), said, at_key=True)

    def _tensors_and_vectors(self) -> None:
        """Keys that mean something to chat only."""
        surfaces = self.policy.match.surfaces
        if not surfaces or "chat" in surfaces or self.problems.touches(("match", "surfaces")):
            return
        traffic = " and ".join(surfaces)
        if lookup(self.root, ("timeouts",)) is not None and not self.problems.touches(("timeouts",)):
            said = f"`timeouts` limits the streams of chat; this policy is for {traffic}: use `deadline`, remove this"
            self._say(("timeouts",), said, at_key=True)
        if "embeddings" in surfaces:
            return  # said in `_match`
        for index, route in enumerate(self.policy.routes):
            path: Path = ("routes", index, "when")
            if route.when is not None and not self.problems.touches(path):
                said = f"signals read the text of a chat and say nothing about {traffic}: this never matches; remove it"
                self._say(path, said, at_key=True)

    def _twice(self, values: Sequence[str], path: Path) -> None:
        for index, value in enumerate(values):
            if value and value in values[:index] and not self.problems.touches((*path, index)):
                self._say((*path, index), f"`{value}` stands here twice; remove one")

    # ------------------------------------------------------------------------------------------------------ signals

    def _signal(self, spec: SignalSpec, path: Path) -> None:
        kinds = self.known.signal_kinds
        if kinds is not None and spec.kind and not self.problems.touches((*path, "kind")):
            if spec.kind not in kinds:
                message = f"there is no signal kind `{spec.kind}`{suggestion(spec.kind, kinds, 'kinds')}"
                self._say((*path, "kind"), message)
                return
            reads = kinds[spec.kind]
            for key in ("any", "head", "tokens", "marks"):
                if key not in reads and lookup(self.root, (*path, key)) is not None:
                    uses = f"it reads {', '.join(sorted(reads))}" if reads else "it takes no settings"
                    self._say(
                        (*path, key), f"`{key}` means nothing to the signal kind `{spec.kind}`; {uses}", at_key=True
                    )
        heads = self.known.heads
        if spec.head and heads is not None and spec.head not in heads:
            self._say((*path, "head"), f"there is no trained head `{spec.head}`{suggestion(spec.head, heads, 'heads')}")
        if self.known.signal_fault is not None and not self.problems.touches(path):
            fault = self.known.signal_fault(spec)
            if fault is not None:
                key, message = fault
                self._say((*path, key), message, at_key=lookup(self.root, (*path, key)) is None)

    # ------------------------------------------------------------------------------------------------------- routes

    def _routes(self) -> None:
        routes = self.policy.routes
        if not routes:
            if not self.problems.touches(("routes",)):
                message = "the default route is missing: `routes` must end with one that has no `when`"
                self._say(("routes",), message)
            return
        names: dict[str, int] = {}
        catch_all: str | None = None
        for index, route in enumerate(routes):
            path: Path = ("routes", index)
            if route.name and names.setdefault(route.name, index) != index:
                self._say((*path, "name"), f"a route `{route.name}` stands above already; give this one another name")
            self._target(route, path)
            if catch_all is not None:
                self._say(path, f"the route `{route.name}` is never reached: `{catch_all}` above it always matches")
            if route.when is not None:
                self._condition(route.when, (*path, "when"))
                self._repeated(route.name, route.when, (*path, "when"))
            elif catch_all is None and not self.problems.touches(path):
                catch_all = route.name
        last: Path = ("routes", len(routes) - 1)
        if catch_all is None and lookup(self.root, (*last, "when")) is not None:
            self._say(last, "the default route is missing: the last route must have no `when`")

    def _repeated(self, name: str, when: Condition, path: Path) -> None:
        if self.problems.touches(path):
            return
        for earlier, condition in self._seen:
            if condition == when:
                self._say(path, f"the route `{name}` is never reached: `{earlier}` above it has the same condition")
        self._seen.append((name, when))

    def _target(self, route: Route, path: Path) -> None:
        given = lookup(self.root, (*path, "answer")) is not None
        if route.to == CANNED:
            if self._only_vectors():
                self._say((*path, "to"), f"embeddings come from a model; `{CANNED}` is for chat and tensors")
            elif not given:
                self._say(path, f"the route `{route.name}` goes to `canned` and so needs an `answer`")
            elif route.answer is not None:
                self._canned(route.answer, (*path, "answer"))
        elif given and route.to and not self.problems.touches((*path, "to")):
            self._say((*path, "answer"), "`answer` belongs only to a route with `to: canned`", at_key=True)
        backends = self.known.backends
        if backends is None or route.to in (CANNED, "") or self.problems.touches((*path, "to")):
            return
        surfaces = self.policy.match.surfaces
        serving = f"that serves {' or '.join(surfaces)}"
        if route.to in ROLES:
            if not any(backend.role == route.to and backend.surfaces & set(surfaces) for backend in backends.values()):
                self._say((*path, "to"), f"there is no {route.to} backend {serving}")
        elif route.to not in backends:
            names = (*ROLES, CANNED, *backends)
            self._say((*path, "to"), f"there is no backend `{route.to}`{suggestion(route.to, names, 'possible are')}")
        elif not backends[route.to].surfaces & set(surfaces) and not self.problems.touches(("match", "surfaces")):
            serves = ", ".join(sorted(backends[route.to].surfaces))
            self._say(
                (*path, "to"), f"the backend `{route.to}` serves {serves}, but this policy is for {', '.join(surfaces)}"
            )

    def _condition(self, when: Condition, path: Path) -> None:
        if self.problems.touches(path):
            return
        forms = [key for key in ("signal", "all", "any", "not") if lookup(self.root, (*path, key)) is not None]
        bounds = [key for key in ("at_least", "below") if lookup(self.root, (*path, key)) is not None]
        if len(forms) > 1:
            self._say(
                path,
                f"a condition has one form, this has {' and '.join(f'`{form}`' for form in forms)}; use `all:` or `any:`",
            )
        elif not forms:
            said = (
                "needs `signal: NAME` beside it" if bounds else "is empty; write `signal:` with `at_least:` or `below:`"
            )
            self._say(path, f"this condition {said}")
        elif forms == ["signal"]:
            self._comparison(when, path)
        elif bounds:
            self._say(path, f"`{bounds[0]}` belongs beside `signal`, not beside `{forms[0]}`")
        else:
            self._combination(when, forms[0], path)

    def _comparison(self, when: Condition, path: Path) -> None:
        signals = self.policy.classify.signals
        if when.signal not in signals:
            message = f"there is no signal `{when.signal}` under `classify.signals`"
            self._say((*path, "signal"), message + suggestion(when.signal, signals, "signals"))
        if when.at_least is None and when.below is None:
            self._say(path, f"what should the signal `{when.signal}` be? Add `at_least:` or `below:`")
        elif when.at_least is not None and when.below is not None and when.at_least >= when.below:
            self._say(path, f"no score is at least {when.at_least:g} and below {when.below:g}: this never matches")
        elif when.below == 0:
            self._say((*path, "below"), "no score is below 0: this never matches")
        elif when.at_least == 0 and when.below is None:
            self._say(
                (*path, "at_least"), "every score is at least 0: this always matches; raise it or leave `when` out"
            )

    def _combination(self, when: Condition, form: str, path: Path) -> None:
        if form == "not":
            if when.not_ is not None:
                self._condition(when.not_, (*path, "not"))
            return
        parts = when.all if form == "all" else when.any
        if not parts:
            self._say((*path, form), f"`{form}` is empty; list the conditions")
        for index, part in enumerate(parts):
            self._condition(part, (*path, form, index))

    # ---------------------------------------------------------------------------------------- ladder, answers, cache

    def _ladder(self) -> None:
        ladder = self.policy.ladder
        for index, rung in enumerate(ladder):
            if rung in ladder[:index] and not self.problems.touches(("ladder",)):
                first = ladder.index(rung)
                circle = " -> ".join(ladder[first : index + 1])
                self._say(("ladder", index), f"the ladder goes in a circle: {circle}; each rung may stand in it once")

    def _default_answer(self) -> None:
        if self.policy.default_answer is not None and self._only_vectors():
            self._say(("default_answer",), "embeddings have no default answer: nothing replaces a vector", at_key=True)
        elif self.policy.default_answer is not None:
            self._canned(self.policy.default_answer, ("default_answer",))
            if "default" not in self.policy.ladder and not self.problems.touches(("ladder",)):
                self._say(
                    ("default_answer",), "this answer is never used: the ladder has no `default` rung", at_key=True
                )

    def _only_vectors(self) -> bool:
        return self.policy.match.surfaces == ("embeddings",)

    def _canned(self, answer: Canned, path: Path) -> None:
        if self.problems.touches(path):
            return
        surfaces = self.policy.match.surfaces
        if not answer.text and not answer.tensors:
            self._say(path, "this answer is empty; give it `text:` or `tensors:`")
        elif "chat" in surfaces and not answer.text:
            self._say(path, "this policy is for chat, so its answer needs `text:`")
        elif surfaces == ("tensor",) and not answer.tensors:
            self._say(path, "this policy is for tensors, so its answer needs `tensors:`")
        elif surfaces == ("chat",) and answer.tensors:
            self._say((*path, "tensors"), "this policy is for chat, where `tensors:` are never sent", at_key=True)
        elif surfaces == ("tensor",) and answer.text:
            self._say((*path, "text"), "this policy is for tensors, where `text:` is never sent", at_key=True)
        for name, values in answer.tensors.items():
            if self.problems.touches((*path, "tensors")):
                break
            try:
                _shape(values)
            except ValueError as error:
                self._say((*path, "tensors", name), f"the tensor `{name}` {error}")

    def _cache(self) -> None:
        cache, result = self.policy.cache, self.policy.cache.result
        if result.stale < result.ttl + result.swr and not self.problems.touches(("cache", "result")):
            need = f"{result.ttl + result.swr:g}s"
            message = f"answers would be gone before they are old: `stale` must be at least ttl + swr ({need})"
            self._say(("cache", "result", "stale"), message)
        elif (
            "stale" not in self.policy.ladder
            and result.stale > result.ttl + result.swr
            and lookup(self.root, ("cache", "result", "stale")) is not None
            and not self.problems.touches(("ladder",))
            and not self.problems.touches(("cache", "result"))
        ):
            said = (
                "older answers than ttl + swr are used by the ladder's `stale` rung only, and it has none; remove this"
            )
            self._say(("cache", "result", "stale"), said, at_key=True)
        if cache.user_tensor and cache.scope != "user" and not self.problems.touches(("cache", "scope")):
            self._say(("cache", "user_tensor"), "`user_tensor` is only read with `scope: user`", at_key=True)


def _shape(values: object) -> tuple[str, tuple[int, ...]]:
    """Kind of the elements and shape of nested lists. Raises ValueError when they are no tensor."""
    if not isinstance(values, (list, tuple)):
        if values is None or isinstance(values, dict):
            raise ValueError("holds something other than numbers, text, true and false")
        return "number" if isinstance(values, (int, float)) and not isinstance(values, bool) else type(
            values
        ).__name__, ()
    parts = {_shape(value) for value in values}
    if len(parts) > 1:
        raise ValueError("has rows of different lengths, or numbers and text side by side")
    kind, shape = parts.pop() if parts else ("", ())
    return kind, (len(values), *shape)
