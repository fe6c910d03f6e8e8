"""The surfaces served by models inside the gateway: embeddings and the recommender."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.support.gateway import EMBEDDED, Gateway, Start, chat_policy, recommender_policy, tensor_policy
from tests.support.gateway_client import Client, Got
from tests.support.settable_upstream import SettableUpstream
from tests.support.waiting import eventually


async def embed(client: Client, text: Any, **fields: Any) -> Got:
    return await client.send("POST", "/v1/embeddings", {"model": "embed", "input": text, **fields})


def vectors(got: Got) -> list[list[float]]:
    return [row["embedding"] for row in got.json["data"]]


@pytest.fixture
async def whole(start: Start, tiny_models: Path) -> Gateway:
    return await start(chat_policy(), tensor_policy(), recommender_policy(), models_dir=str(tiny_models), **EMBEDDED)


async def score(client: Client, history: list[str], items: list[str], **fields: Any) -> Got:
    inputs = [
        {"name": name, "shape": [len(texts)], "datatype": "BYTES", "data": texts}
        for name, texts in (("user_history", history), ("candidates", items))
    ]
    return await client.send("POST", "/v2/models/items/infer", {"inputs": inputs, **fields})


async def test_embeddings_say_who_made_them_and_are_stored(whole: Gateway) -> None:
    got = await embed(whole.client, ["a question", "another"])
    assert got.status == 200
    assert (got.said("policy"), got.said("served-by"), got.said("degraded")) == ("embeddings@1", "embed", None)
    assert got.said("fingerprint")
    again = await embed(whole.client, ["a question", "another"])
    assert (again.said("rung"), vectors(again)) == ("hit-l1", vectors(got))
    packed = await embed(whole.client, ["a question", "another"], encoding_format="base64")
    assert packed.said("rung") == "hit-l1"
    assert (await embed(whole.client, ["another", "a question"])).said("rung") != "hit-l1"


async def test_embeddings_never_change_model(start: Start, up: SettableUpstream, tiny_models: Path) -> None:
    """With the model missing there is an error, whatever else could answer."""
    gateway = await start(models={"minilm": {}}, backends={"embed": EMBEDDED["backends"]["embed"]})
    got = await embed(gateway.client, "a question")
    assert got.status == 503
    assert int(got.headers["Retry-After"]) >= 1
    assert got.error["type"] == "overloaded_error"
    assert up.total() == 0


@pytest.mark.parametrize("twin", [False, True], ids=["alone", "with-a-twin"])
async def test_an_embedding_that_cannot_be_had_is_a_twins_or_the_old_one_or_an_error(
    start: Start, tiny_models: Path, twin: bool
) -> None:
    """A backend with the very same model may stand in; then a stored vector, too old or not; then an error."""
    policy = {
        "policy": "vectors", "version": 1, "match": {"aliases": ["vec"], "surfaces": ["embeddings"]}, "deadline": "5s",
        "routes": [{"name": "only", "to": "embed"}], "ladder": ["light", "stale"],
        "cache": {"scope": "all", "store": "all", "result": {"ttl": "10m", "swr": "0s", "stale": "2h"}},
    }  # fmt: skip
    same = {"kind": "onnx_embedder", "model": "minilm"}
    backends = {"embed": {**same, "limiter": {"max_concurrent": 1}}, **({"other": same} if twin else {})}
    gateway = await start(chat_policy(), policy, models_dir=str(tiny_models), models={"minilm": {}}, backends=backends)
    client = gateway.client
    old = await embed(client, "the stored text", model="vec")
    assert (old.status, old.said("served-by")) == (200, "embed")
    gateway.clock.advance(3600)
    # The one slot of the embedder is taken by a long job: everything else is refused there.
    long_job = asyncio.create_task(embed(client, [f"word {n} " * 200 for n in range(2000)], model="vec"))

    async def busy() -> bool:
        told = (await client.admin("/backends")).json["worker-1"]
        return "1/1" in next(backend["guard"] for backend in told if backend["name"] == "embed")

    await eventually(busy)
    stale = await embed(client, "the stored text", model="vec")
    refused = await embed(client, "something never asked", model="vec")
    assert not long_job.done()
    long_job.cancel()
    assert vectors(stale) == vectors(old)
    assert stale.said("fingerprint") == old.said("fingerprint")
    if twin:
        assert stale.said("served-by") == refused.said("served-by") == "other"
        assert refused.said("fingerprint") == old.said("fingerprint")
    else:
        assert (stale.said("rung"), stale.said("degraded")) == ("stale", "limit_reached")
        assert refused.status == 429
        assert refused.error["code"]


async def test_the_recommender_scores_its_candidates(whole: Gateway) -> None:
    got = await score(whole.client, ["a book about gardens"], ["a spade", "a novel", "a spade"])
    assert got.status == 200
    assert (got.said("rung"), got.said("served-by"), got.said("policy")) == ("light", "recommender", "recommender@2")
    (output,) = got.json["outputs"]
    assert (output["name"], output["shape"], output["datatype"]) == ("scores", [3], "FP32")
    assert output["data"][0] == output["data"][2]
    assert (await score(whole.client, ["a book about gardens"], ["a spade", "a novel", "a spade"])).said(
        "rung"
    ) == "hit-l1"
    assert (await score(whole.client, ["a book about gardens"], ["a novel", "a spade"])).said("rung") == "light"


@pytest.mark.parametrize(
    ("inputs", "named"),
    [
        ([{"name": "surprise", "shape": [1], "datatype": "BYTES", "data": ["x"]}], "surprise"),
        ([{"name": "user_history", "shape": [1], "datatype": "FP32", "data": [1]}, {"name": "candidates", "shape": [1], "datatype": "BYTES", "data": ["x"]}], "user_history"),
        ([{"name": "user_history", "shape": [1], "datatype": "BYTES", "data": ["x"]}], "candidates"),
        ([{"name": "user_embedding", "shape": [2], "datatype": "FP32", "data": [1, 2]}, {"name": "candidates", "shape": [1], "datatype": "BYTES", "data": ["x"]}], "user_embedding"),
    ],
)  # fmt: skip
async def test_wrong_tensors_are_a_400_that_names_the_input(whole: Gateway, inputs: Any, named: str) -> None:
    got = await whole.client.send("POST", "/v2/models/items/infer", {"inputs": inputs})
    assert got.status in (400, 422)
    assert named in got.oip_error
    good = await score(whole.client, ["a"], ["b"])
    assert (good.status, good.said("rung")) == (200, "light")


async def test_metadata_of_server_and_model(whole: Gateway) -> None:
    client = whole.client
    server = (await client.get("/v2")).json
    assert server["name"]
    assert server["version"]
    assert (await client.get("/v2/")).json == server
    for path in ("/v2/models/items", "/v2/models/items/", "/v2/models/items/versions/1"):
        model = (await client.get(path)).json
        assert model["name"] == "items"
        assert {tensor["datatype"] for tensor in model["inputs"]} == {"BYTES", "FP32"}
    for path in ("/v2/health/live", "/v2/health/ready", "/v2/models/items/ready", "/v2/models/recommend/ready"):
        assert (await client.get(path)).status == 200


async def test_a_model_that_is_missing_steps_down_and_says_so(start: Start) -> None:
    gateway = await start(chat_policy(), tensor_policy(), recommender_policy(), **EMBEDDED)
    got = await score(gateway.client, ["a"], ["b", "c"])
    assert (got.status, got.said("rung"), got.said("degraded")) == (200, "default", "model_not_ready")
    assert got.json["outputs"][0]["data"] == [0.5, 0.5]
    assert (await gateway.client.get("/v2/models/items/ready")).status == 503
    assert (await gateway.client.get("/v2/models/recommend/ready")).status == 200
