"""The gateway's own speed: proxied misses and cache hits, beside aiohttp servers that do nothing else.

Runs alternate (A B A B ...), each pair gives one ratio, and the median of the ratios is what counts: both of a pair had
the same minute of a noisy machine.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from gateway.load.bench import targets
from gateway.load.bench.closed import ClosedLoop
from gateway.load.bench.front_report import FrontReport, Pair, cpu_ratio, ratio_goal
from gateway.load.bench.generator import Generator, Measured
from gateway.load.bench.goals import Goal
from gateway.load.bench.processes import Stage
from gateway.load.bench.targets import Target
from gateway.load.bench.wrk import Wrk
from gateway.load.stats import median

_INSTALL = "apt-get install -y --no-install-recommends wrk nginx-light"


@dataclass(frozen=True, slots=True)
class FrontOptions:
    """`rounds` pairs a comparison, each run `seconds` long. Without `gateway` only the bare servers are measured."""

    rounds: int = 3
    seconds: float = 5.0
    gateway: bool = True
    shortened: str = ""


class Front:
    """One bench. `say` gets a line for every step."""

    def __init__(self, stage: Stage, options: FrontOptions, say: Callable[[str], None]) -> None:
        self._stage = stage
        self._options = options
        self._say = say
        self._runs: list[Measured] = []

    async def run(self) -> FrontReport:
        """Start everything, measure, report. The caller ends the stage's processes. Raises BenchError."""
        stage, options = self._stage, self._options
        upstream = await targets.start_upstream(stage)
        wrk = shutil.which("wrk") is not None
        generator: Generator = (Wrk if wrk else ClosedLoop)(stage, upstream.server, targets.MODEL)
        proxy = await targets.start_proxy(stage, upstream.url)
        measure = self._with_gateway if options.gateway else self._bare_only
        report = FrontReport(
            generator=generator.name,
            upstream=upstream.server.name,
            pinned=stage.pinned,
            rounds=options.rounds,
            seconds=options.seconds,
            shortened=options.shortened,
            goals=[],
            notes=_notes(stage, wrk),
            runs=self._runs,
        )
        return replace(report, **await measure(generator, upstream, proxy))

    async def _bare_only(self, generator: Generator, upstream: Target, proxy: Target) -> dict[str, Any]:
        constant = await targets.start_constant(self._stage, None)
        for _ in range(self._options.rounds):
            await self._measure(generator, proxy, 32, unique=True)
            await self._measure(generator, constant, 32, unique=False)
            await self._measure(generator, upstream, 1, unique=True)
            await self._measure(generator, proxy, 1, unique=True)
        return {}

    async def _with_gateway(self, generator: Generator, upstream: Target, proxy: Target) -> dict[str, Any]:
        gateway = await targets.start_gateway(self._stage, upstream.url)
        rss_mb = gateway.server.rss_mb()
        constant = await targets.start_constant(self._stage, await targets.check_rungs(gateway.url, salt=1))
        misses = await self._pairs(generator, (proxy, gateway), 32, unique=True)
        hits = await self._pairs(generator, (constant, gateway), 32, unique=False)
        single = await self._pairs(generator, (upstream, gateway), 1, unique=True)
        # What was measured was what it should be, to the end.
        await targets.check_rungs(gateway.url, salt=2)
        ratios = [ratio_goal("miss_ratio", misses, 0.6), ratio_goal("hit_ratio", hits, 0.6)]
        added_ms = median([through.p50_ms - direct.p50_ms for direct, through in single])
        goals = [
            *ratios,
            Goal("added_p50_ms", round(added_ms, 3), 1.0, at_least=False),
            Goal("rss_mb", round(rss_mb, 1), 200.0, at_least=False),
            Goal("ready_s", round(gateway.ready_s, 2), 5.0, at_least=False),
        ]
        after_mb = round(gateway.server.rss_mb(), 1)
        counted = not any(goal.why for goal in ratios)
        values = {goal.name: goal.value for goal in goals}
        costs = {"miss_cpu_ratio": cpu_ratio(misses), "hit_cpu_ratio": cpu_ratio(hits)}
        return {**values, **costs, "goals": goals, "rss_after_load_mb": after_mb, "ratios_count": counted}

    async def _pairs(self, generator: Generator, pair: tuple[Target, Target], many: int, unique: bool) -> list[Pair]:
        pairs = []
        for target in pair:
            # Connections, caches and code paths are warm before anything counts.
            await generator.measure(target.server, target.url, many, 1.0, unique)
        for _ in range(self._options.rounds):
            bare = await self._measure(generator, pair[0], many, unique=unique)
            pairs.append((bare, await self._measure(generator, pair[1], many, unique=unique)))
        return pairs

    async def _measure(self, generator: Generator, target: Target, connections: int, unique: bool) -> Measured:
        run = await generator.measure(target.server, target.url, connections, self._options.seconds, unique)
        self._runs.append(run)
        kind = "new" if unique else "the same"
        self._say(
            f"{run.server}, {connections} connections, {kind}: {run.requests_per_s:,.0f} req/s, p50 {run.p50_ms:.3f} ms"
        )
        return run


def _notes(stage: Stage, wrk: bool) -> list[str]:
    notes = []
    if not wrk:
        notes.append(f"wrk is missing, so Python sends, and is the limit itself; install it with: {_INSTALL}")
    if targets.find_nginx() is None:
        notes.append(f"nginx is missing: the upstream is a small asyncio server; install it with: {_INSTALL}")
    if not targets.shipped_head():
        notes.append("there is no trained complexity head: the bench's policy decides without that signal")
    if not stage.pinned:
        notes.append("nothing is pinned (one core, or no taskset): server and generator take from each other")
    return notes
