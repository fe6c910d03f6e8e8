"""What the breakers of several workers share about one backend, and which of two findings wins.

A breaker tells what it found out by its own calls: that it opened and until when, that it is held for longer, that
its probes passed. What it heard it never tells again, so there are at most as many messages as own changes and holds.

Order     Findings are ordered by the moment they were made, not by when they arrive. A pass closes only what opened
          before it; an opening that is older than a known pass, or is over, changes nothing. So a finding may be
          late, repeated or overtaken. Of two openings the later end counts. At the same moment an opening wins.
Holds     A hold is the backend's own word: nobody's success ends it early, whether the hold was this worker's or was
          heard. A pass closes only when it was made after the hold's end.
Trust     A heard end is cut to what this breaker could have decided itself at that moment: `open_max_s` with its
          jitter, or `hold_max_s`. Repeating a finding does not lengthen that.
Growth    Trips in a row are shared, so that open times grow the same whoever finds the failure.
Probes    When the time is over each worker sends its own probes: at most workers x `probes` at once. The first
          verdict ends it everywhere (a failure opens all, a pass closes all); probes still out no longer count.
Beginning A worker that starts is told the current findings: it is open for what is left of them, else closed.
Ending    What a worker that is gone told stays true until its time is over. Nobody reachable: each works alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import msgspec
from msgspec import Meta

#: Monotonic seconds of the host. The bound also keeps NaN out, which would be neither early nor late.
Moment = Annotated[float, Meta(ge=0)]
#: A hold that ends this much later than what the others know is worth telling; a burst of 429s is told once.
_TELL_LATER_S = 0.1


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """What one breaker has found out by its own calls: its latest pass and what it has opened for since. 0 = never.

    Each finding says all of it, so whoever missed the ones before loses nothing.
    """

    #: When it opened, or the hold was asked for; 0 after a pass.
    opened_at: Moment = 0.0
    #: Until when it rests because of failures.
    until: Moment = 0.0
    #: Until when the backend asked to be left alone.
    held_until: Moment = 0.0
    #: When its probes passed.
    passed_at: Moment = 0.0
    #: Trips in a row, from which the next open time follows.
    trips: Annotated[int, Meta(ge=0)] = 0
    #: Of the latest change.
    reason: str = ""


#: Called with every own finding, after the change of state.
OnFinding = Callable[[Finding], None]


class Findings:
    """What one breaker knows: found out by itself, or heard. `open_max_s` and `hold_max_s`: the longest that a heard trip
    and a heard hold are believed."""

    __slots__ = (
        "_held_until",
        "_hold_max_s",
        "_known_hold",
        "_open_max_s",
        "_opened_at",
        "_own_pass_at",
        "_own_until",
        "_passed_at",
    )

    def __init__(self, open_max_s: float, hold_max_s: float) -> None:
        self._open_max_s = open_max_s
        self._hold_max_s = hold_max_s
        # The latest of each, own or heard.
        self._opened_at = self._passed_at = float("-inf")
        self._held_until = 0.0
        #: The latest end of a hold that was told or heard.
        self._known_hold = 0.0
        #: The end of an own trip that no pass has ended.
        self._own_until = 0.0
        self._own_pass_at = 0.0

    def tripped(self, now: float, until: float, trips: int, reason: str) -> Finding:
        """An own trip or failed probe."""
        self._opened_at = now
        self._own_until = until
        return Finding(opened_at=now, until=until, passed_at=self._own_pass_at, trips=trips, reason=reason)

    def held(self, now: float, until: float, trips: int, reason: str) -> Finding | None:
        """An own hold. None when the others know as much already."""
        self._opened_at = now
        self._held_until = max(self._held_until, until)
        if until < self._known_hold + _TELL_LATER_S:
            return None
        self._known_hold = until
        return Finding(
            opened_at=now,
            until=self._own_until,
            held_until=until,
            passed_at=self._own_pass_at,
            trips=trips,
            reason=reason,
        )

    def passed(self, now: float, trips: int, reason: str) -> Finding:
        """Own probes passed."""
        self._passed_at = self._own_pass_at = now
        self._own_until = 0.0
        return Finding(passed_at=now, trips=trips, reason=reason)

    def heard_pass(self, finding: Finding, now: float) -> bool:
        """True when its pass ends every opening and hold that is known."""
        at = min(finding.passed_at, now)
        self._passed_at = max(self._passed_at, at)
        if at <= self._opened_at or at < self._held_until:
            return False
        self._own_until = 0.0
        return True

    def heard_opening(self, finding: Finding, now: float) -> float:
        """Until when to be open because of it; 0 when it is over, or older than a known pass."""
        at = min(finding.opened_at, now)
        held = min(finding.held_until, at + self._hold_max_s)
        tripped = min(finding.until, at + self._open_max_s) if at >= self._passed_at else 0.0
        until = max(tripped, held)
        if until <= now:
            return 0.0
        self._opened_at = max(self._opened_at, at)
        self._held_until = max(self._held_until, held)
        self._known_hold = max(self._known_hold, held)
        return until
