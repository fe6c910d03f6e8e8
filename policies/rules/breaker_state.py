"""A breaker's states, events, transition table and options. How it works is at the top of `breaker.py`."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from policies.language.schema import Limit, Section, Share

Count = Annotated[int, Meta(ge=1)]
SomeShare = Annotated[float, Meta(gt=0, extra={"unit": "share"}, extra_json_schema={"x-unit": "share"})]


class BreakerState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class BreakerEvent(StrEnum):
    TRIP = "trip"
    HOLD = "hold"
    COOLED = "cooled"
    PROBES_PASSED = "probes_passed"
    PROBE_FAILED = "probe_failed"
    HEARD_OPEN = "heard_open"
    HEARD_PASSED = "heard_passed"


TRANSITIONS: dict[tuple[BreakerState, BreakerEvent], BreakerState] = {
    (BreakerState.CLOSED, BreakerEvent.TRIP): BreakerState.OPEN,
    (BreakerState.CLOSED, BreakerEvent.HOLD): BreakerState.OPEN,
    (BreakerState.CLOSED, BreakerEvent.HEARD_OPEN): BreakerState.OPEN,
    (BreakerState.OPEN, BreakerEvent.HOLD): BreakerState.OPEN,
    (BreakerState.OPEN, BreakerEvent.HEARD_OPEN): BreakerState.OPEN,
    (BreakerState.OPEN, BreakerEvent.HEARD_PASSED): BreakerState.CLOSED,
    (BreakerState.OPEN, BreakerEvent.COOLED): BreakerState.HALF_OPEN,
    (BreakerState.HALF_OPEN, BreakerEvent.PROBES_PASSED): BreakerState.CLOSED,
    (BreakerState.HALF_OPEN, BreakerEvent.HEARD_PASSED): BreakerState.CLOSED,
    (BreakerState.HALF_OPEN, BreakerEvent.PROBE_FAILED): BreakerState.OPEN,
    (BreakerState.HALF_OPEN, BreakerEvent.HOLD): BreakerState.OPEN,
    (BreakerState.HALF_OPEN, BreakerEvent.HEARD_OPEN): BreakerState.OPEN,
}


class BreakerOptions(Section, frozen=True, kw_only=True):
    """When to open and for how long."""

    failure_rate: SomeShare = 0.5
    min_calls: Count = 20
    window_s: Limit = 10.0
    consecutive: Count = 5
    open_s: Limit = 1.0
    #: At least `open_s`.
    open_max_s: Limit = 30.0
    #: The open time is drawn from open * (1 - jitter) .. open * (1 + jitter).
    jitter: Share = 0.2
    probes: Count = 3
    probe_timeout_s: Limit = 30.0

    @property
    def longest_open_s(self) -> float:
        """The longest that failures alone keep a breaker open."""
        return self.open_max_s * (1.0 + self.jitter)


#: Called with (before, after, reason) after every change of state.
OnChange = Callable[[BreakerState, BreakerState, str], None]
