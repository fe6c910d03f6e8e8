"""Answers past their time to live are renewed behind the client's back, once at a time, with waits after failures."""

from __future__ import annotations

import asyncio

import structlog

from cache.key import RequestDigest
from cache.result import Found
from gateway.dispatch import Attempt, Dispatcher
from gateway.exchange import Exchange, Record
from gateway.plan import Plan
from policies.core.clock import Clock
from policies.core.deadline import Deadline
from policies.core.errors import GatewayError

#: After a failed refresh the next one waits this long, doubling up to the last.
FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 60.0
_MOST_REMEMBERED = 10_000
#: Refreshes compete with users for the backends' permits: a few at a time are enough.
MOST_AT_ONCE = 16

_log = structlog.get_logger("gateway.refresh")


class Refresher:
    """Refreshes stored answers in the background. At most one refresh of a digest runs at a time."""

    def __init__(self, dispatcher: Dispatcher, clock: Clock) -> None:
        self._dispatcher = dispatcher
        self._clock = clock
        self._running: dict[bytes, asyncio.Task[None]] = {}
        #: digest -> (not before, next wait) after a failure.
        self._failed: dict[bytes, tuple[float, float]] = {}
        self.failures = 0

    def behind(self, exchange: Exchange, plan: Plan, digest: RequestDigest, found: Found) -> None:
        """Start a refresh of `found` by the backend that made it, unless one runs or has just failed."""
        backend = plan.backends.get(found.header.backend)
        if backend is None or digest.key in self._running or len(self._running) >= MOST_AT_ONCE:
            return
        wait = self._failed.get(digest.key)
        if wait is not None and self._clock.now() < wait[0]:
            return
        hidden = Exchange(
            request=exchange.request,
            model=exchange.model,
            record=Record(
                request_id=exchange.record.request_id,
                surface=exchange.record.surface,
                started=self._clock.now(),
                rule=found.header.rule,
            ),
        )
        attempt = Attempt(hidden, plan, backend, digest, first_choice=found.header.first_choice)
        task = asyncio.create_task(self._refresh(attempt, digest.key), name="cache-refresh")
        self._running[digest.key] = task
        task.add_done_callback(lambda _: self._running.pop(digest.key, None))

    async def _refresh(self, attempt: Attempt, key: bytes) -> None:
        try:
            await self._dispatcher.call(attempt, Deadline.after(attempt.plan.deadline_s, self._clock))
            self._failed.pop(key, None)
        except Exception as error:
            # A failed attempt has told its event; a defect has not. Either way the next try is put off.
            if not isinstance(error, GatewayError):
                _log.exception("a refresh failed by a defect", backend=attempt.backend.info.name)
            self.failures += 1
            _, wait = self._failed.pop(key, (0.0, FIRST_WAIT_S))
            if len(self._failed) >= _MOST_REMEMBERED:
                self._failed.pop(next(iter(self._failed)))
            self._failed[key] = (self._clock.now() + wait, min(LONGEST_WAIT_S, wait * 2))

    async def aclose(self) -> None:
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
