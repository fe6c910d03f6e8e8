"""The servers the gateway is measured beside: aiohttp without any logic of ours.

`python -m gateway.load.bench.bare proxy PORT UPSTREAM_URL` forwards a chat completion with aiohttp's client;
`... constant PORT ANSWER_FILE` reads the body and answers fixed bytes and headers; `... upstream PORT` is a plain
asyncio server for machines without nginx. Each listens on 127.0.0.1 and runs until it is ended.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import cast

import aiohttp
import msgspec
import uvloop
from aiohttp import web

CHAT_PATH = "/v1/chat/completions"
#: The fixed chat completion that every upstream here answers.
COMPLETION = (
    b'{"id":"chatcmpl-1","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"message":'
    b'{"role":"assistant","content":"hello there, how can I help?"},"finish_reason":"stop"}],"usage":'
    b'{"prompt_tokens":10,"completion_tokens":8,"total_tokens":18}}'
)


class FixedAnswer(msgspec.Struct):
    """What the constant handler answers. `headers` come besides those of the HTTP server itself."""

    body: str
    headers: dict[str, str]


async def proxy(port: int, upstream: str) -> None:
    """Reads, forwards, answers; nothing else."""
    session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
    url, headers = upstream.rstrip("/") + CHAT_PATH, {"content-type": "application/json"}

    async def handle(request: web.Request) -> web.Response:
        body = await request.read()
        async with session.post(url, data=body, headers=headers) as answer:
            return web.Response(body=await answer.read(), content_type="application/json")

    async with session:
        await _serve(port, handle)


async def constant(port: int, fixed: FixedAnswer) -> None:
    """Reads the body and answers the same bytes and headers every time."""
    body, headers = fixed.body.encode(), fixed.headers

    async def handle(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=body, headers=headers, content_type="application/json")

    await _serve(port, handle)


async def _serve(port: int, handle: web.RequestHandler | object) -> None:
    app = web.Application()
    app.router.add_post(CHAT_PATH, handle)  # type: ignore[arg-type]
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


class _Upstream(asyncio.Protocol):
    """Answers every request with the completion; reads just enough HTTP to find the end of a request."""

    _answer = (
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(COMPLETION)
    ) + COMPLETION

    def __init__(self) -> None:
        self._read = b""
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the methods, not the base class.
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        self._read += data
        while (end := self._read.find(b"\r\n\r\n")) >= 0:
            length = 0
            for line in self._read[:end].split(b"\r\n"):
                name, _, value = line.partition(b":")
                if name.lower() == b"content-length":
                    length = int(value)
            if len(self._read) < end + 4 + length:
                return
            self._read = self._read[end + 4 + length :]
            self._transport.write(self._answer)


async def upstream(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(_Upstream, "127.0.0.1", port)
    async with server:
        await server.serve_forever()


def main(arguments: list[str]) -> None:
    kind, port = arguments[0], int(arguments[1])
    if kind == "proxy":
        uvloop.run(proxy(port, arguments[2]))
    elif kind == "constant":
        uvloop.run(constant(port, msgspec.json.decode(Path(arguments[2]).read_bytes(), type=FixedAnswer)))
    elif kind == "upstream":
        uvloop.run(upstream(port))
    else:
        raise SystemExit(f"unknown server {kind!r}; there are proxy, constant and upstream")


if __name__ == "__main__":
    main(sys.argv[1:])
