"""A handler without policies: each model name is one backend. What `gateway model-server` serves."""

from __future__ import annotations

from collections.abc import Mapping

from backends.api import Backend, BackendInfo, ChatRequest
from gateway.exchange import Exchange, Record, Reply
from policies.core.clock import Clock
from policies.core.deadline import Deadline
from policies.core.errors import InvalidRequest, UnknownModel

#: A caller that says nothing gets this long; a gateway always says how long it will wait.
_DEFAULT_LIMIT_S = 120.0


class DirectHandler:
    """Implements `gateway.exchange.Handler` over named backends. `default` answers to any chat model name."""

    def __init__(self, backends: Mapping[str, Backend], default: str | None, clock: Clock) -> None:
        self._backends = backends
        self._default = default
        self._clock = clock

    def _backend(self, model: str, request: object) -> Backend:
        backend = self._backends.get(model)
        if backend is None and self._default is not None and isinstance(request, ChatRequest):
            backend = self._backends[self._default]
        if backend is None:
            raise UnknownModel(model)
        return backend

    async def handle(self, exchange: Exchange) -> Reply:
        record = exchange.record
        backend = self._backend(exchange.model, exchange.request)
        if exchange.request.surface not in backend.info.capabilities.surfaces:
            raise InvalidRequest(
                f"the model {exchange.model[:100]!r} does not serve {exchange.request.surface}", "model"
            )
        record.backend, record.fingerprint = backend.info.name, backend.info.fingerprint
        deadline = Deadline.after(exchange.controls.timeout_s or _DEFAULT_LIMIT_S, self._clock)
        if exchange.stream and isinstance(exchange.request, ChatRequest):
            return Reply(record, rest=backend.stream(exchange.request, deadline))
        return Reply(record, answer=await backend.infer(exchange.request, deadline))

    def completed(self, record: Record) -> None:
        """Nothing is kept: the gateway in front keeps the books."""

    def models(self, authorization: str | None) -> list[tuple[str, str]]:
        return [(name, "model-server") for name in self._backends]

    def describe(self, model: str, authorization: str | None) -> BackendInfo | None:
        backend = self._backends.get(model)
        return backend.info if backend is not None else None
