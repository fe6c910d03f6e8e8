"""The thin walker down the ladder: tries each rung inside the deadline, notes why each was left, and labels the answer."""

from __future__ import annotations

import json

import numpy as np

from backends.api import (
    Answer,
    BackendInfo,
    ChatAnswer,
    ChatRequest,
    EmbeddingsRequest,
    Tensor,
    TensorAnswer,
    TensorRequest,
)
from backends.needs import check_tensor_names, missing, same_answer_space
from backends.openai_assemble import replay
from cache.key import RequestDigest, entry_key
from cache.result import Found, ResultCache
from gateway.dispatch import Attempt, Dispatcher
from gateway.exchange import Exchange, Reply, RungStep
from gateway.latency import FirstOutputs
from gateway.plan import Plan
from policies.core.clock import Clock
from policies.core.deadline import Deadline
from policies.core.errors import (
    CannotServe,
    ClientFault,
    ContextTooLong,
    DeadlineExceeded,
    GatewayError,
    NoAnswer,
    RequestError,
)
from policies.core.events import Degraded, Observer
from policies.language.schema import Canned
from policies.rules.ladder import Step, reserve_s
from routing.router import RouteDecision

#: The rung an answer of each cache tier is labelled with.
HIT_RUNGS = {"l1": "hit-l1", "l2": "hit-l2"}
#: Kept for a stale look-up or a canned answer below the rung being tried.
_STORED_RESERVE_S = 0.05


class Walker:
    """Walks one request down its ladder."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        cache: ResultCache,
        first_outputs: FirstOutputs,
        clock: Clock,
        observer: Observer,
    ) -> None:
        self._dispatcher = dispatcher
        self._cache = cache
        self._first_outputs = first_outputs
        self._clock = clock
        self._observer = observer

    async def walk(
        self, exchange: Exchange, plan: Plan, decision: RouteDecision, digest: RequestDigest | None, deadline: Deadline
    ) -> Reply:
        """The first rung that answers. Raises NoAnswer, CannotServe, or the client's own fault."""
        steps = plan.walk(decision)
        if exchange.controls.degrade_off:
            steps = steps[: len(decision.first)]
        walk = _Walk(exchange, plan, decision, digest, deadline)
        for index, step in enumerate(steps):
            if step.rung == "stale":
                reply = await self._stale(walk)
            elif step.rung == "default":
                reply = _default(walk)
            else:
                reply = await self._rung(walk, step, steps[index + 1 :])
            if reply is not None:
                _label(walk, step)
                return reply
            self._observer.on_event(
                Degraded(
                    request_id=exchange.record.request_id,
                    policy=plan.policy.policy,
                    rung=step.rung,
                    reason=exchange.record.steps[-1].outcome,
                )
            )
        raise walk.failure()

    async def _rung(self, walk: _Walk, step: Step, below: tuple[Step, ...]) -> Reply | None:
        """Call one backend; None = it was skipped or failed, and the walk goes on."""
        exchange, backend = walk.exchange, walk.plan.backends[step.backend]
        info = backend.info
        chosen = step.backend in walk.decision.first
        if chosen and isinstance(exchange.request, TensorRequest):
            # A name that the chosen model does not have is the client's mistake; only stand-ins are skipped for it.
            check_tensor_names(exchange.request, info)
        reason = missing(exchange.request, info) or (
            same_answer_space(walk.first_info, info, exchange.request) if walk.first_info is not None else None
        )
        if reason is not None:
            walk.skip(step, reason)
            return None
        began = self._clock.now()
        if walk.deadline.at <= began:
            walk.fail(step, DeadlineExceeded("the deadline had passed"), 0.0)
            return None
        if not chosen:
            reply = await self._found_before(walk, step, info)
            if reply is not None:
                return reply
        attempt = Attempt(exchange, walk.plan, backend, walk.digest, first_choice=chosen)
        try:
            reply = await self._dispatcher.call(attempt, self._rung_deadline(walk, below))
        except RequestError:
            raise
        except ClientFault as error:
            if not isinstance(error, ContextTooLong):
                raise
            walk.fail(step, error, self._clock.now() - began)
        except GatewayError as error:
            walk.fail(step, error, self._clock.now() - began)
        else:
            walk.note(step, "ok", self._clock.now() - began)
            exchange.record.fingerprint = info.fingerprint
            return reply
        return None

    async def _found_before(self, walk: _Walk, step: Step, info: BackendInfo) -> Reply | None:
        """What this stand-in answered to the same question while it stood in before: readable by its own rung only."""
        if walk.digest is None or walk.exchange.controls.no_cache:
            return None
        began = self._clock.now()
        keys = [entry_key(walk.digest.key, info.fingerprint)]
        found = await self._cache.lookup(keys, walk.digest.check, walk.plan.policy.cache.result, any_choice=True)
        walk.exchange.record.waited_s += self._clock.now() - began
        if found is None:
            return None
        walk.hit = HIT_RUNGS[found.tier]
        walk.note(step, walk.hit, self._clock.now() - began)
        return stored_reply(walk.exchange, found)

    def _rung_deadline(self, walk: _Walk, below: tuple[Step, ...]) -> Deadline:
        deadline = walk.deadline
        if below:
            next_s = self._first_outputs.p95(below[0].backend) if below[0].backend else _STORED_RESERVE_S
            deadline = deadline.less(reserve_s(deadline.remaining(), next_s))
        if walk.exchange.stream:
            deadline = deadline.within(walk.plan.policy.timeouts.first_token)
        return deadline

    async def _stale(self, walk: _Walk) -> Reply | None:
        if walk.digest is None:
            walk.skip(Step("stale", ""), "nothing is stored for this request")
            return None
        began = self._clock.now()
        plan = walk.plan
        chosen = [plan.backends[name] for name in walk.decision.first] or plan.first_choices
        keys = [entry_key(walk.digest.key, backend.info.fingerprint) for backend in chosen]
        found = await self._cache.stale(keys, walk.digest.check, walk.plan.policy.cache.result)
        walk.exchange.record.waited_s += self._clock.now() - began
        if found is None:
            walk.skip(Step("stale", ""), "no stored answer is young enough")
            return None
        walk.note(Step("stale", ""), "ok", self._clock.now() - began)
        return stored_reply(walk.exchange, found)


def stored_reply(exchange: Exchange, found: Found) -> Reply:
    """A stored answer in the form this client asked for."""
    record = exchange.record
    record.backend = found.header.backend
    record.fingerprint = found.header.fingerprint
    record.age_s = found.age_s
    if exchange.stream:
        assert isinstance(found.answer, ChatAnswer)
        return Reply(record, held=replay(found.answer, include_usage=True))
    return Reply(record, answer=found.answer)


class _Walk:
    """One walk's facts and the causes gathered on the way."""

    __slots__ = ("causes", "deadline", "decision", "digest", "exchange", "hit", "plan", "skips")

    def __init__(
        self, exchange: Exchange, plan: Plan, decision: RouteDecision, digest: RequestDigest | None, deadline: Deadline
    ) -> None:
        self.exchange = exchange
        self.plan = plan
        self.decision = decision
        self.digest = digest
        self.deadline = deadline
        self.causes: list[tuple[str, GatewayError]] = []
        self.skips: list[tuple[str, str]] = []
        #: The rung's answer was stored: which tier it came from.
        self.hit = ""

    @property
    def first_info(self) -> BackendInfo | None:
        """The model that was chosen; None where nothing of the chosen role is configured."""
        first = self.decision.first
        return self.plan.backends[first[0]].info if first else None

    def note(self, step: Step, outcome: str, seconds: float) -> None:
        self.exchange.record.steps.append(RungStep(step.rung, step.backend, outcome, seconds))

    def skip(self, step: Step, reason: str) -> None:
        """A rung that was not tried. A missing capability is remembered; an empty stale rung is no cause of anything."""
        if step.backend:
            self.skips.append((step.backend, reason))
        self.exchange.record.steps.append(RungStep(step.rung, step.backend, "skipped", reason=reason))

    def fail(self, step: Step, error: GatewayError, seconds: float) -> None:
        self.causes.append((step.backend, error))
        self.note(step, error.code, seconds)

    def reason(self) -> str:
        """Why the answer is not the first choice's: one header-safe word."""
        if self.causes:
            return self.causes[-1][1].code
        return "capability" if self.skips else "unavailable"

    def too_long(self) -> bool:
        """Did every model that was asked say that the request is too long?"""
        return bool(self.causes) and all(isinstance(error, ContextTooLong) for _, error in self.causes)

    def failure(self) -> GatewayError:
        if self.causes:
            if self.too_long():
                return self.causes[-1][1]
            return NoAnswer(self.causes, self.skips)
        if self.skips:
            listed = "; ".join(f"{name} {reason}" for name, reason in self.skips)
            return CannotServe(f"No model here can serve this request: {listed}.")
        return NoAnswer([])


def _label(walk: _Walk, step: Step) -> None:
    record = walk.exchange.record
    record.rung = walk.hit or step.rung
    if step.backend:
        record.backend = step.backend
    lower = step.rung in ("stale", "default") or (step.rung == "light" and walk.decision.role == "heavy")
    if lower:
        record.degraded = walk.reason()


def _default(walk: _Walk) -> Reply | None:
    if walk.too_long():
        # "Try again later" would be untrue: the request itself has to become shorter.
        walk.skip(Step("default", ""), "the request is too long for every model")
        return None
    answer = canned_answer(walk.exchange, walk.plan.policy.default_answer)
    if answer is None:
        walk.skip(Step("default", ""), "the policy has no default answer for this kind of request")
        return None
    walk.note(Step("default", ""), "ok", 0.0)
    return canned_reply(walk.exchange, answer)


def canned_reply(exchange: Exchange, answer: Answer) -> Reply:
    """A canned answer, whole or as a stream."""
    if exchange.stream:
        assert isinstance(answer, ChatAnswer)
        return Reply(exchange.record, held=replay(answer, include_usage=True))
    return Reply(exchange.record, answer=answer)


def canned_answer(exchange: Exchange, canned: Canned | None) -> Answer | None:
    """What a policy's canned answer means for this request; None when it has none of the right kind."""
    request = exchange.request
    if canned is None or isinstance(request, EmbeddingsRequest):
        return None
    if isinstance(request, ChatRequest):
        return _canned_chat(exchange, canned.text) if canned.text else None
    return _canned_tensors(request, canned) if canned.tensors else None


def _canned_chat(exchange: Exchange, text: str) -> ChatAnswer:
    body = {
        "id": f"chatcmpl-{exchange.record.request_id}",
        "object": "chat.completion",
        "created": 0,
        "model": "canned",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
    }
    return ChatAnswer(body=json.dumps(body, ensure_ascii=False).encode(), model="canned", finish_reason="stop")


def _canned_tensors(request: TensorRequest, canned: Canned) -> TensorAnswer:
    outputs = []
    for name, values in canned.tensors.items():
        if request.outputs and name not in request.outputs:
            continue
        data = np.array(values)
        if data.dtype.kind in "US":
            texts = np.array([str(v).encode() for v in data.ravel()], dtype=object).reshape(data.shape)
            outputs.append(Tensor(name, "BYTES", texts))
        elif data.dtype.kind == "b":
            outputs.append(Tensor(name, "BOOL", data))
        elif data.dtype.kind in "iu":
            outputs.append(Tensor(name, "INT64", data.astype(np.int64)))
        else:
            outputs.append(Tensor(name, "FP32", data.astype(np.float32)))
    return TensorAnswer(model="canned", outputs=outputs)
