"""What every answer says about itself (CONTRACTS, section 2)."""

from __future__ import annotations

from gateway.exchange import Record
from policies.core.clock import Clock


def answer_headers(record: Record, clock: Clock) -> dict[str, str]:
    """The `x-gateway-*` headers of a record, by its `expose`: all, basic (id, rung, degraded, age) or none."""
    if record.expose == "all":
        # Built at once: nearly every answer has all of these.
        overhead_ms = (clock.now() - record.started - record.waited_s) * 1000
        headers = {
            "x-gateway-request-id": record.request_id,
            "x-gateway-policy": record.policy,
            "x-gateway-route": record.rule,
            "x-gateway-served-by": record.backend,
            "x-gateway-rung": record.rung,
            "x-gateway-fingerprint": record.fingerprint,
            "x-gateway-overhead-ms": f"{overhead_ms:.3f}",
        }
        if not (record.fingerprint and record.rung):
            headers = {name: value for name, value in headers.items() if value}
    elif record.expose == "basic":
        headers = {"x-gateway-request-id": record.request_id}
        if record.rung:
            headers["x-gateway-rung"] = record.rung
    else:
        return {}
    if record.degraded:
        headers["x-gateway-degraded"] = record.degraded
    if record.age_s is not None:
        headers["x-gateway-age"] = str(int(record.age_s))
    return headers
