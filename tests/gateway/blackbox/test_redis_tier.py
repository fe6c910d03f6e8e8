"""The second cache tier on a real Redis: shared across restarts, and never in the way."""

from __future__ import annotations

import asyncio
import json
import re
import time
import unicodedata
from pathlib import Path

import pytest

from tests.support.gateway import chat_policy, environment, gateway_here, tensor_policy, write_config
from tests.support.gateway_client import HARD, question
from tests.support.redis_server import RedisServer
from tests.support.settable_upstream import SettableUpstream
from tests.support.waiting import eventually, until

pytestmark = pytest.mark.redis


@pytest.fixture
def config(up: SettableUpstream, tmp_path: Path, redis_server: RedisServer) -> Path:
    # The time limit is for busy test machines; what it is for is tested with a frozen server.
    return write_config(tmp_path, up.url, redis={"url": redis_server.url, "timeout": "500ms"})


async def _stored(redis: RedisServer, count: int) -> None:
    async def there() -> bool:
        return int((await redis.command("DBSIZE"))[1:]) >= count

    await eventually(there)


async def test_answers_outlive_the_gateway(
    config: Path, tmp_path: Path, redis_server: RedisServer, up: SettableUpstream
) -> None:
    """Chat and tensors, whole and streamed, over three restarts and in other bytes of the same meaning."""
    env = environment(tmp_path)
    text = "prove that é is é"
    async with gateway_here(config, env) as gateway:
        first = await gateway.client.chat(text, temperature=1)
        scored = await gateway.client.infer([1.0, 2.0])
        await _stored(redis_server, 2)
    forms = [
        json.dumps({**question(text), "temperature": 1.0}).encode(),
        json.dumps({"temperature": 1, **question(unicodedata.normalize("NFD", text))}, ensure_ascii=False).encode(),
        json.dumps({**question(text, stream=True), "temperature": 1}).encode(),
    ]
    for form in forms:
        async with gateway_here(config, env) as gateway:
            got = await gateway.client.send("POST", "/v1/chat/completions", form)
            assert (got.said("rung"), got.text) == ("hit-l2", first.text)
            assert got.said("served-by") == "heavy"
            assert got.said("route") == "hard"
            assert got.said("fingerprint") == first.said("fingerprint")
            assert int(got.said("age") or "-1") >= 0
            again = await gateway.client.send("POST", "/v1/chat/completions", form)
            assert again.said("rung") == "hit-l1"
            tensor = await gateway.client.infer([1.0, 2.0])
            assert (tensor.said("rung"), tensor.json["outputs"]) == ("hit-l2", scored.json["outputs"])
    assert (up.calls("heavy"), up.calls("scorer")) == (1, 1)


async def test_no_prompt_and_no_answer_stands_in_a_redis_name(
    config: Path, tmp_path: Path, redis_server: RedisServer
) -> None:
    async with gateway_here(config, environment(tmp_path)) as gateway:
        await gateway.client.chat("prove MARKER-PROMPT", user="MARKER-USER")
        await _stored(redis_server, 1)
        names = await redis_server.command("KEYS", "*")
    assert re.search(rb"gw:default-[0-9a-f]{8}:v1:r:", names)
    assert b"MARKER" not in names


async def test_gateways_with_other_secrets_leave_each_other_s_entries_alone(
    config: Path, tmp_path: Path, redis_server: RedisServer, up: SettableUpstream
) -> None:
    for home in ("one", "two", "one", "two"):
        env = {**environment(tmp_path), "GATEWAY_HOME": str(tmp_path / home)}
        async with gateway_here(config, env) as gateway:
            await gateway.client.chat(HARD)
            await _stored(redis_server, 1 if home == "one" else 2)
    assert up.calls("heavy") == 2


async def test_another_version_of_a_backend_or_policy_is_another_answer(
    up: SettableUpstream, tmp_path: Path, redis_server: RedisServer
) -> None:
    redis = {"url": redis_server.url, "timeout": "500ms"}
    env = environment(tmp_path)
    async with gateway_here(write_config(tmp_path, up.url, redis=redis), env) as gateway:
        await gateway.client.chat(HARD)
        await _stored(redis_server, 1)
    newer = write_config(tmp_path, up.url, redis=redis, backends={"heavy": {"version": "2"}})
    async with gateway_here(newer, env) as gateway:
        assert (await gateway.client.chat(HARD)).said("rung") == "heavy"
        await _stored(redis_server, 2)
    bumped = write_config(
        tmp_path,
        up.url,
        chat_policy(cache={"version": 2}),
        tensor_policy(),
        redis=redis,
        backends={"heavy": {"version": "2"}},
    )
    async with gateway_here(bumped, env) as gateway:
        assert (await gateway.client.chat(HARD)).said("rung") == "heavy"
    assert up.calls("heavy") == 3


async def test_a_frozen_redis_costs_its_time_limit_and_then_nothing(
    up: SettableUpstream, tmp_path: Path, redis_server: RedisServer
) -> None:
    config = write_config(tmp_path, up.url, redis={"url": redis_server.url, "timeout": "30ms"})
    async with gateway_here(config, environment(tmp_path)) as gateway:
        client = gateway.client
        await client.chat(HARD)
        redis_server.freeze()
        took = []
        for number in range(60):
            began = time.monotonic()
            got = await client.chat(f"{HARD} {number}", stream=bool(number % 2))
            took.append(time.monotonic() - began)
            assert (got.status, got.said("rung")) == (200, "heavy")
        assert max(took) < 0.25
        assert sorted(took)[len(took) // 2] < 0.02  # skipped, not waited for
        got = await client.get("/readyz")
        assert got.status == 200
        assert any("Redis" in line for line in got.json["degraded"])
        redis_server.thaw()

        async def back() -> bool:
            gateway.clock.advance(1)
            await client.chat(f"{HARD} {gateway.clock.now()}")
            return "degraded" not in (await client.get("/readyz")).json

        await eventually(back, within_s=5.0)


async def test_a_redis_that_restarts_empty_is_used_again(
    config: Path, tmp_path: Path, redis_server: RedisServer, up: SettableUpstream
) -> None:
    async with gateway_here(config, environment(tmp_path)) as gateway:
        client = gateway.client
        await client.chat(HARD)
        await _stored(redis_server, 1)
        redis_server.kill()
        for number in range(10):
            assert (await client.chat(f"{HARD} down {number}")).status == 200
        await redis_server.start()

        async def stored_again() -> bool:
            gateway.clock.advance(1)
            assert (await client.chat(f"{HARD} {gateway.clock.now()}")).status == 200
            return (await redis_server.command("DBSIZE")) != b":0\r\n"

        await eventually(stored_again, within_s=5.0)


@pytest.mark.parametrize("garbage", ["wrong type", "garbage bytes", "unknown version", "empty"])
async def test_what_is_not_ours_in_redis_is_a_miss(
    config: Path, tmp_path: Path, redis_server: RedisServer, up: SettableUpstream, garbage: str
) -> None:
    env = environment(tmp_path)
    async with gateway_here(config, env) as gateway:
        await gateway.client.chat(HARD)
        await _stored(redis_server, 1)
    name = (await redis_server.command("KEYS", "*")).split(b"\r\n")[2]
    await redis_server.command("DEL", name)
    if garbage == "wrong type":
        await redis_server.command("RPUSH", name, "x")
        await redis_server.command("PEXPIRE", name, "100000")
    else:
        value = {"garbage bytes": b"\x00\xff" * 50, "unknown version": b"GWC\xfe" + b"x" * 60, "empty": b""}[garbage]
        await redis_server.command("SET", name, value, "PX", "100000")
    async with gateway_here(config, env) as gateway:
        for stream in (False, True):
            got = await gateway.client.chat(HARD, stream=stream)
            assert got.status == 200
            assert got.said("rung") == ("hit-l1" if stream else "heavy")
    assert up.calls("heavy") == 2


async def test_a_read_only_redis_still_answers_reads(
    config: Path, tmp_path: Path, redis_server: RedisServer, up: SettableUpstream
) -> None:
    env = environment(tmp_path)
    async with gateway_here(config, env) as gateway:
        await gateway.client.chat(HARD)
        await _stored(redis_server, 1)
    await redis_server.command("CONFIG", "SET", "maxmemory", "1")  # every write is refused from now on
    async with gateway_here(config, env) as gateway:
        assert (await gateway.client.chat(HARD)).said("rung") == "hit-l2"
        got = await asyncio.gather(*(gateway.client.chat(f"{HARD} {number}") for number in range(20)))
        assert {answer.status for answer in got} == {200}
    await until(lambda: True)


async def test_clients_that_leave_while_redis_is_read_mix_up_no_answers(
    config: Path, tmp_path: Path, up: SettableUpstream
) -> None:
    """Cancelled reads never leave a connection that hands its reply to another caller."""
    env = environment(tmp_path)
    up.play(heavy="echo")
    texts = [f"{HARD} {number}" for number in range(40)]
    async with gateway_here(config, env) as gateway:
        await asyncio.gather(*(gateway.client.chat(text) for text in texts))
    async with gateway_here(config, env) as gateway:
        client = gateway.client
        for turn in range(5):
            tasks = [asyncio.create_task(client.chat(text)) for text in texts]
            for number, task in enumerate(tasks):
                await asyncio.sleep(0)
                if (number + turn) % 2:
                    task.cancel()
            got = await asyncio.gather(*tasks, return_exceptions=True)
            for text, answer in zip(texts, got, strict=True):
                assert isinstance(answer, asyncio.CancelledError) or answer.text == text
        assert [(await client.chat(text)).text for text in texts] == texts
