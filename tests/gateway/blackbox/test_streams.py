"""Streams: the commit point, what is cut, what passes unaltered, what is replayed."""

from __future__ import annotations

import asyncio
import json
import time
from itertools import pairwise

import pytest

from backends.scripted_models import UNICODE_TEXT
from backends.scripted_steps import Head, Step, Tokens, chunk
from tests.support.gateway import DEFAULT_TEXT, Gateway, Start, chat_policy
from tests.support.gateway_client import HARD, Client, open_raw, question
from tests.support.settable_upstream import SettableUpstream
from tests.support.waiting import eventually, until

BOTH = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
SSE = Step(head=Head(headers={"content-type": "text/event-stream"}))
END = (Step(sse=chunk({}, "stop")), Step(sse="[DONE]"), Step(end=True))


# ---------------------------------------------------------------------------------------------- before the commit point

#: What a heavy backend may do instead of answering, and the reason that the light answer gives for it.
FAULTS = {
    "close-before-content": "upstream_truncated",
    "close-at-once": "upstream_unreachable",
    "reset": "upstream_unreachable",
    "error-first": "upstream_in_band_error",
    "html": "upstream_malformed",
    "empty": "upstream_malformed",
    "invalid-json": "upstream_malformed",
    "not-http": "upstream_malformed",
    "status-500": "upstream_status",
    "status-503": "upstream_status",
    "status-429": "upstream_status",
    "status-302": "upstream_status",
    "status-401": "upstream_misconfigured",
    "status-404": "upstream_misconfigured",
}


@BOTH
@pytest.mark.parametrize("fault", FAULTS)
async def test_what_fails_before_any_content_is_answered_by_the_light_model_after_one_call(
    client: Client, up: SettableUpstream, fault: str, stream: bool
) -> None:
    up.play(heavy=fault)
    got = await client.chat(HARD, stream=stream)
    assert (got.status, got.said("rung"), got.said("degraded")) == (200, "light", FAULTS[fault])
    assert got.text == "hello there, how can I help?"
    assert got.finish_reason == "stop"
    assert (up.calls("heavy"), up.calls("light")) == (1, 1)


#: Whole answers also fail by these; streams fail by them after the commit point.
ONLY_WHOLE = ("no-finish", "cut-after-40")
FAILS = [
    (fault, stream)
    for fault in (*FAULTS, *ONLY_WHOLE)
    for stream in (False, True)
    if not (stream and fault in ONLY_WHOLE)
]


@pytest.mark.parametrize(("fault", "stream"), FAILS)
async def test_with_nothing_below_it_is_an_error_in_json(
    start: Start, up: SettableUpstream, fault: str, stream: bool
) -> None:
    gateway = await start(chat_policy(ladder=["heavy", "light", "stale"], default_answer=None))
    up.play(heavy=fault, light=fault)
    got = await gateway.client.chat(HARD, stream=stream)
    assert got.status == 502
    assert not got.is_stream
    assert got.error["type"] == "upstream_error"
    assert "data:" not in got.body.decode()
    assert (up.calls("heavy"), up.calls("light")) == (1, 1)
    assert (await gateway.client.get("/livez")).status == 200


async def test_both_models_silent_is_a_504_in_json(start: Start, up: SettableUpstream) -> None:
    policy = chat_policy(
        deadline="600ms", timeouts={"first_token": "200ms"}, ladder=["heavy", "light", "stale"], default_answer=None
    )
    gateway = await start(policy)
    up.play(heavy="never", light="never")
    began = time.monotonic()
    got = await gateway.client.chat(HARD, stream=True)
    assert time.monotonic() - began < 0.75
    assert got.status == 504
    assert not got.is_stream
    assert got.error["type"] == "timeout_error"


async def test_a_role_is_not_content_whatever_follows(client: Client, up: SettableUpstream) -> None:
    """Metadata, a role and an empty delta come before the commit point: the light answer has none of them."""
    up.play(heavy=(SSE, Step(sse=chunk({"role": "assistant", "content": ""})), Step(sse=chunk({})), Step(close=True)))
    got = await client.chat(HARD, stream=True)
    assert (got.said("rung"), got.models) == ("light", {"light-model"})


async def test_endless_metadata_is_left_at_a_bound(client: Client, up: SettableUpstream) -> None:
    up.play(heavy=(SSE, *(Step(sse=chunk({"role": "x" * 10_000})) for _ in range(20)), Step(hang=True)))
    got = await client.chat(HARD, stream=True)
    assert (got.said("rung"), got.said("degraded")) == ("light", "upstream_malformed")
    await until(lambda: up.last_seen("heavy").closed_at is not None)


async def test_a_malformed_line_is_skipped(client: Client, up: SettableUpstream) -> None:
    up.play(heavy="malformed-line-then-good")
    got = await client.chat(HARD, stream=True)
    assert (got.status, got.said("rung"), got.said("degraded")) == (200, "heavy", None)
    assert got.text == "good after all"
    assert all(event == "[DONE]" or json.loads(event) for event in got.events)


async def test_a_compressed_upstream_answer_is_understood(client: Client, up: SettableUpstream) -> None:
    up.play(heavy="gzip")
    for stream in (False, True):
        got = await client.chat(f"{HARD} {stream}", stream=stream)
        assert (got.status, got.text) == (200, "unzipped")
        assert "Content-Encoding" not in got.headers


# ----------------------------------------------------------------------------------------------------- on their way


async def test_usage_comes_once_and_only_when_asked_for(client: Client, up: SettableUpstream) -> None:
    for fault in ("ok", "usage"):
        up.play(heavy=fault)
        for origin in ("from the model", "from the cache"):
            asked = await client.chat(f"{HARD} {fault}", stream=True, stream_options={"include_usage": True})
            usage = [c for c in asked.chunks if not c["choices"]]
            assert len(usage) == 1, origin
            assert usage[0]["usage"]["total_tokens"] == 18
            assert asked.chunks[-1] == usage[0]
            for options in (None, {"include_usage": False}, {}):
                not_asked = await client.chat(f"{HARD} {fault}", stream=True, stream_options=options)
                assert all(c["choices"] for c in not_asked.chunks), origin
                assert not_asked.said("rung") == "hit-l1"
    assert up.last_seen("heavy").body["stream_options"]["include_usage"] is True


async def test_usage_of_the_model_is_dropped_when_nobody_asked(client: Client, up: SettableUpstream) -> None:
    up.play(heavy="usage")
    got = await client.chat(HARD, stream=True)
    assert got.said("rung") == "heavy"
    assert all(c["choices"] for c in got.chunks)
    told = await client.why(got)
    assert told["tokens"] == {"in": 10, "out": 8}  # and is counted all the same


async def test_interleaved_tool_calls_pass_unaltered(client: Client, up: SettableUpstream) -> None:
    up.play(heavy="tools-interleaved")
    tools = [{"type": "function", "function": {"name": name}} for name in ("get_weather", "get_time", "get_news")]
    got = await client.chat(HARD, stream=True, tools=tools)
    sent = [step.sse for step in up.script(up.last_seen("heavy")) if isinstance(step.sse, dict)]
    assert got.chunks == [event for event in sent if event["choices"]]
    assert got.finish_reason == "tool_calls"
    assert [call["name"] for call in got.message["calls"]] == ["get_weather", "get_time", "get_news"]
    assert json.loads(got.message["calls"][2]["arguments"]) == {"city": "北京", "n": 2}


async def test_each_token_is_passed_on_before_the_next_exists(client: Client, up: SettableUpstream) -> None:
    """Nothing is held back: the client has the first token while the upstream has not made the second."""
    up.play(heavy=(SSE, Step(tokens=Tokens(count=1)), Step(hang=True)))
    async with client.streaming(HARD) as events:
        async with asyncio.timeout(1.0):
            assert await events.first_content() == "tok0 "


async def test_the_upstreams_pace_is_kept(client: Client, up: SettableUpstream) -> None:
    up.play(heavy="paced-20ms")
    times = []
    async with client.streaming(HARD) as events:
        while event := await events.next():
            if '"tok' in event:
                times.append(time.monotonic())
    gaps = sorted(b - a for a, b in pairwise(times))
    assert len(times) == 10
    assert times[-1] - times[0] > 0.15
    assert 0.010 < gaps[len(gaps) // 2] < 0.040


@pytest.mark.parametrize("first", ["whole", "stream"])
async def test_text_that_arrives_byte_by_byte_is_whole_live_and_replayed(
    client: Client, up: SettableUpstream, first: str
) -> None:
    up.play(heavy="bytewise-unicode")
    live = await client.chat(HARD, stream=first == "stream")
    assert (live.said("rung"), live.text) == ("heavy", UNICODE_TEXT)
    for stream in (False, True):
        replayed = await client.chat(HARD, stream=stream)
        assert (replayed.said("rung"), replayed.text) == ("hit-l1", UNICODE_TEXT)


async def test_a_line_of_600_kibibytes_passes(client: Client, up: SettableUpstream) -> None:
    up.play(heavy="huge-line")
    for _ in ("from the model", "from the cache"):
        got = await client.chat(HARD, stream=True)
        assert len(got.text) == 600 << 10
        assert set(got.text) == {"x"}


@pytest.mark.parametrize("first", [False, True], ids=["stored-whole", "stored-stream"])
@pytest.mark.parametrize("part", ["ok", "reasoning", "tools-interleaved"])
async def test_a_stored_answer_serves_both_forms_alike(
    client: Client, up: SettableUpstream, first: bool, part: str
) -> None:
    up.play(heavy=part)
    options = {"stream_options": {"include_usage": True}}
    live = await client.chat(HARD, stream=first, **(options if first else {}))
    assert live.said("rung") == "heavy"
    whole = await client.chat(HARD)
    stream = await client.chat(HARD, stream=True, **options)
    assert (whole.said("rung"), stream.said("rung")) == ("hit-l1", "hit-l1")
    assert up.calls("heavy") == 1
    assert whole.finish_reason == stream.finish_reason == live.finish_reason
    message, streamed = whole.json["choices"][0]["message"], stream.message
    assert (message.get("content") or "") == streamed["content"] == live.text
    assert message.get("reasoning_content") == streamed.get("reasoning_content")
    calls = [{**c["function"], "id": c["id"]} for c in message.get("tool_calls", ())]
    assert calls == streamed.get("calls", [])
    usage = next(c["usage"] for c in stream.chunks if not c["choices"])
    assert usage == whole.json["usage"]
    assert whole.json["object"] == "chat.completion"
    assert {c["object"] for c in stream.chunks} == {"chat.completion.chunk"}


async def test_a_default_answer_streams_like_any_other(client: Client, up: SettableUpstream) -> None:
    up.play(heavy="status-500", light="status-500")
    got = await client.chat(HARD, stream=True, stream_options={"include_usage": True})
    assert (got.said("rung"), got.text, got.finish_reason) == ("default", DEFAULT_TEXT, "stop")
    assert got.events[-1] == "[DONE]"
    assert len([c for c in got.chunks if not c["choices"]]) == 1


# -------------------------------------------------------------------------------------------------------- many streams


async def test_two_hundred_abandoned_streams_leave_nothing_behind(gateway: Gateway, up: SettableUpstream) -> None:
    up.play(heavy=(SSE, Step(tokens=Tokens(count=1)), Step(hang=True)))
    bodies = [question(f"{HARD} {number}", stream=True) for number in range(200)]
    opened = await asyncio.gather(*(open_raw(gateway.url, "/v1/chat/completions", body) for body in bodies))
    await asyncio.gather(*(reader.readuntil(b"tok0") for reader, _ in opened))
    assert await gateway.client.metric("gateway_flights_in_flight") == 200
    for _, writer in opened:
        writer.transport.abort()
    slowest = 0.0
    for _ in range(20):
        began = time.monotonic()
        assert (await gateway.client.get("/readyz")).status == 200
        slowest = max(slowest, time.monotonic() - began)
    assert slowest < 0.2
    await until(lambda: all(seen.closed_at is not None for seen in up.seen))

    async def idle() -> bool:
        return await gateway.client.metric("gateway_flights_in_flight") == 0

    await eventually(idle)
    await until(lambda: not up.connections)
    up.play(heavy="ok")
    assert (await gateway.client.chat(HARD)).said("rung") == "heavy"


async def test_a_client_that_does_not_read_bounds_memory_and_slows_nobody(
    gateway: Gateway, up: SettableUpstream
) -> None:
    """The upstream is held up once the buffers on the way are full, whatever it has to say."""
    big = Step(tokens=Tokens(count=2000, text="y" * 16_000))  # 32 MB
    up.play(heavy=(SSE, big, *END))
    reader, writer = await open_raw(gateway.url, "/v1/chat/completions", question(HARD, stream=True))
    await reader.readuntil(b"yyyy")
    # While it does not read, somebody else's stream of another question runs.
    up.play(heavy="ok")
    got = await gateway.client.chat(f"{HARD} and more", stream=True)
    assert got.finish_reason == "stop"
    assert up.last_seen("heavy").closed_at is None

    def stuck() -> bool:
        return any(not connection._writable.is_set() for connection in up.connections)

    await until(stuck, within_s=5.0)
    for _ in range(20):
        assert (await gateway.client.get("/livez")).status == 200
        assert stuck()
    writer.transport.abort()
    await until(lambda: not stuck())
    await until(lambda: not any(connection._current for connection in up.connections))
