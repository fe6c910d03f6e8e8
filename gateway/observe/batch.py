"""Events are noted at once and told a little later, many at a time.

Counting one request costs little when its code is warm and a good part of a cached answer when it is not. So the request
path only appends; the observers run over a batch of 64, or after 50 ms, whichever comes first. Who reads what they keep
(metrics, recent requests) flushes before.
"""

from __future__ import annotations

import asyncio

from policies.core.events import Event, Observer

MOST = 64
WAIT_S = 0.05


class BatchedObserver:
    """An observer in front of another one. Order is kept; `flush` tells what is waiting now."""

    __slots__ = ("_events", "_next", "_timer")

    def __init__(self, observer: Observer) -> None:
        self._next = observer
        self._events: list[Event] = []
        self._timer: asyncio.TimerHandle | None = None

    def on_event(self, event: Event) -> None:
        self._events.append(event)
        if len(self._events) >= MOST:
            self.flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(WAIT_S, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.flush()

    def flush(self) -> None:
        events, self._events = self._events, []
        for event in events:
            self._next.on_event(event)
