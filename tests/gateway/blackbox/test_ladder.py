"""The ladder: what answers when the first choice cannot, inside one deadline, and how the answer says so."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from backends.scripted_steps import Reply, Step
from tests.support.gateway import DEFAULT_TEXT, Start, chat_policy, tensor_policy
from tests.support.gateway_client import HARD, Client
from tests.support.settable_upstream import SettableUpstream
from tests.support.waiting import until

BOTH = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
NO_DEFAULT: dict[str, Any] = {"ladder": ["heavy", "light", "stale"], "default_answer": None}


# ------------------------------------------------------------------------------------------------------------- time


async def test_a_silent_model_is_left_at_the_first_token_limit(start: Start, up: SettableUpstream) -> None:
    gateway = await start(chat_policy(timeouts={"first_token": "500ms"}))
    up.play(heavy="never")
    began = time.monotonic()
    got = await gateway.client.chat(HARD, stream=True)
    took = time.monotonic() - began
    assert (got.said("rung"), got.said("degraded")) == ("light", "first_token_timeout")
    assert 0.45 <= took <= 0.6
    await until(lambda: up.last_seen("heavy").closed_at is not None)
    seen = up.last_seen("heavy")
    assert (seen.closed_at or 0) - seen.at <= 0.6


async def test_a_silent_model_leaves_time_for_the_light_one(start: Start, up: SettableUpstream) -> None:
    gateway = await start(chat_policy(deadline="600ms"))
    up.play(heavy="never")
    began = time.monotonic()
    got = await gateway.client.chat(HARD)
    assert time.monotonic() - began < 0.65
    assert (got.said("rung"), got.said("degraded")) == ("light", "deadline_exceeded")
    await until(lambda: up.last_seen("heavy").closed_at is not None)


@BOTH
async def test_with_all_models_silent_the_default_answers_inside_the_deadline(
    start: Start, up: SettableUpstream, stream: bool
) -> None:
    gateway = await start(
        chat_policy(deadline="500ms", timeouts={"first_token": "300ms"}), tensor_policy(deadline="500ms")
    )
    up.play(heavy="never", light="never", scorer="never")
    began = time.monotonic()
    got = await gateway.client.chat(HARD, stream=stream)
    assert time.monotonic() - began < 0.6
    assert (got.status, got.said("rung"), got.text) == (200, "default", DEFAULT_TEXT)
    began = time.monotonic()
    got = await gateway.client.infer()
    assert time.monotonic() - began < 0.6
    assert (got.status, got.said("rung"), got.said("degraded")) == (200, "default", "deadline_exceeded")


async def test_each_step_down_says_which_it_is(start: Start, up: SettableUpstream) -> None:
    """Heavy times out: light. Light too: the stored answer, once there is one. None stored: the default."""
    gateway = await start(chat_policy(deadline="600ms"))
    client, clock = gateway.client, gateway.clock
    stored = await client.chat(HARD)
    up.play(heavy="never")
    assert (await client.chat(HARD + " 2")).said("rung") == "light"
    up.play(light="never")
    clock.advance(20 * 60)  # past ttl and swr
    got = await client.chat(HARD)
    assert (got.said("rung"), got.said("degraded"), got.text) == ("stale", "deadline_exceeded", stored.text)
    assert 20 * 60 <= int(got.said("age")) <= 20 * 60 + 5
    assert got.said("served-by") == "heavy"
    assert (await client.chat(HARD + " 3")).said("rung") == "default"


# ------------------------------------------------------------------------------------------------------------- stale


@BOTH
async def test_an_answer_too_old_to_serve_is_good_enough_when_all_else_fails(
    start: Start, up: SettableUpstream, stream: bool
) -> None:
    gateway = await start()
    client, clock = gateway.client, gateway.clock
    stored = await client.chat(HARD, stream=stream)
    clock.advance(20 * 60)
    up.play(heavy="status-500", light="status-500")
    got = await client.chat(HARD, stream=stream)
    assert (got.said("rung"), got.said("degraded"), got.text) == ("stale", "upstream_status", stored.text)
    clock.advance(3600)  # beyond `stale`: never
    got = await client.chat(HARD, stream=stream)
    assert (got.said("rung"), got.text) == ("default", DEFAULT_TEXT)


async def test_tensors_step_down_to_stale_then_default(start: Start, up: SettableUpstream) -> None:
    gateway = await start()
    stored = await gateway.client.infer([1.0, 2.0])
    gateway.clock.advance(20 * 60)
    up.play(scorer="error")
    got = await gateway.client.infer([1.0, 2.0])
    assert (got.said("rung"), got.json["outputs"]) == ("stale", stored.json["outputs"])
    assert (await gateway.client.infer([3.0])).said("rung") == "default"


async def test_a_stale_rung_serves_only_the_model_that_was_chosen(start: Start, up: SettableUpstream) -> None:
    """What light once answered in heavy's place is not heavy's answer, also not a stale one."""
    gateway = await start()
    up.play(heavy="status-500")
    assert (await gateway.client.chat(HARD)).said("rung") == "light"
    gateway.clock.advance(20 * 60)
    up.play(light="status-500")
    assert (await gateway.client.chat(HARD)).said("rung") == "default"


# ------------------------------------------------------------------------------------------------ all down, no default


@BOTH
@pytest.mark.parametrize(
    ("fault", "status", "retry_after"),
    [("status-500", 502, None), ("status-503", 502, "2"), ("status-429", 502, "1"), ("close-at-once", 502, None), ("status-401", 502, None)],
)  # fmt: skip
async def test_with_nothing_left_the_status_tells_the_cause(
    start: Start, up: SettableUpstream, fault: str, status: int, retry_after: str | None, stream: bool
) -> None:
    gateway = await start(chat_policy(**NO_DEFAULT))
    up.play(heavy=fault, light=fault)
    got = await gateway.client.chat(HARD, stream=stream)
    assert got.status == status
    assert got.error["message"]
    if retry_after is not None:
        assert got.headers.get("Retry-After") == retry_after


@BOTH
async def test_refused_credentials_are_the_operators_matter(start: Start, up: SettableUpstream, stream: bool) -> None:
    gateway = await start(chat_policy(**NO_DEFAULT))
    client = gateway.client
    for fault in ("status-401", "status-404"):
        up.play(heavy=fault, light="ok")
        got = await client.chat(f"{HARD} {fault}", stream=stream)
        assert got.said("rung") == "light"
    assert up.calls("heavy") == 1  # the second finds it resting
    assert await client.metric("gateway_attempts_total", backend="heavy", outcome="upstream_misconfigured") == 1
    gateway.clock.advance(60)
    up.play(heavy="status-404", light="status-404")
    got = await client.chat(f"{HARD} again", stream=stream)
    assert got.status == 502
    assert got.error["code"] == "upstream_misconfigured"


@BOTH
async def test_the_last_word_is_an_error_with_retry_after_when_all_breakers_are_open(
    start: Start, up: SettableUpstream, stream: bool
) -> None:
    breaker = {"breaker": {"consecutive": 1, "open": "20s"}}
    gateway = await start(chat_policy(**NO_DEFAULT), backends={"heavy": breaker, "light": breaker})
    client = gateway.client
    up.play(heavy="status-500", light="status-500")
    await client.chat(HARD, stream=stream)
    calls = up.total()
    began = time.monotonic()
    got = await client.chat(HARD, stream=stream)
    assert time.monotonic() - began < 0.3
    assert got.status == 503
    assert int(got.headers["Retry-After"]) >= 1
    assert got.error["code"] in ("no_answer", "breaker_open")
    assert up.total() == calls
    # With something stored it is stale, and with a default it is that: never a hang.
    gateway.clock.advance(60)
    up.play(heavy="ok", light="ok")


async def test_all_breakers_open_and_something_stored_is_stale(start: Start, up: SettableUpstream) -> None:
    breaker = {"breaker": {"consecutive": 1, "open": "2h", "open_max": "2h"}}
    gateway = await start(backends={"heavy": breaker, "light": breaker, "scorer": breaker})
    client = gateway.client
    await client.chat(HARD)
    await client.infer([1.0])
    gateway.clock.advance(20 * 60)
    up.play(heavy="status-500", light="status-500", scorer="error")
    await client.chat(HARD + " other")
    await client.infer([2.0])
    calls = up.total()
    for stream in (False, True):
        got = await client.chat(HARD, stream=stream)
        assert (got.said("rung"), got.said("degraded")) == ("stale", "breaker_open")
        got = await client.chat(HARD + " third", stream=stream)
        assert (got.said("rung"), got.said("degraded")) == ("default", "breaker_open")
    assert (await client.infer([1.0])).said("rung") == "stale"
    assert (await client.infer([3.0])).said("rung") == "default"
    assert up.total() == calls


# ------------------------------------------------------------------------------------------------- the client's faults


@BOTH
@pytest.mark.parametrize(("fault", "status"), [("status-400", 400), ("status-422", 422)])
async def test_the_clients_own_fault_passes_unaltered_and_moves_nothing(
    client: Client, up: SettableUpstream, fault: str, status: int, stream: bool
) -> None:
    up.play(heavy=fault)
    for number in range(8):
        got = await client.chat(f"{HARD} {number}", stream=stream)
        assert got.status == status
        assert got.json == {"error": _scripted(status)}
        assert got.headers["Content-Type"].startswith("application/json")
    assert up.calls("light") == 0
    assert up.calls("heavy") == 8  # the breaker did not move
    assert await client.metric("gateway_requests_total", outcome="client_error") == 8


def _scripted(status: int) -> dict[str, str]:
    code = {400: "invalid_request", 422: "unprocessable"}[status]
    return {"message": f"scripted {status}", "type": "scripted_error", "code": code}


async def test_a_tensor_clients_own_fault_passes_unaltered(client: Client, up: SettableUpstream) -> None:
    up.play(scorer="bad-input")
    for _ in range(8):
        got = await client.infer()
        assert (got.status, got.oip_error) == (400, "bad shape")
    assert up.calls("scorer") == 8


@BOTH
async def test_a_context_too_long_for_one_model_may_fit_another(
    start: Start, up: SettableUpstream, stream: bool
) -> None:
    gateway = await start(chat_policy(**NO_DEFAULT))
    up.play(heavy="status-400-context")
    got = await gateway.client.chat(HARD, stream=stream)
    assert (got.said("rung"), got.said("degraded")) == ("light", "context_length_exceeded")
    up.play(light="status-400-context")
    got = await gateway.client.chat(f"{HARD} 2", stream=stream)
    assert got.status == 400
    assert got.error["code"] == "context_length_exceeded"


# ----------------------------------------------------------------------------------------------------- keeping count


async def test_canned_tensors_have_the_type_of_their_values(start: Start, up: SettableUpstream) -> None:
    values = {"yes": [True, False], "count": [[1, 2]], "share": [0.5], "name": ["a", "b"]}
    gateway = await start(chat_policy(), tensor_policy(default_answer={"tensors": {"x": None, **values}}))
    up.play(scorer="error")
    outputs = {tensor["name"]: tensor for tensor in (await gateway.client.infer()).json["outputs"]}
    types = {name: tensor["datatype"] for name, tensor in outputs.items()}
    assert types == {"yes": "BOOL", "count": "INT64", "share": "FP32", "name": "BYTES"}
    assert outputs["yes"]["data"] == [True, False]


async def test_each_rung_is_tried_once(start: Start, up: SettableUpstream) -> None:
    gateway = await start(chat_policy(**NO_DEFAULT), tensor_policy(ladder=["heavy"], default_answer=None))
    up.play(heavy="status-503", light="reset", scorer="error")
    for stream in (False, True):
        await gateway.client.chat(f"{HARD} {stream}", stream=stream)
    await gateway.client.infer()
    assert (up.calls("heavy"), up.calls("light"), up.calls("scorer")) == (2, 2, 1)


async def test_a_connection_closed_while_idle_costs_the_client_nothing(client: Client, up: SettableUpstream) -> None:
    up.play(heavy="keepalive-close", scorer=_closes_reused)
    for number in range(4):
        got = await client.chat(f"{HARD} {number}", stream=bool(number % 2))
        assert (got.status, got.said("rung"), got.said("degraded")) == (200, "heavy", None)
    for number in range(3):
        assert (await client.infer([float(number)])).said("rung") == "heavy"


def _closes_reused(seen: Any) -> Any:
    from backends.scripted_models import TENSOR_MODELS

    return (Step(close_if_reused=True), *TENSOR_MODELS["ok"](False, seen.body))


async def test_error_bodies_that_nobody_reads_hold_nothing(start: Start, up: SettableUpstream) -> None:
    """Endless error bodies, many more than connections may be in use."""
    heavy = {
        "breaker": {"consecutive": 100_000, "failure_rate": "100%", "min_calls": 100_000},
        "limiter": {"max_concurrent": 16},
    }
    gateway = await start(backends={"heavy": heavy})
    up.play(heavy="status-500-endless")

    async def asks(number: int) -> None:
        for turn in range(50):
            got = await gateway.client.chat(f"{HARD} {number} {turn}")
            assert got.said("degraded") == "upstream_status"

    await asyncio.gather(*(asks(number) for number in range(8)))
    assert up.calls("heavy") == 400
    up.play(heavy="ok")
    assert (await gateway.client.chat(HARD)).said("rung") == "heavy"
    await until(lambda: len(up.connections) <= 16)


@BOTH
async def test_an_answer_larger_than_the_bound_is_no_answer(client: Client, up: SettableUpstream, stream: bool) -> None:
    big = Step(reply=Reply(headers={"content-type": "application/json"}, text="[" * 1000))
    up.play(heavy=(big,))
    got = await client.chat(HARD, stream=stream)
    assert (got.said("rung"), got.said("degraded")) == ("light", "upstream_malformed")
