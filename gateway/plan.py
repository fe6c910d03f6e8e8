"""A policy compiled for serving: its router, classifier, key rules and ladder walks, ready to be looked up by name.

Plans are immutable. A reload compiles a new PlanBook and swaps the pointer; requests in flight keep the plan they began with.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec

from backends.api import Backend, BackendInfo, Embedder, Priority, Request, Role, StreamLimits, Surface
from cache.key import KeyRules, RequestDigest, entry_key, is_deterministic
from gateway.edge.identity import Identity
from policies.core.events import Observer
from policies.language.policy_set import PolicySet, claims
from policies.language.schema import Policy
from policies.rules.ladder import Step, steps
from routing.classifier import Classifier
from routing.digest import route_digest
from routing.heads import Heads
from routing.router import RouteDecision, Router


@dataclass(frozen=True, slots=True)
class Compilers:
    """What every plan is compiled from, besides its policy."""

    backends: Mapping[str, Backend]
    heads: Heads
    embedder: Embedder | None
    secret: bytes
    observer: Observer
    #: Value of `expose_headers` where a policy says nothing.
    expose: str


class Plan:
    """One policy for one kind of traffic."""

    __slots__ = (
        "_stored_all", "_walks", "backends", "classifier", "deadline_s", "expose", "first_choices", "keys", "label", "limits",
        "policy", "roles", "router", "surface",
    )  # fmt: skip

    def __init__(self, policy: Policy, surface: Surface, parts: Compilers) -> None:
        self.policy = policy
        self.surface = surface
        self.label = f"{policy.policy}@{policy.version}"
        self.expose = policy.expose_headers or parts.expose
        self.deadline_s = policy.deadline
        self.limits = StreamLimits(policy.timeouts.idle, policy.timeouts.total)
        self.backends = {
            name: backend for name, backend in parts.backends.items() if surface in backend.info.capabilities.surfaces
        }
        infos: dict[str, BackendInfo] = {name: backend.info for name, backend in self.backends.items()}
        self.roles = {
            role: tuple(name for name, info in infos.items() if info.role == role) for role in ("heavy", "light")
        }
        self.classifier = Classifier(policy, parts.heads, parts.embedder, parts.observer)
        self.router = Router(policy, infos, surface)
        self.first_choices = tuple(self.backends[name] for name in self.router.first_choices())
        self.keys = (
            KeyRules(policy.cache, policy.policy, route_digest(policy, parts.heads), surface, parts.secret)
            if policy.cache.enabled
            else None
        )
        self._stored_all = policy.cache.store == "all"
        self._walks: dict[tuple[str, ...], tuple[Step, ...]] = {}

    def entry_keys(self, digest: bytes) -> list[bytes]:
        """Where the answer of each model that a rule could choose first would be stored."""
        return [entry_key(digest, backend.info.fingerprint) for backend in self.first_choices]

    def may_store(self, request: Request) -> bool:
        """May the answer be stored, and so be shared in flight?"""
        return self._stored_all or is_deterministic(request)

    def walk(self, decision: RouteDecision) -> tuple[Step, ...]:
        """The rungs to try for a decision, in order."""
        walk = self._walks.get(decision.first)
        if walk is None:
            first = [(str(self.backends[name].info.role), name) for name in decision.first]
            walk = self._walks[decision.first] = steps(first, self.policy.ladder, self.roles)
        return walk

    def named(self, backend: str) -> RouteDecision:
        """The decision of a client that names a backend itself."""
        role: Literal["light", "heavy"] = "light" if self.backends[backend].info.role is Role.LIGHT else "heavy"
        return RouteDecision(rule="named-backend", first=(backend,), role=role)

    def __repr__(self) -> str:
        return f"Plan({self.label} for {self.surface}: {' | '.join(self.router.first_choices())})"


class PlanBook:
    """Plans by what a client may ask for: (model name, surface), first for the tenant, then for everybody."""

    __slots__ = ("_for_all", "_for_tenant", "_policies", "plans")

    def __init__(self, policies: PolicySet, parts: Compilers) -> None:
        self._policies = policies
        self.plans: list[Plan] = []
        #: (name, surface) -> (plan, backend the client named or "")
        self._for_all: dict[tuple[str, str], tuple[Plan, str]] = {}
        self._for_tenant: dict[tuple[str, str, str], tuple[Plan, str]] = {}
        for policy in policies.policies:
            plans = {str(surface): Plan(policy, Surface(surface), parts) for surface in policy.match.surfaces}
            self.plans.extend(plans.values())
            for name, surface, tenant in claims(policy):
                if policies.resolve(name, surface, tenant) is not policy:
                    continue
                plan = plans[surface]
                named = "" if name in policy.match.aliases else name
                if named and named not in plan.backends:
                    continue
                if tenant:
                    self._for_tenant[name, surface, tenant] = (plan, named)
                else:
                    self._for_all[name, surface] = (plan, named)

    def find(self, model: str, surface: Surface, tenant: str) -> tuple[Plan, str] | None:
        if self._for_tenant:
            found = self._for_tenant.get((model, surface, tenant))
            if found is not None:
                return found
        return self._for_all.get((model, surface))

    def names(self, tenant: str, allowed: Iterable[str] | None) -> list[tuple[str, str]]:
        """(name, "gateway") of everything a tenant may put in `model`, each once."""
        return [(name, "gateway") for name in self._policies.names(tenant, allowed)]


class Prepared(msgspec.Struct, frozen=True):
    """Stages 1 to 3 of one request. An equal body of the same caller, under the same plans, has the same."""

    identity: Identity
    plans: PlanBook
    plan: Plan
    #: The backend that the client named itself; empty = the route decides.
    named: str
    priority: Priority
    digest: RequestDigest | None
