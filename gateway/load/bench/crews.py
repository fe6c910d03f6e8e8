"""Gateways of several processes for a bench: started, watched through their admin listener, and through /proc."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from gateway.load.bench import targets
from gateway.load.bench.bare import CHAT_PATH
from gateway.load.bench.generator import body
from gateway.load.bench.processes import BenchError, Server, Stage, free_port
from gateway.load.bench.steady import BrokenAnswer, Wire, request

#: Short, so that a bench that is broken off does not leave anything for long.
DRAIN = "5s"
SLOW = "slow"
RECOMMEND = "recommend"
_START_LIMIT_S = 60.0
#: A row of hits this long says that each of two workers has the answer: one that has not would be met in it, but for once in
#: a thousand times.
_HITS = 12

_SLOW_BACKEND = """\
  dawdler: {{kind: openai, role: heavy, base_url: "{slow}/v1", model: m}}
"""
_MODELS = """\
listen: {{port: {port}}}
admin: {{port: {admin}}}
policies_dir: policies
drain: {drain}
log: {{level: warning}}
models_dir: {models}
models: {{minilm: {{}}, two-tower: {{}}}}
backends:
  embed: {{kind: onnx_embedder, model: minilm}}
  recommender: {{kind: onnx_two_tower, model: two-tower}}
"""
_SLOW_POLICY = f"""
policy: {SLOW}
version: 1
match: {{aliases: [{SLOW}], surfaces: [chat], backends: [dawdler]}}
routes: [{{name: slow, to: dawdler}}]
ladder: [heavy]
cache: {{enabled: false}}
"""
_RECOMMEND_POLICY = f"""
policy: {RECOMMEND}
version: 1
match: {{aliases: [{RECOMMEND}], surfaces: [tensor]}}
routes: [{{name: two-tower, to: recommender}}]
ladder: [light]
cache: {{enabled: false}}
"""


@dataclass(frozen=True, slots=True)
class Crew:
    """A running gateway: its supervisor is `server`, and with one worker all of it."""

    server: Server
    url: str
    admin_url: str
    workers: int

    async def places(self) -> dict[str, dict[str, Any]]:
        """What the admin listener tells of each process but the supervisor, by name. Raises BenchError."""
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session,
                session.get(self.admin_url + "/workers") as answer,
            ):
                told = msgspec.json.decode(await answer.read())
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError) as error:
            raise BenchError(
                f"{self.admin_url}/workers did not answer ({error or type(error).__name__}); the last words of "
                f"{self.server.name}:\n{self.server.last_words()}"
            ) from error
        return {place["name"]: place for place in told["workers"]}

    async def pids(self) -> dict[str, int]:
        return {name: place["pid"] for name, place in (await self.places()).items() if place["pid"]}


async def start_crew(stage: Stage, workers: int, upstream: str, slow: str) -> Crew:
    """A gateway with remote backends only. Not pinned: several processes are to have both cores."""
    ports = free_port(), free_port()
    config = write_crew_files(_folder(stage, f"workers-{workers}"), ports, upstream, slow)
    return await _start(stage, config, workers, ports)


async def start_model_crew(stage: Stage, workers: int, models: Path) -> Crew:
    """A gateway with the recommender and the embedder inside, from the built models in the folder `models`."""
    ports = free_port(), free_port()
    config = write_model_crew_files(_folder(stage, f"models-{workers}"), ports, models)
    return await _start(stage, config, workers, ports)


def write_crew_files(folder: Path, ports: tuple[int, int], upstream: str, slow: str) -> Path:
    """The front bench's configuration and policy, and besides a slow backend with a policy; returns the former's path."""
    config = targets.write_gateway_files(folder, *ports, upstream)
    with config.open("a") as file:
        file.write(_SLOW_BACKEND.format(slow=slow) + f"drain: {DRAIN}\n")
    (folder / "policies" / "slow.yaml").write_text(_SLOW_POLICY)
    return config


def write_model_crew_files(folder: Path, ports: tuple[int, int], models: Path) -> Path:
    """`gateway.yaml` and a policy for the recommender; returns the former's path."""
    (folder / "policies").mkdir()
    (folder / "policies" / "recommend.yaml").write_text(_RECOMMEND_POLICY)
    config = folder / "gateway.yaml"
    # JSON's strings are YAML's, whatever the folder is called.
    quoted = msgspec.json.encode(str(models)).decode()
    config.write_text(_MODELS.format(port=ports[0], admin=ports[1], drain=DRAIN, models=quoted))
    return config


def _folder(stage: Stage, name: str) -> Path:
    """A new folder, also for a second gateway of that name."""
    number = 1 + sum(1 for _ in stage.folder.glob(f"{name}-*"))
    folder = stage.folder / f"{name}-{number}"
    folder.mkdir()
    return folder


async def _start(stage: Stage, config: Path, workers: int, ports: tuple[int, int]) -> Crew:
    # What the shell says about a heavy backend must not reach this one; empty counts as unset.
    env = {"GATEWAY_HOME": str(config.parent / "home"), "GATEWAY_CONFIG": ""}
    env |= dict.fromkeys(("HEAVY_BASE_URL", "HEAVY_API_KEY", "HEAVY_MODEL"), "")
    command = [sys.executable, "-m", "gateway.cli.main", "serve", "--config", str(config), "--workers", str(workers)]
    server = stage.start(f"gateway-{config.parent.name}", None, command, env)
    crew = Crew(server, f"http://127.0.0.1:{ports[0]}", f"http://127.0.0.1:{ports[1]}", workers)
    await stage.until_answers(server, crew.url + "/readyz", _START_LIMIT_S, only_ok=True)
    await until_serving(stage, crew, {})
    return crew


async def until_serving(stage: Stage, crew: Crew, before: Mapping[str, int], limit_s: float = _START_LIMIT_S) -> None:
    """Until every process serves, none is leaving, and none is one of `before` (process ids by name). Raises BenchError."""
    end = stage.clock.now() + limit_s
    while True:
        try:
            places = await crew.places()
        except BenchError:
            # The data port may answer sooner than the admin listener.
            if not crew.server.running() or stage.clock.now() > end:
                raise
            places = {}
        waiting = {
            name: place["state"]
            for name, place in places.items()
            if place["state"] != "serving" or place["leaving"] or (place["pid"] and place["pid"] == before.get(name))
        }
        if places and not waiting:
            return
        if stage.clock.now() > end:
            raise BenchError(
                f"after {limit_s:g} s not every process of {crew.server.name} is as it should be: {waiting}; its last "
                f"words:\n{crew.server.last_words()}"
            )
        await stage.clock.sleep(0.05)


async def warm(crew: Crew) -> None:
    """Every worker has the answer to the bench's repeated request, and a new request is proxied. Raises BenchError."""
    fresh = await _rung(crew, salt=time.time_ns())
    row, rung = 0, "none"
    for _ in range(20 * _HITS):
        rung = await _rung(crew, None)
        row = row + 1 if rung == "hit-l1" else 0
        if row == _HITS:
            break
    if fresh != "heavy" or row < _HITS:
        raise BenchError(
            f"a new request must be answered from rung heavy and a repeated one from hit-l1 by every worker of "
            f"{crew.server.name}, not from {fresh!r} and {rung!r}"
        )


async def _rung(crew: Crew, salt: int | None) -> str:
    """The rung that answers on a new connection."""
    wire = None
    try:
        wire = await Wire.open(crew.url)
        return (await wire.ask(request(crew.url, CHAT_PATH, body(targets.MODEL, salt), close=True))).rung()
    except (BrokenAnswer, OSError) as error:
        raise BenchError(f"{crew.url} did not answer: {error or type(error).__name__}") from error
    finally:
        if wire is not None:
            wire.close()


def own_cpu_s(pid: int) -> float:
    """Processor seconds of one process without its children, in steps of a nanosecond; 0 where there is no such process or clock.

    /proc counts in steps of 10 ms, which is all that an idle process uses in a second. POSIX has a clock for each process;
    its number is made of the process id as in Linux' posix-timers.h: CPUCLOCK_SCHED is 2.
    """
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return 0.0


def pin(pids: Iterable[int], cores: set[int]) -> None:
    """Let processes run on these cores only, with all the threads that they have now or make later. A process may end meanwhile."""
    for pid in pids:
        for thread in Path(f"/proc/{pid}/task").glob("*"):
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread.name), cores)


def core_times() -> list[tuple[float, float]]:
    """(busy, all) ticks of each core this process may run on; empty where /proc/stat is missing."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    try:
        lines = Path("/proc/stat").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        name, *fields = line.split()
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in allowed:
            # user, nice, system, idle, iowait, irq, softirq, steal; guest times are part of user's.
            ticks = [int(field) for field in fields[:8]]
            found.append((float(sum(ticks) - ticks[3] - ticks[4]), float(sum(ticks))))
    return found


def busy_shares(before: list[tuple[float, float]], after: list[tuple[float, float]]) -> list[float]:
    """How busy each core was between two `core_times`, 0..1, whoever kept it busy."""
    return [
        round((busy - busy_0) / max(1.0, total - total_0), 3)
        for (busy_0, total_0), (busy, total) in zip(before, after, strict=True)
    ]
