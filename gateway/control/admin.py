"""The admin API: metrics, requests, policies, caches, models, backends, workers. It asks the crew and its hub, nothing else.

What asks several workers answers by worker; a worker that did not do it, or did not answer, is there with its error.

It never listens on the data port. On loopback without a token, Host must be a loopback literal and a foreign Origin is
refused, so that a page in somebody's browser cannot steer the gateway; changes need `content-type: application/json`.
Outside loopback a bearer token is needed. Every change writes one audit line.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import orjson
import structlog
from aiohttp import web

from gateway.control.crew import Crew
from gateway.control.hub import Ack
from gateway.observe.exposition import exposition, merge
from gateway.observe.metric_store import Family
from gateway.secret import Secret

_log = structlog.get_logger("gateway.audit")
_LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]", "::1")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
OwnFamilies = Callable[[], list[Family]]
#: How many of the recent requests are listed.
_REQUESTS = 50
#: How long a model may take to be loaded anew; a little less than `gateway models reload` waits.
_RELOAD_S = 590.0


@dataclass(frozen=True, slots=True)
class AdminAccess:
    """Who may use the admin listener. No token at all = loopback only."""

    token: Secret | None = None
    view_token: Secret | None = None


@dataclass(frozen=True, slots=True)
class AdminActions:
    """What the supervisor does itself."""

    reload_policies: Callable[[], Awaitable[dict[str, Any]]]
    restart_workers: Callable[[], Awaitable[list[str]]]


def admin_app(crew: Crew, access: AdminAccess, actions: AdminActions, own: OwnFamilies) -> web.Application:
    """The aiohttp application for the admin listener. `own`: the supervisor's own metrics."""
    api = _AdminApi(crew, actions, own)
    app = web.Application(middlewares=[_guard(access)])
    app.router.add_get("/", api.index)
    app.router.add_get("/metrics", api.metrics)
    app.router.add_get("/debug/requests", api.requests)
    app.router.add_get("/debug/requests/{id}", api.why)
    app.router.add_get("/policies", api.ask("policies"))
    app.router.add_post("/policies/reload", api.reload)
    app.router.add_get("/backends", api.ask("backends"))
    app.router.add_get("/models", api.ask("models"))
    app.router.add_post("/models/{name}/reload", api.reload_model)
    app.router.add_get("/workers", api.workers)
    app.router.add_post("/workers/restart", api.restart)
    app.router.add_get("/notices", api.ask("notices"))
    app.router.add_get("/cache", api.ask("cache"))
    return app


def _guard(access: AdminAccess) -> Any:
    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        refusal = _refusal(request, access)
        if refusal is not None:
            return refusal
        try:
            return await handler(request)
        except web.HTTPException as error:
            if error.status < 400:
                raise
            return _error(error.status, f"{request.method} {request.path}: {error.reason}. GET / lists what is here.")

    return guard


def _refusal(request: web.Request, access: AdminAccess) -> web.Response | None:
    change = request.method not in ("GET", "HEAD")
    if access.token is None and access.view_token is None:
        host = urlsplit(f"//{request.host}").hostname or ""
        if host not in _LOOPBACK_NAMES:
            return _error(403, "Without a token the admin API answers to loopback names only (Host is another one).")
    else:
        presented = _bearer(request.headers.get("Authorization", ""))
        if not _matches(presented, access.token) and (change or not _matches(presented, access.view_token)):
            return _error(401, "The admin API needs a bearer token that may do this.")
    origin = request.headers.get("Origin")
    if origin is not None and urlsplit(origin).netloc != request.host:
        return _error(403, "Requests from pages of another origin are refused.")
    if change and request.content_type != "application/json":
        return _error(415, "A change needs the header `content-type: application/json`.")
    return None


def _bearer(header: str) -> bytes | None:
    """The token of `Bearer TOKEN`, as it was sent; None when the header has another form."""
    scheme, _, token = header.partition(" ")
    # aiohttp decodes headers in this way; what is no UTF-8 survives it, and is simply no match.
    return token.strip().encode("utf-8", "surrogateescape") if scheme.lower() == "bearer" else None


def _matches(presented: bytes | None, secret: Secret | None) -> bool:
    if presented is None or secret is None:
        return False
    return hmac.compare_digest(presented, secret.reveal().encode("utf-8", "surrogateescape"))


def _error(status: int, message: str) -> web.Response:
    return web.Response(status=status, body=orjson.dumps({"error": message}), content_type="application/json")


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(
        status=status, body=orjson.dumps(value, option=orjson.OPT_INDENT_2), content_type="application/json"
    )


class _AdminApi:
    def __init__(self, crew: Crew, actions: AdminActions, own: OwnFamilies) -> None:
        self._crew = crew
        self._hub = crew.hub
        self._own = own
        self._actions = actions

    async def index(self, request: web.Request) -> web.Response:
        routes = sorted(
            f"{route.method} {resource.canonical}"
            for resource in request.app.router.resources()
            for route in resource
            if route.method != "HEAD"
        )
        return _json({"admin": routes})

    async def metrics(self, request: web.Request) -> web.Response:
        body = exposition(merge({"supervisor": self._own(), **await self._crew.families()}))
        return web.Response(body=body, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def requests(self, request: web.Request) -> web.Response:
        acks = await self._hub.query("requests", {"count": _REQUESTS})
        found = sorted((pair for ack in acks for pair in (ack.value or [])), reverse=True)
        return _json({"requests": [name for _, name in found[:_REQUESTS]], "no_answer_of": _without_answer(acks)})

    async def why(self, request: web.Request) -> web.Response:
        request_id = request.match_info["id"]
        acks = await self._hub.query("why", {"id": request_id})
        for ack in acks:
            if ack.value is not None:
                return _json({"worker": ack.worker, **ack.value})
        silent = _without_answer(acks)
        if silent:
            who = "; ".join(f"{worker}: {why}" for worker, why in silent.items())
            return _error(
                503, f"Not every worker has answered, and no other knows the request {request_id[:100]!r}. {who}."
            )
        return _error(404, f"The request {request_id[:100]!r} is not (or no longer) among the recent ones.")

    def ask(self, what: str) -> Handler:
        """One query, answered by worker."""

        async def answer(_request: web.Request) -> web.Response:
            return _json(by_worker(await self._hub.query(what, {})))

        return answer

    async def reload(self, request: web.Request) -> web.Response:
        result = await self._actions.reload_policies()
        _log.info("policies_reloaded", who=request.remote, **result)
        return _json(result, 200 if not result.get("problems") else 422)

    async def workers(self, request: web.Request) -> web.Response:
        return _json({"workers": self._crew.status()})

    async def restart(self, request: web.Request) -> web.Response:
        problems = await self._actions.restart_workers()
        _log.info("workers_restarted", who=request.remote, problems=problems)
        return _json({"workers": self._crew.status(), "problems": problems}, 200 if not problems else 500)

    async def reload_model(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        # Workers that are not there would run no models either.
        acks = [ack for ack in await self._hub.command("models.reload", {"name": name}, _RELOAD_S) if ack.asked]
        told = by_worker(acks)
        _log.info("model_reloaded", who=request.remote, model=name[:100], **told)
        if not told:
            return _error(
                404, "No process runs models inside the gateway now: none is configured, or it is down (GET /workers)."
            )
        return _json(told, 200 if not any(ack.error for ack in acks) else 422)


def _without_answer(acks: Sequence[Ack]) -> dict[str, str]:
    """Why, by worker."""
    return {ack.worker: ack.error for ack in acks if ack.error}


def by_worker(acks: Sequence[Ack]) -> dict[str, Any]:
    """Answers (or the error) by worker."""
    return {ack.worker: {"error": ack.error} if ack.error else ack.value for ack in acks}
