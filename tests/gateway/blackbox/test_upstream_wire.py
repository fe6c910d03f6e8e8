"""What upstreams may do on the wire."""

from __future__ import annotations

import json

from backends.scripted_steps import Head, Reply, Step, chunk, completion
from tests.support.gateway_client import HARD, JSON, Client
from tests.support.settable_upstream import SettableUpstream

SSE = Step(head=Head(headers={"content-type": "text/event-stream"}))


async def test_a_service_that_does_not_stream_is_streamed_for_it(client: Client, up: SettableUpstream) -> None:
    up.play(heavy=(Step(reply=Reply(headers=JSON, json=completion({"content": "all at once"}))),))
    got = await client.chat(HARD, stream=True, stream_options={"include_usage": True})
    assert got.is_stream
    assert (got.text, got.finish_reason, got.events[-1]) == ("all at once", "stop", "[DONE]")
    assert len([c for c in got.chunks if not c["choices"]]) == 1


async def test_every_spelling_of_an_event_stream_is_read(client: Client, up: SettableUpstream) -> None:
    one, two, end = (
        json.dumps(chunk(*parts)) for parts in (({"content": "one "},), ({"content": "two"},), ({}, "stop"))
    )
    text = (
        f": a comment\n\nevent: message\nid: 7\ndata: {one}\r\n\r\n: ping\r\n\r\nretry: 100\n\ndata:{two}\n\n"
        f"data: {end[:20]}\ndata: {end[20:]}\n\ndata: [DONE]\n\n"
    )
    up.play(heavy=(SSE, Step(send=text, bytewise=True)))
    got = await client.chat(HARD, stream=True)
    assert (got.said("rung"), got.text, got.finish_reason) == ("heavy", "one two", "stop")
    assert got.events.count("[DONE]") == 1


async def test_a_stream_without_done_but_with_its_finish_is_whole(client: Client, up: SettableUpstream) -> None:
    up.play(heavy=(SSE, Step(sse=chunk({"content": "whole"})), Step(sse=chunk({}, "stop")), Step(close=True)))
    got = await client.chat(HARD, stream=True)
    assert (got.text, got.finish_reason, got.events[-1]) == ("whole", "stop", "[DONE]")
    assert not [c for c in got.chunks if "error" in c]
    assert (await client.chat(HARD, stream=True)).said("rung") == "hit-l1"


async def test_skipped_lines_are_counted_where_an_operator_sees_them(client: Client, up: SettableUpstream) -> None:
    up.play(heavy="malformed-line-then-good")
    await client.chat(HARD, stream=True)
    metrics = (await client.admin("/metrics")).body.decode()
    counted = [line for line in metrics.splitlines() if "skipped" in line and not line.startswith("#")]
    assert any(float(line.rsplit(" ", 1)[1]) >= 1 for line in counted if "heavy" in line)


async def test_redirects_are_not_followed(client: Client, up: SettableUpstream) -> None:
    here = {"location": f"{up.url}/v1/chat/completions"}
    up.play(heavy=(Step(reply=Reply(status=307, headers=here)),))
    for stream in (False, True):
        got = await client.chat(f"{HARD} {stream}", stream=stream)
        assert (got.said("rung"), got.said("degraded")) == ("light", "upstream_status")
    assert up.calls("heavy") == 2


async def test_cookies_of_an_upstream_are_neither_kept_nor_passed_on(client: Client, up: SettableUpstream) -> None:
    headers = {**JSON, "set-cookie": "upstream=secret", "x-upstream": "inner", "server": "inner"}
    up.play(heavy=(Step(reply=Reply(headers=headers, json=completion({"content": "good"}))),))
    for number in range(2):
        got = await client.chat(f"{HARD} {number}")
        assert got.text == "good"
        assert not {"set-cookie", "x-upstream"} & {name.lower() for name in got.headers}
        assert got.headers.get("Server") != "inner"
    assert "cookie" not in up.last_seen("heavy").headers
