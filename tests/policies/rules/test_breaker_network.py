"""Two or three breakers over a channel that loses, delays, repeats and reorders, under arbitrary use."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from policies.core.errors import BreakerOpen
from policies.rules.breaker import TRANSITIONS, BreakerOptions, BreakerPermit, BreakerState, CircuitBreaker
from policies.rules.breaker_findings import Finding

CLOSED, OPEN, HALF_OPEN = BreakerState
ALLOWED = {(before, after) for (before, _), after in TRANSITIONS.items()}
HOLD_MAX_S = 60.0


class Node:
    """One worker's breaker, and what it does."""

    def __init__(self, name: str, options: BreakerOptions, random: float) -> None:
        self.name = name
        self.breaker = CircuitBreaker(
            options, lambda: random, self._changed, on_finding=self._found, hold_max_s=HOLD_MAX_S
        )
        self.permits: list[BreakerPermit] = []
        #: Own changes, and own holds while it was open: only these may tell.
        self.own = 0
        self.told: list[Finding] = []
        self.hearing = False
        #: Until when the backend told this worker to stay away.
        self.held_until = 0.0

    def _changed(self, before: BreakerState, after: BreakerState, reason: str) -> None:
        assert (before, after) in ALLOWED
        assert reason.startswith("worker-") is self.hearing
        self.own += not self.hearing

    def _found(self, finding: Finding) -> None:
        assert not self.hearing, "what was heard is never told again"
        self.told.append(finding)

    def hear(self, teller: str, finding: Finding, now: float) -> None:
        self.hearing = True
        self.breaker.hear(teller, finding, now)
        self.hearing = False


class Network(RuleBasedStateMachine):
    @initialize(count=st.integers(2, 3), probes=st.integers(1, 2), random=st.floats(0, 1))
    def start(self, count: int, probes: int, random: float) -> None:
        self.now = 100.0
        options = BreakerOptions(probes=probes, consecutive=2, open_max_s=8.0, probe_timeout_s=7.0)
        self.longest_s = max(HOLD_MAX_S, options.longest_open_s)
        self.nodes = [Node(f"worker-{number}", options, random) for number in range(count)]
        #: (to, from, finding), in no order.
        self.under_way: list[tuple[Node, Node, Finding]] = []
        self.arrived = 0

    def send(self, node: Node, already: int) -> None:
        for finding in node.told[already:]:
            self.under_way += [(other, node, finding) for other in self.nodes if other is not node]

    # ------------------------------------------------------------------------------------------------ the world

    @rule(
        data=st.data(),
        outcomes=st.lists(st.sampled_from(["success", "failure", "failure", "hold", "keep"]), min_size=1, max_size=4),
    )
    def call(self, data: st.DataObject, outcomes: list[str]) -> None:
        node = data.draw(st.sampled_from(self.nodes))
        for outcome in outcomes:
            try:
                permit = node.breaker.acquire(self.now)
            except BreakerOpen:
                return
            assert self.now >= node.held_until
            node.permits.append(permit)
            if outcome != "keep":
                self.end(node, permit, outcome)

    @rule(data=st.data())
    def break_down(self, data: st.DataObject) -> None:
        """Calls of one worker fail until it opens."""
        node = data.draw(st.sampled_from(self.nodes))
        while node.breaker.state is not OPEN:
            try:
                permit = node.breaker.acquire(self.now)
            except BreakerOpen:
                return
            node.permits.append(permit)
            self.end(node, permit, "failure")

    @rule(data=st.data())
    def throttle(self, data: st.DataObject) -> None:
        """The backend tells one worker to come back later."""
        node = data.draw(st.sampled_from(self.nodes))
        try:
            permit = node.breaker.acquire(self.now)
        except BreakerOpen:
            return
        node.permits.append(permit)
        self.end(node, permit, "hold")

    @rule(data=st.data())
    def recover(self, data: st.DataObject) -> None:
        """One worker waits its time out, and its probes pass."""
        node = data.draw(st.sampled_from(self.nodes))
        self.now += node.breaker.opens_in(self.now) + 0.001
        while node.breaker.state is not CLOSED:
            try:
                permit = node.breaker.acquire(self.now)
            except BreakerOpen:
                return
            node.permits.append(permit)
            self.end(node, permit, "success")

    @rule(data=st.data(), outcome=st.sampled_from(["success", "failure", "ignore", "hold"]))
    def end_late(self, data: st.DataObject, outcome: str) -> None:
        node = data.draw(st.sampled_from(self.nodes))
        if node.permits:
            self.end(node, data.draw(st.sampled_from(node.permits)), outcome)

    def end(self, node: Node, permit: BreakerPermit, outcome: str) -> None:
        node.permits.remove(permit)
        already, counts = len(node.told), permit.generation == node.breaker._generation
        if outcome == "ignore":
            permit.ignore()
        elif outcome == "hold":
            seconds = 3.0 + len(node.permits) % 2 * 20.0
            was_open = node.breaker.state is OPEN
            permit.hold(self.now, seconds, "429")
            if was_open or counts:
                node.held_until = max(node.held_until, self.now + seconds)
                node.own += was_open
        else:
            getattr(permit, outcome)(self.now)
        self.send(node, already)

    @rule(seconds=st.sampled_from([0.001, 0.05, 0.5, 1.0, 2.0, 10.0, 40.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    # ---------------------------------------------------------------------------------------------- the channel

    @rule(data=st.data(), again=st.booleans())
    def deliver_some(self, data: st.DataObject, again: bool) -> None:
        """Some of what is under way to one worker, in any order; `again`: it will come once more."""
        to = data.draw(st.sampled_from(self.nodes))
        messages = [message for message in self.under_way if message[0] is to]
        if not messages:
            return
        for message in data.draw(st.permutations(messages))[: data.draw(st.integers(1, len(messages)))]:
            if not again:
                self.under_way.remove(message)
            to.hear(message[1].name, message[2], self.now)
            self.arrived += 1

    @rule()
    def lose_all(self) -> None:
        self.under_way.clear()

    @rule(data=st.data())
    def deliver_what_is_current(self, data: st.DataObject) -> None:
        """As after a connection was made again: everybody's current fact, in any order, and nothing is left over."""
        self.under_way.clear()
        current = [(to, node) for node in self.nodes if node.told for to in self.nodes if to is not node]
        for to, node in data.draw(st.permutations(current)) if current else ():
            to.hear(node.name, node.told[-1], self.now)
            self.arrived += 1
        self.all_agree()

    def all_agree(self) -> None:
        states = [node.breaker.state for node in self.nodes]
        current = [node.told[-1] for node in self.nodes if node.told]
        passed_at = max((finding.passed_at for finding in current), default=0.0)
        ends = [
            max(finding.until if finding.opened_at >= passed_at else 0.0, finding.held_until) for finding in current
        ]
        in_force = max(ends, default=0.0) - self.now
        if in_force > 0:
            assert set(states) == {OPEN}
            assert min(node.breaker.opens_in(self.now) for node in self.nodes) >= in_force - 1e-6
            return
        told = [finding for node in self.nodes for finding in node.told]
        last_opening = max((finding.opened_at for finding in told), default=0.0)
        last_hold = max(node.held_until for node in self.nodes)
        if passed_at > last_opening and passed_at >= last_hold:
            assert set(states) == {CLOSED}

    # ----------------------------------------------------------------------------------------------- invariants

    @invariant()
    def no_storm(self) -> None:
        for node in getattr(self, "nodes", ()):
            assert len(node.told) <= node.own

    @invariant()
    def holds_are_kept_and_nothing_sticks(self) -> None:
        for node in getattr(self, "nodes", ()):
            left = node.breaker.opens_in(self.now)
            assert left <= self.longest_s + 1e-6
            if node.held_until > self.now:
                assert node.breaker.state is OPEN
                assert left >= node.held_until - self.now - 1e-6

    @invariant()
    def alone_it_is_only_what_it_found_itself(self) -> None:
        if getattr(self, "arrived", 1) == 0:
            for node in self.nodes:
                assert node.own or node.breaker.state is CLOSED


Network.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestNetwork = Network.TestCase
