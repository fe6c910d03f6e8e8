"""Several processes beside one: what a second worker brings and costs, what the hub costs, what a restart and an end lose,
and what the model host adds.

Runs of one and of two workers take turns (A B A B ...), each pair gives one ratio, and the median of the ratios is what
counts: both of a pair had the same minute of a noisy machine. Load generator and upstream have one core, and the gateway's
processes go where the system puts them, as they do in earnest: what a second worker brings is what those two leave of their
core. What it costs is seen when both gateways have one core only, the same, and are the limit there.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from gateway.load.bench import crews, targets
from gateway.load.bench.bare import CHAT_PATH
from gateway.load.bench.closed import ClosedLoop
from gateway.load.bench.crews import SLOW, Crew, busy_shares, core_times, own_cpu_s, pin
from gateway.load.bench.generator import Generator, body
from gateway.load.bench.hub_cost import worker_share
from gateway.load.bench.model_pairs import Added, Pairs, check_models, texts, vectors
from gateway.load.bench.processes import BenchError, Stage
from gateway.load.bench.slow_upstream import SlowUpstream
from gateway.load.bench.steady import Kind, SteadyLoad
from gateway.load.bench.workers_report import (
    PATHS,
    Found,
    Idle,
    Run,
    RunPair,
    Setting,
    Steadily,
    WorkersReport,
    make_report,
)
from gateway.load.bench.wrk import Wrk

_CONNECTIONS = 32
_SLOW_S = 0.25
#: How long the steady load runs before something happens, and after it.
_AROUND_S = 0.5
#: A gateway that has been told to end has drained by then.
_END_LIMIT_S = 20.0


@dataclass(frozen=True, slots=True)
class WorkersOptions:
    """`rounds` pairs a ratio, each run `seconds` long; `restarts` rolling restarts and as many graceful ends; `blocks` blocks of
    `block` requests to each of the gateways with models. `models` is the folder of the built ones."""

    models: Path
    rounds: int = 5
    seconds: float = 4.0
    idle_s: float = 10.0
    restarts: int = 3
    blocks: int = 60
    block: int = 50
    shortened: str = ""


def quicker(options: WorkersOptions) -> WorkersOptions:
    """The same in less than a minute, saying what it leaves out."""
    short = replace(options, rounds=2, seconds=1.0, idle_s=2.0, restarts=1, blocks=12)
    changes = (
        f"{short.rounds} rounds of {short.seconds:g} s instead of {options.rounds} of {options.seconds:g} s",
        f"{short.restarts} restart and end instead of {options.restarts}",
        f"{short.idle_s:g} idle seconds instead of {options.idle_s:g}",
        f"{short.blocks} blocks of requests to the models instead of {options.blocks}",
    )
    return replace(short, shortened=", ".join(changes))


@dataclass(frozen=True, slots=True)
class _Side:
    """A gateway with the processes that its supervisor has."""

    crew: Crew
    pids: list[int]

    @property
    def all_pids(self) -> list[int]:
        return [self.crew.server.pid, *self.pids]

    def cpu_s(self) -> list[float]:
        """Processor seconds so far, the supervisor first."""
        return [own_cpu_s(pid) for pid in self.all_pids]


class Workers:
    """One bench. `say` gets a line for every step."""

    def __init__(self, stage: Stage, options: WorkersOptions, say: Callable[[str], None]) -> None:
        self._stage = stage
        self._clock = stage.clock
        self._options = options
        self._say = say

    async def run(self) -> WorkersReport:
        """Start everything, measure, report. The caller ends the stage's processes. Raises BenchError."""
        check_models(self._options.models)
        async with SlowUpstream(self._clock, _SLOW_S) as slow:
            return await self._measured(slow.url)

    async def _measured(self, slow: str) -> WorkersReport:
        stage, options = self._stage, self._options
        upstream = await targets.start_upstream(stage)
        wrk = shutil.which("wrk") is not None
        generator: Generator = (Wrk if wrk else ClosedLoop)(stage, upstream.server, targets.MODEL)
        one, two = await asyncio.gather(*(crews.start_crew(stage, count, upstream.url, slow) for count in (1, 2)))
        for crew in (one, two):
            await crews.warm(crew)
        pairs = await self._ratios(generator, [_Side(crew, [*(await crew.pids()).values()]) for crew in (one, two)])
        idle = await self._idle(one, two)
        one.server.end()
        restarts = [await self._restart(two) for _ in range(options.restarts)]
        stops = [await self._stop(two)]
        while len(stops) < options.restarts:
            again = await crews.start_crew(stage, 2, upstream.url, slow)
            await crews.warm(again)
            stops.append(await self._stop(again))
        scores, embeddings = await self._models()
        setting = Setting(
            generator=generator.name,
            upstream=upstream.server.name,
            cores=len(core_times()),
            rounds=options.rounds,
            seconds=options.seconds,
            shortened=options.shortened,
            notes=_notes(stage, wrk),
        )
        return make_report(setting, Found(pairs, idle, await worker_share(), restarts, stops, scores, embeddings))

    # ------------------------------------------------------------------------------------------ one and two workers

    async def _ratios(self, generator: Generator, sides: Sequence[_Side]) -> list[RunPair]:
        """Pairs of both paths, on all cores; and half as many on one core that nobody else is to use."""
        pairs = []
        for path in PATHS:
            for side in sides:
                # Connections, caches and code paths are warm before anything counts.
                await generator.measure(side.crew.server, side.crew.url, _CONNECTIONS, 1.0, path == "miss")
            pairs += [await self._pair(generator, sides, path, one_core=False) for _ in range(self._options.rounds)]
        if self._stage.pinned:
            everywhere = os.sched_getaffinity(0)
            pin([pid for side in sides for pid in side.all_pids], {self._stage.server_core})
            for path in PATHS:
                again = max(1, self._options.rounds // 2)
                pairs += [await self._pair(generator, sides, path, one_core=True) for _ in range(again)]
            pin([pid for side in sides for pid in side.all_pids], everywhere)
        return pairs

    async def _pair(self, generator: Generator, sides: Sequence[_Side], path: str, *, one_core: bool) -> RunPair:
        one, two = [await self._measure(generator, side, path, one_core) for side in sides]
        return one, two

    async def _measure(self, generator: Generator, side: _Side, path: str, one_core: bool) -> Run:
        crew, seconds = side.crew, max(1, round(self._options.seconds))
        cores, cpu_s, begin = core_times(), side.cpu_s(), self._clock.now()
        measured = await generator.measure(crew.server, crew.url, _CONNECTIONS, seconds, path == "miss")
        used_s = [after - before for before, after in zip(cpu_s, side.cpu_s(), strict=True)]
        run = Run(
            workers=crew.workers,
            path=path,
            one_core=one_core,
            measured=measured,
            cpu_us=sum(used_s) * 1e6 / max(1.0, measured.requests_per_s * seconds),
            cores=busy_shares(cores, core_times()),
            supervisor_share=used_s[0] / (self._clock.now() - begin) if crew.workers > 1 else None,
        )
        where = "one core" if one_core else "all cores"
        self._say(
            f"{path}, {crew.workers} workers on {where}: {measured.requests_per_s:,.0f} req/s, {run.cpu_us:.0f} us each"
        )
        return run

    async def _idle(self, one: Crew, two: Crew) -> Idle:
        """What processes burn that have nothing to do."""
        self._say(f"no request for {self._options.idle_s:g} s")
        workers = list((await two.pids()).values())
        # What the load left behind (figures to write, connections to close) is over.
        await self._clock.sleep(0.5)
        watched = [two.server.pid, one.server.pid, *workers]
        begin, before = self._clock.now(), [own_cpu_s(pid) for pid in watched]
        await self._clock.sleep(self._options.idle_s)
        span, after = self._clock.now() - begin, [own_cpu_s(pid) for pid in watched]
        shares = [(now - then) / span for then, now in zip(before, after, strict=True)]
        return Idle(round(shares[0], 4), round(sum(shares[2:]) / len(workers), 4), round(shares[1], 4))

    # ------------------------------------------------------------------------------------------ models

    async def _models(self) -> tuple[Added, Added]:
        """Scores of vectors and embeddings of a text, from the model host, beside the same in the process."""
        options = self._options
        start = crews.start_model_crew
        in_process, model_host = await asyncio.gather(*(start(self._stage, count, options.models) for count in (1, 2)))
        self._say("one request at a time, with the models in the process and in the model host")
        pairs = Pairs(in_process, model_host, self._clock)
        scores = await pairs.measure(vectors(1), options.blocks, options.block)
        # A text takes some milliseconds to embed, so there are fewer.
        return scores, await pairs.measure(texts(1), options.blocks, max(1, options.block // 5))

    # ------------------------------------------------------------------------------------------ restarts and ends

    async def _restart(self, crew: Crew) -> Steadily:
        """SIGHUP under a steady load, until every process is another one and none is left of those before."""
        before = await crew.pids()
        self._say(f"{len(before)} workers are replaced under load")
        async with SteadyLoad(crew.url, _clients(), self._clock) as load:
            await self._clock.sleep(_AROUND_S)
            begin = self._clock.now()
            os.kill(crew.server.pid, signal.SIGHUP)
            await crews.until_serving(self._stage, crew, before)
            took_s = self._clock.now() - begin
            await self._clock.sleep(_AROUND_S)
        return _outcome(load, took_s)

    async def _stop(self, crew: Crew) -> Steadily:
        """SIGTERM under a steady load, until the gateway is gone and nobody is left that it had let in."""
        self._say("a gateway of two workers is ended under load")
        async with SteadyLoad(crew.url, _clients(), self._clock) as load:
            await self._clock.sleep(_AROUND_S)
            load.may_end = True
            begin = self._clock.now()
            os.kill(crew.server.pid, signal.SIGTERM)
            while crew.server.running():
                if self._clock.now() - begin > _END_LIMIT_S:
                    raise BenchError(
                        f"{crew.server.name} did not end within {_END_LIMIT_S:g} s of SIGTERM; its last words:\n"
                        f"{crew.server.last_words()}"
                    )
                await self._clock.sleep(0.02)
            took_s = self._clock.now() - begin
        return _outcome(load, took_s)


def _clients() -> tuple[Kind, ...]:
    """Connections that are kept and connections of one request; hits, misses, answers that take their time, and streams; also
    clients that leave their connection idle for longer than a gateway that ends keeps it open."""

    def mixed(number: int) -> bytes:
        return body(targets.MODEL, None if number % 2 else number)

    def slow(number: int) -> bytes:
        return body(SLOW, number)

    def stream(number: int) -> bytes:
        return msgspec.json.encode({**msgspec.json.decode(body(SLOW, number)), "stream": True})

    return (
        Kind("kept", 8, CHAT_PATH, mixed, pause_s=0.002),
        Kind("new", 4, CHAT_PATH, mixed, pause_s=0.005, new=True),
        Kind("seldom", 4, CHAT_PATH, mixed, pause_s=0.4),
        Kind("slow", 4, CHAT_PATH, slow, pause_s=0.0),
        Kind("stream", 4, CHAT_PATH, stream, pause_s=0.0, stream=True),
    )


def _outcome(load: SteadyLoad, took_s: float) -> Steadily:
    return Steadily(
        requests=load.requests,
        answered=dict(load.answered),
        failed=dict(load.failed),
        refused=load.refused,
        slowest_s=round(load.slowest_s, 3),
        took_s=round(took_s, 2),
    )


def _notes(stage: Stage, wrk: bool) -> list[str]:
    notes = []
    if not wrk:
        notes.append(
            "wrk is missing, so Python sends, and is the limit itself; `gateway bench front` says how to install it"
        )
    if targets.find_nginx() is None:
        notes.append("nginx is missing: the upstream is a small asyncio server")
    if not stage.pinned:
        notes.append("load generator and upstream are not pinned (one core, or no taskset)")
    return notes
