"""What every answer says about itself (CONTRACTS, section 2)."""

from __future__ import annotations

from gateway.exchange import Record
from policies.core.clock import Clock


def answer_headers(record: Record, clock: Clock) -> dict[str, str]:
    """The `x-gateway-*` headers of a record, by its `expose`: all, basic (id, rung, degraded, age) or none."""
    if record.expose == "none":
        return {}
    headers = {"x-gateway-request-id": record.request_id}
    if record.rung:
        headers["x-gateway-rung"] = record.rung
    if record.degraded:
        headers["x-gateway-degraded"] = record.degraded
    if record.age_s is not None:
        headers["x-gateway-age"] = str(int(record.age_s))
    if record.expose == "all":
        if record.policy:
            headers["x-gateway-policy"] = record.policy
        if record.rule:
            headers["x-gateway-route"] = record.rule
        if record.backend:
            headers["x-gateway-served-by"] = record.backend
        if record.fingerprint:
            headers["x-gateway-fingerprint"] = record.fingerprint
        overhead_ms = (clock.now() - record.started - record.waited_s) * 1000
        headers["x-gateway-overhead-ms"] = f"{overhead_ms:.3f}"
    return headers
