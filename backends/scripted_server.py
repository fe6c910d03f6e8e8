"""A small HTTP/1.1 server whose every byte is scripted: the upstream of tests, drills and demonstrations.

The request's model name chooses a script: of the script file, else a built-in one, else the file's `default`. What was
seen is kept (`ScriptedServer.seen`) and served at `GET /_seen`. This is a test upstream: it checks nothing and trusts
everybody, and it shows request headers, so it must not listen where strangers can reach it.
"""

from __future__ import annotations

import asyncio
import base64
import gzip
import socket
import struct
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

import msgspec

from backends.scripted_models import MODELS, SSE, TENSOR_MODELS, Script
from backends.scripted_steps import USAGE, Head, Reply, ScriptFile, Step, Tokens, chunk, completion, event
from policies.core.clock import Clock, SystemClock

_KEPT = 10_000


@dataclass(slots=True)
class Seen:
    """One request, and when (monotonic seconds) its client left before the script was over."""

    model: str
    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    stream: bool
    connection: int
    at: float
    closed_at: float | None = None


class ScriptedServer:
    """Handle of a running server."""

    def __init__(self, scripts: ScriptFile, clock: Clock) -> None:
        self.scripts = scripts
        self.clock = clock
        self.seen: deque[Seen] = deque(maxlen=_KEPT)
        self.requests: Counter[str] = Counter()
        self.connections: set[_Connection] = set()
        self.connections_made = 0
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), host, port)

    @property
    def port(self) -> int:
        assert self._server is not None
        number: int = self._server.sockets[0].getsockname()[1]
        return number

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def last(self, model: str) -> Seen:
        """The latest request for `model`. Raises LookupError."""
        for seen in reversed(self.seen):
            if seen.model == model:
                return seen
        raise LookupError(f"no request for {model!r} was seen")

    def script(self, seen: Seen) -> Script:
        own = self.scripts.scripts
        built_in = TENSOR_MODELS if seen.path.startswith("/v2/") else MODELS
        for name in (seen.model, self.scripts.default):
            if name in own:
                return own[name]
            if name in built_in:
                return built_in[name](seen.stream, seen.body)
        return (
            Step(reply=Reply(status=404, json={"error": {"message": "no such script", "code": "model_not_found"}})),
        )

    async def close(self) -> None:
        """Stop listening and drop every connection."""
        if self._server is not None:
            self._server.close()
        tasks = [connection.task for connection in self.connections if connection.task is not None]
        for connection in tuple(self.connections):
            connection.drop()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._server is not None:
            await self._server.wait_closed()


async def serve_scripts(
    host: str, port: int, scripts: ScriptFile | None = None, clock: Clock | None = None
) -> ScriptedServer:
    """Listen on host:port (0 = any free port) and answer by script until `close`."""
    server = ScriptedServer(scripts or ScriptFile(), clock or SystemClock())
    await server.start(host, port)
    return server


class _Connection(asyncio.Protocol):
    """One client. A single task reads requests and runs their scripts; it is cancelled when the client leaves."""

    def __init__(self, server: ScriptedServer) -> None:
        self._server = server
        self._buffer = bytearray()
        self._arrived = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()
        self._chunked = False
        self._served = 0
        self._current: Seen | None = None
        self._transport: asyncio.Transport
        self.task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        raw = transport.get_extra_info("socket")
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._server.connections_made += 1
        self._number = self._server.connections_made
        self._server.connections.add(self)
        self.task = asyncio.get_running_loop().create_task(self._serve())

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        self._arrived.set()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.connections.discard(self)
        if self._current is not None:
            self._current.closed_at = self._server.clock.now()
        if self.task is not None:
            self.task.cancel()

    def drop(self) -> None:
        self._current = None
        self._transport.abort()

    async def _serve(self) -> None:
        while True:
            seen = await self._read_request()
            if seen is None:
                self._transport.close()
                return
            if seen.path == "/_seen":
                await self._reply(Reply(headers={"content-type": "application/json"}, json=self._report()))
                continue
            self._server.seen.append(seen)
            self._server.requests[seen.model] += 1
            self._current = seen
            for step in self._server.script(seen):
                if not await self._run(step, seen):
                    self._current = None
                    return
            if self._chunked:
                await self._run(Step(end=True), seen)
            self._current = None
            self._served += 1

    async def _read_request(self) -> Seen | None:
        end = await self._until(b"\r\n\r\n")
        lines = bytes(self._buffer[:end]).decode("latin-1").split("\r\n")
        del self._buffer[: end + 4]
        parts = lines[0].split(" ")
        headers = {
            name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])
        }
        length = headers.get("content-length", "0")
        if len(parts) != 3 or not length.isdigit():
            return None
        while len(self._buffer) < int(length):
            self._arrived.clear()
            await self._arrived.wait()
        raw = bytes(self._buffer[: int(length)])
        del self._buffer[: int(length)]
        return self._seen(parts[1], headers, raw)

    def _seen(self, path: str, headers: dict[str, str], raw: bytes) -> Seen:
        split = headers.get("inference-header-content-length")
        head = raw[: int(split)] if split else raw
        try:
            body = msgspec.json.decode(head, type=dict[str, Any]) if head else {}
        except msgspec.DecodeError:
            body = {}
        if split:
            body["_binary"] = base64.b64encode(raw[int(split) :]).decode()
        model = path.split("/")[3] if path.startswith("/v2/models/") else str(body.get("model", ""))
        stream = body.get("stream") is True
        return Seen(model, path, headers, body, stream, self._number, self._server.clock.now())

    async def _until(self, mark: bytes) -> int:
        while (end := self._buffer.find(mark)) < 0:
            self._arrived.clear()
            await self._arrived.wait()
        return end

    async def _run(self, step: Step, seen: Seen) -> bool:
        """Do one step; False when the connection is over."""
        action = step.action()
        if action in ("send", "send_base64", "sse"):
            await self._body(step.payload(), bytewise=step.bytewise)
        elif action == "tokens" and step.tokens is not None:
            await self._tokens(step.tokens)
        elif action == "answer" and step.answer is not None:
            await self._answer(step.answer, seen)
        elif action == "reply" and step.reply is not None:
            await self._reply(step.reply)
        elif action == "head" and step.head is not None:
            self._head(step.head)
        elif action == "raw" and step.raw is not None:
            self._transport.write(step.raw.encode())
        elif action == "wait_s" and step.wait_s is not None:
            await self._server.clock.sleep(step.wait_s)
        elif action == "hang":
            await asyncio.Event().wait()
        elif action == "end":
            self._transport.write(b"0\r\n\r\n" if self._chunked else b"")
            self._chunked = False
        elif action != "close_if_reused" or self._served:
            self._close(reset=step.reset)
            return False
        return True

    def _close(self, *, reset: bool) -> None:
        self._current = None
        if reset:
            raw = self._transport.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._transport.abort()
        else:
            self._transport.close()

    def _head(self, head: Head) -> None:
        self._chunked = head.framing == "chunked"
        headers = dict(head.headers)
        if self._chunked:
            headers["transfer-encoding"] = "chunked"
        elif head.framing == "close":
            headers["connection"] = "close"
        lines = [f"HTTP/1.1 {head.status} Scripted", *(f"{name}: {value}" for name, value in headers.items())]
        self._transport.write(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"))

    async def _body(self, data: bytes, *, bytewise: bool = False) -> None:
        for piece in (data[i : i + 1] for i in range(len(data))) if bytewise else (data,):
            await self._writable.wait()
            if piece:
                self._transport.write(b"%x\r\n%b\r\n" % (len(piece), piece) if self._chunked else piece)
            await asyncio.sleep(0)

    async def _tokens(self, tokens: Tokens) -> None:
        for number in range(tokens.count):
            if number and tokens.every_s:
                await self._server.clock.sleep(tokens.every_s)
            await self._body(event(chunk({"content": tokens.text.replace("{i}", str(number))})))

    async def _reply(self, reply: Reply) -> None:
        data = reply.text.encode() if reply.json is None else msgspec.json.encode(reply.json)
        headers = dict(reply.headers)
        if reply.gzip:
            data = gzip.compress(data)
            headers["content-encoding"] = "gzip"
        headers["content-length"] = str(len(data))
        self._head(Head(status=reply.status, headers=headers, framing="length"))
        await self._body(data)

    async def _answer(self, text: str, seen: Seen) -> None:
        if not seen.stream:
            message = completion({"content": text}, model=seen.model)
            await self._reply(Reply(headers={"content-type": "application/json"}, json=message))
            return
        self._head(Head(headers=SSE))
        words = text.split(" ")
        texts = [word if n == 0 else " " + word for n, word in enumerate(words)]
        events = [chunk({"role": "assistant", "content": ""}, model=seen.model)]
        events += [chunk({"content": piece}, model=seen.model) for piece in texts]
        events.append(chunk({}, "stop", model=seen.model))
        if (seen.body.get("stream_options") or {}).get("include_usage"):
            events.append({**chunk(None, model=seen.model), "usage": USAGE})
        for value in events:
            await self._body(event(value))
        await self._body(event("[DONE]"))
        await self._run(Step(end=True), seen)

    def _report(self) -> dict[str, Any]:
        server = self._server
        latest = [
            {
                "model": seen.model,
                "path": seen.path,
                "headers": seen.headers,
                "at": seen.at,
                "closed_after_s": None if seen.closed_at is None else seen.closed_at - seen.at,
            }
            for seen in list(server.seen)[-100:]
        ]
        return {"requests": dict(server.requests), "open_connections": len(server.connections), "latest": latest}
