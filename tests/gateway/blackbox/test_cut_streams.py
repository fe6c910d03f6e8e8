"""Streams that go wrong after their first content, and long ones that must not be cut."""

from __future__ import annotations

import time

import pytest

from backends.scripted_steps import Head, Step, Tokens, chunk
from tests.support.gateway import Start, chat_policy
from tests.support.gateway_client import HARD, Client
from tests.support.settable_upstream import SettableUpstream
from tests.support.waiting import until

SSE = Step(head=Head(headers={"content-type": "text/event-stream"}))
END = (Step(sse=chunk({}, "stop")), Step(sse="[DONE]"), Step(end=True))


@pytest.mark.parametrize(
    ("fault", "code", "tokens"),
    [("cut-after-40", "upstream_truncated", 40), ("no-finish", "upstream_truncated", 3), ("error-after-content", "upstream_in_band_error", 3)],
)  # fmt: skip
async def test_what_fails_after_content_ends_with_one_error_and_one_done(
    client: Client, up: SettableUpstream, fault: str, code: str, tokens: int
) -> None:
    up.play(heavy=fault)
    got = await client.chat(HARD, stream=True)
    assert (got.status, got.said("rung")) == (200, "heavy")
    assert got.text == "".join(f"tok{number} " for number in range(tokens))
    assert got.finish_reason is None
    assert got.events[-1] == "[DONE]"
    assert got.events.count("[DONE]") == 1
    errors = [event for event in got.chunks if "error" in event]
    assert [error["error"]["code"] for error in errors] == [code]
    assert got.chunks[-1] is not None
    assert "error" in got.chunks[-1]
    assert up.calls("light") == 0
    again = await client.chat(HARD, stream=True)
    assert again.said("rung") == "heavy"  # nothing was stored
    assert up.calls("heavy") == 2
    assert (await client.why(got))["outcome"] == "cut"


async def test_cut_streams_count_against_the_backend(client: Client, up: SettableUpstream) -> None:
    up.play(heavy="cut-after-40")
    for number in range(5):
        assert (await client.chat(f"{HARD} {number}", stream=True)).said("rung") == "heavy"
    got = await client.chat(f"{HARD} 6", stream=True)
    assert (got.said("rung"), got.said("degraded")) == ("light", "breaker_open")
    assert up.calls("heavy") == 5


async def test_a_stall_after_content_ends_at_the_idle_limit(start: Start, up: SettableUpstream) -> None:
    gateway = await start(chat_policy(timeouts={"idle": "150ms"}))
    up.play(heavy=(SSE, Step(tokens=Tokens(count=2)), Step(hang=True)))
    began = time.monotonic()
    got = await gateway.client.chat(HARD, stream=True)
    assert 0.1 < time.monotonic() - began < 1.0
    assert [c["error"]["code"] for c in got.chunks if "error" in c] == ["idle_timeout"]
    assert got.events[-1] == "[DONE]"
    await until(lambda: up.last_seen("heavy").closed_at is not None)


async def test_a_stream_without_end_is_cut_at_the_total_limit(start: Start, up: SettableUpstream) -> None:
    gateway = await start(chat_policy(timeouts={"total": "300ms", "idle": "200ms", "first_token": "200ms"}))
    up.play(heavy=(SSE, Step(tokens=Tokens(count=10_000, every_s=0.01))))
    got = await gateway.client.chat(HARD, stream=True)
    assert [c["error"]["code"] for c in got.chunks if "error" in c] == ["total_timeout"]
    assert got.events[-1] == "[DONE]"


async def test_a_healthy_long_stream_is_not_cut_by_deadline_or_first_token_limit(
    start: Start, up: SettableUpstream
) -> None:
    gateway = await start(chat_policy(deadline="400ms", timeouts={"first_token": "250ms"}))
    up.play(heavy=(Step(wait_s=0.05), SSE, Step(tokens=Tokens(count=40, every_s=0.02)), *END))
    got = await gateway.client.chat(HARD, stream=True)
    assert (got.said("rung"), got.finish_reason) == ("heavy", "stop")
    assert got.text == "".join(f"tok{number} " for number in range(40))
