"""What a worker does when the hub asks: the same actions whether it is a process of its own or not."""

from __future__ import annotations

from typing import Any

import msgspec

from backends.guarded import Guarded
from gateway.control.hub import Payload
from gateway.control.model_actions import offer_models
from gateway.control.start import KeysInForce, Standing
from gateway.control.worker import WorkerParts
from gateway.plan import PlanBook
from policies.language.policy_set import PolicySet
from policies.language.schema import Policy


def policies_payload(standing: Standing) -> Payload:
    """Of the command `policies.prepare`."""
    policies = [msgspec.to_builtins(policy) for policy in standing.policies]
    return {"generation": standing.generation, "policies": policies}


def keys_payload(keys: KeysInForce) -> Payload:
    """Of the command `keys.swap`."""
    return {"data": keys.data, "problem": keys.problem}


def catch_up(standing: Standing) -> list[tuple[str, Payload]]:
    """The commands that bring a worker to what is in force. The keys first: one that cannot take up the policies must still
    learn who may use it no more."""
    return [
        ("keys.swap", keys_payload(standing.keys)),
        ("policies.prepare", policies_payload(standing)),
        ("policies.commit", {"generation": standing.generation}),
        ("policies.notices", {"lines": standing.notices}),
    ]


class WorkerActions:
    """Registers itself at the worker's port.

    Policies change in two steps, so that all workers change within moments and none alone: every worker compiles the new ones
    and says that it could, then all are told to put them in force.
    """

    def __init__(self, parts: WorkerParts) -> None:
        self._parts = parts
        self._prepared: tuple[int, PlanBook] | None = None
        port = parts.port
        port.commands["policies.prepare"] = self._prepare_policies
        port.commands["policies.commit"] = self._commit_policies
        port.commands["policies.notices"] = self._take_notices
        port.commands["keys.swap"] = self._swap_keys
        port.queries["metrics"] = self._metrics
        port.queries["why"] = self._why
        port.queries["requests"] = self._requests
        port.queries["policies"] = self._policies
        port.queries["backends"] = self._backends
        port.queries["notices"] = self._notices
        port.queries["cache"] = self._cache
        offer_models(port, parts.places)

    async def _prepare_policies(self, payload: Payload) -> None:
        generation = payload["generation"]
        if generation == self._parts.pipeline.book.generation:
            self._prepared = None
            return
        policies = msgspec.convert(payload["policies"], list[Policy])
        plans = PlanBook(PolicySet(policies, self._parts.builtin), self._parts.compilers)
        self._prepared = (generation, plans)

    async def _commit_policies(self, payload: Payload) -> dict[str, Any]:
        book, generation = self._parts.pipeline.book, payload["generation"]
        if generation != book.generation:
            if self._prepared is None or self._prepared[0] != generation:
                raise RuntimeError(f"the policies of change {generation} were not prepared here")
            book.generation, book.plans = self._prepared
        self._prepared = None
        return {"policies": [plan.label for plan in book.plans.plans]}

    async def _take_notices(self, payload: Payload) -> None:
        self._parts.readiness.policy_notices = list(payload["lines"])

    async def _swap_keys(self, payload: Payload) -> dict[str, Any]:
        identities = self._parts.pipeline.book.identities
        identities.take(payload["data"], payload["problem"])
        return {"keys": len(identities)}

    async def _metrics(self, payload: Payload) -> Any:
        self._parts.events.flush()
        return self._parts.metrics.plain()

    async def _why(self, payload: Payload) -> Any:
        self._parts.events.flush()
        return self._parts.recent.explain(payload["id"])

    async def _requests(self, payload: Payload) -> Any:
        """Newest first: [moment (monotonic seconds of this machine), id]."""
        self._parts.events.flush()
        return self._parts.recent.newest(payload["count"])

    async def _policies(self, payload: Payload) -> Any:
        return [
            {"policy": plan.label, "surface": str(plan.surface), "first_choices": list(plan.router.first_choices())}
            for plan in self._parts.pipeline.book.plans.plans
        ]

    async def _backends(self, payload: Payload) -> Any:
        told = []
        for name, backend in self._parts.backends.items():
            info, health = backend.info, await backend.health()
            guard = backend.status() if isinstance(backend, Guarded) else {}
            told.append(
                {
                    "name": name,
                    "role": str(info.role),
                    "model": info.model,
                    "fingerprint": info.fingerprint,
                    "surfaces": sorted(info.capabilities.surfaces),
                    "ready": health.ready,
                    "reason": health.reason,
                    **guard,
                    "guard": repr(backend),
                }
            )
        return told

    async def _notices(self, payload: Payload) -> Any:
        """What is not as the files say, in full: one line each."""
        keys = self._parts.pipeline.book.identities.problem
        return {"policies": self._parts.readiness.policy_notices, "keys": keys.split("\n") if keys else []}

    async def _cache(self, payload: Payload) -> Any:
        return {"result": self._parts.cache.stats(), "flights": repr(self._parts.flights)}
