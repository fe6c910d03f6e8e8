"""Bodies and heads that are too large, packed, too deep, too late, or no HTTP at all."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from collections.abc import AsyncIterator

import pytest

from tests.support.gateway import Start
from tests.support.gateway_client import EASY, HARD, JSON, Client, open_raw, question, raw, tensors
from tests.support.settable_upstream import SettableUpstream

CHAT = "/v1/chat/completions"
INFER = "/v2/models/recommend/infer"


@pytest.mark.parametrize("path", [CHAT, INFER, "/v1/embeddings"])
async def test_a_body_over_the_limit_is_a_413(start: Start, up: SettableUpstream, path: str) -> None:
    gateway = await start(limits={"body_bytes": "64KiB"})
    client = gateway.client
    body = json.dumps({**question("x" * 100_000), "input": "x"}).encode()

    async def pieces() -> AsyncIterator[bytes]:
        for at in range(0, len(body), 1000):
            yield body[at : at + 1000]

    for sent in (body, pieces()):
        got = await client.send("POST", path, sent, JSON)
        assert got.status == 413
        assert got.oip_error if path == INFER else got.error["code"] == "body_too_large"
    assert up.total() == 0
    assert (await client.chat("prove " + "y" * 60_000)).status == 200


async def test_the_default_limit_is_four_mebibytes(client: Client, up: SettableUpstream) -> None:
    assert (await client.chat("y" * 4_000_000)).status == 200
    assert (await client.chat("y" * 4_300_000)).status == 413
    assert up.total() == 1


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
async def test_compressed_bodies_are_read(client: Client, up: SettableUpstream, coding: str) -> None:
    squeeze = gzip.compress if coding == "gzip" else zlib.compress
    headers = {**JSON, "Content-Encoding": coding}
    up.play(heavy="echo")
    got = await client.send("POST", CHAT, squeeze(json.dumps(question(HARD)).encode()), headers)
    assert (got.status, got.text) == (200, HARD)
    got = await client.send("POST", INFER, squeeze(json.dumps(tensors([5.0])).encode()), headers)
    assert (got.status, got.json["outputs"][0]["data"]) == (200, [5.0])


async def test_a_gzip_bomb_is_refused_at_the_limit(client: Client, up: SettableUpstream) -> None:
    bomb = gzip.compress(b'{"model":"auto","messages":"' + b"x" * 50_000_000 + b'"}')
    for path in (CHAT, INFER):
        got = await client.send("POST", path, bomb, {**JSON, "Content-Encoding": "gzip"})
        assert got.status == 413
    assert up.total() == 0
    assert (await client.get("/livez")).status == 200


@pytest.mark.parametrize("coding", ["gzip", "br", "unheard-of"])
async def test_a_body_that_cannot_be_unpacked_is_a_client_error(
    client: Client, up: SettableUpstream, coding: str
) -> None:
    got = await client.send("POST", CHAT, b"this is not packed at all", {**JSON, "Content-Encoding": coding})
    assert got.status in (400, 415)
    assert got.error["type"] == "invalid_request_error"
    assert up.total() == 0
    assert (await client.get("/livez")).status == 200


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"auto","messages":' + b"[" * 10_000 + b"]" * 10_000 + b"}",
        b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
        b"[" * 10_000,
        b'{"inputs":[{"name":"x","shape":[1],"datatype":"FP32","data":' + b"[" * 10_000 + b"1" + b"]" * 10_000 + b"}]}",
    ],
    ids=["lists", "objects", "unclosed", "tensor"],
)
async def test_ten_thousand_levels_are_a_400(client: Client, up: SettableUpstream, body: bytes) -> None:
    for path in (CHAT, INFER, "/v1/embeddings"):
        got = await client.send("POST", path, body)
        assert got.status == 400
    assert up.total() == 0
    assert (await client.chat(EASY)).status == 200


async def test_headers_beyond_the_limits_are_refused(client: Client, up: SettableUpstream) -> None:
    body = json.dumps(question(HARD)).encode()
    length = f"Content-Length: {len(body)}\r\n".encode()
    many = b"".join(b"X-H%d: 1\r\n" % number for number in range(200))
    for extra in (b"X-Big: " + b"a" * 20_000 + b"\r\n", many):
        answer = await raw(
            client.url, b"POST " + CHAT.encode() + b" HTTP/1.1\r\nHost: x\r\n" + extra + length + b"\r\n" + body
        )
        status = answer.split(b" ", 2)[1]
        assert status in (b"400", b"431")
        assert b"aaaaaaaaaaaaaaaaaaaa" not in answer  # nor is anything of the request sent back
        assert b"application/json" in answer
    assert up.total() == 0
    assert (await client.get("/livez")).status == 200


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GARBAGE\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: abc\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nhello\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
    ids=["no-http", "two-lengths", "length-no-number", "length-and-chunked", "bad-chunk", "tls"],
)
async def test_a_request_that_is_not_http_is_refused_and_the_connection_closed(
    client: Client, up: SettableUpstream, request_bytes: bytes
) -> None:
    answer = await raw(client.url, request_bytes)
    assert answer == b"" or answer.split(b" ", 2)[1] == b"400"
    assert up.total() == 0
    assert (await client.get("/livez")).status == 200


async def test_a_body_that_never_arrives_ends_by_its_time_limit(start: Start, up: SettableUpstream) -> None:
    gateway = await start(limits={"body_time": "200ms"})
    reader, writer = await open_raw(gateway.url, CHAT, {})
    writer.close()
    host, port = gateway.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    async with asyncio.timeout(3):
        head = await reader.readuntil(b"\r\n\r\n")
    assert head.split(b" ", 2)[1] in (b"408", b"504")
    writer.close()
    assert up.total() == 0


NOT_JSON = (b"", b"{", b"[]", b"null", b"\xff\xfe{}", b'{"model": NaN}')


async def test_repeated_refusals_leave_the_gateway_as_it_was(client: Client, up: SettableUpstream) -> None:
    async def bad(number: int) -> int:
        return (await client.send("POST", CHAT, NOT_JSON[number % len(NOT_JSON)])).status

    assert set(await asyncio.gather(*(bad(number) for number in range(200)))) == {400}
    assert (await client.chat(HARD)).status == 200
    assert await client.metric("gateway_requests_total", outcome="failed") == 0
