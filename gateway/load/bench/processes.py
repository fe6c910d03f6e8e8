"""Processes of a bench: started on one core, watched through /proc, ended by their own id whatever happens."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import aiohttp

from policies.core.clock import Clock

_TICKS_PER_S = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


class BenchError(Exception):
    """The bench cannot go on: says what is missing or broken, and what to do."""


class Server:
    """One started process and its children."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log: Path, started_at: float) -> None:
        self.name = name
        self.pid = process.pid
        self.started_at = started_at
        self._process = process
        self._log = log

    def running(self) -> bool:
        return self._process.poll() is None

    def last_words(self) -> str:
        """The end of what it printed."""
        return self._log.read_text(errors="replace")[-1500:].strip()

    def cpu_s(self) -> float:
        """Processor seconds of the process and its living descendants so far; 0 where /proc is missing."""
        return cpu_of(self.pid)

    def rss_mb(self) -> float:
        """Resident memory of the process and its descendants, in MB (10^6 bytes)."""
        return sum(_rss_kib(pid) for pid in _family(self.pid)) * 1024 / 1e6

    def end(self, grace_s: float = 10.0) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(grace_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


class Stage:
    """A folder for files and logs, two sets of cores, and the processes started on them.

    The server under test has core `server_core`; upstream and generator share `load_core`. With one core, or without
    taskset, nothing is pinned and `pinned` says so.
    """

    def __init__(self, folder: Path, clock: Clock) -> None:
        self.folder = folder
        self.clock = clock
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        self.pinned = len(cores) >= 2 and shutil.which("taskset") is not None
        self.server_core, self.load_core = (cores[0], cores[-1]) if self.pinned else (-1, -1)
        self._servers: list[Server] = []

    def command(self, core: int | None, command: Sequence[str]) -> list[str]:
        pinned = self.pinned and core is not None
        return ["taskset", "-c", str(core), *command] if pinned else list(command)

    def start(self, name: str, core: int | None, command: Sequence[str], env: dict[str, str] | None = None) -> Server:
        log = self.folder / f"{name}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                self.command(core, command),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
            )
        server = Server(name, process, log, self.clock.now())
        self._servers.append(server)
        return server

    def python(self, name: str, module: str, *arguments: str) -> Server:
        """A module of this project on the server core, with this interpreter."""
        return self.start(name, self.server_core, [sys.executable, "-m", module, *arguments])

    def end_all(self) -> None:
        for server in reversed(self._servers):
            server.end()
        self._servers.clear()

    async def until_answers(self, server: Server, url: str, limit_s: float = 20.0, only_ok: bool = False) -> float:
        """Waits until `url` answers (with `only_ok`: 200) and returns the seconds since the server's start."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2)) as session:
            while True:
                if not server.running():
                    raise BenchError(f"{server.name} ended at once; its last words:\n{server.last_words()}")
                try:
                    async with session.get(url) as answer:
                        # A bare server knows no GET on its path: any answer of it shows that it is there.
                        if answer.status == 200 or not only_ok:
                            return self.clock.now() - server.started_at
                except (aiohttp.ClientError, TimeoutError, OSError):
                    pass
                if self.clock.now() - server.started_at > limit_s:
                    raise BenchError(f"{server.name} did not answer {url} in {limit_s:g} s:\n{server.last_words()}")
                await self.clock.sleep(0.02)


def free_port() -> int:
    """A loopback port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def is_free(port: int) -> bool:
    """Does nobody listen on this loopback port? Else somebody else's answers would be taken for our server's."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def cpu_of(pid: int) -> float:
    """Processor seconds of a process and its living descendants so far."""
    return sum(_cpu_ticks(member) for member in _family(pid)) / _TICKS_PER_S


def _family(pid: int) -> list[int]:
    """The process and its descendants."""
    family, at = [pid], 0
    while at < len(family):
        for children in Path(f"/proc/{family[at]}/task").glob("*/children"):
            try:
                family.extend(int(child) for child in children.read_text().split())
            except OSError:
                continue
        at += 1
    return family


def _cpu_ticks(pid: int) -> int:
    try:
        # The name in brackets may hold blanks; after it, fields 14 and 15 are user and system ticks.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12])


def _rss_kib(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("VmRSS:")), 0)
