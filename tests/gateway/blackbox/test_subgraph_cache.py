"""The recommender's subgraph cache, seen from outside: what is not run again, and what the operator is told."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tests.support.gateway import EMBEDDED, Gateway, Serve, Start, chat_policy, recommender_policy
from tests.support.gateway_client import Client, Got
from tests.support.redis_server import RedisServer
from tests.support.waiting import eventually


async def score(client: Client, history: list[str], candidates: list[str]) -> Got:
    inputs = [
        {"name": name, "shape": [len(data)], "datatype": "BYTES", "data": data}
        for name, data in (("user_history", history), ("candidates", candidates))
    ]
    return await client.send("POST", "/v2/models/items/infer", {"inputs": inputs})


async def counted(client: Client, cut: str, what: str) -> float:
    """`gateway_subgraph_cuts` of all processes together."""
    text = (await client.admin("/metrics")).body.decode()
    lines = re.findall(rf'^gateway_subgraph_cuts\S*{{(.*cut="{cut}".*)}} (\S+)$', text, re.MULTILINE)
    return sum(float(value) for labels, value in lines if f'what="{what}"' in labels)


async def gateway_of(start: Start, tiny_models: Path, **sections: Any) -> Gateway:
    policies = (chat_policy(), recommender_policy())
    return await start(*policies, models_dir=str(tiny_models), **{**EMBEDDED, **sections})


async def test_a_user_tower_is_not_run_again(start: Start, tiny_models: Path) -> None:
    client = (await gateway_of(start, tiny_models)).client
    for items in (["tent lamp", "song train"], ["bread knife", "tent lamp"], ["a boat"]):
        got = await score(client, ["warm tent", "boots rain"], items)
        assert (got.status, got.said("rung")) == (200, "light")
    assert await counted(client, "user_tower", "runs") == 1
    assert await counted(client, "user_tower", "hits") == 2
    assert await counted(client, "item_tower", "rows") == 4
    told = (await client.admin("/models")).json
    (recommender,) = [model for models in told.values() for model in models if model["name"] == "recommender"]
    labels = {cut["name"]: cut["label"] for cut in recommender["cuts"]}
    assert (labels["history_encoder"], labels["user_tower"]) == ("exact", "exact")
    assert labels["item_tower"] in ("exact", "within tolerance")
    assert 0 <= recommender["cuts"][2]["difference"] < 1e-5


async def test_a_gateway_that_starts_later_finds_what_lies_in_redis(
    start: Start, tiny_models: Path, redis_server: RedisServer
) -> None:
    sections: dict[str, Any] = {"redis": {"url": redis_server.url}}
    first = (await gateway_of(start, tiny_models, **sections)).client
    one = await score(first, ["warm tent"], ["tent lamp", "song train"])

    async def stored() -> bool:
        """The answer, what the user's history came to, and the two items."""
        text = (await first.admin("/metrics")).body.decode()
        (writes,) = re.findall(r"^gateway_redis_writes\S* (\S+)$", text, re.MULTILINE)
        return float(writes) >= 4

    await eventually(stored)
    other = (await gateway_of(start, tiny_models, **sections)).client
    got = await score(other, ["warm tent"], ["song train", "tent lamp"])
    assert got.said("rung") == "light"
    assert got.json["outputs"][0]["data"] == one.json["outputs"][0]["data"][::-1]
    assert await counted(other, "user_tower", "runs") == 0
    assert await counted(other, "item_tower", "hits") == 2


async def test_with_several_workers_it_lives_in_the_model_host(serve: Serve, tiny_models: Path) -> None:
    policies = (chat_policy(), recommender_policy())
    process = await serve(*policies, workers=2, models_dir=str(tiny_models), drain="5s", **EMBEDDED)
    client = await process.ready(30.0)
    for item in range(8):
        assert (await score(client, ["warm tent"], [f"item {item}"])).said("rung") == "light"
    assert await counted(client, "user_tower", "runs") == 1
    assert await counted(client, "user_tower", "hits") == 7
    told = (await client.admin("/models")).json
    cuts = [model["cuts"] for models in told.values() for model in models if model["name"] == "recommender"]
    assert len(cuts) == 3 and all(len(each) == 3 for each in cuts), "the host and both workers know"
