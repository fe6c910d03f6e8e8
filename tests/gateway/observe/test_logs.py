import logging

import pytest
import structlog

from gateway.observe.logs import LibraryLogs, LogObserver
from gateway.observe.quiet import Quiet
from policies.core import events as ev
from policies.core.clock import FakeClock


def _failed(number: int, policy: str = "support@3") -> ev.Completed:
    return ev.Completed(request_id=f"r{number}", policy=policy, outcome="failed", status=503, degraded="no_answer")


def test_a_thousand_failed_requests_are_one_line_and_then_a_count() -> None:
    clock = FakeClock()
    observer = LogObserver(clock)
    handle = observer.handlers[ev.Completed]
    with structlog.testing.capture_logs() as logs:
        for number in range(1_000):
            handle(_failed(number))
        handle(_failed(0, "scoring@1"))
        clock.advance(60.0)
        handle(_failed(1_000))
    assert [(line["request_id"], line.get("suppressed")) for line in logs] == [
        ("r0", None),
        ("r0", None),
        ("r1000", 999),
    ]
    assert {line["event"] for line in logs} == {"request_failed"}


def test_a_misconfigured_backend_is_told_once_for_each_backend() -> None:
    handle = LogObserver(FakeClock()).handlers[ev.Attempted]
    with structlog.testing.capture_logs() as logs:
        for backend in ("heavy", "light", "heavy", "heavy"):
            handle(ev.Attempted(backend=backend, outcome="upstream_misconfigured", seconds=0.1, first_s=0.1))
            handle(ev.Attempted(backend=backend, outcome="ok", seconds=0.1, first_s=0.1))
    assert [line["backend"] for line in logs] == ["heavy", "light"]


def test_facts_that_cannot_be_read_are_told_once_for_each_teller() -> None:
    handle = LogObserver(FakeClock()).handlers[ev.FactRefused]
    with structlog.testing.capture_logs() as logs:
        for teller in ("worker-1", "worker-2", "worker-1"):
            handle(ev.FactRefused(key="breaker/heavy", teller=teller, reason="Expected `float`"))
    assert [(line["event"], line["teller"], line["reason"]) for line in logs] == [
        ("fact_refused", "worker-1", "Expected `float`"),
        ("fact_refused", "worker-2", "Expected `float`"),
    ]


@pytest.fixture
def library() -> logging.Logger:
    """A logger of some library whose records go our way and no other."""
    logger = logging.Logger("some.library")  # noqa: LOG001  not to be found by anybody else
    logger.addHandler(LibraryLogs(Quiet(FakeClock())))
    return logger


def test_what_a_library_logs_comes_with_its_traceback_and_not_again_and_again(library: logging.Logger) -> None:
    with structlog.testing.capture_logs() as logs:
        for number in range(100):
            try:
                raise ValueError(f"number {number}")
            except ValueError:
                library.exception("broken for %s", number)
        library.warning("another thing")
        library.info("nothing that matters")
    assert [(line["event"], line["logger"], line["message"]) for line in logs] == [
        ("library_message", "some.library", "broken for 0"),
        ("library_message", "some.library", "another thing"),
    ]
    assert isinstance(logs[0]["exc_info"], ValueError)
    assert [line["log_level"] for line in logs] == ["error", "warning"]
