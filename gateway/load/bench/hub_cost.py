"""What a worker's own part in the hub costs while it works: its beats and figures, by the code that sends them."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable

from backends.frames import FrameConnection
from gateway.control.hub import WorkerPort
from gateway.control.reporter import BEATS_PER_FIGURES, publish_figures
from gateway.observe.metric_store import Metrics
from gateway.observe.metrics import MetricsObserver
from gateway.observe.ticks import EVERY_S
from policies.core.events import Attempted, Completed

_POLICIES = ("chatbot@1", "support@7", "recommendation@3")
_RUNGS = ("hit-l1", "hit-l2", "light", "heavy", "stale", "default")
_TIMES = 400


async def worker_share() -> float:
    """Seconds of processor time a second: of both ends, for a worker with the metrics of three policies."""
    metrics = _busy_metrics()
    here, there = socket.socketpair()
    loop, arrived = asyncio.get_running_loop(), asyncio.Event()
    _, sending = await loop.create_connection(lambda: FrameConnection(lambda _: None, lambda _: None), sock=here)
    _, receiving = await loop.create_connection(
        lambda: FrameConnection(lambda _: arrived.set(), lambda _: None), sock=there
    )
    port = WorkerPort("worker-1")
    port.connect(lambda topic, payload: _send(sending, topic, payload))

    async def each_s(publish: Callable[[], None]) -> float:
        began = time.process_time()
        for _ in range(_TIMES):
            arrived.clear()
            publish()
            await arrived.wait()
        return (time.process_time() - began) / _TIMES

    beat_s = await each_s(lambda: port.publish("beat", {"in_flight": 12, "generation": 3}))
    figures_s = await each_s(lambda: publish_figures(port, metrics))
    sending.close()
    receiving.close()
    return beat_s / EVERY_S + figures_s / (EVERY_S * BEATS_PER_FIGURES)


def _send(connection: FrameConnection, topic: str, payload: object) -> None:
    connection.send(["publish", topic, payload])


def _busy_metrics() -> Metrics:
    metrics = Metrics()
    handlers = MetricsObserver(metrics).handlers
    for policy in _POLICIES:
        for rung in _RUNGS:
            done = Completed(
                surface="chat", policy=policy, priority="normal", rule="hard", rung=rung, backend="heavy", outcome="full",
                stream=True, seconds=0.2, first_s=0.1, lookup="miss", prompt_tokens=20, completion_tokens=100,
            )  # fmt: skip
            handlers[Completed](done)
            handlers[Attempted](Attempted(backend=rung, outcome="ok", seconds=0.2, first_s=0.1))
    return metrics
