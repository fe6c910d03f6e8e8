"""How late the event loop runs its callbacks: the first thing to look at when everything is slow at once."""

from __future__ import annotations

from gateway.observe.metric_store import Metrics
from gateway.observe.ticks import tick
from policies.core.clock import Clock


async def watch_loop_lag(metrics: Metrics, clock: Clock) -> None:
    """Runs until cancelled. A sample is how much longer than asked a short sleep took."""
    lag = metrics.histogram("gateway_loop_lag_seconds", "Seconds by which the event loop was late.")
    while True:
        lag.observe(await tick(clock))
