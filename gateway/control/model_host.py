"""The process that runs the models for several workers: one batch, one order of urgency, one prefix cache, one reload.

Workers reach it over a Unix socket (`backends.link`); to them its models are backends like any other. When it ends, their
rungs are skipped until it is back.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from backends.link.server import LinkServer
from gateway.control.hub import Payload, WorkerPort
from gateway.control.model_actions import offer_models
from gateway.control.process import Life
from gateway.control.start import Start
from gateway.models import MODEL_KINDS, ModelSlots
from gateway.observe.logs import LogObserver
from gateway.observe.loop_lag import watch_loop_lag
from gateway.observe.metric_store import Metrics
from gateway.observe.metrics import MetricsObserver
from gateway.stores import redis_store, subgraph_cache, subgraph_families
from policies.core.clock import Clock
from policies.core.events import Observers

#: No request waits on this loop but for models: a run as short as this is quicker here than on a thread.
ON_LOOP_S = 0.0003


def model_host_life(start: Start, port: WorkerPort, clock: Clock) -> Life:
    """The life of the model host, with its actions at `port`."""
    config = start.config
    metrics = Metrics()
    store = redis_store(config, clock)
    tensors = subgraph_cache(config, clock, store)
    observers = Observers([MetricsObserver(metrics), LogObserver(clock)])
    models = ModelSlots(config, clock, observers, tensors, on_loop_s=ON_LOOP_S)
    metrics.source(models.families)
    if tensors is not None:
        metrics.source(lambda: subgraph_families(tensors, models.cut_counts))
    slots = {name: models.place(name, spec) for name, spec in config.backends.items() if spec.kind in MODEL_KINDS}
    server = LinkServer(slots, models.embedder, clock)
    tasks: list[asyncio.Task[None]] = []
    offer_models(port, list(slots.values()))

    async def answer_metrics(_payload: Payload) -> object:
        return metrics.plain()

    port.queries["metrics"] = answer_metrics

    async def begin(_at_once: bool) -> None:
        await server.start(Path(start.models_at))
        tasks.extend(asyncio.create_task(slot.run(), name=f"model-{name}") for name, slot in slots.items())
        tasks.append(asyncio.create_task(watch_loop_lag(metrics, clock), name="loop-lag"))
        await asyncio.gather(*(slot.first_try() for slot in slots.values()))

    async def stop(_replaced: bool) -> None:
        await server.drain(config.drain_s)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.aclose()
        for slot in slots.values():
            await slot.aclose()
        for closed in (models.embedder, tensors, store):
            if closed is not None:
                await closed.aclose()

    def beat() -> Payload:
        return {"in_flight": server.in_flight}

    return Life(begin, stop, server.hurry, beat, lambda: metrics)
