"""The only place where a cause becomes an HTTP status. A test proves that every error class has a row."""

from __future__ import annotations

from typing import NamedTuple

from policies.core import errors as e


class Row(NamedTuple):
    """`status` and the OpenAI error `type`."""

    status: int
    type: str


_CLIENT = "invalid_request_error"
_UPSTREAM = "upstream_error"
_BUSY = "overloaded_error"
_TIME = "timeout_error"

TABLE: dict[type[e.GatewayError], Row] = {
    e.GatewayError: Row(500, "server_error"),
    e.RequestError: Row(400, _CLIENT),
    e.InvalidRequest: Row(400, _CLIENT),
    e.BodyTooLarge: Row(413, _CLIENT),
    e.BodyTimeout: Row(408, _CLIENT),
    e.UnsupportedMedia: Row(415, _CLIENT),
    e.UnknownModel: Row(404, _CLIENT),
    e.UnknownPath: Row(404, _CLIENT),
    e.MethodNotAllowed: Row(405, _CLIENT),
    e.Unauthenticated: Row(401, "authentication_error"),
    e.NotPermitted: Row(403, "permission_error"),
    e.NotCached: Row(504, _CLIENT),
    e.BackendError: Row(502, _UPSTREAM),
    e.ConnectFailed: Row(502, _UPSTREAM),
    e.UpstreamStatus: Row(502, _UPSTREAM),
    e.ClientFault: Row(400, _CLIENT),  # the upstream's own status and body pass through
    e.ContextTooLong: Row(400, _CLIENT),
    e.UpstreamMisconfigured: Row(502, _UPSTREAM),
    e.FirstTokenTimeout: Row(504, _TIME),
    e.IdleTimeout: Row(504, _TIME),
    e.TotalTimeout: Row(504, _TIME),
    e.MalformedAnswer: Row(502, _UPSTREAM),
    e.TruncatedAnswer: Row(502, _UPSTREAM),
    e.InBandError: Row(502, _UPSTREAM),
    e.ModelFailed: Row(502, _UPSTREAM),
    e.Rejected: Row(503, _BUSY),
    e.BreakerOpen: Row(503, _BUSY),
    e.LimitReached: Row(429, _BUSY),
    e.ModelNotReady: Row(503, _BUSY),
    e.Draining: Row(503, _BUSY),
    e.CannotServe: Row(422, _CLIENT),
    e.DeadlineExceeded: Row(504, _TIME),
    e.NoAnswer: Row(503, _BUSY),
    e.ConfigError: Row(500, "server_error"),
}


def row(error: e.GatewayError) -> Row:
    """Status and type of `error`. NoAnswer speaks for its last real cause."""
    if isinstance(error, e.ClientFault):
        return Row(error.status, _CLIENT)
    if isinstance(error, e.NoAnswer) and error.last is not None:
        return row(error.last)
    for kind in type(error).__mro__:
        found = TABLE.get(kind)
        if found is not None:
            return found
    raise AssertionError("GatewayError itself has a row")


def is_client_fault(error: e.GatewayError) -> bool:
    """Is `error` the client's own doing, not to be counted against availability? NoAnswer speaks for its last real cause.

    Decided by the cause, never by its status: an only-if-cached miss is a 504, and a 429 may be either's doing.
    """
    if isinstance(error, e.NoAnswer) and error.last is not None:
        return is_client_fault(error.last)
    return isinstance(error, _CLIENTS_DOING)


_CLIENTS_DOING = (e.RequestError, e.ClientFault, e.CannotServe)
