"""A remote backend that speaks the Open Inference Protocol v2 over HTTP, with binary tensors both ways.

Failures become errors as in `backends/openai_http.py`. The model asked for upstream is `info.model`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from urllib.parse import quote

from backends.api import BackendInfo, ChatRequest, Chunk, Health, Request, TensorAnswer, TensorRequest
from backends.http_transport import HttpOptions, HttpTransport
from backends.oip_wire import HEADER_LENGTH, read_answer, write_request
from policies.core.clock import Clock
from policies.core.deadline import Deadline
from policies.core.errors import BackendError, CannotServe


class OipBackend:
    """Tensors from `{base_url}/v2/models/{info.model}/infer`; `base_url` is the server's root."""

    __slots__ = ("_model", "_target", "_transport", "info")

    def __init__(self, info: BackendInfo, options: HttpOptions, clock: Clock) -> None:
        self.info = info
        self._model = info.model
        self._transport = HttpTransport(info.name, options, clock)
        self._target = self._transport.target(
            f"/v2/models/{quote(info.model, safe='')}/infer", {"accept": "application/octet-stream, application/json"}
        )

    @property
    def in_flight(self) -> int:
        return self._transport.in_flight

    async def infer(self, request: Request, deadline: Deadline) -> TensorAnswer:
        if type(request) is not TensorRequest:
            raise CannotServe(f"the backend {self.info.name!r} serves tensors only")
        headers, body = write_request(request)
        answered, data = await self._transport.exchange(self._target, headers, body, deadline)
        try:
            return read_answer(data, answered.get(HEADER_LENGTH), self._model)
        except BackendError as error:
            error.backend = self.info.name
            raise

    def stream(self, request: ChatRequest, deadline: Deadline) -> AsyncIterator[Chunk]:
        return _no_stream(self.info.name)

    async def health(self) -> Health:
        """Always ready: whether a remote service answers is learnt from calls, never asked for."""
        return Health(ready=True)

    async def aclose(self) -> None:
        await self._transport.aclose()

    def __repr__(self) -> str:
        return f"OipBackend({self.info.name!r}, {self._transport.in_flight} in flight)"


async def _no_stream(name: str) -> AsyncIterator[Chunk]:
    raise CannotServe(f"the backend {name!r} serves tensors, which do not stream")
    yield  # pragma: no cover  makes this a generator, so that it can be closed like any stream
