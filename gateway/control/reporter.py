"""What a process publishes by itself: that it lives, twice a second, and its figures, once in two seconds.

The figures are for the moment when it can no longer be asked: what a killed worker had counted is not lost.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from gateway.control.hub import Payload, WorkerPort
from gateway.observe.metric_store import Metrics
from gateway.observe.ticks import tick
from policies.core.clock import Clock

BEATS_PER_FIGURES = 4


async def report(port: WorkerPort, clock: Clock, beat: Callable[[], Payload], metrics: Callable[[], Metrics]) -> None:
    """Publish until cancelled."""
    count = 0
    while True:
        port.publish("beat", beat())
        if count % BEATS_PER_FIGURES == 0:
            publish_figures(port, metrics())
        count += 1
        await tick(clock)


def publish_figures(port: WorkerPort, metrics: Metrics) -> None:
    """Encoded here: the supervisor keeps what it may never have to read."""
    port.publish("metrics", {"families": msgspec.msgpack.encode(metrics.families())})
