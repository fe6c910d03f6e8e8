"""Policies that change while the gateway runs: edits, mistakes, reloads under load."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.gateway import Gateway, chat_policy, tensor_policy, write_policies
from tests.support.gateway_client import HARD
from tests.support.settable_upstream import SettableUpstream
from tests.support.waiting import eventually


def _version(version: int, **changes: Any) -> dict[str, Any]:
    return chat_policy(version=version, **changes)


async def test_a_saved_edit_is_live_within_two_seconds(gateway: Gateway) -> None:
    client = gateway.client
    assert (await client.chat(HARD)).said("policy") == "support@3"
    write_policies(gateway.folder / "policies", _version(4, routes=[{"name": "all", "to": "light"}], classify=None))

    async def live() -> bool:
        return (await client.chat(HARD)).said("policy") == "support@4"

    await eventually(live, within_s=2.0)
    assert (await client.chat(f"{HARD} new")).said("rung") == "light"


async def test_reload_applies_at_once(gateway: Gateway) -> None:
    write_policies(gateway.folder / "policies", _version(5))
    got = await gateway.client.send("POST", "/policies/reload", {}, admin=True)
    assert got.status == 200
    assert "support@5" in got.json["policies"]
    assert (await gateway.client.chat(HARD)).said("policy") == "support@5"


@pytest.mark.parametrize(
    ("bad", "word"),
    [
        ("policy: support\nversion: 9\nmatch: {aliases: [auto\n", "yaml"),
        (json.dumps(_version(9, ladder=["heavy", "light", "heavy"])), "circle"),
        (json.dumps(_version(9, deadline="5x")), "deadline"),
        (json.dumps({**_version(9, deadline=None), "dead_line": "5s"}), "deadline"),
        (json.dumps(_version(9, routes=[{"name": "x", "to": "nobody"}])), "nobody"),
        (json.dumps(_version(9, hedge={"after": "1s"})), "not available in this version"),
    ],
    ids=["syntax", "circle", "unit", "typo", "unknown-backend", "later"],
)
async def test_a_bad_edit_keeps_the_last_good_version_and_says_where(gateway: Gateway, bad: str, word: str) -> None:
    client, path = gateway.client, gateway.folder / "policies" / "support.yaml"
    fresh = path.with_suffix(".new")
    fresh.write_text(bad + "\n")
    fresh.rename(path)
    got = await client.send("POST", "/policies/reload", {}, admin=True)
    assert got.status == 422
    said = json.dumps(got.json)
    assert re.search(rf"{path.name}:\d+:\d+: ", said)
    if word != "yaml":
        assert word in said
    assert (await client.chat(HARD)).said("policy") == "support@3"
    assert (await client.infer()).said("policy") == "scoring@2"
    ready = await client.get("/readyz")
    assert ready.status == 200
    assert ready.json["degraded"] == ["policy files have problems: see the log and the admin API"]
    assert path.name in json.dumps((await client.admin("/notices")).json["worker-1"]["policies"])
    assert await client.metric("gateway_policy_changes_total", policy="support", outcome="refused") >= 1
    write_policies(path.parent, _version(10))
    assert (await client.send("POST", "/policies/reload", {}, admin=True)).status == 200
    assert (await client.chat(HARD)).said("policy") == "support@10"
    assert "degraded" not in (await client.get("/readyz")).json


async def test_one_teams_typo_does_not_hold_up_anothers_fix(gateway: Gateway) -> None:
    folder = gateway.folder / "policies"
    write_policies(folder, tensor_policy(version=7))
    (folder / "support.yaml").write_text("policy: [\n")

    async def live() -> bool:
        return (await gateway.client.infer()).said("policy") == "scoring@7"

    await eventually(live, within_s=2.5)
    assert (await gateway.client.chat(HARD)).said("policy") == "support@3"


async def test_requests_under_way_keep_their_version(gateway: Gateway, up: SettableUpstream) -> None:
    up.play(heavy="paced-20ms")
    async with gateway.client.streaming(HARD) as events:
        await events.first_content()
        write_policies(gateway.folder / "policies", _version(6, routes=[{"name": "all", "to": "light"}], classify=None))
        await gateway.client.send("POST", "/policies/reload", {}, admin=True)
        assert (await gateway.client.chat(HARD)).said("policy") == "support@6"
        assert (await events.rest())[-1] == "[DONE]"
        assert events.http.headers["x-gateway-policy"] == "support@3"


async def test_many_reloads_under_load_drop_nothing(gateway: Gateway) -> None:
    import asyncio

    folder: Path = gateway.folder / "policies"

    async def reloads() -> None:
        for version in range(10, 40):
            write_policies(folder, _version(version))
            await gateway.client.send("POST", "/policies/reload", {}, admin=True)

    reloading = asyncio.create_task(reloads())
    statuses = set()
    number = 0
    while not reloading.done():
        got = await asyncio.gather(*(gateway.client.chat(f"{HARD} {number + n}", stream=bool(n % 2)) for n in range(8)))
        statuses |= {answer.status for answer in got}
        number += 8
    await reloading
    assert statuses == {200}
    assert (await gateway.client.chat(HARD)).said("policy") == "support@39"
