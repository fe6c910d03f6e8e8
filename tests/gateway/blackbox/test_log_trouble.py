"""Standard output that takes nothing: requests are served all the same."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.support.gateway import environment, write_config
from tests.support.gateway_client import EASY, HARD, Client
from tests.support.settable_upstream import SettableUpstream
from tests.support.waiting import eventually

StartMute = Callable[[int], Awaitable[tuple[Client, asyncio.subprocess.Process]]]


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@asynccontextmanager
async def _gateway(config: dict[str, Any], folder: Path, upstream: str, stdout: int) -> AsyncIterator[Any]:
    """`gateway serve`: what it says about its ports is lost, so they are chosen."""
    path = write_config(folder, upstream, **config)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gateway.cli.main", "serve", "--config", str(path),
        env={"PATH": os.environ["PATH"], **environment(folder)}, stdout=stdout, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    client = Client(*(f"http://127.0.0.1:{config[name]['port']}" for name in ("listen", "admin")))
    try:
        yield client, process
    finally:
        await client.aclose()
        if process.returncode is None:
            process.kill()
        await process.communicate()


@pytest.fixture
async def mute(up: SettableUpstream, tmp_path: Path) -> AsyncIterator[StartMute]:
    async with AsyncExitStack() as stack:

        async def start(stdout: int) -> tuple[Client, asyncio.subprocess.Process]:
            config = {name: {"port": _free_port()} for name in ("listen", "admin")}
            client, process = await stack.enter_async_context(_gateway(config, tmp_path, up.url, stdout))

            async def ready() -> bool:
                try:
                    return (await client.get("/readyz")).status == 200
                except aiohttp.ClientError:
                    return False

            await eventually(ready, within_s=20.0)
            return client, process

        yield start


async def _ended(process: asyncio.subprocess.Process) -> str:
    """Standard error of a process that ends well."""
    process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(8.0):
        _, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    return errors.decode()


async def test_a_full_disk_under_the_log(mute: StartMute) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        client, process = await mute(full)
    finally:
        os.close(full)
    for text in (EASY, HARD, EASY):
        assert (await client.chat(text)).status == 200

    async def told() -> float:
        # The line that says that it is ready, if nothing else.
        return await client.metric("gateway_log_lines_lost_total")

    assert await eventually(told, within_s=5.0) >= 1
    assert await _ended(process) == ""


async def test_a_pipe_that_nobody_reads_under_the_log(mute: StartMute) -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    try:
        while True:
            os.write(writing, b"." * 4096)
    except BlockingIOError:
        os.set_blocking(writing, True)
    try:
        # Its first line would hold it up for good.
        client, process = await mute(writing)
        for text in (EASY, HARD, EASY):
            assert (await client.chat(text)).status == 200
        assert await _ended(process) == ""
    finally:
        os.close(writing)
        os.close(reading)
