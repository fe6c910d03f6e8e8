"""What happened to a request, as values. Metrics, logs, traces and recent requests are observers of these and nothing else.

Events carry names from configuration and numbers; never prompt text, keys or secrets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import msgspec


class Event(msgspec.Struct, gc=False):
    """Base of all events. `request_id` is empty where no request is concerned."""

    request_id: str = ""


class Attempted(Event, gc=False, kw_only=True):
    """One call of one backend ended. `outcome`: ok, or the error's code, or client_closed.

    `first_s`: seconds to the first content (streams), else equal to `seconds`.
    """

    backend: str
    outcome: str
    seconds: float
    first_s: float


class BreakerChanged(Event, gc=False, kw_only=True):
    backend: str
    before: str
    after: str
    reason: str


class FactRefused(Event, gc=False, kw_only=True):
    """What another worker told could not be read: a defect of one of the two."""

    key: str
    teller: str
    reason: str


class Degraded(Event, gc=False, kw_only=True):
    """A rung was left or skipped. `reason` is an error code or a skip reason."""

    policy: str
    rung: str
    reason: str


class FaultInjected(Event, gc=False, kw_only=True):
    fault: str
    target: str


class SignalFailed(Event, gc=False, kw_only=True):
    """A signal broke and was taken as neutral: a defect that re-routes traffic. `error`: the exception's class."""

    policy: str
    signal: str
    error: str


class PolicyChanged(Event, gc=False, kw_only=True):
    """`outcome`: applied or refused."""

    policy: str
    version: int
    outcome: str
    reason: str = ""


class ModelChanged(Event, gc=False, kw_only=True):
    """`state`: loading, ready, failed or gone."""

    model: str
    state: str
    reason: str = ""


class Completed(Event, gc=False, kw_only=True):
    """A request is over. `outcome`: full, degraded, failed, cut, client_error, client_closed.

    The one event that is filled in along the way (a request's record is one), so that nothing is copied at its end.
    """

    surface: str = ""
    #: name@version
    policy: str = ""
    tenant: str = ""
    priority: str = ""
    rule: str = ""
    rung: str = ""
    backend: str = ""
    outcome: str = ""
    status: int = 0
    stream: bool = False
    seconds: float = 0.0
    #: Seconds to the first content sent; equal to `seconds` for a whole answer.
    first_s: float = 0.0
    #: Seconds spent waiting for a model, a store, or (in a stream) the client.
    waited_s: float = 0.0
    degraded: str = ""
    #: Seconds to classify and route; 0 where there was nothing to decide.
    classify_s: float = 0.0
    #: Outcome of the look-up in the result cache: hit-l1, hit-l2, miss; empty where nothing was looked up.
    lookup: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0

    @property
    def overhead_s(self) -> float:
        """Seconds that were the gateway's own."""
        return max(0.0, self.seconds - self.waited_s)


class Observer(Protocol):
    """Gets every event, in the order they happened, on the event loop: must be quick and must not raise."""

    def on_event(self, event: Event) -> None: ...


#: Event class -> what to do with one. A class also stands for the classes derived from it.
Handlers = Mapping[type[Event], Callable[[Any], None]]


class Subscriber(Protocol):
    """An observer that says which events it wants."""

    @property
    def handlers(self) -> Handlers: ...


class Observers:
    """Hands each event to the subscribers that want its class; the others cost nothing."""

    __slots__ = ("_by_class", "_subscribers")

    def __init__(self, subscribers: Iterable[Subscriber] = ()) -> None:
        self._subscribers = tuple(subscribers)
        self._by_class: dict[type[Event], tuple[Callable[[Any], None], ...]] = {}

    def on_event(self, event: Event) -> None:
        wanted = self._by_class.get(type(event))
        if wanted is None:
            wanted = self._by_class[type(event)] = self._wanted(type(event))
        for handle in wanted:
            handle(event)

    def _wanted(self, kind: type[Event]) -> tuple[Callable[[Any], None], ...]:
        found = []
        for subscriber in self._subscribers:
            table = subscriber.handlers
            handle = next((table[base] for base in kind.__mro__ if base in table), None)
            if handle is not None:
                found.append(handle)
        return tuple(found)
