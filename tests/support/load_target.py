"""A server on a real socket that answers what a test scripts, and can stall on command."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

WHOLE = b'{"id":"c","choices":[{"message":{"content":"hello"},"finish_reason":"stop"}]}'
_ROLE = b'data: {"choices":[{"delta":{"role":"assistant"}}]}\n\n'
_WORD = b'data: {"choices":[{"delta":{"content":"word "}}]}\n\n'
_END = b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n'
_DONE = b"data: [DONE]\n\n"
STREAM = (_ROLE, _WORD, _WORD, _WORD, _END, _DONE)
CUT_STREAM = (_ROLE, _WORD)
ERROR_STREAM = (_ROLE, _WORD, b'data: {"error":{"code":"upstream_error"}}\n\n', _DONE)


@dataclass(frozen=True)
class Answer:
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = WHOLE
    #: Pieces of an event stream, instead of `body`; closed without a proper end when `abort`.
    pieces: tuple[bytes, ...] = ()
    abort: bool = False


class LoadTarget:
    """`async with LoadTarget(answer) as target:`; `answer` gets the number of the request and says what comes back.

    While `gate` is clear, requests are read but not answered.
    """

    def __init__(self, answer: Callable[[int], Answer] = lambda _: Answer()) -> None:
        self._answer = answer
        self.gate = asyncio.Event()
        self.gate.set()
        self.requests = 0
        self.authorizations: list[str] = []
        self.bodies: list[bytes] = []
        self.arrived = asyncio.Event()
        self._writers: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> LoadTarget:
        self._server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for writer in tuple(self._writers):
            writer.transport.abort()
        await self._server.wait_closed()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                fields = {
                    k.strip().lower(): v.strip() for k, _, v in (s.partition(":") for s in head.decode().split("\r\n"))
                }
                self.bodies.append(await reader.readexactly(int(fields.get("content-length", 0))))
                self.authorizations.append(fields.get("authorization", ""))
                number, self.requests = self.requests, self.requests + 1
                self.arrived.set()
                await self.gate.wait()
                if not await self._reply(writer, self._answer(number)):
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _reply(self, writer: asyncio.StreamWriter, answer: Answer) -> bool:
        lines = [f"HTTP/1.1 {answer.status} Said", *(f"{name}: {value}" for name, value in answer.headers.items())]
        if not answer.pieces:
            lines += ["content-type: application/json", f"content-length: {len(answer.body)}"]
            writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + answer.body)
            await writer.drain()
            return True
        lines += ["content-type: text/event-stream", "transfer-encoding: chunked"]
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n")
        for piece in answer.pieces:
            writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            await writer.drain()
        if answer.abort:
            return False
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True
