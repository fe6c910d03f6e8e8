"""The gateway's processes as metrics, from what the crew says of its places."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gateway.observe.metric_store import Family, Sample

_LABEL = ("process",)


def process_families(status: Sequence[dict[str, Any]]) -> list[Family]:
    """One sample a place; `status` is `Crew.status()`."""

    def samples(value: Any) -> list[Sample]:
        return [Sample((place["name"],), [float(value(place))]) for place in status]

    return [
        Family("gateway_process_up", "1 while a process serves in this place.", "gauge", _LABEL, "max",
               samples(lambda place: place["state"] == "serving")),
        Family("gateway_process_crash_loop", "1 while the process of this place keeps ending.", "gauge", _LABEL, "max",
               samples(lambda place: place["crash_loop"])),
        Family("gateway_process_ends", "Times that a process of this place ended by itself.", "counter", _LABEL, "sum",
               samples(lambda place: place["ended"])),
    ]  # fmt: skip


def in_flight_family(in_flight: int) -> Family:
    """What one worker has under way."""
    help_ = "Requests under way, by worker."
    return Family("gateway_requests_in_flight", help_, "gauge", (), "per-worker", [Sample((), [float(in_flight)])])
