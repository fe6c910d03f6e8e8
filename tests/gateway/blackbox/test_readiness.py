"""When traffic may come: required and optional models, remote backends, Redis."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gateway.keys import new_key
from tests.support.gateway import EMBEDDED, Start, chat_policy, recommender_policy
from tests.support.gateway_client import EASY, HARD
from tests.support.redis_server import free_port
from tests.support.settable_upstream import SettableUpstream
from tests.support.waiting import eventually


async def test_ready_without_any_call(start: Start, up: SettableUpstream) -> None:
    gateway = await start()
    got = await gateway.client.get("/readyz")
    assert (got.status, got.json["status"]) == (200, "ready")
    assert "degraded" not in got.json
    assert (await gateway.client.get("/livez")).status == 200
    assert (await gateway.client.send("HEAD", "/readyz")).status == 200
    assert up.total() == 0
    assert up.connections_made == 0


@pytest.mark.parametrize("where", ["models", "backends"])
async def test_a_missing_required_model_is_a_503_with_the_reason(start: Start, where: str) -> None:
    sections = json.loads(json.dumps(EMBEDDED))
    sections[where]["minilm" if where == "models" else "embed"]["required"] = True
    gateway = await start(chat_policy(), recommender_policy(), **sections)
    got = await gateway.client.get("/readyz")
    assert got.status == 503
    assert got.json["status"] == "not ready"
    assert any("embed" in reason for reason in got.json["reasons"])
    assert (await gateway.client.get("/v2/health/ready")).status == 503
    assert (await gateway.client.get("/livez")).status == 200
    assert (await gateway.client.get("/v2/health/live")).status == 200
    assert (await gateway.client.chat(EASY)).status == 200  # what can be served is served


async def test_a_missing_optional_model_is_only_named(start: Start) -> None:
    gateway = await start(chat_policy(), recommender_policy(), **EMBEDDED)
    got = await gateway.client.get("/readyz")
    assert (got.status, got.json["status"]) == (200, "ready")
    assert any("recommender" in line for line in got.json["degraded"])
    assert any("embed" in line for line in got.json["degraded"])
    assert (await gateway.client.get("/v2/health/ready")).status == 200


async def test_readiness_tells_no_paths_and_no_causes(start: Start) -> None:
    """They are on the admin listener."""
    gateway = await start(chat_policy(), recommender_policy(), **EMBEDDED)
    got = await gateway.client.get("/readyz")
    assert got.json["degraded"] == [
        "the model embed is not there: failed",
        "the model recommender is not there: failed",
    ]
    assert str(gateway.folder) not in got.body.decode()
    models = (await gateway.client.admin("/models")).json["worker-1"]
    assert [model["state"] for model in models] == ["failed", "failed"]
    assert all(str(gateway.folder) in model["reason"] for model in models)


async def test_a_keys_file_that_is_not_in_force_is_named_without_its_contents(start: Start) -> None:
    gateway = await start()
    key = new_key()
    path = gateway.folder / "keys.yaml"
    path.write_text(f"keys:\n  - id: shop\n    sha256: {key}\n    tenant: shop\n")

    async def noticed() -> bool:
        return "degraded" in (await gateway.client.get("/readyz")).json

    await eventually(noticed, within_s=4.0)
    got = await gateway.client.get("/readyz")
    assert got.json["degraded"] == ["keys.yaml is not in force: see the log and the admin API"]
    (notice,) = (await gateway.client.admin("/notices")).json["worker-1"]["keys"]
    assert notice.startswith(f"{path}:3:13: `keys[0].sha256` has characters that are not allowed here")
    assert key not in notice
    path.unlink()


async def test_a_model_that_comes_later_is_loaded_without_a_restart(start: Start, tiny_models: Path) -> None:
    """Loading is tried again: the folder appears, the model serves, readiness is whole."""
    sections = {**EMBEDDED, "models": {"minilm": {"required": True}, "two-tower": {}}}
    gateway = await start(chat_policy(), recommender_policy(), **sections)
    assert (await gateway.client.get("/readyz")).status == 503
    (gateway.folder / "models").symlink_to(tiny_models)

    async def ready() -> bool:
        got = await gateway.client.get("/readyz")
        return got.status == 200 and "degraded" not in got.json

    await eventually(ready, within_s=8.0, every_s=0.02)
    got = await gateway.client.send("POST", "/v1/embeddings", {"model": "embed", "input": "x"})
    assert got.status == 200


async def test_remote_backends_never_affect_readiness(start: Start) -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    gateway = await start(backends={"heavy": {"base_url": f"{nobody}/v1"}, "scorer": {"base_url": nobody}})
    got = await gateway.client.get("/readyz")
    assert (got.status, got.json["status"]) == (200, "ready")
    for stream in (False, True):
        got = await gateway.client.chat(f"{HARD} {stream}", stream=stream)
        assert (got.status, got.said("rung"), got.said("degraded")) == (200, "light", "upstream_unreachable")
    got = await gateway.client.infer()
    assert (got.status, got.said("rung"), got.said("degraded")) == (200, "default", "upstream_unreachable")
    assert (await gateway.client.get("/readyz")).status == 200


async def test_readiness_stays_with_every_breaker_open(start: Start, up: SettableUpstream) -> None:
    gateway = await start()
    up.play(heavy="status-500", light="status-500")
    for number in range(8):
        await gateway.client.chat(f"{HARD} {number}")
    assert (await gateway.client.get("/readyz")).status == 200


async def test_redis_down_at_start_is_ready_and_answers(start: Start) -> None:
    gateway = await start(redis={"url": f"redis://127.0.0.1:{free_port()}/0"})
    client = gateway.client
    assert (await client.get("/readyz")).status == 200
    assert (await client.chat(HARD)).said("rung") == "heavy"
    assert (await client.chat(HARD)).said("rung") == "hit-l1"
    for number in range(8):
        assert (await client.chat(f"{HARD} {number}")).status == 200
    got = await client.get("/readyz")
    assert got.status == 200
    assert any("Redis" in line for line in got.json["degraded"])
