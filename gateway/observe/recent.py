"""The last requests, for `gateway why` and `/debug/requests/{id}`. A bounded ring; no prompt text is in it."""

from __future__ import annotations

from typing import Any

from gateway.exchange import Record, RungStep
from policies.core.events import Completed, Handlers


class RecentRequests:
    """Keeps the last `most` records. Adding costs next to nothing; finding one looks through all of them."""

    __slots__ = ("_next", "_ring", "handlers")

    def __init__(self, most: int = 2_000) -> None:
        self._ring: list[Record | None] = [None] * most
        self._next = 0
        self.handlers: Handlers = {Completed: self.add}

    def add(self, record: Record) -> None:
        ring, at = self._ring, self._next
        ring[at] = record
        self._next = (at + 1) % len(ring)

    def newest(self, count: int) -> list[tuple[float, str]]:
        """(monotonic seconds at arrival, id) of the latest that ended, newest first."""
        size = len(self._ring)
        records = (self._ring[(self._next - 1 - back) % size] for back in range(min(count, size)))
        return [(record.started, record.request_id) for record in records if record is not None]

    def explain(self, request_id: str) -> dict[str, Any] | None:
        """Everything known about one request, as plain values; None = not (or no longer) here."""
        record = next((r for r in self._ring if r is not None and r.request_id == request_id), None)
        return None if record is None else _explained(record)


def _explained(record: Record) -> dict[str, Any]:
    told: dict[str, Any] = {
        "request_id": record.request_id,
        "surface": record.surface,
        "stream": record.stream,
        "policy": record.policy,
        "tenant": record.tenant,
        "class": record.priority,
        "route": record.rule,
        "rung": record.rung,
        "served_by": record.backend,
        "degraded": record.degraded,
        "outcome": record.outcome,
        "status": record.status,
        "fingerprint": record.fingerprint,
        "age_s": record.age_s,
        "ms": {
            "total": round(record.seconds * 1000, 3),
            "first": round(record.first_s * 1000, 3),
            "waited": round(record.waited_s * 1000, 3),
            "overhead": round(record.overhead_s * 1000, 3),
        },
        "tokens": {"in": record.prompt_tokens, "out": record.completion_tokens},
        "lookup": {"request_digest": record.digest.hex(), "outcome": record.lookup},
        "steps": [_step(step) for step in record.steps],
    }
    if record.explain is not None:
        router, reading = record.explain
        told["decision"] = router.explain(reading)
    return told


def _step(step: RungStep) -> dict[str, Any]:
    told: dict[str, Any] = {"rung": step.rung, "backend": step.backend, "outcome": step.outcome}
    if step.reason:
        told["reason"] = step.reason
    else:
        told["ms"] = round(step.seconds * 1000, 2)
    return told
