"""What happened to a request, as values. Metrics, logs, traces and recent requests are observers of these and nothing else.

Events carry names from configuration and numbers; never prompt text, keys or secrets.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import msgspec


class Event(msgspec.Struct, frozen=True, gc=False):
    """Base of all events. `request_id` is empty where no request is concerned."""

    request_id: str = ""


class Admitted(Event, frozen=True, gc=False, kw_only=True):
    surface: str
    policy: str
    tenant: str
    priority: str


class CacheLookup(Event, frozen=True, gc=False, kw_only=True):
    """`outcome`: hit-l1, hit-l2, revalidate, miss or bypass."""

    tier: str
    outcome: str
    policy: str


class Routed(Event, frozen=True, gc=False, kw_only=True):
    policy: str
    rule: str
    candidates: tuple[str, ...]
    seconds: float


class Attempted(Event, frozen=True, gc=False, kw_only=True):
    """One call of one backend ended. `outcome`: ok, or the error's code, or client_closed.

    `first_s`: seconds to the first content (streams), else equal to `seconds`.
    """

    backend: str
    outcome: str
    seconds: float
    first_s: float


class BreakerChanged(Event, frozen=True, gc=False, kw_only=True):
    backend: str
    before: str
    after: str
    reason: str


class Degraded(Event, frozen=True, gc=False, kw_only=True):
    """A rung was left or skipped. `reason` is an error code or a skip reason."""

    policy: str
    rung: str
    reason: str


class FaultInjected(Event, frozen=True, gc=False, kw_only=True):
    fault: str
    target: str


class PolicyChanged(Event, frozen=True, gc=False, kw_only=True):
    """`outcome`: applied or refused."""

    policy: str
    version: int
    outcome: str
    reason: str = ""


class ModelChanged(Event, frozen=True, gc=False, kw_only=True):
    """`state`: loading, ready, failed or gone."""

    model: str
    state: str
    reason: str = ""


class Completed(Event, frozen=True, gc=False, kw_only=True):
    """A request is over. `outcome`: full, degraded, failed, cut, client_error, client_closed."""

    surface: str
    policy: str
    tenant: str
    priority: str
    rule: str
    rung: str
    backend: str
    outcome: str
    status: int
    stream: bool
    seconds: float
    #: Seconds to the first content sent; equal to `seconds` for a whole answer.
    first_s: float
    #: Seconds that were the gateway's own.
    overhead_s: float
    degraded: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Observer(Protocol):
    """Gets every event, in the order they happened, on the event loop: must be quick and must not raise."""

    def on_event(self, event: Event) -> None: ...


class Observers:
    """Several observers as one."""

    __slots__ = ("_observers",)

    def __init__(self, observers: Iterable[Observer] = ()) -> None:
        self._observers = tuple(observers)

    def on_event(self, event: Event) -> None:
        for observer in self._observers:
            observer.on_event(event)
