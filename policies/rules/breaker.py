"""A circuit breaker: when to stop calling a backend, and when to try it again.

Theory of operation
    CLOSED     Calls pass. Every outcome goes into a ring of ten sub-windows. The breaker trips when `consecutive`
               calls failed in a row, or when of at least `min_calls` calls within `window_s` the share `failure_rate`
               failed.
    OPEN       Calls are refused without being made. The time grows by two with every trip that follows soon after the
               last one, up to `open_max_s`, and is jittered so that many gateways do not probe at the same moment.
               A hold (the backend said when to come back, or refused our credentials) opens too; of two holds the
               longer counts.
    HALF_OPEN  Exactly `probes` calls may pass; their permits are counted before the caller's first await. A probe whose
               caller left gives its permit back; one that never comes back loses it after `probe_timeout_s`. As many
               successes close the breaker; one failure opens it again.

Transitions (the table in `breaker_state.py` is the machine: nothing else changes the state)
    from        event           to
    CLOSED      trip            OPEN
    CLOSED      hold            OPEN
    CLOSED      heard_open      OPEN
    OPEN        hold            OPEN        only ever later
    OPEN        heard_open      OPEN        only ever later
    OPEN        heard_passed    CLOSED      unless held
    OPEN        cooled          HALF_OPEN
    HALF_OPEN   probes_passed   CLOSED
    HALF_OPEN   heard_passed    CLOSED
    HALF_OPEN   probe_failed    OPEN
    HALF_OPEN   hold            OPEN
    HALF_OPEN   heard_open      OPEN

Outcomes of calls begun before a transition are not counted after it (each permit knows its generation), so a late failure
can neither re-open a breaker that has recovered nor spend a probe. All functions are synchronous, take `now` (monotonic
seconds) and draw jitter from an injected `random`; nothing here reads a clock.

What breakers of several workers share, and which of two findings wins, is at the top of `breaker_findings.py`.
"""

# ruff: noqa: SLF001  a permit is the other half of its breaker
from __future__ import annotations

from collections.abc import Callable

from policies.core.errors import BreakerOpen
from policies.rules.breaker_findings import Finding, Findings, OnFinding
from policies.rules.breaker_state import TRANSITIONS, BreakerEvent, BreakerOptions, BreakerState, OnChange

__all__ = [
    "TRANSITIONS",
    "BreakerEvent",
    "BreakerOptions",
    "BreakerPermit",
    "BreakerState",
    "CircuitBreaker",
]

_SLOTS = 10


class CircuitBreaker:
    """The state of one backend (or replica). See the module's theory of operation."""

    __slots__ = (
        "_bad",
        "_closed_at",
        "_consecutive",
        "_findings",
        "_generation",
        "_good",
        "_on_change",
        "_on_finding",
        "_open_until",
        "_options",
        "_passed",
        "_probes",
        "_random",
        "_stamps",
        "_state",
        "_trips",
        "_width",
    )

    def __init__(
        self,
        options: BreakerOptions,
        random: Callable[[], float],
        on_change: OnChange | None = None,
        *,
        on_finding: OnFinding | None = None,
        hold_max_s: float = 300.0,
    ) -> None:
        """`hold_max_s`: the longest hold that is believed when it is only heard."""
        self._options = options
        self._random = random
        self._on_change = on_change
        self._on_finding = on_finding
        self._findings = Findings(options.longest_open_s, hold_max_s)
        self._width = options.window_s / _SLOTS
        self._state = BreakerState.CLOSED
        self._generation = 0
        self._consecutive = 0
        self._good = [0] * _SLOTS
        self._bad = [0] * _SLOTS
        self._stamps = [-_SLOTS] * _SLOTS
        self._trips = 0
        self._closed_at = float("-inf")
        self._open_until = 0.0
        self._probes: list[BreakerPermit] = []
        self._passed = 0

    @property
    def state(self) -> BreakerState:
        return self._state

    def acquire(self, now: float) -> BreakerPermit:
        """A permit for one call. Raises BreakerOpen, with the seconds after which a try makes sense."""
        if self._state is BreakerState.CLOSED:
            return BreakerPermit(self, self._generation, now, probe=False)
        return self._acquire_probe(now)

    def opens_in(self, now: float) -> float:
        """Seconds until an open breaker may probe; 0 when calls may pass already."""
        return max(0.0, self._open_until - now) if self._state is BreakerState.OPEN else 0.0

    def _acquire_probe(self, now: float) -> BreakerPermit:
        if self._state is BreakerState.OPEN:
            if now < self._open_until:
                raise BreakerOpen("the backend is being rested after failures", self._open_until - now)
            self._move(BreakerEvent.COOLED, now, "the open time is over")
        kept = []
        for probe in self._probes:
            if now - probe.taken_at < self._options.probe_timeout_s:
                kept.append(probe)
            else:
                probe.generation = -1  # whenever it comes back, it no longer counts
        self._probes = kept
        if len(kept) + self._passed >= self._options.probes:
            raise BreakerOpen("the backend is being probed", self._options.open_s)
        permit = BreakerPermit(self, self._generation, now, probe=True)
        kept.append(permit)
        return permit

    # ------------------------------------------------------------------------------------ called by permits only

    def _succeeded(self, permit: BreakerPermit, now: float) -> None:
        if permit.generation != self._generation:
            return
        if permit.probe:
            self._probe_passed(permit, now)
            return
        self._consecutive = 0
        self._good[self._slot(now)] += 1

    def _probe_passed(self, permit: BreakerPermit, now: float) -> None:
        self._probes.remove(permit)
        self._passed += 1
        if self._passed >= self._options.probes:
            self._move(BreakerEvent.PROBES_PASSED, now, f"{self._passed} probes passed")

    def _failed(self, permit: BreakerPermit, now: float) -> None:
        if permit.generation != self._generation:
            return
        if self._state is BreakerState.HALF_OPEN:
            self._move(BreakerEvent.PROBE_FAILED, now, "a probe failed")
            return
        self._consecutive += 1
        self._bad[self._slot(now)] += 1
        if self._consecutive >= self._options.consecutive:
            self._move(BreakerEvent.TRIP, now, f"{self._consecutive} calls failed in a row")
            return
        good, bad = self.counts(now)
        if good + bad >= self._options.min_calls and bad >= self._options.failure_rate * (good + bad):
            self._move(BreakerEvent.TRIP, now, f"{bad} of {good + bad} calls failed")

    def _ignored(self, permit: BreakerPermit) -> None:
        if permit.probe and permit.generation == self._generation:
            self._probes.remove(permit)

    def _hold(self, permit: BreakerPermit, now: float, seconds: float, reason: str) -> None:
        if permit.generation != self._generation and self._state is not BreakerState.OPEN:
            return
        until = now + seconds
        if self._state is not BreakerState.OPEN:
            self._move(BreakerEvent.HOLD, now, reason, until)
            return
        self._open_until = max(self._open_until, until)
        self._tell(self._findings.held(now, until, self._trips, reason))

    # ------------------------------------------------------------------------------------------- other workers

    def hear(self, teller: str, finding: Finding, now: float) -> None:
        """Take over what `teller`, a breaker of the same backend in another worker, has found out. In any order, any
        number of times."""
        reason = f"{teller}: {finding.reason}"
        if self._findings.heard_pass(finding, now) and self._state is not BreakerState.CLOSED:
            self._move(BreakerEvent.HEARD_PASSED, now, reason)
        until = self._findings.heard_opening(finding, now)
        if not until:
            return
        self._trips = max(self._trips, finding.trips)
        if self._state is BreakerState.OPEN:
            self._open_until = max(self._open_until, until)
        else:
            self._move(BreakerEvent.HEARD_OPEN, now, reason, until)

    def _tell(self, finding: Finding | None) -> None:
        if finding is not None and self._on_finding is not None:
            self._on_finding(finding)

    # ---------------------------------------------------------------------------------------------------- inside

    def counts(self, now: float) -> tuple[int, int]:
        """(successes, failures) within the window."""
        oldest = int(now / self._width) - _SLOTS
        live = [i for i in range(_SLOTS) if self._stamps[i] > oldest]
        return sum(self._good[i] for i in live), sum(self._bad[i] for i in live)

    def _slot(self, now: float) -> int:
        stamp = int(now / self._width)
        index = stamp % _SLOTS
        if self._stamps[index] != stamp:
            self._stamps[index] = stamp
            self._good[index] = self._bad[index] = 0
        return index

    def _move(self, event: BreakerEvent, now: float, reason: str, until: float = 0.0) -> None:
        """`until`: the end of a hold or of what was heard; a trip's is drawn here."""
        before = self._state
        after = TRANSITIONS[before, event]
        self._state = after
        self._generation += 1
        self._probes = []
        self._passed = 0
        finding: Finding | None = None
        if after is BreakerState.CLOSED:
            self._closed_at = now
            self._consecutive = 0
            self._stamps = [-_SLOTS] * _SLOTS
            if event is BreakerEvent.PROBES_PASSED:
                finding = self._findings.passed(now, self._trips, reason)
        elif after is BreakerState.OPEN:
            if event is BreakerEvent.HOLD:
                finding = self._findings.held(now, until, self._trips, reason)
            elif event is not BreakerEvent.HEARD_OPEN:
                until = now + self._open_time(event, now)
                finding = self._findings.tripped(now, until, self._trips, reason)
            self._open_until = until
        if self._on_change is not None:
            self._on_change(before, after, reason)
        self._tell(finding)

    def _open_time(self, event: BreakerEvent, now: float) -> float:
        options = self._options
        if event is BreakerEvent.TRIP and now - self._closed_at > options.window_s:
            self._trips = 0  # it held for a whole window: not the same trouble
        length = min(options.open_s * 2.0 ** min(self._trips, 32), options.open_max_s)
        self._trips += 1
        return length * (1.0 + options.jitter * (2.0 * self._random() - 1.0))

    def __repr__(self) -> str:
        if self._state is BreakerState.HALF_OPEN:
            detail = f"{self._passed}/{self._options.probes} probes passed, {len(self._probes)} out"
        elif self._state is BreakerState.OPEN:
            detail = f"until {self._open_until:.2f}, trip {self._trips}"
        else:
            detail = f"{self._consecutive}/{self._options.consecutive} failures in a row"
        return f"CircuitBreaker({self._state.name}, {detail})"


class BreakerPermit:
    """Leave to make one call; closed by exactly one of success, failure, ignore and hold."""

    __slots__ = ("_breaker", "generation", "probe", "taken_at")

    def __init__(self, breaker: CircuitBreaker, generation: int, now: float, *, probe: bool) -> None:
        self._breaker: CircuitBreaker | None = breaker
        self.generation = generation
        self.taken_at = now
        self.probe = probe

    def success(self, now: float) -> None:
        self._close()._succeeded(self, now)

    def failure(self, now: float) -> None:
        self._close()._failed(self, now)

    def ignore(self) -> None:
        """The call says nothing about the backend: the client left, or the request itself was at fault."""
        self._close()._ignored(self)

    def hold(self, now: float, seconds: float, reason: str) -> None:
        """The backend must be left alone for `seconds`."""
        self._close()._hold(self, now, seconds, reason)

    def progress(self, now: float) -> None:
        """A stream has shown its first content. For a probe that is the proof asked for; the stream's end counts later
        as an ordinary call, so that a breaker does not stay half-open for the length of an answer."""
        breaker = self._breaker
        if self.probe and breaker is not None and self.generation == breaker._generation:
            breaker._probe_passed(self, now)
            self.probe = False
            # Counted with the calls of the state this probe led to.
            self.generation = breaker._generation if breaker._state is BreakerState.CLOSED else -1

    def _close(self) -> CircuitBreaker:
        breaker = self._breaker
        if breaker is None:
            raise RuntimeError("this permit was closed already: every call closes its permit exactly once")
        self._breaker = None
        return breaker
