"""What is never stored, and whose stored answers are read by whom."""

from __future__ import annotations

import json
from typing import Any

import pytest

from backends.scripted_steps import Head, Reply, Step, Tokens, chunk, completion
from tests.support.gateway import Start, chat_policy
from tests.support.gateway_client import HARD, JSON, Client, tensors
from tests.support.settable_upstream import SettableUpstream
from tests.support.waiting import until

BOTH = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
SSE = Step(head=Head(headers={"content-type": "text/event-stream"}))


NOT_STORED: dict[str, tuple[Any, Any]] = {
    # name: what a whole answer is, what a stream is
    "status-500": ("status-500", "status-500"),
    "status-429": ("status-429", "status-429"),
    "no choices": ((Step(reply=Reply(headers=JSON, json={**completion({}), "choices": []})),), (SSE, Step(sse=chunk(None)), Step(sse="[DONE]"))),
    "empty text": ((Step(reply=Reply(headers=JSON, json=completion({"content": ""}))),), (SSE, Step(sse=chunk({"content": ""})), Step(sse=chunk({}, "stop")), Step(sse="[DONE]"))),
    "length": ((Step(reply=Reply(headers=JSON, json=completion({"content": "half"}, "length"))),), (SSE, Step(tokens=Tokens(count=2)), Step(sse=chunk({}, "length")), Step(sse="[DONE]"))),
    "filtered": ((Step(reply=Reply(headers=JSON, json=completion({"content": "half"}, "content_filter"))),), (SSE, Step(tokens=Tokens(count=2)), Step(sse=chunk({}, "content_filter")), Step(sse="[DONE]"))),
    "cut": ("cut-after-40", "cut-after-40"),
    "no finish": ("no-finish", "no-finish"),
}  # fmt: skip


@BOTH
@pytest.mark.parametrize("name", NOT_STORED)
async def test_what_is_no_whole_answer_is_never_stored(
    start: Start, up: SettableUpstream, name: str, stream: bool
) -> None:
    gateway = await start(chat_policy(ladder=["heavy"], default_answer=None))
    up.play(heavy=NOT_STORED[name][stream])
    await gateway.client.chat(HARD, stream=stream)
    gateway.clock.advance(30)  # a throttled backend rests
    up.play(heavy=(Step(answer="good"),))
    for form in (stream, not stream):
        got = await gateway.client.chat(HARD, stream=form)
        assert got.text == "good", form
    assert up.calls("heavy") == 2


@pytest.mark.parametrize("fault", ["error", "error-first", "malformed", "empty"])
async def test_failed_tensor_answers_are_never_stored(client: Client, up: SettableUpstream, fault: str) -> None:
    up.play(scorer=fault)
    assert (await client.infer()).said("rung") == "default"
    up.play(scorer="ok")
    assert (await client.infer()).said("rung") == "heavy"


async def test_a_stream_whose_client_left_is_not_stored(client: Client, up: SettableUpstream) -> None:
    up.play(heavy=(SSE, Step(tokens=Tokens(count=1)), Step(hang=True)))
    async with client.streaming(HARD) as events:
        await events.first_content()
    await until(lambda: up.last_seen("heavy").closed_at is not None)
    up.play(heavy="ok")
    assert (await client.chat(HARD)).said("rung") == "heavy"


@BOTH
async def test_an_answer_given_in_anothers_place_is_not_served_as_its(
    client: Client, up: SettableUpstream, stream: bool
) -> None:
    up.play(heavy="status-500")
    assert (await client.chat(HARD, stream=stream)).said("rung") == "light"
    up.play(heavy="ok")
    got = await client.chat(HARD, stream=stream)
    assert (got.said("rung"), got.said("served-by"), got.said("degraded")) == ("heavy", "heavy", None)
    assert (await client.chat(HARD, stream=stream)).said("served-by") == "heavy"


async def test_only_answers_that_would_be_the_same_again_are_stored_where_the_policy_says_so(
    start: Start, up: SettableUpstream
) -> None:
    gateway = await start(chat_policy(cache={"store": "deterministic"}))
    client = gateway.client
    for fields, stored in (({}, False), ({"temperature": 1}, False), ({"temperature": 0}, True), ({"seed": 3}, True)):
        for stream in (False, True):
            rungs = [(await client.chat(f"{HARD} {stream}", stream=stream, **fields)).said("rung") for _ in range(2)]
            assert rungs == ["heavy", "hit-l1" if stored else "heavy"], (fields, stream)


async def test_a_switched_off_cache_neither_looks_up_nor_stores(start: Start, up: SettableUpstream) -> None:
    gateway = await start(chat_policy(cache={"enabled": False}))
    for stream in (False, True):
        assert [(await gateway.client.chat(HARD, stream=stream)).said("rung") for _ in range(2)] == ["heavy"] * 2
    got = await gateway.client.chat(HARD, headers={"Cache-Control": "only-if-cached"})
    assert got.status == 504


async def test_an_answer_found_by_a_fallback_is_found_again_by_the_fallback(
    client: Client, up: SettableUpstream
) -> None:
    """While heavy stays down, light's own stored answer spares light the work."""
    up.play(heavy="status-500")
    assert (await client.chat(HARD)).said("rung") == "light"
    again = await client.chat(HARD)
    assert again.said("degraded")
    assert again.said("served-by") == "light"
    assert up.calls("light") == 1


async def test_binary_and_json_tensors_are_the_same_question(client: Client, up: SettableUpstream) -> None:
    import numpy as np

    await client.send("POST", "/v2/models/recommend/infer", tensors([1.0, 2.0]))
    data = np.array([1.0, 2.0], np.float32).tobytes()
    head = json.dumps(
        {"inputs": [{"name": "x", "shape": [2], "datatype": "FP32", "parameters": {"binary_data_size": len(data)}}]}
    ).encode()
    headers = {"Inference-Header-Content-Length": str(len(head)), "Content-Type": "application/octet-stream"}
    got = await client.send("POST", "/v2/models/recommend/infer", head + data, headers)
    assert (got.status, got.said("rung")) == (200, "hit-l1")
    assert up.calls("scorer") == 1
