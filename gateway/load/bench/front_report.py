"""What the front bench found: figures, their targets, and whether they count."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gateway.load.bench.generator import BUSY, Measured
from gateway.load.bench.goals import Goal, exit_code, goal_line
from gateway.load.stats import median

#: Two runs of one comparison: the bare server's and the gateway's.
Pair = tuple[Measured, Measured]


class FrontReport(msgspec.Struct, frozen=True, kw_only=True):
    """The document of `gateway bench front --json`. Ratios are of requests a second; None = not measured."""

    format: int = 1
    generator: str
    upstream: str
    pinned: bool
    rounds: int
    seconds: float
    #: What a quick run left out; empty = nothing.
    shortened: str
    miss_ratio: float | None = None
    hit_ratio: float | None = None
    added_p50_ms: float | None = None
    rss_mb: float | None = None
    rss_after_load_mb: float | None = None
    ready_s: float | None = None
    #: The same ratios of requests a second of processor time: an estimate that other work on the core disturbs less.
    miss_cpu_ratio: float | None = None
    hit_cpu_ratio: float | None = None
    #: Are miss_ratio and hit_ratio made only of runs in which the server was the limit?
    ratios_count: bool = False
    goals: list[Goal]
    notes: list[str]
    runs: list[Measured]

    @property
    def exit_code(self) -> int:
        """0 all targets met, 1 one was missed, 4 a ratio does not count."""
        return exit_code(self.goals)


def ratio_goal(name: str, pairs: Sequence[Pair], target: float) -> Goal:
    """The median of gateway / bare over the pairs that count; over all of them when none does."""
    good = [pair for pair in pairs if all(run.counts for run in pair)]
    value = median([gateway.requests_per_s / bare.requests_per_s for bare, gateway in good or pairs])
    # One pair that does not count among others is noise; a majority is a finding.
    why = "" if len(good) * 2 > len(pairs) else _why(pairs)
    return Goal(name, round(value, 3), target, at_least=True, why=why)


def cpu_ratio(pairs: Sequence[Pair]) -> float | None:
    """The median of gateway / bare in requests a second of the server's processor time; None where it is not known."""
    if not pairs or any(run.server_busy <= 0 for pair in pairs for run in pair):
        return None
    costs = [tuple(run.requests_per_s / run.server_busy for run in pair) for pair in pairs]
    return round(median([gateway / bare for bare, gateway in costs]), 3)


def _why(pairs: Sequence[Pair]) -> str:
    for run in (run for pair in pairs for run in pair):
        if run.failed:
            return f"{run.failed} requests to {run.server} failed"
    for run in (run for pair in pairs for run in pair):
        if run.generator_busy >= BUSY:
            return f"the generator's core was {run.generator_busy:.0%} busy with {run.server}: it was the limit itself"
        if run.server_busy < BUSY:
            return f"{run.server} had only {run.server_busy:.0%} of its core: other work ran there, or it had to wait"
    return ""


def page(report: FrontReport) -> RenderableType:
    """The report for a terminal."""
    runs = Table(box=None, pad_edge=False)
    for name in ("server", "connections", "req/s", "p50 ms", "p99 ms", "server busy", "generator busy", "counts"):
        runs.add_column(name, justify="left" if name == "server" else "right")
    for run in report.runs:
        figures = (f"{run.requests_per_s:,.0f}", f"{run.p50_ms:.3f}", f"{run.p99_ms:.3f}")
        shares = (f"{run.server_busy:.0%}", f"{run.generator_busy:.0%}")
        # One connection waits most of the time: there only latency is of interest.
        counts = "-" if run.connections == 1 else "yes" if run.counts else "no"
        runs.add_row(run.server, str(run.connections), *figures, *shares, counts)
    lines = [goal_line(goal) for goal in report.goals]
    if report.miss_cpu_ratio is not None:
        per_cpu = f"miss {report.miss_cpu_ratio:g}, hit {report.hit_cpu_ratio or 0:g}"
        lines.append(Text(f"     the ratios by processor time instead: {per_cpu}"))
    if report.rss_after_load_mb is not None:
        lines.append(
            Text(f"     rss after the load {report.rss_after_load_mb:.0f} MB (answers in the cache are part of it)")
        )
    lines.extend(Text(f"note: {note}", "yellow") for note in report.notes)
    if report.shortened:
        lines.append(Text(f"shortened: {report.shortened}", "yellow"))
    return Group(runs, *lines)
