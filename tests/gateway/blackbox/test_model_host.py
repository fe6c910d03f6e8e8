"""Models in a process of their own, reached by two workers."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.gateway import EMBEDDED, GatewayProcess, Serve, chat_policy, recommender_policy
from tests.support.gateway_client import Client, Got
from tests.support.waiting import eventually, until


@pytest.fixture
async def gateway(serve: Serve, tiny_models: Path) -> GatewayProcess:
    policies = (chat_policy(), recommender_policy())
    return await serve(*policies, workers=2, models_dir=str(tiny_models), drain="5s", **EMBEDDED)


@pytest.fixture
async def client(gateway: GatewayProcess) -> Client:
    return await gateway.ready(30.0)


async def score(client: Client, text: str, **headers: str) -> Got:
    """A question that nobody has asked before, on a connection of its own: any worker may get it."""
    inputs = [
        {"name": name, "shape": [2], "datatype": "BYTES", "data": [text, f"{name} {text}"]}
        for name in ("user_history", "candidates")
    ]
    return await client.send("POST", "/v2/models/items/infer", {"inputs": inputs}, {"connection": "close", **headers})


async def places(client: Client) -> dict[str, Any]:
    return {place["name"]: place for place in (await client.admin("/workers")).json["workers"]}


async def host_serves_again(client: Client, before: int) -> None:
    async def serves() -> bool:
        host = (await places(client))["model-host"]
        told = (await client.admin("/models")).json
        ready = [model["ready"] for models in told.values() if isinstance(models, list) for model in models]
        return host["pid"] != before and host["state"] == "serving" and len(ready) == 6 and all(ready)

    await eventually(serves, 20.0)


class Asking:
    """Scores asked for all the time, and what came of them."""

    def __init__(self, client: Client, name: str) -> None:
        self._client = client
        self._name = name
        self._running = True
        self.got: Counter[tuple[int, str | None]] = Counter()
        self.slowest_s = 0.0
        self._tasks = [asyncio.create_task(self._ask(n)) for n in range(4)]

    async def _ask(self, client: int) -> None:
        number, loop = 0, asyncio.get_running_loop()
        while self._running:
            began = loop.time()
            got = await score(self._client, f"{self._name} {client} {number}")
            self.slowest_s = max(self.slowest_s, loop.time() - began)
            self.got[got.status, got.said("rung")] += 1
            number += 1
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        self._running = False
        await asyncio.gather(*self._tasks)


async def test_both_workers_answer_from_the_one_host(client: Client) -> None:
    told = (await client.admin("/models")).json
    assert set(told) == {"model-host", "worker-1", "worker-2"}
    assert [model["state"] for model in told["worker-1"]] == ["ready", "ready"]
    fingerprints = {model["fingerprint"] for models in told.values() for model in models if model["name"] == "embed"}
    assert len(fingerprints) == 1
    first = await score(client, "mushrooms")
    assert (first.status, first.said("rung"), first.said("served-by")) == (200, "light", "recommender")
    workers = {(await client.why(await score(client, f"n {number}")))["worker"] for number in range(12)}
    assert workers == {"worker-1", "worker-2"}
    got = await client.send("POST", "/v1/embeddings", {"model": "embed", "input": ["a", "b"]})
    assert (got.status, len(got.json["data"])) == (200, 2)
    # The client's own mistake is told by the host as if there were none in between.
    bad = await client.send("POST", "/v1/embeddings", {"model": "embed", "input": "a", "dimensions": 7})
    assert bad.status == 400
    assert "dimensions" in bad.error["message"]
    meta = (await client.get("/v2/models/items")).json
    assert {tensor["name"] for tensor in meta["inputs"]} >= {"user_history", "candidates"}
    assert (await client.get("/v2/health/ready")).status == 200
    assert await client.metric("gateway_model_ready", model="embed") == 1


async def test_a_killed_host_is_started_again_and_requests_walk_the_ladder(
    client: Client, gateway: GatewayProcess
) -> None:
    host = (await places(client))["model-host"]["pid"]
    asking = Asking(client, "kill")
    await until(lambda: asking.got[200, "light"] > 20, 10.0)
    os.kill(host, signal.SIGKILL)
    await until(lambda: asking.got[200, "default"] > 0, 5.0)
    await host_serves_again(client, host)
    before = asking.got[200, "light"]
    await until(lambda: asking.got[200, "light"] > before + 20, 10.0)
    await asking.stop()
    assert set(asking.got) == {(200, "light"), (200, "default")}, asking.got
    assert asking.slowest_s < 2.0
    found = await places(client)
    assert (found["model-host"]["ended"], found["worker-1"]["ended"]) == (1, 0)
    assert gateway.events("process_ended")[0]["worker"] == "model-host"


async def test_a_frozen_host_holds_nobody_beyond_the_deadline(client: Client, gateway: GatewayProcess) -> None:
    host = (await places(client))["model-host"]["pid"]
    os.kill(host, signal.SIGSTOP)
    loop = asyncio.get_running_loop()
    began = loop.time()
    got = await score(client, "frozen", **{"x-request-timeout-ms": "800"})
    assert (got.status, got.said("rung")) == (200, "default")
    assert loop.time() - began < 1.2
    await until(lambda: gateway.events("process_killed"), 10.0)
    await host_serves_again(client, host)

    async def light() -> bool:
        return (await score(client, f"thawed {loop.time()}")).said("rung") == "light"

    await eventually(light, 10.0)


async def test_a_model_is_loaded_anew_once_for_all_workers(client: Client) -> None:
    asking = Asking(client, "reload")
    await until(lambda: asking.got[200, "light"] > 5, 10.0)
    told = await client.send("POST", "/models/recommender/reload", {}, admin=True)
    assert told.status == 200, told.body
    (done,) = told.json["model-host"]["models"]
    assert (done["name"], done["before"]) == ("recommender", done["after"])
    await asking.stop()
    assert set(asking.got) == {(200, "light")}, asking.got
    unknown = await client.send("POST", "/models/nobody/reload", {}, admin=True)
    assert unknown.status == 422
    assert "there are embed, recommender" in unknown.json["model-host"]["error"]


async def test_a_rolling_restart_leaves_no_request_without_its_model(client: Client, gateway: GatewayProcess) -> None:
    host = (await places(client))["model-host"]["pid"]
    asking = Asking(client, "roll")
    await until(lambda: asking.got[200, "light"] > 5, 10.0)
    gateway.signal(signal.SIGHUP)
    await until(lambda: gateway.events("rolling_restart_done"), 40.0)
    before = asking.got[200, "light"]
    await until(lambda: asking.got[200, "light"] > before + 20, 10.0)
    await asking.stop()
    assert set(asking.got) == {(200, "light")}, asking.got
    found = await places(client)
    assert found["model-host"]["pid"] != host
    assert found["model-host"]["process"] == "model-host.2"


async def test_everything_ends_with_the_gateway(client: Client, gateway: GatewayProcess) -> None:
    pids = [place["pid"] for place in (await places(client)).values()]
    assert len(pids) == 3
    gateway.signal(signal.SIGTERM)
    assert await gateway.ended() == 0

    def gone() -> bool:
        return not any(Path(f"/proc/{pid}").exists() for pid in pids)

    await until(gone, 3.0)
    assert "Traceback" not in gateway.output


async def test_nothing_is_left_when_the_supervisor_is_killed(client: Client, gateway: GatewayProcess) -> None:
    pids = [place["pid"] for place in (await places(client)).values()]
    gateway.signal(signal.SIGKILL)

    def gone() -> bool:
        return not any(Path(f"/proc/{pid}").exists() for pid in pids)

    await until(gone, 12.0)
