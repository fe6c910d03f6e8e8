"""One rung: one call of one backend, shared with equal requests in flight, stored when it may be."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

from backends.api import Answer, Backend, ChatRequest, Chunk, ChunkKind
from backends.openai_assemble import assemble
from cache.key import RequestDigest, entry_key
from cache.result import EntryMeta, ResultCache
from cache.single_flight import Flights
from gateway.exchange import Exchange, Reply
from gateway.plan import Plan
from policies.core.clock import Clock
from policies.core.deadline import Deadline
from policies.core.errors import DeadlineExceeded, FirstTokenTimeout, MalformedAnswer, TruncatedAnswer

#: What may arrive before the first content; more is not an answer.
PRE_COMMIT_BYTES = 64 * 1024
#: A backend ends its own wait at the deadline; the waiter's own guard fires this much later, only if that failed.
_GRACE_S = 0.02


@dataclass(frozen=True, slots=True)
class Attempt:
    """What one call of one backend needs to know."""

    exchange: Exchange
    plan: Plan
    backend: Backend
    digest: RequestDigest | None
    first_choice: bool


class Dispatcher:
    """Calls backends. Raises what backends raise; never degrades by itself."""

    def __init__(self, cache: ResultCache, flights: Flights, clock: Clock) -> None:
        self._cache = cache
        self._flights = flights
        self._clock = clock

    async def call(self, attempt: Attempt, deadline: Deadline) -> Reply:
        """The whole answer, or a stream that has passed its commit point, before `deadline`."""
        record = attempt.exchange.record
        began = self._clock.now()
        try:
            if attempt.exchange.stream:
                held, rest = await self._committed(attempt, deadline)
                reply = Reply(record, held=held, rest=rest)
            else:
                reply = Reply(record, answer=await self._whole(attempt, deadline))
        finally:
            record.waited_s += self._clock.now() - began
        return reply

    def _shared_key(self, attempt: Attempt) -> bytes | None:
        """The entry key when this answer may be stored and shared in flight, else None."""
        if attempt.digest is None or attempt.exchange.controls.no_store:
            return None
        if not attempt.plan.may_store(attempt.exchange.request):
            return None
        return entry_key(attempt.digest.key, attempt.backend.info.fingerprint)

    async def _whole(self, attempt: Attempt, deadline: Deadline) -> Answer:
        backend, request = attempt.backend, attempt.exchange.request
        key = self._shared_key(attempt)
        if key is None:
            async with deadline.less(-_GRACE_S).timeout():
                return await backend.infer(request, deadline)
        store = self._storer(attempt, key)
        flight = _flight_key(attempt, key)
        return await self._flights.whole(flight, lambda shared: backend.infer(request, shared), deadline, store)

    async def _committed(self, attempt: Attempt, deadline: Deadline) -> tuple[list[Chunk], AsyncIterator[Chunk]]:
        backend, request = attempt.backend, attempt.exchange.request
        assert isinstance(request, ChatRequest)
        key = self._shared_key(attempt)
        if key is None:
            chunks = backend.stream(request, deadline)
        else:
            store = self._storer(attempt, key)
            chunks = self._flights.stream(
                _flight_key(attempt, key),
                lambda shared: backend.stream(request, shared),
                deadline,
                lambda log: store(assemble([chunk.data for chunk in log])),
            )
        return await self._until_content(chunks, backend.info.name, deadline), chunks

    async def _until_content(self, chunks: AsyncIterator[Chunk], name: str, deadline: Deadline) -> list[Chunk]:
        """The chunks up to the first content. Whatever goes wrong, the stream is closed."""
        held: list[Chunk] = []
        size = 0
        try:
            async with deadline.less(-_GRACE_S).timeout():
                async for chunk in chunks:
                    held.append(chunk)
                    if chunk.kind is ChunkKind.CONTENT:
                        return held
                    size += len(chunk.data)
                    if chunk.kind is ChunkKind.FINISH:
                        raise MalformedAnswer("the stream finished without any content", name)
                    if size > PRE_COMMIT_BYTES:
                        raise MalformedAnswer(f"no content within the first {PRE_COMMIT_BYTES} bytes", name)
            raise TruncatedAnswer("the stream ended before any content", name)
        except BaseException as error:
            close = getattr(chunks, "aclose", None)
            if close is not None:
                await close()
            if isinstance(error, DeadlineExceeded):
                raise FirstTokenTimeout("no first token within the limit", name) from error
            raise

    def _storer(self, attempt: Attempt, key: bytes) -> _Storer:
        info = attempt.backend.info
        record = attempt.exchange.record
        assert attempt.digest is not None
        meta = EntryMeta(
            fingerprint=info.fingerprint,
            rule=record.rule,
            backend=info.name,
            first_choice=attempt.first_choice,
            generation=self._cache.generation(info.fingerprint),
        )
        return _Storer(self._cache, key, attempt.digest.check, meta, attempt.plan, self._clock)


def _flight_key(attempt: Attempt, key: bytes) -> bytes:
    """`no-cache` asks for a call of its own: a flight that nobody else can join, whose answer is stored all the same."""
    return key + attempt.exchange.record.request_id.encode() if attempt.exchange.controls.no_cache else key


class _Storer:
    """Stores one answer when it is complete; called once a flight."""

    __slots__ = ("_began", "_cache", "_check", "_clock", "_key", "_meta", "_plan")

    def __init__(self, cache: ResultCache, key: bytes, check: bytes, meta: EntryMeta, plan: Plan, clock: Clock) -> None:
        self._cache = cache
        self._key = key
        self._check = check
        self._meta = meta
        self._plan = plan
        self._clock = clock
        self._began = clock.now()

    def __call__(self, answer: Answer) -> None:
        compute_ms = (self._clock.now() - self._began) * 1000
        self._cache.put(self._key, self._check, answer, self._meta, compute_ms, self._plan.policy.cache.result)
