"""Clients that leave: the upstream is let go within a second, and nothing stays in use."""

from __future__ import annotations

import asyncio

import pytest

from backends.scripted_steps import Head, Step, Tokens
from tests.support.gateway import Gateway, Start, chat_policy
from tests.support.gateway_client import HARD, open_raw, question, tensors
from tests.support.settable_upstream import SettableUpstream
from tests.support.waiting import eventually, until

CHAT = "/v1/chat/completions"
SSE = Step(head=Head(headers={"content-type": "text/event-stream"}))
ROLE = Step(sse={"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
WHEN = {
    "before any header, whole": ("never", False),
    "before any header, stream": ("never", True),
    "before the first token": ((SSE, ROLE, Step(hang=True)), True),
    "in mid-stream": ((SSE, Step(tokens=Tokens(count=2)), Step(hang=True)), True),
    "while tokens flow": ((SSE, Step(tokens=Tokens(count=10_000, every_s=0.01))), True),
    "in mid-answer": ((Step(head=Head(headers={"content-type": "application/json"})), Step(send="{"), Step(hang=True)), False),
}  # fmt: skip


@pytest.mark.parametrize("cached", [True, False], ids=["shared", "not-shared"])
@pytest.mark.parametrize("when", WHEN)
async def test_a_chat_client_that_leaves_ends_the_call(
    start: Start, up: SettableUpstream, when: str, cached: bool
) -> None:
    """With and without a flight; the one slot of the backend is free again, and no other rung was tried."""
    script, stream = WHEN[when]
    gateway = await start(
        chat_policy(cache={"enabled": cached}), backends={"heavy": {"limiter": {"max_concurrent": 1}}}
    )
    up.play(heavy=script)
    reader, writer = await open_raw(gateway.url, CHAT, question(HARD, stream=stream))
    if when in ("in mid-stream", "while tokens flow"):
        await reader.readuntil(b"tok1")
    else:
        await until(lambda: up.calls("heavy") == 1)
    writer.transport.abort()
    await until(lambda: up.last_seen("heavy").closed_at is not None, within_s=1.0)

    async def closed() -> bool:
        return await gateway.client.metric("gateway_requests_total", outcome="client_closed") == 1

    await eventually(closed)
    assert await gateway.client.metric("gateway_flights_in_flight") == 0
    assert up.calls("light") == 0
    up.play(heavy="ok")
    assert (await gateway.client.chat(HARD + " next")).said("rung") == "heavy"
    assert await gateway.client.metric("gateway_breaker_state", backend="heavy") == 0
    assert gateway.worker._parts.listener.in_flight == 0
    outcomes = {o: await gateway.client.metric("gateway_requests_total", outcome=o) for o in ("failed", "cut", "full")}
    assert outcomes == {"failed": 0, "cut": 0, "full": 1}


async def test_a_tensor_client_that_leaves_ends_the_call(start: Start, up: SettableUpstream) -> None:
    gateway = await start(backends={"scorer": {"limiter": {"max_concurrent": 1}}})
    up.play(scorer="never")
    _, writer = await open_raw(gateway.url, "/v2/models/recommend/infer", tensors([1.0]))
    await until(lambda: up.calls("scorer") == 1)
    writer.transport.abort()
    await until(lambda: up.last_seen("scorer").closed_at is not None, within_s=1.0)
    up.play(scorer="ok")
    assert (await gateway.client.infer([2.0])).said("rung") == "heavy"


async def test_a_client_that_says_goodbye_politely_is_gone_as_well(gateway: Gateway, up: SettableUpstream) -> None:
    """A FIN of the whole connection, not a reset."""
    up.play(heavy="never")
    _, writer = await open_raw(gateway.url, CHAT, question(HARD))
    await until(lambda: up.calls("heavy") == 1)
    writer.close()
    await until(lambda: up.last_seen("heavy").closed_at is not None, within_s=1.0)


async def test_a_client_that_leaves_on_a_lower_rung_ends_that_call(gateway: Gateway, up: SettableUpstream) -> None:
    up.play(heavy="status-500", light="never")
    _, writer = await open_raw(gateway.url, CHAT, question(HARD, stream=True))
    await until(lambda: up.calls("light") == 1)
    writer.transport.abort()
    await until(lambda: up.last_seen("light").closed_at is not None, within_s=1.0)


async def test_many_clients_that_leave_leave_nothing(gateway: Gateway, up: SettableUpstream) -> None:
    up.play(heavy="never", scorer="never")
    opened = []
    for number in range(50):
        opened.append(await open_raw(gateway.url, CHAT, question(f"{HARD} {number}", stream=bool(number % 2))))
        opened.append(await open_raw(gateway.url, "/v2/models/recommend/infer", tensors([float(number)])))
    await until(lambda: up.total() == 100, within_s=5.0)
    for _, writer in opened:
        writer.transport.abort()
    await until(lambda: not up.connections, within_s=2.0)
    listener = gateway.worker._parts.listener
    await until(lambda: listener.in_flight == 0)
    assert await gateway.client.metric("gateway_flights_in_flight") == 0
    await asyncio.sleep(0)
    assert await gateway.client.metric("gateway_requests_total", outcome="client_closed") == 100
