"""L2: a Redis shared by workers and hosts. An accelerator, never a dependency: whatever goes wrong is a miss.

Names are `gw:{namespace}:v1:<kind>:<32 hex>`; a value lives PX milliseconds, and PTTL, read with it, tells its age without
comparing the clocks of two hosts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from cache.api import MISS, Kind, Missing, Stored, Write
from cache.redis_wire import Command, RedisWire
from policies.core.clock import Clock
from policies.core.errors import BreakerOpen
from policies.rules.breaker import BreakerOptions, BreakerPermit, BreakerState, CircuitBreaker

_log = structlog.get_logger("gateway.cache.redis")

#: The same kind of line is not logged again within this time.
_QUIET_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisOptions:
    """`url`: redis://, rediss:// or unix://, credentials included (never logged)."""

    url: str
    namespace: str = "default"
    #: Limit of one read; writes are made behind answers and may take longer.
    limit_s: float = 0.030
    write_limit_s: float = 0.250
    max_connections: int = 16
    breaker: BreakerOptions = BreakerOptions(probes=1, probe_timeout_s=5.0)


class RedisStore:
    """Implements `cache.api.Store`. Nothing is connected before the first call."""

    def __init__(self, options: RedisOptions, clock: Clock, random: Callable[[], float]) -> None:
        self._options = options
        self._clock = clock
        self._wire = RedisWire(options.url, options.max_connections)
        self._prefix = f"gw:{options.namespace}:v1:"
        #: The server as such; a call that is cancelled says nothing about it.
        self._breaker = CircuitBreaker(options.breaker, random, self._on_change)
        #: Refused writes (a replica, out of memory) must not stop the reads.
        self._writes = CircuitBreaker(options.breaker, random)
        self._probe: asyncio.Task[None] | None = None
        self._last_error = ""
        self._said: dict[str, float] = {}
        self._counts = dict.fromkeys(
            ("hits", "misses", "skipped", "read_failures", "writes", "write_failures", "write_refused", "unusable"), 0
        )

    @property
    def available(self) -> bool:
        return self._breaker.state is BreakerState.CLOSED

    async def get_many(self, kind: Kind, keys: Sequence[bytes]) -> list[Stored | Missing]:
        misses: list[Stored | Missing] = [MISS] * len(keys)
        if not keys or not self._may_call():
            self._counts["skipped"] += len(keys)
            return misses
        names = [self._name(kind, key) for key in keys]
        # Times left first: should a value be replaced in between, it looks older than it is, never younger.
        commands: list[Command] = [("PTTL", name) for name in names]
        commands.append(("MGET", *names))
        replies = await self._call(commands, self._options.limit_s, "read_failures")
        if replies is None:
            return misses
        *left, values = replies
        if not isinstance(values, list) or len(values) != len(keys):
            self._counts["read_failures"] += 1
            self._say("redis refuses reads", error=type(values).__name__)
            return misses
        found = [self._stored(value, ms) for value, ms in zip(values, left, strict=True)]
        hits = sum(item is not MISS for item in found)
        self._counts["hits"] += hits
        self._counts["misses"] += len(keys) - hits
        return found

    async def put_many(self, kind: Kind, writes: Sequence[Write]) -> None:
        permit = self._may_write() if writes and self._may_call() else None
        if permit is None:
            self._counts["skipped"] += len(writes)
            return
        commands: list[Command] = [
            ("SET", self._name(kind, write.key), write.value, "PX", max(1, int(write.ttl_s * 1000))) for write in writes
        ]
        try:
            replies = await self._call(commands, self._options.write_limit_s, "write_failures")
        except asyncio.CancelledError:
            permit.ignore()
            raise
        if replies is None:
            permit.ignore()
            return
        refused = [reply for reply in replies if isinstance(reply, Exception)]
        self._counts["writes"] += len(replies) - len(refused)
        if refused:
            self._counts["write_refused"] += len(refused)
            self._say("redis refuses writes", error=type(refused[0]).__name__)
            permit.failure(self._clock.now())
        else:
            permit.success(self._clock.now())

    async def delete_many(self, kind: Kind, keys: Sequence[bytes]) -> None:
        if keys and self._may_call():
            names = [self._name(kind, key) for key in keys]
            await self._call([("UNLINK", *names)], self._options.write_limit_s, "write_failures")

    def stats(self) -> dict[str, float]:
        return {**self._counts, "available": float(self.available)}

    async def aclose(self) -> None:
        if self._probe is not None:
            self._probe.cancel()
            await asyncio.gather(self._probe, return_exceptions=True)
        await self._wire.aclose()

    # ------------------------------------------------------------------------------------------------------ inside

    def _name(self, kind: Kind, key: bytes) -> str:
        return f"{self._prefix}{kind.value}:{key.hex()}"

    def _stored(self, value: object, left_ms: object) -> Stored | Missing:
        """A value without a time to live is none of ours: its age is not known."""
        if value is None:
            return MISS
        if not isinstance(value, bytes) or not isinstance(left_ms, int) or left_ms < 0:
            # -2 = stored between the two commands: it is there next time.
            self._counts["unusable"] += left_ms != -2
            return MISS
        return Stored(value, left_ms / 1000.0)

    def _may_call(self) -> bool:
        """False while the server is being rested. When it is time to try again, a probe of our own does, not a request."""
        if self._breaker.state is BreakerState.CLOSED:
            return True
        if (self._probe is None or self._probe.done()) and self._breaker.opens_in(self._clock.now()) == 0.0:
            self._probe = asyncio.create_task(self._run_probe(), name="redis-probe")
        return False

    def _may_write(self) -> BreakerPermit | None:
        try:
            return self._writes.acquire(self._clock.now())
        except BreakerOpen:
            return None

    async def _run_probe(self) -> None:
        await self._call([("PING",)], self._options.limit_s, "read_failures")

    async def _call(self, commands: Sequence[Command], limit_s: float, counter: str) -> list[object] | None:
        """The replies, or None after a failure, which is counted. Raises CancelledError only."""
        try:
            permit = self._breaker.acquire(self._clock.now())
        except BreakerOpen:
            return None
        try:
            replies = await self._wire.call(commands, limit_s)
        except asyncio.CancelledError:
            permit.ignore()
            raise
        except Exception as error:
            # Of whatever kind: the client library and a broken server have many, and none may reach a request.
            self._counts[counter] += 1
            self._last_error = type(error).__name__
            permit.failure(self._clock.now())
            return None
        permit.success(self._clock.now())
        return replies

    def _on_change(self, before: BreakerState, after: BreakerState, reason: str) -> None:
        if before is BreakerState.CLOSED:
            self._say("redis is left alone for a while; answers keep flowing", reason=reason, error=self._last_error)
        elif after is BreakerState.CLOSED:
            self._say("redis is back")

    def _say(self, event: str, **facts: str) -> None:
        """A warning, unless the same one was given within the last minute: an outage takes a few lines, not thousands."""
        now = self._clock.now()
        if now - self._said.get(event, -_QUIET_S) >= _QUIET_S:
            self._said[event] = now
            _log.warning(event, namespace=self._options.namespace, **facts)

    def __repr__(self) -> str:
        return f"RedisStore({self._options.namespace}, {self._breaker!r}, {self._wire!r})"
