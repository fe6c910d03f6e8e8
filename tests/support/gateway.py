"""A whole gateway for black-box tests: configuration files on disk, then in this event loop or as a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from gateway.app import build_supervisor
from gateway.config import load_config
from gateway.control.in_process import InProcessCrew
from gateway.control.worker import Worker
from policies.core.clock import SystemClock
from tests.support.gateway_client import Client

#: What the gateway sends its heavy backend as credential.
CREDENTIAL = "sk-upstream-credential-0123456789"
DEFAULT_TEXT = "Sorry, no answer right now."


def chat_policy(**changes: Any) -> dict[str, Any]:
    """The test's chat policy: `prove` goes to heavy, the rest to light. `changes` are merged in; None takes a key out."""
    base = {
        "policy": "support",
        "version": 3,
        "match": {"aliases": ["auto"], "surfaces": ["chat"], "backends": ["heavy", "light"]},
        "deadline": "5s",
        "timeouts": {"first_token": "3s", "idle": "3s", "total": "60s"},
        "classify": {"signals": {"thinking": {"kind": "keywords", "any": ["prove"]}}},
        "routes": [
            {"name": "hard", "when": {"signal": "thinking", "at_least": 0.5}, "to": "heavy"},
            {"name": "easy", "to": "light"},
        ],
        "ladder": ["heavy", "light", "stale", "default"],
        "default_answer": {"text": DEFAULT_TEXT},
        "cache": {"scope": "tenant", "store": "all", "result": {"ttl": "10m", "swr": "5m", "stale": "1h"}},
    }
    return _consistent(_merged(base, changes))


def tensor_policy(**changes: Any) -> dict[str, Any]:
    """The test's tensor policy: everything to `scorer`, then stale, then canned tensors."""
    base = {
        "policy": "scoring",
        "version": 2,
        "match": {"aliases": ["recommend"], "surfaces": ["tensor"]},
        "deadline": "5s",
        "routes": [{"name": "score", "to": "scorer"}],
        "ladder": ["heavy", "stale", "default"],
        "default_answer": {"tensors": {"x": [0.25, 0.75]}},
        "cache": {"scope": "tenant", "store": "all", "result": {"ttl": "10m", "swr": "5m", "stale": "1h"}},
    }
    return _consistent(_merged(base, changes))


def _consistent(policy: dict[str, Any]) -> dict[str, Any]:
    """Without the key `stale` where the ladder has no such rung."""
    if "stale" not in policy.get("ladder", ["stale"]):
        policy["cache"] = _merged(policy["cache"], {"result": {"stale": None}})
    return policy


#: Sections that put the two models of the `tiny_models` fixture into a gateway: `embed` and `recommender`.
EMBEDDED: dict[str, Any] = {
    "models": {"minilm": {}, "two-tower": {}},
    "backends": {
        "embed": {"kind": "onnx_embedder", "model": "minilm"},
        "recommender": {"kind": "onnx_two_tower", "model": "two-tower"},
    },
}


def recommender_policy(**changes: Any) -> dict[str, Any]:
    """Tensor traffic to the recommender in the process."""
    base = tensor_policy(
        policy="recommender", match={"aliases": ["items"]}, routes=[{"name": "two-tower", "to": "recommender"}],
        ladder=["light", "stale", "default"], default_answer={"tensors": {"x": None, "scores": [0.5, 0.5]}},
    )  # fmt: skip
    return _merged(base, changes)


def _merged(base: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    whole = dict(base)
    for key, value in changes.items():
        if value is None:
            whole.pop(key, None)
        elif isinstance(value, Mapping) and isinstance(whole.get(key), dict):
            whole[key] = _merged(whole[key], value)
        else:
            whole[key] = value
    return whole


def write_policies(folder: Path, *policies: dict[str, Any]) -> None:
    """One file a policy, in JSON, which is YAML."""
    folder.mkdir(parents=True, exist_ok=True)
    for policy in policies:
        fresh = folder / f".{policy['policy']}.new"
        fresh.write_text(json.dumps(policy, indent=1) + "\n")
        fresh.rename(folder / f"{policy['policy']}.yaml")


def write_config(folder: Path, upstream: str, *policies: dict[str, Any], **sections: Any) -> Path:
    """`gateway.yaml` and the policies in `folder`; `sections` are merged into a configuration with two chat backends and
    one for tensors at the scripted `upstream`. The backend NAME asks for the model NAME-model."""
    # Client, gateway and upstream share one loop here: a burst of requests makes each of them slow to connect.
    connect = {"timeouts": {"connect": "2s"}}
    chat = {"kind": "openai", "base_url": f"{upstream}/v1", **connect}
    base = {
        "listen": {"port": 0},
        "admin": {"port": 0},
        "drain": "2s",
        "models_dir": str(folder / "models"),
        "backends": {
            "heavy": {**chat, "model": "heavy-model", "credential_env": "TEST_CREDENTIAL"},
            "light": {**chat, "model": "light-model", "role": "light"},
            "scorer": {"kind": "oip", "base_url": upstream, "model": "scorer-model", **connect},
        },
    }
    write_policies(folder / "policies", *(policies or (chat_policy(), tensor_policy())))
    path = folder / "gateway.yaml"
    path.write_text(json.dumps(_merged(base, sections), indent=1) + "\n")
    return path


def environment(folder: Path) -> dict[str, str]:
    env = {"GATEWAY_HOME": str(folder / "home"), "HOME": str(folder), "TEST_CREDENTIAL": CREDENTIAL}
    # What a killed gateway leaves is cleared away with the test's folder, unless a socket's path would become too long.
    return {**env, "TMPDIR": str(folder)} if len(str(folder)) < 70 else env


class MovableClock(SystemClock):
    """The machine's clock, which a test may put forward: what is stored ages, what waits comes due. Never in mid-request."""

    __slots__ = ("_ahead",)

    def __init__(self) -> None:
        self._ahead = 0.0

    def now(self) -> float:
        return super().now() + self._ahead

    def wall(self) -> float:
        return super().wall() + self._ahead

    def advance(self, seconds: float) -> None:
        self._ahead += seconds


@dataclass(frozen=True)
class Gateway:
    """One gateway that runs in this event loop."""

    folder: Path
    clock: MovableClock
    worker: Worker
    client: Client
    url: str
    admin_url: str


@asynccontextmanager
async def gateway_here(config_path: Path, env: Mapping[str, str]) -> AsyncIterator[Gateway]:
    """What `gateway serve` runs, in this loop, on a clock that can be put forward."""
    config = msgspec.structs.replace(load_config(config_path, env), workers=1)
    clock = MovableClock()
    supervisor = build_supervisor(config, clock)
    crew = supervisor.crew
    assert isinstance(crew, InProcessCrew)
    ready = asyncio.Event()
    running = asyncio.create_task(supervisor.run(lambda *_: ready.set()))
    waiting = asyncio.create_task(ready.wait())
    await asyncio.wait((running, waiting), return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if not ready.is_set():
        await running
    worker = crew.worker
    host = "127.0.0.1"
    client = Client(f"http://{host}:{worker.bound_port}", f"http://{host}:{supervisor.admin_port}")
    try:
        yield Gateway(config_path.parent, clock, worker, client, client.url, client.admin_url)
    finally:
        await client.aclose()
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


class GatewayProcess:
    """`gateway serve` as a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.lines: list[str] = []
        self.errors = ""
        self.url = ""
        self.admin_url = ""
        self._clients: list[Client] = []
        assert process.stdout is not None
        assert process.stderr is not None
        self._reading = [
            asyncio.create_task(self._read_lines(process.stdout)),
            asyncio.create_task(self._read_errors(process.stderr)),
        ]

    @classmethod
    async def start(cls, config_path: Path, env: Mapping[str, str], *arguments: str) -> GatewayProcess:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "gateway.cli.main", "serve", "--config", str(config_path), *arguments,
            env={**{name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}, **env},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=1 << 20,
        )  # fmt: skip
        return cls(process)

    async def _read_lines(self, stream: asyncio.StreamReader) -> None:
        while line := await stream.readline():
            self.lines.append(line.decode())

    async def _read_errors(self, stream: asyncio.StreamReader) -> None:
        while piece := await stream.read(65536):
            self.errors += piece.decode()

    @property
    def output(self) -> str:
        return "".join(self.lines) + self.errors

    def events(self, name: str) -> list[dict[str, Any]]:
        """The log lines of one event."""
        told = [json.loads(line) for line in self.lines]
        return [line for line in told if line["event"] == name]

    async def ready(self, within_s: float = 20.0) -> Client:
        """A client, once the process says that it is ready."""
        async with asyncio.timeout(within_s):
            while not self.events("ready"):
                if self._process.returncode is not None:
                    raise AssertionError(f"it ended with {self._process.returncode}: {self.output}")
                await asyncio.sleep(0.01)
        told = self.events("ready")[0]
        self.url, self.admin_url = told["data"], f"http://{told['admin'].removeprefix('http://')}"
        client = Client(self.url, self.admin_url)
        self._clients.append(client)
        return client

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        self._process.send_signal(number)

    async def ended(self, within_s: float = 15.0) -> int:
        """The exit code."""
        async with asyncio.timeout(within_s):
            code = await self._process.wait()
        await asyncio.gather(*self._reading)
        return code

    async def kill(self) -> None:
        """For the end of a test: whatever it and its own processes do, it is over."""
        if self._process.returncode is None:
            inside = _children(self._process.pid)
            self._process.kill()
            for pid in inside:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for client in self._clients:
            await client.aclose()
        await self.ended()


def _children(pid: int) -> list[int]:
    told = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in told.read_text().split()] if told.exists() else []


#: The fixtures `start` and `serve`.
Start = Callable[..., Awaitable[Gateway]]
Serve = Callable[..., Awaitable[GatewayProcess]]
