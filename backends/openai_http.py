"""A remote backend that speaks the OpenAI chat API.

How its answers become errors (the retry table's rows):

    refused, reset, timed out before any byte     ConnectFailed
    5xx 408 425 429 3xx and other odd statuses    UpstreamStatus, with Retry-After in seconds
    401 402 403 404                               UpstreamMisconfigured
    400 that says the context is too long         ContextTooLong
    any other 4xx                                 ClientFault, body and status kept
    2xx that is no answer                         MalformedAnswer
    2xx with an error in it                       InBandError
    2xx that is cut, or ends without finish       TruncatedAnswer
    no content by the deadline                    FirstTokenTimeout (stream), DeadlineExceeded (whole answer)
    no chunk for `idle_s`, longer than `total_s`  IdleTimeout, TotalTimeout
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec

from backends.api import BackendInfo, ChatAnswer, ChatRequest, Chunk, Health, Request
from backends.http_connection import Response
from backends.http_transport import HttpOptions, HttpTransport
from backends.openai_assemble import replay
from backends.openai_stream import ChunkStream
from backends.openai_wire import read_completion
from policies.core.clock import Clock
from policies.core.deadline import Deadline
from policies.core.errors import BackendError, CannotServe, DeadlineExceeded, FirstTokenTimeout, MalformedAnswer

_encode = msgspec.json.Encoder().encode


def _choices(body: dict[str, Any]) -> int:
    count = body.get("n")
    return count if isinstance(count, int) and count > 1 else 1


def _headers(request: ChatRequest) -> dict[str, str]:
    return {"x-request-id": request.id} if request.id else {}


class OpenAIBackend:
    """`info.model` is the model name sent upstream. `skipped_events` counts malformed lines left out of streams."""

    __slots__ = (
        "_clock",
        "_max_body_bytes",
        "_model",
        "_stream_target",
        "_target",
        "_transport",
        "info",
        "skipped_events",
    )

    def __init__(self, info: BackendInfo, options: HttpOptions, clock: Clock) -> None:
        self.info = info
        self.skipped_events = 0
        self._model = info.model
        self._clock = clock
        self._max_body_bytes = options.max_body_bytes
        self._transport = HttpTransport(info.name, options, clock)
        for_json = {"content-type": "application/json"}
        self._target = self._transport.target("/chat/completions", {**for_json, "accept": "application/json"})
        self._stream_target = self._transport.target("/chat/completions", {**for_json, "accept": "text/event-stream"})

    @property
    def in_flight(self) -> int:
        return self._transport.in_flight

    async def infer(self, request: Request, deadline: Deadline) -> ChatAnswer:
        if type(request) is not ChatRequest:
            raise CannotServe(f"the backend {self.info.name!r} serves chat only")
        body = request.body.copy()
        body["model"] = self._model
        body["stream"] = False
        body.pop("stream_options", None)  # refused by services when the answer is not a stream
        _, data = await self._transport.exchange(self._target, _headers(request), _encode(body), deadline)
        return self._whole(data)

    async def stream(self, request: ChatRequest, deadline: Deadline) -> AsyncIterator[Chunk]:
        transport = self._transport
        transport.enter()
        source: ChunkStream | None = None
        try:
            try:
                async with deadline.timeout():
                    response = await self._open(request, deadline)
                    if response.content_type == "application/json":
                        # A service that does not stream answers whole.
                        chunks = replay(self._whole(await self._read_whole(response)), include_usage=True)
                    else:
                        source = ChunkStream(transport, response, _choices(request.body))
                        chunks = await self._first(source, response)
            except DeadlineExceeded as error:
                message = f"no content from {self.info.name!r} within the limit for the first token"
                raise FirstTokenTimeout(message, self.info.name) from error
            limits = request.limits
            ends_at = self._clock.now() + limits.total_s
            while chunks:
                for chunk in chunks:
                    yield chunk
                if source is None:
                    break
                chunks = await source.next(limits.idle_s, ends_at - self._clock.now())
        finally:
            transport.leave()
            if source is not None:
                self.skipped_events += source.skipped
                source.close()

    async def health(self) -> Health:
        """Always ready: whether a remote service answers is learnt from calls, never asked for."""
        return Health(ready=True)

    async def aclose(self) -> None:
        await self._transport.aclose()

    async def _open(self, request: ChatRequest, deadline: Deadline) -> Response:
        body = request.body.copy()
        body["model"] = self._model
        body["stream"] = True
        body["stream_options"] = {**(body.get("stream_options") or {}), "include_usage": True}
        return await self._transport.send(self._stream_target, _headers(request), _encode(body), deadline)

    async def _first(self, source: ChunkStream, response: Response) -> list[Chunk]:
        if response.content_type == "text/html":
            raise MalformedAnswer(f"the backend {self.info.name!r} answered with a web page", self.info.name)
        return await source.first()

    async def _read_whole(self, response: Response) -> bytes:
        try:
            return await self._transport.read(response, self._max_body_bytes)
        except BaseException:
            response.close()
            raise

    def _whole(self, data: bytes) -> ChatAnswer:
        try:
            answer = read_completion(data)
        except BackendError as error:
            error.backend = self.info.name
            raise
        return answer if answer.model else msgspec.structs.replace(answer, model=self._model)

    def __repr__(self) -> str:
        return f"OpenAIBackend({self.info.name!r}, {self._transport.in_flight} in flight)"
