"""One worker in the supervisor's process: replaced, or not."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from gateway.app import Surroundings, build_worker
from gateway.config import load_config
from gateway.control.crew import Agreement
from gateway.control.facts import FactBoard
from gateway.control.hub import WorkerPort
from gateway.control.in_process import InProcessCrew
from gateway.control.start import Standing, Start
from gateway.control.worker import Worker
from gateway.secret import Secret
from policies.core.clock import SystemClock
from routing.heads import Heads
from tests.support.gateway import environment, write_config


async def test_a_successor_that_cannot_be_had_leaves_all_as_it_was(tmp_path: Path) -> None:
    config = load_config(write_config(tmp_path, "http://127.0.0.1:9"), environment(tmp_path))
    config = replace(config, cache=replace(config.cache, secret=Secret("0123456789")))
    clock, broken = SystemClock(), [False]

    def build(start: Start, port: WorkerPort) -> Worker:
        if broken[0]:
            raise ValueError("no such thing")
        return build_worker(start, Heads.shipped(), Surroundings(clock, port))

    crew = InProcessCrew(config, build, clock)
    await crew.start(Agreement(Standing()), FactBoard(crew.hub))
    await crew.ready()
    first, broken[0] = crew.worker, True
    assert await crew.restart(config) == (["worker-1 was not replaced: ValueError: no such thing"], False)
    # One that was built and cannot begin: here, to listen.
    broken[0] = False
    crew._sockets[0][0].close()
    (problem,), taken_up = await crew.restart(config)
    assert not taken_up
    assert problem.startswith("worker-1 was not replaced: OSError: ")
    assert crew.worker is first
    assert [ack.worker for ack in await crew.hub.query("cache", {})] == ["worker-1"]
    assert crew.status()[0]["leaving"] == []
    await crew.stop()
    # Who asks while the last things are closed gets an answer.
    assert crew.status()[0]["state"] == "down"
    assert await crew.families() == crew._fleet.families()
