"""The HTTP edge on aiohttp: bytes to an Exchange, a Reply to bytes. Nothing below this folder knows the HTTP library.

It uses aiohttp's low-level server with a path table of its own: routing, middlewares and signals of the application layer
would cost more than the rest of a cached answer.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import cast

import msgspec
import structlog
from aiohttp import web

from backends.api import ChatAnswer, ChatRequest, EmbeddingsAnswer, Surface
from gateway import error_table
from gateway.edge.answer_headers import answer_headers
from gateway.edge.codec import Codec, Parsed
from gateway.edge.connection import Connection
from gateway.edge.oip_codec import OipCodec, OipPaths
from gateway.edge.openai_codec import ChatCodec, EmbeddingsCodec, models_list, one_model, openai_error
from gateway.edge.repeated import RepeatedBodies
from gateway.edge.sse import send_stream
from gateway.edge.whole_response import DateHeader, WholeResponse, fits
from gateway.exchange import DEFAULT_CONTROLS, Controls, Exchange, Handler, Record, Reply
from gateway.readiness import Readiness
from policies.core.clock import Clock
from policies.core.errors import (
    BodyTimeout,
    BodyTooLarge,
    GatewayError,
    InvalidRequest,
    MethodNotAllowed,
    UnknownPath,
    UnsupportedMedia,
)

_log = structlog.get_logger("gateway.edge")
_JSON = "application/json"
#: nginx's status for a client that left; only our own books ever see it.
CLIENT_CLOSED = 499

Action = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class EdgeLimits:
    """Bounds on what a client may send."""

    body_bytes: int = 4 * 1024 * 1024
    header_bytes: int = 8190
    headers: int = 128
    connections: int = 10_000
    header_time_s: float = 10.0
    body_time_s: float = 30.0
    #: A client that takes nothing of its answer for this long is cut off.
    write_stall_s: float = 30.0


class HttpEdge:
    """Callable given to `aiohttp.web.Server`."""

    def __init__(self, handler: Handler, readiness: Readiness, clock: Clock, limits: EdgeLimits, expose: str) -> None:
        self._handler = handler
        self._readiness = readiness
        self._clock = clock
        self._limits = limits
        self._expose = expose
        self._started_wall = int(clock.wall())
        # A random prefix and a counter: unique across processes, and cheap.
        self._id_prefix = secrets.token_hex(6)
        self._ids = itertools.count(1)
        self._chat, self._embeddings, self._oip = ChatCodec(), EmbeddingsCodec(), OipCodec()
        self._repeated = RepeatedBodies()
        self._date = DateHeader(clock)
        self._oip_paths = OipPaths(handler, readiness)
        self._exact: dict[str, tuple[str, Action]] = {
            "/v1/chat/completions": ("POST", self._on_chat),
            "/v1/embeddings": ("POST", self._on_embeddings),
            "/v1/models": ("GET", self._on_models),
            "/livez": ("GET", self._on_live),
            "/readyz": ("GET", self._on_ready),
        }

    def __call__(self, http: web.BaseRequest) -> Awaitable[web.StreamResponse]:
        # The path as it was sent nearly always is one of ours; decoding it costs more than looking it up.
        found = self._exact.get(http.raw_path) or self._exact.get(http.path)
        if found is None:
            return self._other(http)
        method, action = found
        if http.method != method and not (method == "GET" and http.method == "HEAD"):
            return self._wrong_method(http, method)
        return action(http)

    async def _wrong_method(self, http: web.BaseRequest, method: str) -> web.StreamResponse:
        return self._refusal(MethodNotAllowed(f"{http.path} answers {method} only.", (method,)))

    def _on_chat(self, http: web.BaseRequest) -> Awaitable[web.StreamResponse]:
        return self._serve(http, self._chat, Surface.CHAT, "")

    def _on_embeddings(self, http: web.BaseRequest) -> Awaitable[web.StreamResponse]:
        return self._serve(http, self._embeddings, Surface.EMBEDDINGS, "")

    async def _other(self, http: web.BaseRequest) -> web.StreamResponse:
        """Paths with parts in them: the Open Inference Protocol; everything else is unknown."""
        path = http.path
        if path == "/v2" or path.startswith("/v2/"):
            # Split before decoding: a model's name may hold an escaped slash.
            path = http.rel_url.raw_path
            try:
                model = self._oip_paths.infer_model(path)
                if model is not None:
                    if http.method != "POST":
                        raise MethodNotAllowed(f"{path} answers POST only.", ("POST",))
                    return await self._serve(http, self._oip, Surface.TENSOR, model)
                status, body = await self._oip_paths.get(http.method, path, http.headers.get("Authorization"))
                return web.Response(status=status, body=body, content_type=_JSON)
            except GatewayError as error:
                return self._refusal(error, self._oip)
        if path.startswith("/v1/models/") and http.method in ("GET", "HEAD"):
            return await self._on_models(http)
        return self._refusal(
            UnknownPath(
                f"There is nothing at {path[:200]!r}. Chat is POST /v1/chat/completions, tensors POST /v2/models/NAME/infer."
            )
        )

    async def _serve(self, http: web.BaseRequest, codec: Codec, surface: Surface, model: str) -> web.StreamResponse:
        record = Record(
            request_id=f"{self._id_prefix}{next(self._ids):08x}",
            surface=surface.value,
            started=self._clock.now(),
            expose=self._expose,
        )
        try:
            body = await self._read(http)
            parsed = self._repeated.get(surface, body)
            if parsed is None:
                parsed = codec.parse(body, http.headers, model)
                exchange = self._exchange(http, parsed, record)
            else:
                exchange = self._exchange(http, parsed, record)
                exchange.prepared, exchange.shared = parsed.prepared, True
            record.stream = parsed.stream
            reply = await self._handler.handle(exchange)
            if record.age_s is not None and exchange.prepared is not None:
                parsed.prepared = exchange.prepared
                self._repeated.add(surface, body, parsed)
            if reply.answer is None:
                limits = cast(ChatRequest, exchange.request).limits
                return await send_stream(http, reply, parsed.include_usage, self, limits.total_s)
            return self._whole(http, codec, parsed, reply)
        except GatewayError as error:
            return self._failed(error, record, codec)
        except (asyncio.CancelledError, ConnectionResetError):
            if not record.outcome:
                self.complete(record, CLIENT_CLOSED, "client_closed")
            raise
        except Exception:
            _log.exception("a defect in the gateway: please report it", request_id=record.request_id)
            return self._failed(GatewayError("internal error"), record, codec)

    def _exchange(self, http: web.BaseRequest, parsed: Parsed, record: Record) -> Exchange:
        headers = http.headers
        controls = controls_of(headers)
        if parsed.timeout_s is not None:
            controls = msgspec.structs.replace(
                controls, timeout_s=min(parsed.timeout_s, controls.timeout_s or parsed.timeout_s)
            )
        return Exchange(
            parsed.request,
            parsed.model,
            record,
            parsed.stream,
            parsed.include_usage,
            headers.get("Authorization"),
            headers,
            controls,
        )

    async def _read(self, http: web.BaseRequest) -> bytes:
        """The whole body, within the limits of size and time. aiohttp undoes gzip and deflate and bounds the result."""
        most = self._limits.body_bytes
        try:
            if http.content.is_eof():
                # All of it is here already, as nearly always: take it without the reading loop.
                body = http.content.read_nowait(-1)
                if len(body) > most:
                    raise BodyTooLarge(f"The body has {len(body)} bytes; at most {most} are read.")
                return body
            length = http.content_length
            if length is not None and length > most:
                raise BodyTooLarge(f"The body has {length} bytes; at most {most} are read.")
            if http.headers.get("Expect", "").lower() == "100-continue" and http.transport is not None:
                # The client waits for a word before it sends its body; the limits above have already spoken.
                http.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            async with asyncio.timeout(self._limits.body_time_s):
                return await http.read()
        except web.HTTPRequestEntityTooLarge:
            raise BodyTooLarge(f"At most {most} bytes of body are read.") from None
        except TimeoutError:
            raise BodyTimeout(f"The body did not arrive within {self._limits.body_time_s:g} s.") from None
        except web.RequestPayloadError as error:
            raise UnsupportedMedia(f"The body could not be read: {str(error)[:200]}") from None

    def _whole(self, http: web.BaseRequest, codec: Codec, parsed: Parsed, reply: Reply) -> web.StreamResponse:
        record, answer = reply.record, reply.answer
        assert answer is not None
        written = codec.write(answer, parsed)
        if isinstance(answer, ChatAnswer | EmbeddingsAnswer):
            record.prompt_tokens = answer.usage.prompt_tokens
            record.completion_tokens = answer.usage.completion_tokens
        headers = answer_headers(record, self._clock)
        headers["Content-Type"] = written.content_type
        if written.headers:
            headers.update(written.headers)
        self.complete(record, 200, "degraded" if record.degraded else "full")
        if fits(http):
            return WholeResponse(headers, written.body, self._date.text())
        return web.Response(body=written.body, headers=headers)

    def _failed(self, error: GatewayError, record: Record, codec: Codec) -> web.Response:
        status, type_ = error_table.row(error)
        headers = answer_headers(record, self._clock)
        headers["Content-Type"] = getattr(error, "content_type", "") or _JSON
        if error.retry_after_s is not None and status in (429, 502, 503, 504):
            headers["Retry-After"] = str(max(1, round(error.retry_after_s)))
        client = error_table.is_client_fault(error)
        self.complete(record, status, "client_error" if client else "failed", error.code)
        response = web.Response(status=status, body=codec.error(error, type_), headers=headers)
        if isinstance(error, BodyTimeout):
            response.force_close()
        return response

    def complete(self, record: Record, status: int, outcome: str, reason: str = "") -> None:
        """The books of one request are closed."""
        record.status, record.outcome = status, outcome
        record.seconds = self._clock.now() - record.started
        if not record.first_s:
            record.first_s = record.seconds
        if reason and not record.degraded:
            record.degraded = reason
        self._handler.completed(record)

    @property
    def clock(self) -> Clock:
        return self._clock

    def ends_connection(self, http: web.BaseRequest) -> bool:
        """Must the answer to `http` say `Connection: close`? While draining everything is served, but no connection is
        kept for another request."""
        return self._readiness.draining and cast(Connection, http.protocol).is_last_answer()

    def _refusal(self, error: GatewayError, codec: Codec | None = None) -> web.Response:
        """An error before there is a request to account for."""
        status, type_ = error_table.row(error)
        body = codec.error(error, type_) if codec is not None else openai_error(error, type_)
        headers = {"Content-Type": _JSON}
        if isinstance(error, MethodNotAllowed):
            headers["Allow"] = ", ".join(error.allowed)
        return web.Response(status=status, body=body, headers=headers)

    async def _on_models(self, http: web.BaseRequest) -> web.StreamResponse:
        try:
            names = self._handler.models(http.headers.get("Authorization"))
            wanted = http.path.removeprefix("/v1/models").removeprefix("/")
            body = one_model(names, wanted, self._started_wall) if wanted else models_list(names, self._started_wall)
        except GatewayError as error:
            return self._refusal(error)
        return web.Response(body=body, content_type=_JSON)

    async def _on_live(self, http: web.BaseRequest) -> web.StreamResponse:
        return web.Response(body=b'{"status":"alive"}', content_type=_JSON)

    async def _on_ready(self, http: web.BaseRequest) -> web.StreamResponse:
        ready, body = self._readiness.report()
        return web.Response(status=200 if ready else 503, body=body, content_type=_JSON)


def controls_of(headers: Mapping[str, str]) -> Controls:
    """The client's wishes; every other inbound `x-gateway-*` header is simply never read."""
    cache_control = headers.get("Cache-Control")
    degrade = headers.get("x-gateway-degrade")
    timeout = headers.get("x-request-timeout-ms")
    if cache_control is None and degrade is None and timeout is None:
        return DEFAULT_CONTROLS
    wishes = {part.strip().lower() for part in (cache_control or "").split(",")}
    return Controls(
        no_cache="no-cache" in wishes,
        no_store="no-store" in wishes,
        only_if_cached="only-if-cached" in wishes,
        degrade_off=(degrade or "").strip().lower() == "off",
        timeout_s=_timeout_s(timeout),
    )


def _timeout_s(text: str | None) -> float | None:
    if text is None:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 12 or int(text) == 0:
        raise InvalidRequest(
            "`x-request-timeout-ms` must be a whole number of milliseconds, more than 0.", "x-request-timeout-ms"
        )
    return int(text) / 1000
