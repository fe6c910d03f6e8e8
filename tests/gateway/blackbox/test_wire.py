"""The wire on both sides: what clients may send in which form, and what upstreams may do."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress

import pytest

from backends.scripted_steps import Head, Step
from tests.support.gateway import Gateway, Start, chat_policy, tensor_policy
from tests.support.gateway_client import HARD, JSON, Client, question, raw, tensors
from tests.support.settable_upstream import SettableUpstream
from tests.support.waiting import eventually

SSE = Step(head=Head(headers={"content-type": "text/event-stream"}))


async def _connect(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


# ---------------------------------------------------------------------------------------------------------- clients


async def test_a_client_that_waits_for_continue_is_told_to_go_on(gateway: Gateway) -> None:
    """curl does for large bodies; the answer to it must come before the body does."""
    body = json.dumps(question(HARD)).encode()
    reader, writer = await _connect(gateway.url)
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode())
    async with asyncio.timeout(1.0):
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100")
        writer.write(body)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
    writer.close()


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_both_versions_of_http_are_spoken(gateway: Gateway, version: str) -> None:
    body = json.dumps(question(HARD, stream=True)).encode()
    head = f"POST /v1/chat/completions HTTP/{version}\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    answer = await raw(gateway.url, head.encode() + body)
    assert b" 200 " in answer.split(b"\r\n", 1)[0]
    assert b"data: [DONE]\n\n" in answer
    assert (b"transfer-encoding: chunked" in answer.lower()) == (version == "1.1")


async def test_a_body_in_small_chunks_is_put_together(client: Client, up: SettableUpstream) -> None:
    body = json.dumps(question(HARD)).encode()

    async def pieces():
        for at in range(0, len(body), 7):
            yield body[at : at + 7]

    up.play(heavy="echo")
    got = await client.send("POST", "/v1/chat/completions", pieces(), JSON)
    assert (got.status, got.text) == (200, HARD)


async def test_requests_one_after_the_other_on_one_connection(gateway: Gateway, up: SettableUpstream) -> None:
    """Answers keep their order, also when all requests were sent at once and one of them is wrong."""
    reader, writer = await _connect(gateway.url)
    for text in ("prove one", "", "prove three"):
        body = json.dumps(question(text) if text else {"model": "auto"}).encode()
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    statuses = []
    for _ in range(3):
        async with asyncio.timeout(2.0):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            length = next(line.split(":")[1] for line in head.split("\r\n") if line.startswith("content-length"))
            await reader.readexactly(int(length))
        statuses.append(head.split(" ", 2)[1])
    assert statuses == ["200", "400", "200"]
    assert up.calls("heavy") == 2
    writer.close()


async def test_a_head_that_never_ends_is_closed_by_its_time_limit(start: Start) -> None:
    gateway = await start(limits={"header_time": "300ms"})
    slow = [await _connect(gateway.url) for _ in range(20)]
    for _, writer in slow:
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nX-Slow: ")
    assert (await gateway.client.chat(HARD)).status == 200
    async with asyncio.timeout(2.0):
        answers = await asyncio.gather(*(reader.read() for reader, _ in slow))
    assert all(answer == b"" or answer.split(b" ", 2)[1] in (b"400", b"408") for answer in answers)
    for _, writer in slow:
        writer.close()


async def test_a_later_head_that_never_ends_is_closed_by_its_time_limit_too(start: Start) -> None:
    gateway = await start(limits={"header_time": "200ms"})
    reader, writer = await _connect(gateway.url)
    request = b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"
    loop = asyncio.get_running_loop()
    began = loop.time()
    # Longer than the limit on one connection: whole requests, and the line ends that some clients send, may take it.
    while loop.time() - began < 0.5:
        writer.write(request + b"\r\n")
        assert b" 200 " in await reader.readline()
        await reader.readuntil(b"}")
        await asyncio.sleep(0.05)
    cut = asyncio.create_task(reader.read())
    writer.write(b"GET /livez HTTP/1.1\r\nX-Slow: ")
    async with asyncio.timeout(3.0):
        while not cut.done():
            writer.write(b"x")
            await asyncio.sleep(0.05)
    with suppress(ConnectionError):
        assert await cut == b""
    writer.close()


async def test_a_body_that_comes_too_slowly_is_the_clients_fault(start: Start) -> None:
    gateway = await start(limits={"body_time": "150ms"})
    reader, writer = await _connect(gateway.url)
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
    async with asyncio.timeout(2.0):
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        assert b'"body_timeout"' in await reader.readuntil(b"}}")
    assert b" 408 " in head.split(b"\r\n", 1)[0]
    assert b"connection: close" in head
    writer.close()
    only_cached = await gateway.client.chat(HARD, headers={"Cache-Control": "only-if-cached"})
    assert only_cached.status == 504
    client = gateway.client
    assert (await client.why(only_cached))["outcome"] == "client_error"
    assert await client.metric("gateway_requests_total", outcome="client_error") == 2
    assert await client.metric("gateway_requests_total", outcome="failed") == 0


async def test_no_more_connections_than_allowed(start: Start) -> None:
    """The one too many is refused or closed; those within the limit are served, and room is made again."""
    gateway = await start(limits={"connections": 5})
    held = [await _connect(gateway.url) for _ in range(5)]
    for reader, writer in held:
        writer.write(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"200" in await reader.readline()
    try:
        answer = await raw(gateway.url, b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    except OSError:
        answer = b""
    assert b" 200 " not in answer
    held[0][1].close()

    async def served() -> bool:
        return b" 200 " in await raw(gateway.url, b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")

    await eventually(served)
    for _, writer in held[1:]:
        writer.close()


async def test_a_name_with_a_slash_can_be_asked_for_on_every_surface(start: Start) -> None:
    gateway = await start(
        chat_policy(match={"aliases": ["team/model:1"]}), tensor_policy(match={"aliases": ["team/model:1"]})
    )
    assert (await gateway.client.chat(HARD, model="team/model:1")).status == 200
    host, port = gateway.url.removeprefix("http://").split(":")
    body = json.dumps(tensors([1.0])).encode()
    answer = await raw(
        f"http://{host}:{port}",
        b"POST /v2/models/team%%2Fmodel%%3A1/infer HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
        % len(body)
        + body,
    )
    assert b" 200 " in answer.split(b"\r\n", 1)[0]


async def test_query_strings_do_not_change_the_path(client: Client) -> None:
    got = await client.send("POST", "/v1/chat/completions?api-version=2024-06-01", question(HARD))
    assert (got.status, got.said("rung")) == (200, "heavy")
    assert (await client.get("/readyz?verbose=1")).status == 200
