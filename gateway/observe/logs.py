"""Structured logs: JSON lines on standard output. A good answer writes no line; what went wrong writes one, and what goes
wrong again and again writes one every few seconds, with a count. Lines go through a `LogSink`: they never hold up a request."""

from __future__ import annotations

import atexit
import logging
import sys
from typing import Any

import structlog

from gateway.observe.log_sink import LogSink
from gateway.observe.quiet import Quiet
from policies.core import events as ev
from policies.core.clock import Clock, SystemClock


def configure(level: str = "info", *, human: bool = False, clock: Clock | None = None, worker: str = "") -> LogSink:
    """Set structlog up once, at the start of a process. `human` prints for a terminal instead of JSON; `worker`, where
    given, stands in every line that has no `worker` of its own.

    What libraries log (warnings and errors) takes the same way, so that every line has one form. The sink that is returned
    counts lost lines, and is closed when the interpreter ends.
    """
    renderer = structlog.dev.ConsoleRenderer(colors=False) if human else structlog.processors.JSONRenderer()
    processors: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        renderer,
    ]
    if worker:
        processors.insert(0, _WorkerName(worker))
    sink = LogSink(sys.stdout, lambda lost: _rendered("log_lines_lost", processors, lost=lost))
    atexit.register(sink.close)
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.WriteLoggerFactory(sink),  # type: ignore[arg-type]  # all of TextIO that it uses
        cache_logger_on_first_use=True,
    )
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if isinstance(handler, LibraryLogs)]:
        root.removeHandler(handler)
    root.addHandler(LibraryLogs(Quiet(clock or SystemClock())))
    return sink


class _WorkerName:
    """A processor of structlog's that says which process writes."""

    def __init__(self, worker: str) -> None:
        self._worker = worker

    def __call__(self, _logger: Any, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        event.setdefault("worker", self._worker)
        return event


def _rendered(event: str, processors: list[structlog.typing.Processor], **fields: Any) -> str:
    """One warning as a line, without a logger."""
    line: Any = {**fields, "event": event}
    for process in processors:
        line = process(None, "warning", line)
    return f"{line}\n"


class LibraryLogs(logging.Handler):
    """Hands what libraries log to structlog, warnings and worse, each kind now and then."""

    def __init__(self, quiet: Quiet) -> None:
        super().__init__(logging.WARNING)
        self._quiet = quiet
        self._log = structlog.get_logger("gateway.library")

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        more = self._quiet.admit((record.name, str(record.msg), type(error)))
        if more is not None:
            self._log.log(
                record.levelno,
                "library_message",
                logger=record.name,
                message=record.getMessage(),
                exc_info=error,
                **more,
            )


class LogObserver:
    """Writes the events that someone must see at 2 a.m."""

    def __init__(self, clock: Clock) -> None:
        self._log = structlog.get_logger("gateway")
        self._quiet = Quiet(clock)
        self.handlers: ev.Handlers = {
            ev.Completed: self._on_completed,
            ev.BreakerChanged: self._on_breaker,
            ev.FactRefused: self._on_fact_refused,
            ev.PolicyChanged: self._on_policy,
            ev.ModelChanged: self._on_model,
            ev.Attempted: self._on_attempted,
        }

    def _on_completed(self, event: ev.Completed) -> None:
        if event.outcome not in ("failed", "cut"):
            return
        more = self._quiet.admit((event.outcome, event.policy, event.degraded))
        if more is not None:
            self._log.warning(
                f"request_{event.outcome}",
                request_id=event.request_id,
                policy=event.policy,
                status=event.status,
                reason=event.degraded,
                ms=round(event.seconds * 1000, 1),
                **more,
            )

    def _on_breaker(self, event: ev.BreakerChanged) -> None:
        self._log.warning(
            "breaker_changed", backend=event.backend, before=event.before, after=event.after, reason=event.reason
        )

    def _on_fact_refused(self, event: ev.FactRefused) -> None:
        more = self._quiet.admit(("fact_refused", event.key, event.teller))
        if more is not None:
            self._log.warning("fact_refused", key=event.key, teller=event.teller, reason=event.reason, **more)

    def _on_policy(self, event: ev.PolicyChanged) -> None:
        write = self._log.info if event.outcome == "applied" else self._log.error
        write(f"policy_{event.outcome}", policy=event.policy, version=event.version, reason=event.reason)

    def _on_model(self, event: ev.ModelChanged) -> None:
        write = self._log.error if event.state == "failed" else self._log.info
        write(f"model_{event.state}", model=event.model, reason=event.reason)

    def _on_attempted(self, event: ev.Attempted) -> None:
        if event.outcome != "upstream_misconfigured":
            return
        more = self._quiet.admit((event.outcome, event.backend))
        if more is not None:
            self._log.error("upstream_misconfigured", backend=event.backend, request_id=event.request_id, **more)
