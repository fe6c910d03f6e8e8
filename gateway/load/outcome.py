"""What became of one request, decided from status, headers and how the body ended.

| seen                                                                | outcome      |
|---------------------------------------------------------------------|--------------|
| 2xx, whole, neither degraded header nor a stale / default rung      | full         |
| 2xx, whole, `x-gateway-degraded` set, or rung stale / default       | degraded     |
| a stream that broke, or reported an error, after its first content  | cut          |
| 5xx, 408, 3xx, no connection, timeout, empty or broken answer       | failed       |
| 429 because of the tenant's quota                                   | client_error |
| any other 429: a shed request                                       | failed       |
| other 4xx                                                           | client_error |
| never sent: the generator was at its own limit                      | dropped      |
| sent, but the run was stopped before the answer came                | abandoned    |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec

RUNG_HEADER = "x-gateway-rung"
DEGRADED_HEADER = "x-gateway-degraded"
#: Rungs whose answers are degraded by what they are.
DEGRADED_RUNGS = frozenset({"stale", "default"})
#: The rungs a gateway can name; anything else a server says becomes "other", so that counters stay bounded.
RUNGS = frozenset({"hit-l1", "hit-l2", "semantic", "stale", "heavy", "light", "canned", "default"})


class Outcome(StrEnum):
    FULL = "full"
    DEGRADED = "degraded"
    FAILED = "failed"
    CUT = "cut"
    CLIENT_ERROR = "client_error"
    DROPPED = "dropped"
    ABANDONED = "abandoned"


#: What the shares are taken of. Client errors, quota refusals, drops and abandoned requests are not the service's doing.
COUNTED = (Outcome.FULL, Outcome.DEGRADED, Outcome.FAILED, Outcome.CUT)
#: Requests that got a usable answer; the latency figures speak of these.
ANSWERED = (Outcome.FULL, Outcome.DEGRADED)


@dataclass(frozen=True, slots=True)
class Seen:
    """What the client saw of one request. `status` 0 = no answer began; `error` names what went wrong, for counting."""

    status: int
    rung: str = ""
    degraded: bool = False
    #: The body ended as its protocol says, with something in it and no error inside.
    complete: bool = True
    #: A stream's first content had arrived.
    committed: bool = False
    quota: bool = False
    error: str = ""


def classify(seen: Seen) -> Outcome:
    """The outcome of one request that was sent and ended."""
    status = seen.status
    if 200 <= status < 300:
        if seen.complete:
            return Outcome.DEGRADED if seen.degraded or seen.rung in DEGRADED_RUNGS else Outcome.FULL
        return Outcome.CUT if seen.committed else Outcome.FAILED
    if status == 429:
        return Outcome.CLIENT_ERROR if seen.quota else Outcome.FAILED
    if 400 <= status < 500 and status != 408:
        return Outcome.CLIENT_ERROR
    return Outcome.FAILED


def rung_of(headers: Mapping[str, str]) -> str:
    """The rung that answered: "none" without the header, "other" for a name we do not know."""
    rung = headers.get(RUNG_HEADER)
    if rung is None:
        return "none"
    return rung if rung in RUNGS else "other"


def error_code(body: bytes) -> str:
    """The machine-readable code of an error body in OpenAI's shape; empty when there is none."""
    try:
        answer: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""
    error = answer.get("error") if isinstance(answer, dict) else None
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, str) else ""


def is_quota(headers: Mapping[str, str], code: str) -> bool:
    """Is this 429 the tenant's own quota (says what remains, or names it), not a shed request?"""
    return (
        "quota" in code or code == "rate_limit_exceeded" or any(h.lower().startswith("x-ratelimit-") for h in headers)
    )
