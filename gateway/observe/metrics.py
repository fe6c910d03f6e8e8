"""The observer that counts. Labels come from configuration only, so the number of series is bounded."""

from __future__ import annotations

from gateway.observe.metric_store import Metrics
from policies.core import events as ev

_BREAKER_STATES = {"closed": 0.0, "half_open": 1.0, "open": 2.0}


class MetricsObserver:
    """Turns events into metrics."""

    def __init__(self, metrics: Metrics) -> None:
        self._requests = metrics.counter(
            "gateway_requests", "Requests by how they ended.", ("surface", "policy", "class", "rung", "outcome")
        )
        self._seconds = metrics.histogram(
            "gateway_request_seconds", "Seconds from the first byte read to the end.", ("surface", "rung")
        )
        self._first = metrics.histogram(
            "gateway_first_token_seconds", "Seconds to the first content of a stream.", ("policy", "rung")
        )
        self._overhead = metrics.histogram(
            "gateway_overhead_seconds", "Seconds that were the gateway's own (neither model nor store).", ("surface",)
        )
        self._tokens = metrics.counter("gateway_tokens", "Tokens answered.", ("backend", "direction"))
        self._lookups = metrics.counter("gateway_cache_lookups", "Look-ups in the result cache.", ("policy", "outcome"))
        self._routed = metrics.counter("gateway_routed", "Routing decisions.", ("policy", "rule"))
        self._classify = metrics.histogram("gateway_classify_seconds", "Seconds to classify and route.", ("policy",))
        self._attempts = metrics.counter("gateway_attempts", "Calls of backends by outcome.", ("backend", "outcome"))
        self._attempt_seconds = metrics.histogram("gateway_attempt_seconds", "Seconds of one call.", ("backend",))
        self._degraded = metrics.counter(
            "gateway_rungs_left", "Rungs that were skipped or failed.", ("policy", "rung", "reason")
        )
        self._breaker = metrics.gauge(
            "gateway_breaker_state", "0 closed, 1 half open, 2 open.", ("backend",), merge="max"
        )
        self._breaker_changes = metrics.counter("gateway_breaker_changes", "Breaker transitions.", ("backend", "to"))
        self._faults = metrics.counter("gateway_faults_injected", "Injected faults.", ("fault", "target"))
        self._signals = metrics.counter("gateway_signal_failures", "Signals that broke.", ("policy", "signal"))
        self._policies = metrics.counter("gateway_policy_changes", "Policy loads.", ("policy", "outcome"))
        self._models = metrics.gauge("gateway_model_ready", "1 when a model may be called.", ("model",), merge="max")
        self.handlers: ev.Handlers = {
            ev.Completed: self._on_completed,
            ev.Attempted: self._on_attempted,
            ev.Degraded: self._on_degraded,
            ev.BreakerChanged: self._on_breaker,
            ev.FaultInjected: self._on_fault,
            ev.PolicyChanged: self._on_policy,
            ev.SignalFailed: self._on_signal,
            ev.ModelChanged: self._on_model,
        }

    def _on_completed(self, event: ev.Completed) -> None:
        policy = event.policy.partition("@")[0]
        self._requests.inc((event.surface, policy, event.priority, event.rung, event.outcome))
        self._seconds.observe(event.seconds, (event.surface, event.rung))
        self._overhead.observe(event.overhead_s, (event.surface,))
        if event.rule and event.rung not in ("hit-l1", "hit-l2"):
            self._routed.inc((policy, event.rule))
        if event.classify_s:
            self._classify.observe(event.classify_s, (policy,))
        if event.lookup:
            self._lookups.inc((policy, event.lookup))
        if event.stream and event.outcome in ("full", "degraded", "cut"):
            self._first.observe(event.first_s, (policy, event.rung))
        if event.completion_tokens and event.rung in ("light", "heavy"):
            self._tokens.inc((event.backend, "in"), event.prompt_tokens)
            self._tokens.inc((event.backend, "out"), event.completion_tokens)

    def _on_attempted(self, event: ev.Attempted) -> None:
        self._attempts.inc((event.backend, event.outcome))
        self._attempt_seconds.observe(event.seconds, (event.backend,))

    def _on_degraded(self, event: ev.Degraded) -> None:
        self._degraded.inc((event.policy, event.rung, event.reason))

    def _on_breaker(self, event: ev.BreakerChanged) -> None:
        self._breaker.set(_BREAKER_STATES[event.after], (event.backend,))
        self._breaker_changes.inc((event.backend, event.after))

    def _on_fault(self, event: ev.FaultInjected) -> None:
        self._faults.inc((event.fault, event.target))

    def _on_signal(self, event: ev.SignalFailed) -> None:
        self._signals.inc((event.policy, event.signal))

    def _on_policy(self, event: ev.PolicyChanged) -> None:
        self._policies.inc((event.policy, event.outcome))

    def _on_model(self, event: ev.ModelChanged) -> None:
        self._models.set(1.0 if event.state == "ready" else 0.0, (event.model,))
