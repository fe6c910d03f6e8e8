"""Every way a request can fail, named by cause. HTTP statuses live in `gateway/error_table.py` alone.

GatewayError
├── RequestError              the client's request cannot be served as it is
│   ├── InvalidRequest        wrong JSON, type or value; `param` names the field
│   ├── BodyTooLarge
│   ├── BodyTimeout           the body did not arrive in time
│   ├── UnsupportedMedia      a content type or encoding we do not read
│   ├── UnknownModel          no policy alias and no allowed backend has this name
│   ├── UnknownPath, MethodNotAllowed
│   ├── Unauthenticated       no key, or one that is unknown, revoked or expired
│   ├── NotPermitted          the key does not allow this
│   └── NotCached             only-if-cached, and it is not
├── BackendError              one attempt at one backend failed
│   ├── ConnectFailed         refused, reset or timed out before any byte of an answer
│   ├── UpstreamStatus        the backend answered with an error status
│   ├── ClientFault           the backend says that the client's request is at fault; passes through unaltered
│   ├── UpstreamMisconfigured our credentials or our model name were refused: the operator's to mend
│   ├── FirstTokenTimeout, IdleTimeout
│   ├── MalformedAnswer       a 200 that cannot be understood, or is empty
│   ├── TruncatedAnswer       the stream ended before it was finished
│   ├── InBandError           an error event inside a 200
│   └── ModelFailed           an in-process run failed
├── Rejected                  our own decision not to call; never counted against a backend
│   ├── BreakerOpen, LimitReached, ModelNotReady, Draining
│   └── CannotServe           no rung can do what the request needs
├── DeadlineExceeded
└── NoAnswer                  every rung of the ladder was tried or skipped
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar


class GatewayError(Exception):
    """Base of all; never raised itself. `code` is the machine-readable name clients see."""

    code: ClassVar[str] = "internal_error"
    #: Seconds after which a client may try again; None = we have nothing to say.
    retry_after_s: float | None = None

    @property
    def message(self) -> str:
        """What is wrong, for a person; holds no prompt text and no secret."""
        return str(self) or self.code.replace("_", " ")


class RequestError(GatewayError):
    """The client's request cannot be served as it is."""

    code = "invalid_request"


class InvalidRequest(RequestError):
    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        if code is not None:
            self.code = code  # type: ignore[misc]  # an instance may be more precise than its class


class BodyTooLarge(RequestError):
    code = "body_too_large"


class BodyTimeout(RequestError):
    code = "body_timeout"


class UnsupportedMedia(RequestError):
    code = "unsupported_media_type"


class UnknownModel(RequestError):
    code = "model_not_found"

    def __init__(self, model: str) -> None:
        super().__init__(f"The model {model[:100]!r} does not exist here. GET /v1/models lists the names you may use.")


class UnknownPath(RequestError):
    code = "unknown_path"


class MethodNotAllowed(RequestError):
    code = "method_not_allowed"

    def __init__(self, message: str, allowed: tuple[str, ...]) -> None:
        super().__init__(message)
        self.allowed = allowed


class Unauthenticated(RequestError):
    code = "invalid_api_key"


class NotPermitted(RequestError):
    code = "not_permitted"


class NotCached(RequestError):
    code = "not_cached"


class BackendError(GatewayError):
    """One attempt at one backend failed. `backend` is its configured name."""

    code = "upstream_error"

    def __init__(self, message: str = "", backend: str = "") -> None:
        super().__init__(message)
        self.backend = backend


class ConnectFailed(BackendError):
    code = "upstream_unreachable"


class UpstreamStatus(BackendError):
    """An error status that is the backend's own doing (5xx, 408, 425, 429, 501, 3xx)."""

    code = "upstream_status"

    def __init__(self, status: int, backend: str = "", retry_after_s: float | None = None) -> None:
        super().__init__(f"the backend answered with status {status}", backend)
        self.status = status
        self.retry_after_s = retry_after_s


class ClientFault(BackendError):
    """A 4xx about the client's own request: status and body reach the client unaltered, the ladder is unused."""

    code = "upstream_client_error"

    def __init__(self, status: int, body: bytes, content_type: str, backend: str = "") -> None:
        super().__init__(f"the backend refused the request with status {status}", backend)
        self.status = status
        self.body = body
        self.content_type = content_type


class ContextTooLong(ClientFault):
    """400 context_length_exceeded: a rung with a larger context may still answer."""

    code = "context_length_exceeded"


class UpstreamMisconfigured(BackendError):
    """401, 402, 403 or 404: our credentials or our model name, not the client's."""

    code = "upstream_misconfigured"

    def __init__(self, status: int, backend: str = "") -> None:
        super().__init__(
            f"the backend {backend!r} refused the gateway's own credentials or model name (status {status}); "
            "the operator must check its model and credential_env",
            backend,
        )
        self.status = status


class FirstTokenTimeout(BackendError):
    code = "first_token_timeout"


class IdleTimeout(BackendError):
    code = "idle_timeout"


class TotalTimeout(BackendError):
    """A stream ran past its total limit."""

    code = "total_timeout"


class MalformedAnswer(BackendError):
    code = "upstream_malformed"


class TruncatedAnswer(BackendError):
    code = "upstream_truncated"


class InBandError(BackendError):
    code = "upstream_in_band_error"


class ModelFailed(BackendError):
    code = "model_failed"


class Rejected(GatewayError):
    """Our own decision not to call. Spends no retry budget and never counts against a backend."""

    code = "rejected"

    def __init__(self, message: str = "", retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class BreakerOpen(Rejected):
    code = "breaker_open"


class LimitReached(Rejected):
    code = "limit_reached"


class ModelNotReady(Rejected):
    code = "model_not_ready"


class Draining(Rejected):
    code = "draining"


class CannotServe(Rejected):
    """No rung can do what the request needs; the message says what was missing where."""

    code = "unsupported_by_models"


class DeadlineExceeded(GatewayError):
    code = "deadline_exceeded"


class NoAnswer(GatewayError):
    """Every rung was tried or skipped. `causes` holds (backend, error) in the order of the walk, `skips` (backend, reason).

    It speaks with the code of its last cause.
    """

    code = "no_answer"

    def __init__(self, causes: list[tuple[str, GatewayError]], skips: Sequence[tuple[str, str]] = ()) -> None:
        told = [f"{name}: {error.code}" for name, error in causes] + [f"{name} {reason}" for name, reason in skips]
        super().__init__(f"no rung of the ladder could answer ({'; '.join(told) or 'the ladder is empty'})")
        self.causes = causes
        if causes:
            self.code = causes[-1][1].code  # type: ignore[misc]  # an instance is more precise than its class
        waits = [error.retry_after_s for _, error in causes if error.retry_after_s is not None]
        self.retry_after_s = min(waits) if waits else 1.0

    @property
    def last(self) -> GatewayError | None:
        return self.causes[-1][1] if self.causes else None


class ConfigError(GatewayError):
    """A configuration file cannot be used. `problems` are complete lines for a person, file:line:column first."""

    code = "config_error"

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems
