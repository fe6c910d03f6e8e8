"""The end of a worker: whatever cannot be closed, the rest is."""

import asyncio
import dataclasses
from pathlib import Path

import pytest
import structlog
from msgspec.structs import replace

from gateway.app import Surroundings, build_worker
from gateway.config import load_config
from gateway.control.hub import WorkerPort
from gateway.control.sockets import bind_sockets, close_groups
from gateway.control.start import Start
from gateway.control.worker import Worker, WorkerParts
from gateway.secret import Secret
from policies.core.clock import SystemClock
from routing.heads import Heads
from tests.support.gateway import environment, write_config


class _Part:
    """Something that is closed, and may fail at it."""

    def __init__(self, closed: list[str], name: str, error: Exception | None = None) -> None:
        self._closed = closed
        self._name = name
        self._error = error

    async def aclose(self) -> None:
        self._closed.append(self._name)
        if self._error is not None:
            raise self._error


def _parts(tmp_path: Path) -> WorkerParts:
    config = load_config(write_config(tmp_path, "http://127.0.0.1:9"), environment(tmp_path))
    config = replace(config, cache=replace(config.cache, secret=Secret("0123456789")))
    surroundings = Surroundings(SystemClock(), WorkerPort("worker-1"))
    return build_worker(Start(config), Heads.shipped(), surroundings)._parts


async def test_a_part_that_cannot_be_closed_does_not_keep_the_rest_open(tmp_path: Path) -> None:
    closed: list[str] = []
    whole = _parts(tmp_path)
    broken = dataclasses.replace(
        whole,
        port=WorkerPort("worker-2"),
        backends={
            "heavy": _Part(closed, "heavy", RuntimeError("stuck")),
            "light": _Part(closed, "light"),
        },
        cache=_Part(closed, "cache", OSError("gone")),
        closers=(_Part(closed, "store", ValueError("no")), _Part(closed, "embedder")),
    )
    worker = Worker(broken)
    groups = bind_sockets("127.0.0.1", 0, 1)
    await worker.start(groups[0])
    close_groups(groups)
    with structlog.testing.capture_logs() as logs:
        await worker.stop()
    assert closed == ["heavy", "light", "cache", "store", "embedder"]
    told = [line["what"] for line in logs if line["event"] == "could_not_be_closed"]
    assert told == ["backend heavy", "cache", "_Part"]
    for backend in whole.backends.values():
        await backend.aclose()
    await whole.cache.aclose()


async def test_a_successor_that_cannot_listen_is_never_ready(tmp_path: Path) -> None:
    """Whoever waits for it learns why, and does not wait for ever."""
    worker = Worker(_parts(tmp_path))
    groups = bind_sockets("127.0.0.1", 0, 1)
    close_groups(groups)
    await worker.start(groups[0], at_once=False)
    with pytest.raises(OSError, match="Bad file descriptor"):
        async with asyncio.timeout(2.0):
            await worker.ready()
    await worker.stop()
