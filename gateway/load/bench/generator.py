"""What a generator of a bench measures, and the one request that all of them send."""

from __future__ import annotations

from typing import Protocol

import msgspec

from gateway.load.bench.processes import Server

#: A ratio counts only when the server's core is this busy and the generator's is not.
BUSY = 0.95

_HEAD = (
    '{"model":"%s","messages":[{"role":"system","content":"You are a helpful assistant."},'
    '{"role":"user","content":"What are your opening hours?'
)
_TAIL = '"}],"temperature":0}'


def body(model: str, salt: int | None = None) -> bytes:
    """The request: a system line and one short question. A salt makes it different from all others."""
    return (_HEAD % model + ("" if salt is None else f" #{salt}") + _TAIL).encode()


class Measured(msgspec.Struct, frozen=True):
    """One run of a generator against one server. Shares are of one core; the upstream's work is the generator's."""

    server: str
    connections: int
    requests_per_s: float
    p50_ms: float
    p99_ms: float
    failed: int
    server_busy: float
    generator_busy: float

    @property
    def counts(self) -> bool:
        """May a ratio be made of it: was the server the limit, and not the generator, and did all requests succeed?"""
        return self.server_busy >= BUSY and self.generator_busy < BUSY and self.failed == 0


class Generator(Protocol):
    """Sends as fast as answers come, on a number of connections."""

    name: str

    async def measure(
        self, server: Server, base_url: str, connections: int, seconds: float, unique: bool
    ) -> Measured: ...
