"""Breakers and limits round each backend, as a client and the operator see them."""

from __future__ import annotations

import asyncio
import time

import pytest

from backends.scripted_steps import Step
from tests.support.gateway import DEFAULT_TEXT, Start, chat_policy, tensor_policy
from tests.support.gateway_client import HARD, Client, Got
from tests.support.settable_upstream import SettableUpstream
from tests.support.waiting import until

BOTH = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


def breaker(**options: object) -> dict[str, object]:
    return {"breaker": {"consecutive": 3, "open": "10s", "jitter": "0%", **options}}


@BOTH
async def test_a_breaker_opens_is_seen_and_recovers(start: Start, up: SettableUpstream, stream: bool) -> None:
    gateway = await start(backends={"heavy": breaker(probes=2)})
    client = gateway.client
    up.play(heavy="status-500")
    for number in range(6):
        got = await client.chat(f"{HARD} {number}", stream=stream)
        assert got.said("degraded") == ("upstream_status" if number < 3 else "breaker_open")
    assert up.calls("heavy") == 3
    assert await client.metric("gateway_breaker_state", backend="heavy") == 2
    told = (await client.admin("/backends")).json["worker-1"]
    heavy = next(backend for backend in told if backend["name"] == "heavy")
    assert "OPEN" in heavy["guard"]
    gateway.clock.advance(11)
    up.play(heavy="ok")
    for number in range(3):
        assert (await client.chat(f"{HARD} back {number}", stream=stream)).said("rung") == "heavy"
    assert await client.metric("gateway_breaker_state", backend="heavy") == 0


async def test_the_tensor_surface_has_its_breaker_too(start: Start, up: SettableUpstream) -> None:
    gateway = await start(backends={"scorer": breaker()})
    client = gateway.client
    up.play(scorer="error")
    degraded = [(await client.infer([float(number)])).said("degraded") for number in range(5)]
    assert degraded == ["upstream_status"] * 3 + ["breaker_open"] * 2
    gateway.clock.advance(11)
    up.play(scorer="ok")
    assert (await client.infer([9.0])).said("rung") == "heavy"


async def test_a_failed_probe_opens_it_again(start: Start, up: SettableUpstream) -> None:
    gateway = await start(backends={"heavy": breaker(probes=1)})
    client = gateway.client
    up.play(heavy="status-500")
    for number in range(3):
        await client.chat(f"{HARD} {number}")
    gateway.clock.advance(11)
    assert (await client.chat(f"{HARD} probe")).said("degraded") == "upstream_status"
    assert (await client.chat(f"{HARD} after")).said("degraded") == "breaker_open"
    gateway.clock.advance(11)
    assert (await client.chat(f"{HARD} still")).said("degraded") == "breaker_open"  # the time has grown
    assert up.calls("heavy") == 4


async def test_only_the_permitted_probes_reach_a_backend_that_may_be_back(start: Start, up: SettableUpstream) -> None:
    gateway = await start(backends={"heavy": breaker(probes=2)})
    client = gateway.client
    up.play(heavy="status-500")
    for number in range(3):
        await client.chat(f"{HARD} {number}")
    gateway.clock.advance(11)
    up.play(heavy="slow-first-token")
    got = await asyncio.gather(*(client.chat(f"{HARD} crowd {number}") for number in range(100)))
    assert up.calls("heavy") == 3 + 2
    assert sorted({answer.said("rung") for answer in got}) == ["heavy", "light"]


async def test_a_probe_whose_client_leaves_does_not_block_the_breaker(start: Start, up: SettableUpstream) -> None:
    gateway = await start(backends={"heavy": breaker(probes=1)})
    client = gateway.client
    up.play(heavy="status-500")
    for number in range(3):
        await client.chat(f"{HARD} {number}")
    gateway.clock.advance(11)
    up.play(heavy="never")
    probe = asyncio.create_task(client.chat(f"{HARD} probe"))
    await until(lambda: up.calls("heavy") == 4)
    probe.cancel()
    await until(lambda: up.last_seen("heavy").closed_at is not None)
    up.play(heavy="ok")
    assert (await client.chat(f"{HARD} next")).said("rung") == "heavy"


async def test_a_light_model_that_fails_as_a_stand_in_is_counted_itself(start: Start, up: SettableUpstream) -> None:
    gateway = await start(backends={"heavy": breaker(), "light": breaker()})
    client = gateway.client
    up.play(heavy="status-500", light="status-500")
    for number in range(8):
        assert (await client.chat(f"{HARD} {number}")).said("rung") == "default"
    assert (up.calls("heavy"), up.calls("light")) == (3, 3)
    assert await client.metric("gateway_breaker_state", backend="light") == 2


@BOTH
async def test_a_hundred_clients_that_leave_say_nothing_about_the_backend(
    start: Start, up: SettableUpstream, stream: bool
) -> None:
    gateway = await start(backends={"heavy": breaker()})
    client = gateway.client
    up.play(heavy="never")
    tasks = [asyncio.create_task(client.chat(f"{HARD} {number}", stream=stream)) for number in range(100)]
    await until(lambda: up.calls("heavy") == 100, within_s=5.0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await until(lambda: not up.connections, within_s=5.0)
    assert await client.metric("gateway_breaker_state", backend="heavy") == 0
    up.play(heavy="ok")
    assert (await client.chat(HARD, stream=stream)).said("rung") == "heavy"


async def test_a_throttled_backend_rests_as_long_as_it_asked(start: Start, up: SettableUpstream) -> None:
    gateway = await start()
    client = gateway.client
    up.play(heavy="status-429")  # Retry-After: 1
    began = time.monotonic()
    assert (await client.chat(HARD)).said("degraded") == "upstream_status"
    assert (await client.chat(f"{HARD} 2")).said("degraded") == "breaker_open"
    assert time.monotonic() - began < 0.5
    assert up.calls("heavy") == 1
    gateway.clock.advance(1.1)
    up.play(heavy="ok")
    assert (await client.chat(f"{HARD} 3")).said("rung") == "heavy"


# ------------------------------------------------------------------------------------------------------------ limits


def _counts(got: list[Got]) -> dict[str, int]:
    rungs = [answer.said("rung") or str(answer.status) for answer in got]
    return {rung: rungs.count(rung) for rung in sorted(set(rungs))}


@BOTH
async def test_without_stale_and_default_the_surplus_is_refused_at_once(
    start: Start, up: SettableUpstream, stream: bool
) -> None:
    policy = chat_policy(ladder=["heavy"], default_answer=None)
    gateway = await start(policy, backends={"heavy": {"limiter": {"max_concurrent": 10}, **breaker()}})
    client = gateway.client
    up.play(heavy=(Step(wait_s=0.4), Step(answer="late but good")))
    got = await asyncio.gather(*(client.chat(f"{HARD} {number}", stream=stream) for number in range(30)))
    refused = [answer for answer in got if answer.status != 200]
    assert (len(refused), up.calls("heavy")) == (20, 10)
    for answer in refused:
        assert answer.status in (429, 503)
        assert int(answer.headers["Retry-After"]) >= 1
        assert answer.error["type"] == "overloaded_error"
        assert float(answer.said("overhead-ms") or "nan") < 400
    # Our own refusals are no failures of the backend.
    assert await client.metric("gateway_breaker_state", backend="heavy") == 0
    up.play(heavy="ok")
    assert (await client.chat(HARD, stream=stream)).status == 200


@BOTH
async def test_with_a_default_the_surplus_gets_labelled_degraded_answers(
    start: Start, up: SettableUpstream, stream: bool
) -> None:
    policy = chat_policy(ladder=["heavy", "default"])
    gateway = await start(policy, backends={"heavy": {"limiter": {"max_concurrent": 10}}})
    up.play(heavy=(Step(wait_s=0.4), Step(answer="late but good")))
    got = await asyncio.gather(*(gateway.client.chat(f"{HARD} {number}", stream=stream) for number in range(30)))
    assert _counts(got) == {"default": 20, "heavy": 10}
    degraded = [answer for answer in got if answer.said("rung") == "default"]
    assert {answer.said("degraded") for answer in degraded} == {"limit_reached"}
    assert {answer.text for answer in degraded} == {DEFAULT_TEXT}


async def test_a_full_tensor_backend_refuses_in_its_own_shape(start: Start, up: SettableUpstream) -> None:
    policy = tensor_policy(ladder=["heavy"], default_answer=None)
    gateway = await start(policy, backends={"scorer": {"limiter": {"max_concurrent": 1}}})
    up.play(scorer="never")
    waiting = asyncio.create_task(gateway.client.infer([1.0]))
    await until(lambda: up.calls("scorer") == 1)
    got = await gateway.client.infer([2.0])
    assert got.status in (429, 503)
    assert int(got.headers["Retry-After"]) >= 1
    assert got.oip_error
    assert up.calls("scorer") == 1
    waiting.cancel()


async def test_a_full_backend_is_left_at_once_whatever_the_deadline(start: Start, up: SettableUpstream) -> None:
    gateway = await start(backends={"heavy": {"limiter": {"max_concurrent": 1}}})
    client: Client = gateway.client
    up.play(heavy="never")
    waiting = asyncio.create_task(client.chat(HARD))
    await until(lambda: up.calls("heavy") == 1)
    began = time.monotonic()
    got = await client.chat(f"{HARD} 2", headers={"x-request-timeout-ms": "100"})
    assert time.monotonic() - began < 0.1
    assert (got.said("rung"), got.said("degraded")) == ("light", "limit_reached")
    assert up.calls("heavy") == 1
    waiting.cancel()


async def test_stored_answers_are_never_shed_with_the_costly_ones(start: Start, up: SettableUpstream) -> None:
    gateway = await start(backends={"heavy": {"limiter": {"max_concurrent": 1}}})
    client = gateway.client
    await client.chat(HARD)
    up.play(heavy="never")
    waiting = asyncio.create_task(client.chat(f"{HARD} other"))
    await until(lambda: up.calls("heavy") == 2)
    got = await asyncio.gather(*(client.chat(HARD) for _ in range(50)))
    assert _counts(got) == {"hit-l1": 50}
    waiting.cancel()
