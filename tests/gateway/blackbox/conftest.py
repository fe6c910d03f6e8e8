"""A scripted upstream and gateways in front of it, for the tests of this folder."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.gateway import Gateway, GatewayProcess, Serve, Start, environment, gateway_here, write_config
from tests.support.gateway_client import Client
from tests.support.redis_server import RedisServer
from tests.support.settable_upstream import SettableUpstream
from tests.support.tiny_bert import write_tiny_bert


@pytest.fixture
async def up() -> AsyncIterator[SettableUpstream]:
    """A scripted upstream; every model answers well until told otherwise."""
    server = SettableUpstream()
    await server.start("127.0.0.1", 0)
    yield server
    await server.close()


@pytest.fixture
async def start(up: SettableUpstream, tmp_path: Path) -> AsyncIterator[Start]:
    """Starts gateways in this loop: `await start(policy, ..., env={}, SECTION={...})`."""
    async with AsyncExitStack() as stack:

        async def make(*policies: dict[str, Any], env: dict[str, str] | None = None, **sections: Any) -> Gateway:
            path = write_config(tmp_path, up.url, *policies, **sections)
            return await stack.enter_async_context(gateway_here(path, {**environment(tmp_path), **(env or {})}))

        yield make


@pytest.fixture
async def gateway(start: Start) -> Gateway:
    """A gateway with the test's own policies."""
    return await start()


@pytest.fixture
def client(gateway: Gateway) -> Client:
    return gateway.client


@pytest.fixture
async def redis_server() -> AsyncIterator[RedisServer]:
    server = RedisServer()
    await server.start()
    yield server
    server.close()


@pytest.fixture
async def serve(up: SettableUpstream, tmp_path: Path) -> AsyncIterator[Serve]:
    """Starts `gateway serve` as a process: `await serve(policy, ..., env={}, SECTION={...})`."""
    started: list[GatewayProcess] = []

    async def make(*policies: dict[str, Any], env: dict[str, str] | None = None, **sections: Any) -> GatewayProcess:
        path = write_config(tmp_path, up.url, *policies, **sections)
        process = await GatewayProcess.start(path, {**environment(tmp_path), **(env or {})})
        started.append(process)
        return process

    yield make
    for process in started:
        await process.kill()


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A models folder with minilm and two-tower from random weights: quick to build and to load."""
    from backends.onnx.prepare import prepare
    from backends.onnx.store import ModelStore

    weights = write_tiny_bert(tmp_path_factory.mktemp("weights"))
    folder = tmp_path_factory.mktemp("models")
    prepare(ModelStore(folder), ["minilm:q8", "two-tower:q8"], sources={"minilm": f"file:{weights}"})
    return folder
