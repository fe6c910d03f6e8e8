"""An upstream that takes its time, so that a gateway has requests and streams under way at any moment. Runs in the bench's process."""

from __future__ import annotations

import asyncio
from typing import Self

from gateway.load.bench.bare import COMPLETION
from policies.core.clock import Clock

_TOKEN = b'data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{"content":"word "}}]}\n\n'
_LAST = b'data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
_DONE = b"data: [DONE]\n\n"
_TOKENS = 10
_WHOLE = (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(COMPLETION) + COMPLETION
)


class SlowUpstream:
    """Answers each chat completion `delay_s` after it came; a streamed one in ten pieces over that time."""

    def __init__(self, clock: Clock, delay_s: float) -> None:
        self._clock = clock
        self._delay_s = delay_s
        self._connections: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.url = ""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        await self._server.wait_closed()

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._connection(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = head.partition(b"\r\ncontent-length:")[2].partition(b"\r\n")[0]
                body = await reader.readexactly(int(length or 0))
                if b'"stream":true' in body:
                    await self._stream(writer)
                else:
                    await self._clock.sleep(self._delay_s)
                    writer.write(_WHOLE)
                await writer.drain()
        except (asyncio.IncompleteReadError, OSError):
            # The gateway keeps its connections as long as it likes.
            pass
        finally:
            writer.transport.abort()

    async def _stream(self, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for piece in (*[_TOKEN] * _TOKENS, _LAST + _DONE):
            writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            await writer.drain()
            await self._clock.sleep(self._delay_s / _TOKENS)
        writer.write(b"0\r\n\r\n")
