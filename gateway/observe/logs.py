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

    def on_event(self, event: ev.Event) -> None:
        kind = type(event)
        if kind is ev.Completed:
            assert isinstance(event, ev.Completed)
            if event.outcome in ("failed", "cut"):
                self._log.warning(
                    f"request_{event.outcome}",
                    request_id=event.request_id,
                    policy=event.policy,
                    status=event.status,
                    reason=event.degraded,
                    ms=round(event.seconds * 1000, 1),
                )
        elif kind is ev.BreakerChanged:
            assert isinstance(event, ev.BreakerChanged)
            self._log.warning(
                "breaker_changed",
                backend=event.backend,
                before=event.before,
                after=event.after,
                reason=event.reason,
            )
        elif kind is ev.PolicyChanged:
            assert isinstance(event, ev.PolicyChanged)
            write = self._log.info if event.outcome == "applied" else self._log.error
            write(f"policy_{event.outcome}", policy=event.policy, version=event.version, reason=event.reason)
        elif kind is ev.ModelChanged:
            assert isinstance(event, ev.ModelChanged)
            write = self._log.error if event.state == "failed" else self._log.info
            write(f"model_{event.state}", model=event.model, reason=event.reason)
        elif kind is ev.Attempted:
            assert isinstance(event, ev.Attempted)
            if event.outcome == "upstream_misconfigured":
                self._log.error("upstream_misconfigured", backend=event.backend, request_id=event.request_id)
