"""Everything at once, by chance but repeatable: faults, fallbacks, shared calls, clients that leave. Then the books must be right."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from backends.scripted_steps import Step
from tests.support.gateway import DEFAULT_TEXT, Start, chat_policy, tensor_policy
from tests.support.gateway_client import Got
from tests.support.settable_upstream import SettableUpstream
from tests.support.waiting import eventually, until

FAULTS = (
    "ok", "ok", "ok", "close-before-content", "close-at-once", "reset", "cut-after-40", "no-finish", "error-first",
    "error-after-content", "html", "empty", "status-500", "status-503", "status-400", "slow-first-token", "never",
)  # fmt: skip
TENSOR_FAULTS = ("ok", "ok", "error", "error-first", "malformed", "empty", "never", "bad-input")


def _by_chance(source: random.Random) -> Any:
    def part(seen: Any) -> Any:
        name = source.choice(TENSOR_FAULTS if seen.path.startswith("/v2/") else FAULTS)
        return (Step(answer=f"answer of {seen.model}"),) if name == "ok" and seen.path.startswith("/v1/") else name

    return part


@pytest.mark.parametrize("seed", range(3))
async def test_after_a_storm_every_request_is_booked_once_and_nothing_is_left(
    start: Start, up: SettableUpstream, seed: int
) -> None:
    source = random.Random(seed)
    calm = {"breaker": {"consecutive": 20, "open": "50ms"}, "limiter": {"max_concurrent": 30}}
    gateway = await start(
        chat_policy(deadline="600ms", timeouts={"first_token": "250ms", "idle": "200ms"}),
        tensor_policy(deadline="400ms"),
        backends=dict.fromkeys(("heavy", "light", "scorer"), calm),
    )
    client = gateway.client
    part = _by_chance(source)
    up.play(heavy=part, light=part, scorer=part)

    async def one(number: int) -> Got | None:
        leaves = source.random() < 0.2
        if number % 5 == 0:
            asking = client.infer([float(source.randrange(15))])
        else:
            word = source.choice(("prove", "tell me"))
            asking = client.chat(f"{word} {source.randrange(20)}", stream=source.random() < 0.5)
        task = asyncio.create_task(asking)
        if not leaves:
            return await task
        await until(lambda: up.total() > number // 4 or task.done(), within_s=5.0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return None

    sent = 400
    got = []
    for first in range(0, sent, 80):
        got += await asyncio.gather(*(one(number) for number in range(first, first + 80)))
    for answer in got:
        if answer is not None:
            _is_whole(answer)
    listener = gateway.worker._parts.listener
    await until(lambda: listener.in_flight == 0)

    async def booked() -> bool:
        return await client.metric("gateway_requests_total") >= sent - _never_arrived(got)

    await eventually(booked)
    total = await client.metric("gateway_requests_total")
    answered = len([answer for answer in got if answer is not None])
    closed = await client.metric("gateway_requests_total", outcome="client_closed")
    assert answered <= total <= sent
    assert closed <= sent - answered
    await until(lambda: not any(connection._current for connection in up.connections), within_s=3.0)
    assert await client.metric("gateway_flights_in_flight") == 0
    guards = {backend["name"]: backend["guard"] for backend in (await client.admin("/backends")).json["worker-1"]}
    assert all("(0/30 in use)" in guard for guard in guards.values()), guards
    up.play(heavy="ok", light="ok", scorer="ok")
    gateway.clock.advance(120)
    for _ in range(4):  # half-open breakers want their probes
        await client.chat(f"prove {source.random()}")
        await client.infer([source.random()])
    assert (await client.chat("prove calm")).said("rung") == "heavy"
    assert (await client.infer([99.0])).said("rung") == "heavy"


def _never_arrived(got: list[Got | None]) -> int:
    """Clients that left may have left before their request was read."""
    return len([answer for answer in got if answer is None])


def _is_whole(got: Got) -> None:
    """Whatever happened upstream: a complete answer, a labelled lower one, the client's error, or one cut with its notice."""
    assert got.said("request-id")
    if got.status != 200:
        assert got.status == 400
        return
    rung = got.said("rung") or ""
    assert rung in ("heavy", "light", "stale", "default") or rung.startswith("hit-")
    if "/json" in got.headers["Content-Type"] and "outputs" in got.json:
        assert got.json["outputs"]
        return
    if got.is_stream:
        assert got.events[-1] == "[DONE]"
        assert got.events.count("[DONE]") == 1
        errors = [chunk for chunk in got.chunks if "error" in chunk]
        assert len(errors) == (0 if got.finish_reason else 1)
        if errors:
            assert not rung.startswith("hit-")
            return
    assert got.text.startswith(("answer of ", "late but good")) or got.text == DEFAULT_TEXT
    assert (rung == "default") == (got.text == DEFAULT_TEXT)
