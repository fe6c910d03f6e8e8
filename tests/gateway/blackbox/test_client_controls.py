"""What a client may ask of the gateway itself, and what it may not."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.support.gateway import CREDENTIAL, Start, chat_policy, tensor_policy
from tests.support.gateway_client import EASY, HARD, Client
from tests.support.settable_upstream import SettableUpstream

BOTH = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


@BOTH
async def test_no_cache_asks_the_model_and_renews_what_is_stored(
    client: Client, up: SettableUpstream, stream: bool
) -> None:
    up.play(heavy=_says("first"))
    assert (await client.chat(HARD, stream=stream)).text == "first"
    up.play(heavy=_says("second"))
    fresh = await client.chat(HARD, stream=stream, headers={"Cache-Control": "no-cache"})
    assert (fresh.said("rung"), fresh.text) == ("heavy", "second")
    stored = await client.chat(HARD, stream=stream)
    assert (stored.said("rung"), stored.text) == ("hit-l1", "second")
    assert up.calls("heavy") == 2


@BOTH
async def test_no_store_leaves_nothing_behind_and_takes_nothing_stored(
    client: Client, up: SettableUpstream, stream: bool
) -> None:
    no_store = {"Cache-Control": "no-store"}
    got = await client.chat(HARD, stream=stream, headers=no_store)
    assert (got.status, got.said("rung")) == (200, "heavy")
    assert (await client.chat(HARD, stream=stream)).said("rung") == "heavy"
    assert (await client.chat(HARD, stream=stream, headers=no_store)).said("rung") == "heavy"
    assert (await client.chat(HARD, stream=stream)).said("rung") == "hit-l1"
    assert up.calls("heavy") == 3


async def test_tensors_obey_the_same_cache_controls(client: Client, up: SettableUpstream) -> None:
    await client.infer(headers={"Cache-Control": "no-store"})
    assert (await client.infer()).said("rung") == "heavy"
    assert (await client.infer()).said("rung") == "hit-l1"
    assert (await client.infer(headers={"Cache-Control": "No-Cache, max-age=0"})).said("rung") == "heavy"
    assert up.calls("scorer") == 3


@BOTH
async def test_only_if_cached_never_calls_a_model(client: Client, up: SettableUpstream, stream: bool) -> None:
    only = {"Cache-Control": "only-if-cached"}
    got = await client.chat(HARD, stream=stream, headers=only)
    assert got.status == 504
    assert got.error["code"] == "not_cached"
    assert not got.is_stream
    assert up.total() == 0
    await client.chat(HARD)
    assert (await client.chat(HARD, stream=stream, headers=only)).said("rung") == "hit-l1"
    got = await client.infer(headers=only)
    assert got.status == 504
    assert got.oip_error
    assert up.calls("scorer") == 0


@BOTH
async def test_the_clients_time_limit_holds(start: Start, up: SettableUpstream, stream: bool) -> None:
    gateway = await start(
        chat_policy(ladder=["heavy"], default_answer=None), tensor_policy(ladder=["heavy"], default_answer=None)
    )
    up.play(heavy="never", scorer="never")
    began = time.monotonic()
    limit = {"x-request-timeout-ms": "200"}
    got = await gateway.client.chat(HARD, stream=stream, headers=limit)
    assert got.status == 504
    assert got.error["type"] == "timeout_error"
    assert 0.15 < time.monotonic() - began < 0.45
    began = time.monotonic()
    got = await gateway.client.infer(headers=limit)
    assert got.status == 504
    assert got.oip_error
    assert 0.15 < time.monotonic() - began < 0.45


async def test_a_client_cannot_have_more_time_than_the_policy_gives(start: Start, up: SettableUpstream) -> None:
    gateway = await start(chat_policy(deadline="200ms", ladder=["heavy"], default_answer=None))
    up.play(heavy="never")
    began = time.monotonic()
    got = await gateway.client.chat(HARD, headers={"x-request-timeout-ms": "60000"})
    assert got.status == 504
    assert time.monotonic() - began < 0.5


async def test_the_protocols_own_timeout_is_in_microseconds(start: Start, up: SettableUpstream) -> None:
    gateway = await start(tensor_policy(ladder=["heavy"], default_answer=None))
    up.play(scorer="never")
    began = time.monotonic()
    got = await gateway.client.infer(parameters={"timeout": 200_000})
    assert got.status == 504
    assert 0.15 < time.monotonic() - began < 0.45


@pytest.mark.parametrize("value", ["0", "-1", "abc", "1.5", "", "1e3", "٣", "9" * 400, "100, 200"])
async def test_an_unreadable_time_limit_is_refused(client: Client, up: SettableUpstream, value: str) -> None:
    got = await client.chat(HARD, headers={"x-request-timeout-ms": value})
    assert got.status == 400
    assert "x-request-timeout-ms" in got.error["message"]
    assert up.total() == 0


async def test_upstreams_get_the_time_that_is_left(client: Client, up: SettableUpstream) -> None:
    await client.chat(HARD, headers={"x-request-timeout-ms": "900"})
    assert 1 <= int(up.last_seen("heavy").headers["x-request-timeout-ms"]) < 900


@BOTH
async def test_degrade_off_means_the_first_choice_or_an_error(
    client: Client, up: SettableUpstream, stream: bool
) -> None:
    off = {"x-gateway-degrade": "off"}
    assert (await client.chat(HARD, stream=stream, headers=off)).said("rung") == "heavy"
    up.play(heavy="status-500", scorer="error")
    got = await client.chat(HARD + "!", stream=stream, headers=off)
    assert got.status == 502
    assert got.error["type"] == "upstream_error"
    assert up.calls("light") == 0
    got = await client.infer(headers=off)
    assert got.status == 502
    assert got.oip_error


async def test_inbound_gateway_headers_decide_nothing_and_go_nowhere(client: Client, up: SettableUpstream) -> None:
    forged = {
        "x-gateway-priority": "vip",
        "x-gateway-tenant": "other",
        "x-gateway-rung": "default",
        "x-gateway-policy": "other@1",
        "x-gateway-chaos": "latency=5s",
        "x-gateway-fault": "error",
        "x-gateway-request-id": "forged",
    }
    got = await client.chat(HARD, headers=forged)
    assert (got.said("policy"), got.said("rung")) == ("support@3", "heavy")
    assert got.said("request-id") != "forged"
    told = await client.why(got)
    assert (told["tenant"], told["class"]) == ("local", "normal")
    assert not [name for name in up.last_seen("heavy").headers if name.startswith("x-gateway")]


@BOTH
async def test_only_our_own_headers_reach_an_upstream(client: Client, up: SettableUpstream, stream: bool) -> None:
    """Also on a fallback: never the client's key, cookies, hop-by-hop headers or user agent."""
    theirs = {
        "Authorization": "Bearer client-key-of-theirs",
        "Cookie": "session=client-cookie",
        "X-Api-Key": "client-key-of-theirs",
        "TE": "trailers",
        "Proxy-Authorization": "Basic client-proxy",
        "User-Agent": "client-agent",
        "X-Forwarded-For": "10.9.8.7",
    }
    up.play(heavy="status-500")
    got = await client.chat(HARD, stream=stream, headers=theirs)
    assert got.said("rung") == "light"
    allowed = {
        "host", "accept", "accept-encoding", "authorization", "content-length", "content-type", "user-agent",
        "x-request-id", "x-request-timeout-ms",
    }  # fmt: skip
    for backend, authorization in (("heavy", f"Bearer {CREDENTIAL}"), ("light", None)):
        seen = up.last_seen(backend)
        assert set(seen.headers) <= allowed
        assert seen.headers.get("authorization") == authorization
        assert "client" not in str(seen.headers)
    await client.infer(headers=theirs)
    assert "client" not in str(up.last_seen("scorer").headers)


@BOTH
async def test_a_backend_may_be_named_where_the_policy_allows_it(
    client: Client, up: SettableUpstream, stream: bool
) -> None:
    got = await client.chat(HARD, model="light", stream=stream)
    assert (got.said("served-by"), got.said("rung"), got.said("degraded")) == ("light", "light", None)
    got = await client.chat(EASY, model="heavy", stream=stream)
    assert (got.said("served-by"), got.said("rung"), got.said("degraded")) == ("heavy", "heavy", None)
    assert (up.calls("light"), up.calls("heavy")) == (1, 1)
    assert (await client.infer(model="scorer")).status == 404  # its policy lists no backend


async def test_the_models_list_names_what_a_client_may_ask_for(client: Client) -> None:
    got = await client.get("/v1/models")
    assert got.status == 200
    assert {"auto", "heavy", "light"} <= {model["id"] for model in got.json["data"]}
    assert all(model["object"] == "model" for model in got.json["data"])


async def test_a_named_backend_that_is_down_steps_down_like_any_other(client: Client, up: SettableUpstream) -> None:
    up.play(heavy="status-500")
    got = await client.chat(EASY, model="heavy")
    assert (got.said("rung"), got.said("degraded")) == ("light", "upstream_status")


async def test_requests_side_by_side_keep_their_own_answers(client: Client, up: SettableUpstream) -> None:
    up.play(heavy="echo")
    texts = [f"{HARD} {number}" for number in range(100)]
    got = await asyncio.gather(*(client.chat(text, stream=bool(n % 2)) for n, text in enumerate(texts)))
    assert [answer.text for answer in got] == texts
    assert len({answer.said("request-id") for answer in got}) == 100


def _says(text: str):
    from backends.scripted_steps import Step

    return (Step(answer=text),)
