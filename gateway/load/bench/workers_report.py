"""What the workers bench found: figures, their targets, and what each of them means."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from msgspec.structs import replace
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gateway.load.bench.generator import Measured
from gateway.load.bench.goals import Goal, exit_code, goal_line
from gateway.load.bench.model_pairs import Added
from gateway.load.stats import median

PATHS = ("hit", "miss")
#: Fewer requests than this under way through a restart or an end say nothing about dropped ones.
ENOUGH_REQUESTS = 100
#: With more cores than this taken by others, waiting for one's turn is measured.
OTHER_WORK = 0.25

SHARED_CORES = "no target: load generator and upstream need a core, and a second worker gets what they leave of it"
UNANSWERED = (
    "counted: everything that a client sent and that was not answered in full with 200, also on a connection that the "
    "gateway closed at that moment. Not counted: connections refused after it had stopped listening"
)


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One run of the generator. `cores` = how busy each core of the machine was, whoever kept it busy."""

    workers: int
    #: One of PATHS.
    path: str
    #: Did all of the gateway's processes share one core, which load generator and upstream left alone?
    one_core: bool
    measured: Measured
    #: Processor time of all the gateway's processes, in microseconds a request; 0 where it is not known.
    cpu_us: float
    cores: list[float]
    #: The supervisor's share of a core; None with one worker, where it is the same process.
    supervisor_share: float | None


#: With one worker and with two.
RunPair = tuple[Run, Run]


class Idle(msgspec.Struct, frozen=True):
    """Shares of a core while no request comes."""

    supervisor: float
    #: The mean of the workers: beats, figures, timers.
    worker: float
    #: A gateway of one process, with all of that and no hub between processes.
    one_process: float


class Steadily(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a steady load. `failed` by kind of client and what it saw."""

    requests: int
    answered: dict[str, int]
    failed: dict[str, int]
    #: Connections refused after the gateway had been told to end.
    refused: int = 0
    slowest_s: float
    took_s: float

    @property
    def lost(self) -> int:
        return sum(self.failed.values())


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured with. `shortened` = what a quick run left out; empty = nothing."""

    generator: str
    upstream: str
    cores: int
    rounds: int
    seconds: float
    shortened: str
    notes: list[str]


class WorkersReport(Setting, frozen=True, kw_only=True):
    """The document of `gateway bench workers --json`."""

    format: int = 1
    #: Requests a second with two workers, over those with one.
    hit_2_to_1: float
    miss_2_to_1: float
    #: The same of processor time a request, all of the gateway's processes together on one core; None where it is not known.
    hit_cpu_2_to_1: float | None
    miss_cpu_2_to_1: float | None
    #: Shares of a core under load: the supervisor, whatever it does; the beats and figures of one worker; their sum.
    supervisor_core_share: float
    worker_hub_core_share: float
    hub_core_share: float
    #: Without load, which on a virtual machine is mostly the price of waking up.
    idle: Idle
    rolling_restart_failed: int
    #: Medians, like all seconds here.
    rolling_restart_s: float
    rolling_restarts: list[Steadily]
    graceful_stop_failed: int
    graceful_stop_s: float
    graceful_stops: list[Steadily]
    model_host_added_p50_ms: float
    embeddings_added_p50_ms: float
    model_host: Added
    embeddings: Added
    goals: list[Goal]
    runs: list[Run]

    @property
    def exit_code(self) -> int:
        """0 all targets met, 1 one was missed, 4 one could not be judged."""
        return exit_code(self.goals)


@dataclass(frozen=True, slots=True)
class Found:
    """All that was measured."""

    pairs: list[RunPair]
    idle: Idle
    worker_hub_share: float
    restarts: list[Steadily]
    stops: list[Steadily]
    scores: Added
    embeddings: Added


def make_report(setting: Setting, found: Found) -> WorkersReport:
    """The figures of what was found, judged."""
    runs = [run for pair in found.pairs for run in pair]
    hits, misses = ([pair for pair in found.pairs if pair[0].path == path] for path in PATHS)
    supervisor = round(median([run.supervisor_share for run in runs if run.supervisor_share is not None]), 4)
    worker = round(found.worker_hub_share, 4)
    restarts = lost_goal("rolling_restart_failed", found.restarts)
    stops = lost_goal("graceful_stop_failed", found.stops)
    return WorkersReport(
        **{**msgspec.structs.asdict(setting), "notes": [*setting.notes, *_doubts(runs)]},
        hit_2_to_1=rate_ratio(hits),
        miss_2_to_1=rate_ratio(misses),
        hit_cpu_2_to_1=cost_ratio(hits),
        miss_cpu_2_to_1=cost_ratio(misses),
        supervisor_core_share=supervisor,
        worker_hub_core_share=worker,
        hub_core_share=round(supervisor + worker, 4),
        idle=found.idle,
        rolling_restart_failed=int(restarts.value or 0),
        rolling_restart_s=round(median([load.took_s for load in found.restarts]), 2),
        rolling_restarts=found.restarts,
        graceful_stop_failed=int(stops.value or 0),
        graceful_stop_s=round(median([load.took_s for load in found.stops]), 2),
        graceful_stops=found.stops,
        model_host_added_p50_ms=found.scores.added_p50_ms,
        embeddings_added_p50_ms=found.embeddings.added_p50_ms,
        model_host=found.scores,
        embeddings=found.embeddings,
        goals=[
            Goal("hub_core_share", round(supervisor + worker, 4), 0.01, at_least=False),
            restarts,
            stops,
            added_goal("model_host_added_p50_ms", found.scores, 0.3),
        ],
        runs=runs,
    )


def _doubts(runs: Sequence[Run]) -> list[str]:
    """Why the runs mean less than they should."""
    others = max(sum(run.cores) - run.measured.server_busy - run.measured.generator_busy for run in runs)
    crowd = (
        [f"other work took up to {others:.1f} of the cores in the runs of the ratios"] if others > OTHER_WORK else []
    )
    return crowd + [
        f"{run.measured.failed} requests failed in a run of {run.workers} workers ({run.path}): its ratio means little"
        for run in runs
        if run.measured.failed
    ]


def rate_ratio(pairs: Sequence[RunPair]) -> float:
    """The median of requests a second on all cores, second over first."""
    free = [pair for pair in pairs if not pair[0].one_core]
    return round(median([two.measured.requests_per_s / one.measured.requests_per_s for one, two in free]), 3)


def cost_ratio(pairs: Sequence[RunPair]) -> float | None:
    """The median of processor time a request, second over first: of the runs on one core, where there are any, since a
    gateway that is not kept busy does less at a time. None where it is not known."""
    alone = [pair for pair in pairs if pair[0].one_core] or pairs
    if any(run.cpu_us <= 0 for pair in alone for run in pair):
        return None
    return round(median([two.cpu_us / one.cpu_us for one, two in alone]), 3)


def lost_goal(name: str, rounds: Sequence[Steadily]) -> Goal:
    """No request may be lost. It does not count when there was hardly a request."""
    few = min(load.requests for load in rounds)
    why = f"only {few} requests were sent meanwhile" if few < ENOUGH_REQUESTS else ""
    return Goal(name, float(sum(load.lost for load in rounds)), 0.0, at_least=False, why=why)


def added_goal(name: str, added: Added, target_ms: float) -> Goal:
    """A miss does not count while others kept the cores busy: every process on the way waits for its turn then."""
    goal = Goal(name, added.added_p50_ms, target_ms, at_least=False)
    if goal.met or added.other_work <= OTHER_WORK:
        return goal
    return replace(
        goal, why=f"other work took {added.other_work:g} cores meanwhile, and each process had to wait its turn"
    )


def page(report: WorkersReport) -> RenderableType:
    """The report for a terminal. In the table `others` are load generator and upstream; `busy` is each core, by whomever."""
    where = "on one core" if any(run.one_core for run in report.runs) else "on all cores"
    cpu = f"{where}: hit {_or_unknown(report.hit_cpu_2_to_1)}, miss {_or_unknown(report.miss_cpu_2_to_1)}"
    hub = (
        f"the supervisor under load {report.supervisor_core_share:g} + a worker's beats and figures "
        f"{report.worker_hub_core_share:g}"
    )
    idle = (
        f"supervisor {report.idle.supervisor:g}, a worker {report.idle.worker:g}, a gateway of one process, which has no "
        f"other to speak to, {report.idle.one_process:g}"
    )
    lines = [
        f"2 workers to 1, requests a second: hit {report.hit_2_to_1:g}, miss {report.miss_2_to_1:g} ({SHARED_CORES})",
        f"2 workers to 1, processor time a request {cpu} (about 1: a second worker costs nothing but itself)",
        f"hub_core_share {report.hub_core_share:g} of a core: {hub}; when idle: {idle}",
        *_losses("rolling restart", report.rolling_restarts, report.rolling_restart_s),
        *_losses("graceful stop", report.graceful_stops, report.graceful_stop_s),
        UNANSWERED,
        _added("scores of vectors", report.model_host),
        _added("embeddings of one text", report.embeddings),
    ]
    texts = [Text(line) for line in lines]
    texts += [goal_line(goal) for goal in report.goals]
    texts += [Text(f"note: {note}", "yellow") for note in report.notes]
    if report.shortened:
        texts.append(Text(f"shortened: {report.shortened}", "yellow"))
    return Group(_table(report.runs), *texts)


def _table(runs: Sequence[Run]) -> Table:
    table = Table(box=None, pad_edge=False)
    names = (
        "path",
        "workers",
        "cores",
        "req/s",
        "p50 ms",
        "p99 ms",
        "cpu us",
        "gateway",
        "others",
        "busy",
        "supervisor",
    )
    for name in names:
        table.add_column(name, justify="left" if name == "path" else "right")
    for run in runs:
        told = run.measured
        busy = " ".join(f"{core:.0%}" for core in run.cores)
        shares = (f"{told.server_busy:.0%}", f"{told.generator_busy:.0%}", busy)
        supervisor = "-" if run.supervisor_share is None else f"{run.supervisor_share:.2%}"
        figures = (f"{told.requests_per_s:,.0f}", f"{told.p50_ms:.3f}", f"{told.p99_ms:.3f}", f"{run.cpu_us:.0f}")
        table.add_row(run.path, str(run.workers), "one" if run.one_core else "all", *figures, *shares, supervisor)
    return table


def _losses(what: str, rounds: Sequence[Steadily], took_s: float) -> list[str]:
    requests = sum(load.requests for load in rounds)
    lost = sum(load.lost for load in rounds)
    slowest = max(load.slowest_s for load in rounds)
    refused = sum(load.refused for load in rounds)
    more = f", {refused} connections refused once it had stopped listening" if refused else ""
    line = f"{what}: {took_s:.1f} s, {requests} requests, {lost} failed, the slowest took {slowest:.2f} s{more}"
    return [line, *(f"  failed: {cause} ({count})" for load in rounds for cause, count in load.failed.items())]


def _added(what: str, added: Added) -> str:
    return (
        f"{what}: p50 {added.in_process_p50_ms:g} ms in the process, {added.model_host_p50_ms:g} ms from the model host, "
        f"{added.added_p50_ms:+g} ms in the median of pairs; processor time {added.in_process_cpu_ms:g} and "
        f"{added.model_host_cpu_ms:g} ms; other work took {added.other_work:g} cores"
    )


def _or_unknown(value: float | None) -> str:
    return "unknown" if value is None else f"{value:g}"
