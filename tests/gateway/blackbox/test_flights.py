"""Equal requests at the same time: one call, and each client's own fate."""

from __future__ import annotations

import asyncio
import time

import pytest

from backends.scripted_steps import Head, Step, Tokens, chunk
from tests.support.gateway import Gateway, Start, chat_policy, tensor_policy
from tests.support.gateway_client import HARD, Client, question
from tests.support.settable_upstream import SettableUpstream
from tests.support.waiting import until

BOTH = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
SLOW = (Step(wait_s=0.4), Step(answer="late but good"))
SSE = Step(head=Head(headers={"content-type": "text/event-stream"}))


@BOTH
async def test_five_hundred_equal_requests_at_once_are_one_call(
    client: Client, up: SettableUpstream, stream: bool
) -> None:
    up.play(heavy=(Step(wait_s=1.0), Step(answer="late but good")))
    got = await asyncio.gather(*(client.chat(HARD, stream=stream) for _ in range(500)))
    assert up.calls("heavy") == 1
    assert {(answer.status, answer.text) for answer in got} == {(200, "late but good")}
    assert len({answer.said("request-id") for answer in got}) == 500
    assert {answer.said("degraded") for answer in got} == {None}


async def test_five_hundred_equal_tensor_requests_at_once_are_one_call(client: Client, up: SettableUpstream) -> None:
    from backends.scripted_models import TENSOR_MODELS

    up.play(scorer=lambda seen: (Step(wait_s=1.0), *TENSOR_MODELS["ok"](False, seen.body)))
    got = await asyncio.gather(*(client.infer([4.0]) for _ in range(500)))
    assert up.calls("scorer") == 1
    assert {answer.json["outputs"][0]["data"][0] for answer in got} == {4.0}


@BOTH
async def test_the_first_client_leaves_and_the_others_are_served(
    client: Client, up: SettableUpstream, stream: bool
) -> None:
    up.play(heavy=SLOW)
    first = asyncio.create_task(client.chat(HARD, stream=stream))
    await until(lambda: up.calls("heavy") == 1)
    others = [asyncio.create_task(client.chat(HARD, stream=stream)) for _ in range(5)]

    async def joined() -> bool:
        return await client.metric("gateway_flights_joined_total") == 5

    while not await joined():
        await asyncio.sleep(0)
    first.cancel()
    got = await asyncio.gather(*others)
    assert {(answer.said("rung"), answer.text) for answer in got} == {("heavy", "late but good")}
    assert up.calls("heavy") == 1
    assert up.last_seen("heavy").closed_at is None


@BOTH
async def test_all_clients_leave_and_the_call_ends(client: Client, up: SettableUpstream, stream: bool) -> None:
    up.play(heavy="never")
    tasks = [asyncio.create_task(client.chat(HARD, stream=stream)) for _ in range(5)]
    await until(lambda: up.calls("heavy") == 1)
    while await client.metric("gateway_flights_joined_total") < 4:
        await asyncio.sleep(0)
    for task in tasks[:4]:
        task.cancel()
    await asyncio.gather(*tasks[:4], return_exceptions=True)
    assert up.last_seen("heavy").closed_at is None
    tasks[4].cancel()
    await until(lambda: up.last_seen("heavy").closed_at is not None, within_s=1.0)
    assert up.total() == 1


@BOTH
async def test_a_call_that_fails_sends_each_client_down_its_own_ladder(
    client: Client, up: SettableUpstream, stream: bool
) -> None:
    up.play(heavy=(Step(wait_s=0.3), Step(reset=True)))
    plain = [client.chat(HARD, stream=stream) for _ in range(5)]
    alone = [client.chat(HARD, stream=stream, headers={"x-gateway-degrade": "off"}) for _ in range(5)]
    got = await asyncio.gather(*plain, *alone)
    assert up.calls("heavy") == 1
    assert [answer.said("rung") for answer in got[:5]] == ["light"] * 5
    assert [answer.status for answer in got[5:]] == [502] * 5
    assert up.calls("light") == 1
    up.play(heavy="ok")
    assert (await client.chat(HARD, stream=stream)).said("rung") == "heavy"  # nothing was stored


@BOTH
async def test_each_client_has_its_own_deadline(start: Start, up: SettableUpstream, stream: bool) -> None:
    gateway = await start(chat_policy(ladder=["heavy"], default_answer=None))
    up.play(heavy=SLOW)

    async def timed(limit_ms: int) -> tuple[int, float]:
        began = time.monotonic()
        got = await gateway.client.chat(HARD, stream=stream, headers={"x-request-timeout-ms": str(limit_ms)})
        return got.status, time.monotonic() - began

    (short, short_s), (long, long_s) = await asyncio.gather(timed(100), timed(5000))
    assert short == 504
    assert short_s < 0.25
    assert long == 200
    assert long_s > 0.35
    assert up.calls("heavy") == 1


async def test_a_later_client_with_more_time_prolongs_the_call(start: Start, up: SettableUpstream) -> None:
    gateway = await start(
        tensor_policy(ladder=["heavy"], default_answer=None), chat_policy(ladder=["heavy"], default_answer=None)
    )
    up.play(heavy=SLOW)
    first = asyncio.create_task(gateway.client.chat(HARD, headers={"x-request-timeout-ms": "200"}))
    await until(lambda: up.calls("heavy") == 1)
    second = await gateway.client.chat(HARD, headers={"x-request-timeout-ms": "5000"})
    assert (second.status, second.text) == (200, "late but good")
    assert (await first).status == 504
    assert up.calls("heavy") == 1


async def test_a_stream_joined_half_way_replays_from_its_start(client: Client, up: SettableUpstream) -> None:
    script = (SSE, Step(tokens=Tokens(count=20, every_s=0.03)), Step(sse=chunk({}, "stop")), Step(sse="[DONE]"))
    up.play(heavy=script)
    async with client.streaming(HARD) as events:
        for _ in range(8):
            await events.next()
        late = asyncio.create_task(client.chat(HARD, stream=True))
        rest = await events.rest()
    assert rest[-1] == "[DONE]"
    got = await late
    assert got.text == "".join(f"tok{number} " for number in range(20))
    assert got.finish_reason == "stop"
    assert up.calls("heavy") == 1


async def test_a_slow_follower_slows_nobody(gateway: Gateway, up: SettableUpstream) -> None:
    from tests.support.gateway_client import open_raw

    up.play(
        heavy=(
            Step(wait_s=0.2),
            SSE,
            Step(tokens=Tokens(count=300, text="z" * 16_000)),
            Step(sse=chunk({}, "stop")),
            Step(sse="[DONE]"),
        )
    )
    slow = await open_raw(gateway.url, "/v1/chat/completions", question(HARD, stream=True))
    await until(lambda: up.calls("heavy") == 1)
    got = await gateway.client.chat(HARD, stream=True)
    assert (got.finish_reason, len(got.text)) == ("stop", 300 * 16_000)
    assert up.calls("heavy") == 1
    slow[1].transport.abort()


async def test_what_may_not_be_stored_is_not_shared(start: Start, up: SettableUpstream) -> None:
    gateway = await start(chat_policy(cache={"store": "deterministic"}))
    up.play(heavy=SLOW)
    await asyncio.gather(*(gateway.client.chat(HARD) for _ in range(4)))
    assert up.calls("heavy") == 4
    await asyncio.gather(*(gateway.client.chat(HARD, temperature=0) for _ in range(4)))
    assert up.calls("heavy") == 5
    no_store = {"Cache-Control": "no-store"}
    await asyncio.gather(*(gateway.client.chat(HARD, temperature=0, seed=2, headers=no_store) for _ in range(3)))
    assert up.calls("heavy") == 8


async def test_whole_and_streamed_requests_do_not_share_a_flight(client: Client, up: SettableUpstream) -> None:
    up.play(heavy=SLOW)
    got = await asyncio.gather(client.chat(HARD), client.chat(HARD, stream=True))
    assert {answer.text for answer in got} == {"late but good"}
    assert [answer.is_stream for answer in got] == [False, True]
    assert up.calls("heavy") == 2
