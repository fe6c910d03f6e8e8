"""Which backend should answer: the first rule that applies. Pure; compiled once per policy version.

to: light | heavy    every backend of that role that serves the surface, in the operator's order
to: <backend>        that backend
to: canned           the rule's own answer, without a model
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from backends.api import BackendInfo, Role, Surface
from policies.core.errors import ConfigError
from policies.language.schema import Canned, Policy, Route
from routing.conditions import ConditionError, Test, compile_condition, describe, explain
from routing.reading import UNREAD, Reading


class RouteDecision(msgspec.Struct, frozen=True):
    """What a rule decides. Made at compile time: routing a request allocates nothing.

    `first`: backends that may answer as the first choice, in order; empty when canned, or when nothing that the operator
    configured has the role (the ladder goes on from there). `reasons`: the rule's condition in one line each.
    """

    rule: str
    first: tuple[str, ...]
    role: Literal["light", "heavy", "canned"]
    canned: Canned | None = None
    reasons: tuple[str, ...] = ()


#: Applies when a policy has no route without `when`.
_IMPLICIT = "default"


class Router:
    """The routes of one policy for one of its surfaces."""

    __slots__ = ("_policy", "_rules", "_signals", "trivial")

    def __init__(self, policy: Policy, backends: Mapping[str, BackendInfo], surface: Surface | None = None) -> None:
        """`backends` in the operator's order. `surface` is one of the policy's [its first].

        Raises ConfigError with every route that names an unknown backend, signal or form of condition.
        """
        surface = surface or Surface(policy.match.surfaces[0])
        self._policy = policy
        self._signals = policy.classify.signals
        rules: list[tuple[Test | None, RouteDecision]] = []
        problems: list[str] = []
        for position, route in enumerate(_with_default(policy)):
            where = f"policy {policy.policy}: routes[{position}] ({route.name})"
            try:
                test = compile_condition(route.when, self._signals) if route.when is not None else None
            except ConditionError as error:
                problems.append(f"{where}.when: {error}")
                continue
            decision = _decide(route, backends, surface)
            if isinstance(decision, str):
                problems.append(f"{where}.{decision}")
            else:
                rules.append((test, decision))
        if problems:
            raise ConfigError(problems)
        self._rules = tuple(rules)
        #: The decision, when it is the same for every request: then nothing needs to be classified.
        self.trivial: RouteDecision | None = rules[0][1] if rules[0][0] is None else None

    def route(self, reading: Reading) -> RouteDecision:
        """The first rule whose condition holds; the last has none."""
        scores = reading.scores
        for test, decision in self._rules:
            if test is None or test(scores):
                return decision
        raise AssertionError("the last rule has no condition")

    def settled(self, reading: Reading) -> bool:
        """Is the decision the same whatever the signals that are still UNREAD would say?"""
        scores = reading.scores
        if UNREAD not in scores.values():
            return True
        for test, _ in self._rules:
            verdict = True if test is None else test(scores)
            if verdict is None:
                return False
            if verdict:
                return True
        return True

    def first_choices(self) -> tuple[str, ...]:
        """Every backend that some rule could choose first, each once, in the order of the rules."""
        return tuple(dict.fromkeys(name for _, decision in self._rules for name in decision.first))

    def explain(self, reading: Reading) -> dict[str, Any]:
        """How every signal and every rule came out, also the rules after the one that applied; ready for JSON.

        `matched` is None where a neutral score left a rule open; `chosen` marks the first that applied.
        """
        chosen = self.route(reading).rule
        rules = []
        for route in _with_default(self._policy):
            tree = explain(route.when, self._signals, reading.scores) if route.when is not None else None
            matched = True if tree is None else tree["holds"]
            rules.append(
                {"rule": route.name, "to": route.to, "matched": matched, "chosen": route.name == chosen, "when": tree}
            )
        signals = {
            name: {"score": None if score.neutral else round(score.value, 4), "reason": score.text}
            for name, score in reading.scores.items()
        }
        return {"rule": chosen, "truncated": reading.truncated, "signals": signals, "rules": rules}


def _with_default(policy: Policy) -> tuple[Route, ...]:
    """The routes up to the first without `when`; where there is none, the upper rung of the ladder follows."""
    for position, route in enumerate(policy.routes):
        if route.when is None:
            return policy.routes[: position + 1]
    upper = next((rung for rung in policy.ladder if rung in ("heavy", "light")), "heavy")
    return (*policy.routes, Route(name=_IMPLICIT, to=upper))


def _decide(route: Route, backends: Mapping[str, BackendInfo], surface: Surface) -> RouteDecision | str:
    """The decision of a route, or `key: what is wrong`."""
    reasons = (describe(route.when),) if route.when is not None else ()
    if route.to == "canned":
        if route.answer is None:
            return "answer: a canned route needs its answer, for example `answer: {text: ...}`"
        return RouteDecision(route.name, (), "canned", route.answer, reasons)
    if route.to in ("light", "heavy"):
        role = Role(route.to)
        serving = (
            name for name, info in backends.items() if info.role is role and surface in info.capabilities.surfaces
        )
        return RouteDecision(route.name, tuple(serving), role.value, None, reasons)
    info = backends.get(route.to)
    if info is None:
        known = ("light", "heavy", "canned", *backends)
        close = difflib.get_close_matches(route.to, known, 1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        return f"to: {route.to!r} is not one of {', '.join(known)}{hint}"
    if surface not in info.capabilities.surfaces:
        return f"to: the backend {route.to!r} does not serve {surface.value}"
    return RouteDecision(route.name, (route.to,), info.role.value, None, reasons)
