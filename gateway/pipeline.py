"""The one path of a request, whatever its surface.

    #  stage      reads                              adds                        may raise
    1  identify   authorization                      identity, tenant, class     Unauthenticated, NotPermitted
    2  policy     model name, surface, tenant        plan                        UnknownModel
    3  digest     request, plan.keys, scope, vary    request digest or None      -
    4  lookup     digest, first choices              Fresh | Revalidate | Miss   NotCached
    5  classify   request                            reading, decision           -
    6  walk       decision, ladder, deadline         the answer                  NoAnswer, CannotServe, ClientFault

Parsing comes before (the edge) and responding after it (the edge again). Looking up needs no classification: an answer is
looked for under every model that a rule could choose first.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

from backends.api import BackendInfo, ChatRequest, Priority, Surface, TensorRequest
from cache.key import RequestDigest, Scope
from cache.result import Found, Freshness, ResultCache
from gateway.degrade import HIT_RUNGS, Walker, canned_answer, canned_reply, stored_reply
from gateway.edge.identity import Identities, Identity
from gateway.exchange import DEFAULT_CONTROLS, Exchange, Record, Reply
from gateway.plan import Plan, PlanBook, Prepared
from gateway.refresh import Refresher
from policies.core.clock import Clock
from policies.core.deadline import Deadline
from policies.core.errors import NotCached, UnknownModel
from policies.core.events import Observer
from routing.router import RouteDecision
from routing.view import RequestView

#: Of the deadline, at most this share goes to a classification that needs the embedder.
_CLASSIFY_SHARE = 0.1


@dataclass(slots=True)
class Book:
    """The current plans and keys: what a reload swaps. `generation`: the number of the change that brought the plans."""

    generation: int
    plans: PlanBook
    identities: Identities


@dataclass(frozen=True, slots=True)
class Stages:
    """The parts the pipeline drives."""

    cache: ResultCache
    walker: Walker
    refresher: Refresher
    observer: Observer
    clock: Clock


class Pipeline:
    """Implements `gateway.exchange.Handler` with policies, caches and the ladder."""

    def __init__(self, book: Book, stages: Stages, loopback: bool) -> None:
        self.book = book
        self._stages = stages
        self._loopback = loopback

    async def handle(self, exchange: Exchange) -> Reply:
        known = self._prepare(exchange)
        plan, digest = known.plan, known.digest
        if digest is not None and not exchange.controls.no_cache:
            found = self._lookup_now(exchange.record, plan, digest)
            if found is None and self._stages.cache.has_l2:
                found = await self._lookup_l2(exchange.record, plan, digest)
            if found is not None:
                if found.state is Freshness.REFRESH:
                    self._own_request(exchange, known)
                    self._stages.refresher.behind(exchange, plan, digest, found)
                exchange.record.rung = exchange.record.lookup
                exchange.record.rule = found.header.rule
                return stored_reply(exchange, found)
        if exchange.controls.only_if_cached:
            raise NotCached("only-if-cached was asked for, and no fresh answer is stored")
        self._own_request(exchange, known)
        deadline = self._deadline(exchange, plan)
        decision = plan.named(known.named) if known.named else await self._classify(exchange, plan, deadline)
        exchange.record.rule = decision.rule
        if decision.role == "canned":
            answer = canned_answer(exchange, decision.canned)
            if answer is not None:
                exchange.record.rung, exchange.record.backend = "canned", "canned"
                return canned_reply(exchange, answer)
        return await self._stages.walker.walk(exchange, plan, decision, digest, deadline)

    def completed(self, record: Record) -> None:
        """A request is over: its record is the Completed event."""
        self._stages.observer.on_event(record)

    def _prepare(self, exchange: Exchange) -> Prepared:
        """Identify, find the plan, make the digest; or take over what an equal request had."""
        identity = self._identify(exchange.authorization)
        record, known = exchange.record, exchange.prepared
        record.tenant = identity.tenant
        if (
            known is None
            or known.plans is not self.book.plans
            or known.identity is not identity
            or exchange.controls is not DEFAULT_CONTROLS
        ):
            known = self._admit(exchange, identity)
        record.policy, record.expose = known.plan.label, known.plan.expose
        record.priority = _CLASS_NAMES[known.priority]
        return known

    def _admit(self, exchange: Exchange, identity: Identity) -> Prepared:
        request, plans = exchange.request, self.book.plans
        found = plans.find(exchange.model, request.surface, identity.tenant)
        if found is None:
            raise UnknownModel(exchange.model)
        plan, named = found
        identity.require_policy(plan.policy.policy)
        # The Open Inference Protocol's `priority` may lower the class, never raise it.
        lowered = request.priority if isinstance(request, TensorRequest) else identity.priority
        priority = max(identity.priority, lowered)
        digest = self._digest(exchange, plan, identity)
        known = Prepared(identity, plans, plan, named, priority, digest)
        # Header values and controls are no part of the body: such findings hold for this request only.
        if digest is not None and not plan.policy.cache.vary and exchange.controls is DEFAULT_CONTROLS:
            exchange.prepared = known
        return known

    def _own_request(self, exchange: Exchange, known: Prepared) -> None:
        """Make the request this exchange's own, and say whose and how urgent it is."""
        if exchange.shared:
            exchange.request, exchange.shared = copy.copy(exchange.request), False
        request = exchange.request
        request.id, request.priority = exchange.record.request_id, known.priority
        if isinstance(request, ChatRequest):
            request.limits = known.plan.limits

    def _identify(self, authorization: str | None) -> Identity:
        return self.book.identities.identify(authorization, self._loopback)

    def _digest(self, exchange: Exchange, plan: Plan, identity: Identity) -> RequestDigest | None:
        """None = this request is neither looked up nor stored."""
        if plan.keys is None or exchange.controls.no_store:
            return None
        headers, names = exchange.headers, plan.policy.cache.vary
        vary = {name: headers[name] for name in names if name in headers} if names else _NO_VARY
        return plan.keys.digest(exchange.request, Scope(identity.tenant), vary)

    def _lookup_now(self, record: Record, plan: Plan, digest: RequestDigest) -> Found | None:
        """In memory, under every model that a rule could choose first. Synchronous: most answers end here."""
        keys = plan.entry_keys(digest.key)
        found = self._stages.cache.lookup_now(keys, digest.check, plan.policy.cache.result)
        record.digest = digest.key
        record.lookup = "miss" if found is None else HIT_RUNGS[found.tier]
        return found

    async def _lookup_l2(self, record: Record, plan: Plan, digest: RequestDigest) -> Found | None:
        stages = self._stages
        began = stages.clock.now()
        found = await stages.cache.lookup_l2(plan.entry_keys(digest.key), digest.check, plan.policy.cache.result)
        record.waited_s += stages.clock.now() - began
        if found is not None:
            record.lookup = HIT_RUNGS[found.tier]
        return found

    def _deadline(self, exchange: Exchange, plan: Plan) -> Deadline:
        allowed = plan.deadline_s
        asked = exchange.controls.timeout_s
        if asked is not None:
            allowed = min(allowed, asked)
        return Deadline(exchange.record.started + allowed, self._stages.clock)

    async def _classify(self, exchange: Exchange, plan: Plan, deadline: Deadline) -> RouteDecision:
        if plan.router.trivial is not None:
            return plan.router.trivial
        stages, record = self._stages, exchange.record
        began = stages.clock.now()
        view = RequestView(exchange.request)
        reading = plan.classifier.read(view)
        if plan.classifier.needs_embedding and not plan.router.settled(reading):
            await plan.classifier.read_embedding(view, reading, deadline.within(deadline.remaining() * _CLASSIFY_SHARE))
        decision = plan.router.route(reading)
        record.explain = (plan.router, reading)
        record.classify_s = stages.clock.now() - began
        return decision

    def models(self, authorization: str | None) -> list[tuple[str, str]]:
        identity = self._identify(authorization)
        return self.book.plans.names(identity.tenant, identity.policies)

    def describe(self, model: str, authorization: str | None) -> BackendInfo | None:
        identity = self._identify(authorization)
        found = self.book.plans.find(model, Surface.TENSOR, identity.tenant)
        if found is None or not found[0].first_choices:
            return None
        plan, named = found
        if identity.policies is not None and plan.policy.policy not in identity.policies:
            # A name that this key may not use is, to it, no name.
            return None
        return plan.backends[named].info if named else plan.first_choices[0].info


_NO_VARY: dict[str, str] = {}
_CLASS_NAMES = {Priority.VIP: "vip", Priority.NORMAL: "normal", Priority.BATCH: "batch"}
