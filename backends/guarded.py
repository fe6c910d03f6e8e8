"""One backend with its protection round it, itself a Backend.

Order of a call, outermost first (a test asserts it):

    limiter -> backend breaker -> chaos -> transport

The limiter is outermost so that a full backend is refused without spending a probe of a half-open breaker; chaos is
below the breaker so that what it injects is judged like the real thing. Retries, hedges and replicas have their place
between breaker and chaos. Both permits are taken before the first await of a call and closed exactly once.

What an outcome means
    ok, a stream that finished                          success
    ConnectFailed, UpstreamStatus (not 429), malformed,
      truncated, in-band error, idle, total, ModelFailed  failure
    FirstTokenTimeout, DeadlineExceeded                 failure, if the backend had a fair time (see `_FAIR_S`)
    429, UpstreamMisconfigured                          hold: the backend is rested (Retry-After, or the options' times)
    ClientFault, RequestError, Rejected, cancelled,
      a consumer that stopped reading                   ignored
A stream is judged at its end.

What the breaker finds out it tells the other workers of the host, under `breaker/<backend>`, and it takes over what theirs
find out (`policies/rules/breaker_findings.py`). That happens when its state changes, never in the way of a call.
"""

# ruff: noqa: SLF001  a call is the other half of its guard
from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from enum import Enum
from typing import cast

import msgspec

from backends.api import Answer, Backend, BackendInfo, ChatRequest, Chunk, ChunkKind, Health, Request
from policies.core.clock import Clock
from policies.core.deadline import Deadline
from policies.core.errors import (
    BackendError,
    ClientFault,
    DeadlineExceeded,
    FirstTokenTimeout,
    GatewayError,
    Rejected,
    RequestError,
    UpstreamMisconfigured,
    UpstreamStatus,
)
from policies.core.events import Attempted, BreakerChanged, FactRefused, Observer
from policies.core.shared_state import Alone, Fact, SharedState
from policies.language.schema import Duration, Section
from policies.rules.breaker import BreakerOptions, BreakerPermit, BreakerState, CircuitBreaker
from policies.rules.breaker_findings import Finding
from policies.rules.limit import ConcurrencyLimiter, FixedLimit, LimitOptions, LimitPermit

#: A client may ask for an answer within 1 ms; that the backend has none by then says nothing about the backend. A
#: timeout counts only when the call had this long, and as long as answers of its form usually take.
_FAIR_S = 0.1
_MEAN_WEIGHT = 0.1


class GuardOptions(Section, frozen=True, kw_only=True):
    """Protection of one backend."""

    breaker: BreakerOptions = BreakerOptions()
    limit: LimitOptions = LimitOptions()
    #: Rest after our credentials or model name were refused.
    misconfigured_hold_s: Duration = 10.0
    #: Rest after a 429 without Retry-After, and the longest that a Retry-After is believed.
    throttled_hold_s: Duration = 1.0
    throttled_hold_max_s: Duration = 300.0

    @property
    def longest_hold_s(self) -> float:
        return max(self.misconfigured_hold_s, self.throttled_hold_s, self.throttled_hold_max_s)


class Verdict(Enum):
    SUCCESS = "success"
    FAILURE = "failure"
    TIMEOUT = "timeout"
    HOLD = "hold"
    IGNORED = "ignored"


_VERDICTS: dict[type[BaseException], Verdict] = {
    DeadlineExceeded: Verdict.TIMEOUT,
    FirstTokenTimeout: Verdict.TIMEOUT,
    UpstreamMisconfigured: Verdict.HOLD,
    ClientFault: Verdict.IGNORED,
    Rejected: Verdict.IGNORED,
    RequestError: Verdict.IGNORED,
    asyncio.CancelledError: Verdict.IGNORED,
    GeneratorExit: Verdict.IGNORED,
    BackendError: Verdict.FAILURE,
    # Anything else is a defect of the backend's code: it failed.
    BaseException: Verdict.FAILURE,
}


def verdict(error: BaseException) -> Verdict:
    """What an error says about the backend that raised it (the nearest class in the table decides)."""
    if isinstance(error, UpstreamStatus) and error.status == 429:
        return Verdict.HOLD
    return next(_VERDICTS[kind] for kind in type(error).__mro__ if kind in _VERDICTS)


class Guarded:
    """A backend behind its limiter and its breaker. `random` gives 0..1 for the jitter of open times."""

    __slots__ = ("_backend", "_clock", "_observer", "_options", "_shared", "_usual_s", "breaker", "limiter")

    def __init__(
        self,
        backend: Backend,
        options: GuardOptions,
        *,
        clock: Clock,
        observer: Observer,
        random: Callable[[], float],
        shared: SharedState = Alone(),  # noqa: B008  it has no state
    ) -> None:
        self._backend = backend
        self._options = options
        self._clock = clock
        self._observer = observer
        self.limiter = ConcurrencyLimiter(FixedLimit(options.limit))
        #: Moving mean of the seconds to a whole answer, and to a stream's first content.
        self._usual_s = [0.0, 0.0]
        self._shared = shared
        self.breaker = CircuitBreaker(
            options.breaker,
            random,
            self._breaker_changed,
            on_finding=self._tell,
            hold_max_s=options.longest_hold_s,
        )
        shared.listen(self._fact_key, self._heard)

    @property
    def info(self) -> BackendInfo:
        return self._backend.info

    async def infer(self, request: Request, deadline: Deadline) -> Answer:
        call = _Call(self, request.id, deadline, streaming=0)
        try:
            answer = await self._backend.infer(request, deadline)
        except BaseException as error:
            call.failed(error)
            raise
        call.succeeded()
        return answer

    async def stream(self, request: ChatRequest, deadline: Deadline) -> AsyncIterator[Chunk]:
        call = _Call(self, request.id, deadline, streaming=1)
        finished = False
        try:
            # Every stream is a generator in fact: it must be closed here and now, not when it is collected.
            async with aclosing(cast("_Closable", self._backend.stream(request, deadline))) as chunks:
                async for chunk in chunks:
                    if call.first_s < 0 and chunk.kind is not ChunkKind.META:
                        call.saw_content()
                    if chunk.kind is ChunkKind.FINISH:
                        finished = True
                    yield chunk
        except GeneratorExit as error:
            # Whoever has read the finish has all of the answer.
            if finished:
                call.succeeded()
            else:
                call.failed(error)
            raise
        except BaseException as error:
            call.failed(error)
            raise
        call.succeeded()

    async def health(self) -> Health:
        health = await self._backend.health()
        if health.ready and self.breaker.state is BreakerState.OPEN:
            return Health(ready=True, reason="its breaker is open")
        return health

    async def aclose(self) -> None:
        await self._backend.aclose()

    @property
    def _fact_key(self) -> str:
        return f"breaker/{self.info.name}"

    def _tell(self, finding: Finding) -> None:
        self._shared.tell(self._fact_key, msgspec.to_builtins(finding))

    def _heard(self, teller: str, fact: Fact | None) -> None:
        if fact is None:
            return  # what a worker that is gone found out stays true until its time is over
        try:
            finding = msgspec.convert(fact, Finding)
        except msgspec.ValidationError as error:
            self._observer.on_event(FactRefused(key=self._fact_key, teller=teller, reason=str(error)))
            return
        self.breaker.hear(teller, finding, self._clock.now())

    def _breaker_changed(self, before: BreakerState, after: BreakerState, reason: str) -> None:
        self._observer.on_event(
            BreakerChanged(backend=self.info.name, before=before.value, after=after.value, reason=reason)
        )

    def status(self) -> dict[str, object]:
        """For people."""
        return {"breaker": self.breaker.state.value, "in_use": self.limiter.in_use, "limit": self.limiter.limit}

    def __repr__(self) -> str:
        return f"Guarded({self.limiter!r} -> {self.breaker!r} -> {self._backend!r})"


class _Closable(AsyncIterator[Chunk]):
    async def aclose(self) -> None: ...


class _Call:
    """One attempt: both permits and its times. Closed by exactly one of succeeded and failed."""

    __slots__ = ("_allowed_s", "_guard", "_permit", "_request_id", "_room", "_started", "_streaming", "first_s")

    def __init__(self, guard: Guarded, request_id: str, deadline: Deadline, *, streaming: int) -> None:
        now = guard._clock.now()
        self._guard = guard
        self._request_id = request_id
        self._streaming = streaming
        self._started = now
        self._allowed_s = deadline.at - now
        if self._allowed_s <= 0:
            raise DeadlineExceeded
        #: Seconds to the first content; negative until it is there.
        self.first_s = -1.0
        self._room: LimitPermit = guard.limiter.acquire()
        try:
            self._permit: BreakerPermit = guard.breaker.acquire(now)
        except Rejected:
            self._room.ignored()
            raise

    def saw_content(self) -> None:
        now = self._guard._clock.now()
        self.first_s = now - self._started
        self._permit.progress(now)

    def succeeded(self) -> None:
        guard = self._guard
        now = guard._clock.now()
        seconds = now - self._started
        if self.first_s < 0:
            self.first_s = seconds
        usual = guard._usual_s[self._streaming]
        guard._usual_s[self._streaming] = usual + _MEAN_WEIGHT * (self.first_s - usual) if usual else self.first_s
        self._room.success(self.first_s)
        self._permit.success(now)
        self._report("ok", seconds)

    def failed(self, error: BaseException) -> None:
        guard = self._guard
        now = guard._clock.now()
        seconds = now - self._started
        what = verdict(error)
        if what is Verdict.TIMEOUT:
            fair = self._allowed_s >= max(_FAIR_S, guard._usual_s[self._streaming])
            what = Verdict.FAILURE if fair else Verdict.IGNORED
        if what is Verdict.IGNORED:
            self._room.ignored()
            self._permit.ignore()
        else:
            self._room.dropped(seconds)
            if what is Verdict.HOLD:
                self._permit.hold(now, self._hold_s(error), _code(error))
            else:
                self._permit.failure(now)
        self._report(_code(error), seconds)

    def _hold_s(self, error: BaseException) -> float:
        options = self._guard._options
        if isinstance(error, UpstreamStatus):
            asked = options.throttled_hold_s if error.retry_after_s is None else error.retry_after_s
            return min(asked, options.throttled_hold_max_s)
        return options.misconfigured_hold_s

    def _report(self, outcome: str, seconds: float) -> None:
        guard = self._guard
        guard._observer.on_event(
            Attempted(
                request_id=self._request_id,
                backend=guard.info.name,
                outcome=outcome,
                seconds=seconds,
                first_s=self.first_s if self.first_s >= 0 else seconds,
            )
        )


def _code(error: BaseException) -> str:
    if isinstance(error, GatewayError):
        return error.code
    return "client_closed" if isinstance(error, asyncio.CancelledError | GeneratorExit) else "internal_error"
