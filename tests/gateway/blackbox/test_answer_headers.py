"""What every answer says about itself, on every surface, whole and streamed."""

from __future__ import annotations

import re

import pytest

from tests.support.gateway import DEFAULT_TEXT, Gateway, Start, chat_policy, tensor_policy
from tests.support.gateway_client import EASY, HARD, Client, Got
from tests.support.settable_upstream import SettableUpstream

BOTH = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
BASIC = {"x-gateway-request-id", "x-gateway-rung", "x-gateway-degraded", "x-gateway-age"}


def told(got: Got) -> set[str]:
    return {name.lower() for name in got.headers if name.lower().startswith("x-gateway-")}


@BOTH
async def test_a_first_choice_answer_says_who_answered_and_why(client: Client, stream: bool) -> None:
    got = await client.chat(HARD, stream=stream)
    assert got.status == 200
    assert re.fullmatch(r"[0-9a-f]{16,}", got.said("request-id") or "")
    assert got.said("policy") == "support@3"
    assert got.said("route") == "hard"
    assert got.said("served-by") == "heavy"
    assert got.said("rung") == "heavy"
    assert got.said("fingerprint")
    assert float(got.said("overhead-ms") or "-1") >= 0
    assert got.said("degraded") is None
    assert got.said("age") is None
    easy = await client.chat(EASY, stream=stream)
    assert (easy.said("rung"), easy.said("served-by"), easy.said("route")) == ("light", "light", "easy")
    assert easy.said("degraded") is None
    assert easy.said("fingerprint") != got.said("fingerprint")
    assert easy.said("request-id") != got.said("request-id")


@BOTH
async def test_a_stored_answer_says_its_age_and_who_once_answered(gateway: Gateway, stream: bool) -> None:
    first = await gateway.client.chat(HARD, stream=stream)
    gateway.clock.advance(7)
    again = await gateway.client.chat(HARD, stream=stream)
    assert (again.said("rung"), again.said("age")) == ("hit-l1", "7")
    assert again.said("degraded") is None
    for name in ("policy", "route", "served-by", "fingerprint"):
        assert again.said(name) == first.said(name)
    assert again.text == first.text


@BOTH
async def test_a_degraded_answer_says_so_and_names_the_reason(
    client: Client, up: SettableUpstream, stream: bool
) -> None:
    up.play(heavy="status-500")
    got = await client.chat(HARD, stream=stream)
    assert (got.said("rung"), got.said("served-by")) == ("light", "light")
    assert got.said("degraded") == "upstream_status"
    up.play(light="close-at-once")
    got = await client.chat(HARD + "!", stream=stream)
    assert (got.status, got.said("rung"), got.said("degraded")) == (200, "default", "upstream_unreachable")
    assert got.text == DEFAULT_TEXT
    assert got.finish_reason == "stop"


@BOTH
async def test_the_body_names_the_model_that_really_answered(
    client: Client, up: SettableUpstream, stream: bool
) -> None:
    assert (await client.chat(HARD, stream=stream)).models == {"heavy-model"}
    up.play(heavy="status-503")
    assert (await client.chat(HARD + "!", stream=stream)).models == {"light-model"}
    assert up.last_seen("light").body["model"] == "light-model"


@BOTH
async def test_a_canned_route_is_not_degraded_and_calls_nobody(
    start: Start, up: SettableUpstream, stream: bool
) -> None:
    canned = {"name": "closed", "to": "canned", "answer": {"text": "We open at nine. 九点开门。"}}
    gateway = await start(chat_policy(routes=[canned], classify=None))
    got = await gateway.client.chat(HARD, stream=stream)
    assert (got.status, got.said("rung"), got.said("route")) == (200, "canned", "closed")
    assert got.said("degraded") is None
    assert got.text == "We open at nine. 九点开门。"
    assert up.total() == 0


@BOTH
@pytest.mark.parametrize("expose", ["basic", "none"])
async def test_a_policy_limits_what_its_answers_tell(
    start: Start, up: SettableUpstream, stream: bool, expose: str
) -> None:
    gateway = await start(chat_policy(expose_headers=expose), tensor_policy(expose_headers=expose))
    allowed = BASIC if expose == "basic" else set()
    client = gateway.client
    up.play(heavy="status-500", light="ok", scorer="ok")
    degraded = await client.chat(HARD, stream=stream)
    assert told(degraded) == allowed - {"x-gateway-age"}
    await client.chat(EASY, stream=stream)
    assert told(await client.chat(EASY, stream=stream)) == allowed - {"x-gateway-degraded"}
    assert told(await client.infer()) == allowed - {"x-gateway-age", "x-gateway-degraded"}


async def test_an_error_of_a_policy_that_exposes_nothing_exposes_nothing(start: Start, up: SettableUpstream) -> None:
    gateway = await start(chat_policy(expose_headers="none", ladder=["heavy"], default_answer=None))
    up.play(heavy="status-500")
    got = await gateway.client.chat(HARD)
    assert got.status == 502
    assert told(got) == set()


async def test_beyond_loopback_answers_tell_the_basic_facts_only(start: Start, tmp_path) -> None:
    from gateway.keys import ApiKey, create_key, digest

    create_key(tmp_path / "keys.yaml", ApiKey(id="one", sha256=digest("gw-one"), tenant="shop"))
    gateway = await start(listen={"host": "0.0.0.0"})
    got = await gateway.client.chat(HARD, headers={"authorization": "Bearer gw-one"})
    assert got.status == 200
    assert told(got) == {"x-gateway-request-id", "x-gateway-rung"}


async def test_tensor_answers_say_the_same(gateway: Gateway, up: SettableUpstream) -> None:
    client = gateway.client
    got = await client.infer([1.0, 2.0])
    assert got.status == 200
    assert (got.said("policy"), got.said("route"), got.said("served-by")) == ("scoring@2", "score", "scorer")
    assert got.said("rung") == "heavy"
    assert got.said("fingerprint")
    gateway.clock.advance(5)
    again = await client.infer([1.0, 2.0])
    assert (again.said("rung"), again.said("age"), again.json["outputs"]) == ("hit-l1", "5", got.json["outputs"])
    up.play(scorer="error")
    down = await client.infer([3.0, 4.0])
    assert (down.status, down.said("rung"), down.said("degraded")) == (200, "default", "upstream_status")
    assert down.json["outputs"][0]["data"] == [0.25, 0.75]


@BOTH
async def test_overhead_leaves_out_the_wait_for_the_model(client: Client, up: SettableUpstream, stream: bool) -> None:
    up.play(heavy="slow-first-token")  # 300 ms
    got = await client.chat(HARD, stream=stream)
    assert float(got.said("overhead-ms") or "nan") < 150


async def test_errors_carry_the_request_id_and_the_policy(start: Start, up: SettableUpstream) -> None:
    gateway = await start(
        chat_policy(ladder=["heavy"], default_answer=None), tensor_policy(ladder=["heavy"], default_answer=None)
    )
    up.play(heavy="status-500", scorer="error")
    for got, policy in (
        (await gateway.client.chat(HARD), "support@3"),
        (await gateway.client.chat(HARD, stream=True), "support@3"),
        (await gateway.client.infer(), "scoring@2"),
    ):
        assert got.status == 502
        assert got.said("request-id")
        assert got.said("policy") == policy


async def test_streams_are_not_to_be_buffered_on_the_way(client: Client) -> None:
    for _ in ("from the model", "from the cache"):
        got = await client.chat(HARD, stream=True)
        assert got.is_stream
        assert got.headers["Cache-Control"] == "no-cache"
        assert got.headers["X-Accel-Buffering"] == "no"
        assert got.events.count("[DONE]") == 1
        assert got.events[-1] == "[DONE]"
