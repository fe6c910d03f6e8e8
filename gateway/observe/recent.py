"""The last requests, for `gateway why` and `/debug/requests/{id}`. A bounded ring; no prompt text is in it."""

from __future__ import annotations

from typing import Any

from gateway.exchange import Record


class RecentRequests:
    """Keeps the last `most` records."""

    __slots__ = ("_most", "_records")

    def __init__(self, most: int = 2_000) -> None:
        self._most = most
        self._records: dict[str, Record] = {}

    def add(self, record: Record) -> None:
        records = self._records
        records[record.request_id] = record
        if len(records) > self._most:
            del records[next(iter(records))]

    def explain(self, request_id: str) -> dict[str, Any] | None:
        """Everything known about one request, as plain values; None = not (or no longer) here."""
        record = self._records.get(request_id)
        if record is None:
            return None
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
                "overhead": round(max(0.0, record.seconds - record.waited_s) * 1000, 3),
            },
            "tokens": {"in": record.prompt_tokens, "out": record.completion_tokens},
            "lookups": [{"request_digest": digest, "outcome": outcome} for digest, outcome in record.lookups],
            "steps": record.steps,
        }
        if record.explain is not None:
            router, reading = record.explain
            told["decision"] = router.explain(reading)
        return told

    def newest(self, count: int) -> list[str]:
        return list(self._records)[-count:][::-1]
