"""Requests that need something which not every model has."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.gateway import Start, chat_policy
from tests.support.gateway_client import EASY, HARD
from tests.support.settable_upstream import SettableUpstream

BOTH = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
NO_DEFAULT: dict[str, Any] = {"ladder": ["heavy", "light", "stale"], "default_answer": None}


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
IMAGE = [{"type": "text", "text": "prove it"}, {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}]
NEEDS = {
    "tools": {"tools": TOOLS},
    "json_schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}},
    "images": {"messages": [{"role": "user", "content": IMAGE}]},
    "n": {"n": 2},
    "logprobs": {"logprobs": True},
    "context": {"messages": [{"role": "user", "content": "prove " + "word " * 20_000}]},
    "language": {"messages": [{"role": "user", "content": "prove 这个系统为什么会死锁"}]},
}
#: What the skipped rung's reason says.
WORDS = {"context": "context of 4096 tokens", "language": "language zh"}
LIMITED = {"light": {"capabilities": {"context_tokens": 4096, "features": []}, "languages": ["en"]}}


@BOTH
@pytest.mark.parametrize("need", NEEDS)
async def test_a_rung_that_cannot_do_it_is_skipped_with_its_reason(
    start: Start, up: SettableUpstream, need: str, stream: bool
) -> None:
    gateway = await start(chat_policy(), backends=LIMITED)
    client = gateway.client
    up.play(heavy="status-500")
    got = await client.chat(HARD, stream=stream, **NEEDS[need])
    assert (got.status, got.said("rung"), got.said("degraded")) == (200, "default", "upstream_status")
    assert up.calls("light") == 0
    steps = (await client.why(got))["steps"]
    skipped = next(step for step in steps if step["backend"] == "light")
    assert skipped["outcome"] == "skipped"
    assert WORDS.get(need, need) in skipped["reason"]


@BOTH
@pytest.mark.parametrize("need", NEEDS)
async def test_without_a_default_the_error_says_what_was_missing(
    start: Start, up: SettableUpstream, need: str, stream: bool
) -> None:
    gateway = await start(chat_policy(**NO_DEFAULT), backends=LIMITED)
    up.play(heavy="status-500")
    got = await gateway.client.chat(HARD, stream=stream, **NEEDS[need])
    assert got.status == 502
    assert "light" in got.error["message"]
    assert WORDS.get(need, need) in got.error["message"]


async def test_a_request_that_no_model_can_serve_is_the_clients_matter(start: Start, up: SettableUpstream) -> None:
    none = {"capabilities": {"features": []}}
    gateway = await start(chat_policy(), backends={"heavy": none, "light": none})
    got = await gateway.client.chat(HARD, tools=TOOLS, headers={"x-gateway-degrade": "off"})
    assert got.status == 422
    assert "tools" in got.error["message"]
    assert up.total() == 0


async def test_an_easy_question_that_needs_tools_goes_to_the_model_that_has_them(
    start: Start, up: SettableUpstream
) -> None:
    gateway = await start(chat_policy(), backends=LIMITED)
    got = await gateway.client.chat(EASY, tools=TOOLS)
    assert (got.status, got.said("rung"), got.said("served-by")) == (200, "heavy", "heavy")
    assert up.calls("light") == 0
