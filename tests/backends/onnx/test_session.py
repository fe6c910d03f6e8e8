from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable
from pathlib import Path

import numpy as np
import pytest

from backends.onnx.build.graph import FLOAT, GraphWriter, save, value
from backends.onnx.manifest import ModelError
from backends.onnx.session import (
    OneThread,
    ProviderUnavailable,
    SessionSettings,
    check_names,
    create_session,
    first_line,
    full_provider_name,
    provider_of,
)
from policies.core.clock import FakeClock, SystemClock
from policies.core.deadline import Deadline
from policies.core.errors import DeadlineExceeded, InvalidRequest, LimitReached, ModelFailed, ModelNotReady


@pytest.fixture(scope="module")
def long_graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A graph of 4000 small nodes: it can be stopped at many places and takes far longer than a test waits."""
    writer = GraphWriter("fp32")
    writer.constant("w", np.eye(256, dtype=np.float32))
    current = "x"
    for step in range(4000):
        current = writer.node("MatMul", [current, "w"], f"y{step}")
    path = tmp_path_factory.mktemp("graph") / "long.onnx"
    save(writer.model("long", [value("x", FLOAT, ["n", 256])], [value(current, FLOAT, ["n", 256])]), path)
    return path


def test_the_cpu_provider_loads_and_is_named(long_graph: Path) -> None:
    assert provider_of(create_session(long_graph)) == "CPUExecutionProvider"


def test_a_provider_that_is_not_installed_is_an_error_not_a_fallback() -> None:
    with pytest.raises(ProviderUnavailable, match="install the `gpu` extra"):
        full_provider_name("cuda", ["CPUExecutionProvider"])
    assert full_provider_name("cuda", ["CUDAExecutionProvider", "CPUExecutionProvider"]) == "CUDAExecutionProvider"


def test_an_unknown_provider_is_an_error(long_graph: Path) -> None:
    with pytest.raises(ProviderUnavailable, match="use one of cpu, cuda, tensorrt"):
        create_session(long_graph, SessionSettings(provider="quantum"))


def test_a_file_that_is_no_graph_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(b"\x00garbage")
    with pytest.raises(ModelError, match="cannot be loaded"):
        create_session(tmp_path / "m.onnx")


def test_names_are_checked(long_graph: Path) -> None:
    session = create_session(long_graph)
    check_names(session, ["x"], ["y3999"])
    with pytest.raises(ModelError, match="rebuild the model"):
        check_names(session, ["x", "mask"], ["y3999"])
    with pytest.raises(ModelError, match="rebuild the model"):
        check_names(session, ["x"], ["scores"])


def test_only_the_first_line_of_an_error_is_kept() -> None:
    assert first_line(RuntimeError("what\nstack trace\nmore")) == "what"
    assert first_line(RuntimeError()) == "RuntimeError"
    assert len(first_line(RuntimeError("x" * 1000))) == 200


class Gate:
    """A job that stops in the thread until it is let go."""

    def __init__(self) -> None:
        self.entered, self.go = threading.Event(), threading.Event()
        self.options = None

    def job(self, options: object, result: str = "done") -> str:
        self.options = options
        self.entered.set()
        assert self.go.wait(10)
        return result


async def started(gate: Gate) -> None:
    assert await asyncio.to_thread(gate.entered.wait, 10)


async def test_jobs_run_one_after_another_with_their_arguments(soon: Deadline) -> None:
    thread = OneThread("m")
    order: list[int] = []

    def job(_options: object, number: int) -> int:
        order.append(number)
        return number * 10

    assert await asyncio.gather(*(thread.run(job, soon, n) for n in range(5))) == [0, 10, 20, 30, 40]
    assert order == [0, 1, 2, 3, 4] and thread.waiting == 0
    await thread.aclose()


async def test_the_queue_is_bounded(soon: Deadline) -> None:
    thread, gate = OneThread("m", max_waiting=2), Gate()
    running = asyncio.create_task(thread.run(gate.job, soon))
    await started(gate)
    queued = asyncio.create_task(thread.run(gate.job, soon, "second"))
    await asyncio.sleep(0)
    with pytest.raises(LimitReached, match="2 calls already wait for 'm'"):
        await thread.run(gate.job, soon)
    gate.go.set()
    assert [await running, await queued] == ["done", "second"]
    await thread.aclose()


async def test_a_deadline_stops_a_run_between_nodes(long_graph: Path, soon: Deadline) -> None:
    session, thread = create_session(long_graph), OneThread("m")
    x = np.ones((512, 256), np.float32)
    with pytest.raises(DeadlineExceeded):
        await thread.run(lambda options: session.run(None, {"x": x}, options), Deadline.after(0.05, SystemClock()))
    # The flag belonged to that run: the next one, on the same session, is not stopped.
    small = await thread.run(lambda options: session.run(None, {"x": x[:1]}, options)[0], soon)
    assert (small == 1).all() and thread.waiting == 0
    await thread.aclose()


async def test_cancelling_stops_the_running_job_and_drops_a_queued_one(soon: Deadline) -> None:
    thread, gate, never = OneThread("m"), Gate(), Gate()
    running = asyncio.create_task(thread.run(gate.job, soon))
    await started(gate)
    queued = asyncio.create_task(thread.run(never.job, soon))
    await asyncio.sleep(0)
    for task in (running, queued):
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert gate.options.terminate is True
    gate.go.set()
    await thread.aclose()
    assert not never.entered.is_set()


async def test_what_a_job_raises_becomes_model_failed(soon: Deadline) -> None:
    thread = OneThread("m")

    def broken(_options: object) -> None:
        raise ValueError("bad shape\nstack")

    with pytest.raises(ModelFailed, match=r"a run failed: bad shape$") as failed:
        await thread.run(broken, soon)
    assert failed.value.backend == "m"
    await thread.aclose()


async def test_our_own_errors_pass_unchanged(soon: Deadline) -> None:
    thread = OneThread("m")

    def refuses(_options: object) -> None:
        raise InvalidRequest("no", param="x")

    with pytest.raises(InvalidRequest):
        await thread.run(refuses, soon)
    await thread.aclose()


async def test_an_expired_deadline_runs_nothing() -> None:
    thread, gate = OneThread("m"), Gate()
    with pytest.raises(DeadlineExceeded):
        await thread.run(gate.job, Deadline.after(-1.0, SystemClock()))
    await thread.aclose()
    assert not gate.entered.is_set()


async def test_closing_refuses_what_waits_and_what_comes(soon: Deadline) -> None:
    thread, gate = OneThread("m"), Gate()
    running = asyncio.create_task(thread.run(gate.job, soon))
    await started(gate)
    queued = asyncio.create_task(thread.run(gate.job, soon))
    await asyncio.sleep(0)
    closing = asyncio.create_task(thread.aclose())
    with pytest.raises(ModelNotReady, match="unloaded"):
        await queued
    with pytest.raises(ModelNotReady, match="unloaded"):
        await thread.run(gate.job, soon)
    gate.go.set()
    assert await running == "done"
    await closing


async def test_short_runs_are_made_on_the_loop_when_that_is_asked_for() -> None:
    """Not before one has been timed, not while another waits, and not once they have become long."""
    clock = FakeClock()
    thread = OneThread("m", on_loop_s=0.001)
    here = threading.get_ident()

    def run(_options: object, seconds: float = 0.0) -> int:
        clock.advance(seconds)
        return threading.get_ident()

    def ask(seconds: float = 0.0) -> Awaitable[int]:
        return thread.run(run, Deadline.after(60.0, clock), seconds)

    assert await ask() != here
    assert await ask() == here
    assert await ask(0.5) == here  # who could know
    assert await ask() != here
    for _ in range(200):
        await ask()
    assert await ask() == here
    first, second = await asyncio.gather(ask(), ask())
    assert {first, second} == {here}
    await thread.aclose()


async def test_runs_are_made_on_the_thread_unless_asked_otherwise() -> None:
    thread = OneThread("m")
    for _ in range(3):
        found = await thread.run(lambda _options: threading.get_ident(), Deadline.after(60.0, SystemClock()))
        assert found != threading.get_ident()
    await thread.aclose()
