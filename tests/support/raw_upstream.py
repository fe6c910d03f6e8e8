"""A TCP server whose every byte a test decides, and a runner of either event loop that lets no error pass unseen."""

from __future__ import annotations

import asyncio
import gc
import socket
import ssl
import struct
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")
LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


def run_on(loop: str, work: Coroutine[Any, Any, T]) -> T:
    """Run to the end on a new loop. Errors that only the loop hears of fail the test; leaks show as warnings."""
    heard: list[dict[str, Any]] = []

    async def watched() -> T:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: heard.append(context))
        async with asyncio.timeout(20):
            return await work

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        result = runner.run(watched())
    gc.collect()
    assert not heard, heard
    return result


class Peer:
    """The server's end of one connection. `number` counts from 1."""

    def __init__(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.number = number
        self.reader = reader
        self.writer = writer

    async def request(self) -> tuple[list[str], bytes]:
        """The lines of the head and the body. Raises IncompleteReadError when the client leaves."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode().rstrip().split("\r\n")
        length = next(int(line.split(":")[1]) for line in head if line.startswith("content-length:"))
        return head, await self.reader.readexactly(length)

    async def send(self, data: bytes, *, bytewise: bool = False) -> None:
        for piece in (data[i : i + 1] for i in range(len(data))) if bytewise else (data,):
            self.writer.write(piece)
            await self.writer.drain()
            if bytewise:
                await asyncio.sleep(0)

    async def gone(self) -> None:
        """Return when the client has closed; what it still sends does not count."""
        try:
            while await self.reader.read(1 << 16):
                pass
        except ConnectionError:
            pass

    def close(self) -> None:
        self.writer.close()

    def reset(self) -> None:
        raw = self.writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


class RawUpstream:
    """`made` connections so far, `open` ones now."""

    def __init__(self) -> None:
        self.made = 0
        self.open: set[Peer] = set()
        self.port = 0

    async def empty(self) -> None:
        """Return when every client has left; fails after 2 seconds."""
        async with asyncio.timeout(2):
            while self.open:
                await asyncio.sleep(0.002)


@asynccontextmanager
async def raw_upstream(serve: Callable[[Peer], Awaitable[None]], tls: ssl.SSLContext | None = None) -> Any:
    """`serve(peer)` has a connection until it returns; a client that leaves ends it quietly."""
    up = RawUpstream()
    tasks: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up.made += 1
        peer = Peer(up.made, reader, writer)
        up.open.add(peer)
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await serve(peer)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            up.open.discard(peer)
            tasks.discard(task)
            writer.close()
            try:
                await writer.wait_closed()
            except (OSError, asyncio.CancelledError):
                pass

    server = await asyncio.start_server(connected, "127.0.0.1", 0, ssl=tls)
    up.port = server.sockets[0].getsockname()[1]
    try:
        yield up
    finally:
        server.close()
        for task in tuple(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
