"""Structured logs: JSON lines on standard output. A good answer writes no line; what went wrong writes one."""

from __future__ import annotations

import logging
import sys

import structlog

from policies.core import events as ev


def configure(level: str = "info", *, human: bool = False) -> None:
    """Set structlog up once, at the start of a process. `human` prints for a terminal instead of JSON."""
    renderer = structlog.dev.ConsoleRenderer(colors=False) if human else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.WriteLoggerFactory(sys.stdout),
        cache_logger_on_first_use=True,
    )


class LogObserver:
    """Writes the events that someone must see at 2 a.m."""

    def __init__(self) -> None:
        self._log = structlog.get_logger("gateway")
        self.handlers: ev.Handlers = {
            ev.Completed: self._on_completed,
            ev.BreakerChanged: self._on_breaker,
            ev.PolicyChanged: self._on_policy,
            ev.ModelChanged: self._on_model,
            ev.Attempted: self._on_attempted,
        }

    def _on_completed(self, event: ev.Completed) -> None:
        if event.outcome in ("failed", "cut"):
            self._log.warning(
                f"request_{event.outcome}",
                request_id=event.request_id,
                policy=event.policy,
                status=event.status,
                reason=event.degraded,
                ms=round(event.seconds * 1000, 1),
            )

    def _on_breaker(self, event: ev.BreakerChanged) -> None:
        self._log.warning(
            "breaker_changed", backend=event.backend, before=event.before, after=event.after, reason=event.reason
        )

    def _on_policy(self, event: ev.PolicyChanged) -> None:
        write = self._log.info if event.outcome == "applied" else self._log.error
        write(f"policy_{event.outcome}", policy=event.policy, version=event.version, reason=event.reason)

    def _on_model(self, event: ev.ModelChanged) -> None:
        write = self._log.error if event.state == "failed" else self._log.info
        write(f"model_{event.state}", model=event.model, reason=event.reason)

    def _on_attempted(self, event: ev.Attempted) -> None:
        if event.outcome == "upstream_misconfigured":
            self._log.error("upstream_misconfigured", backend=event.backend, request_id=event.request_id)
