"""What a run found, as one document: `gateway load --json` prints it, and the terminal report is drawn from it.

Milliseconds are from the intended send time. `latency_ms` speaks of answered requests (full and degraded); `ended_ms` of
all counted ones, so that a service cannot look fast by failing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from gateway.load.outcome import ANSWERED, COUNTED, Outcome
from gateway.load.recorder import Cell, Histogram, Recorder, Window, merged, share_of
from gateway.load.runner import LoopOptions, RunFacts

#: Above this share of one core the generator itself may be what is slow.
BUSY_SHARE = 0.9

EXIT_VALID, EXIT_LIMIT, EXIT_USAGE, EXIT_INVALID, EXIT_INTERRUPTED = 0, 1, 2, 4, 130


class Quantiles(msgspec.Struct, frozen=True):
    """Milliseconds."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    p999: float
    max: float


class Group(msgspec.Struct, frozen=True):
    """One traffic class, or one rung."""

    count: int
    outcomes: dict[str, int]
    latency_ms: Quantiles | None
    ttft_ms: Quantiles | None


class Point(msgspec.Struct, frozen=True):
    """One window of intended send time, beginning at `t_s`."""

    t_s: float
    outcomes: dict[str, int]
    p50_ms: float | None
    p99_ms: float | None


class Generator(msgspec.Struct, frozen=True):
    """The generator's own state. `limited` = it may have been the bottleneck itself."""

    late: int
    dropped: int
    send_lag_ms: Quantiles | None
    cpu_share: float
    max_in_flight: int
    limited: bool


class Limit(msgspec.Struct, frozen=True):
    """A limit that was asked for. `value` None = nothing was measured, which does not meet it."""

    name: str
    value: float | None
    limit: float
    ok: bool


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The document. Shares are of full + degraded + failed + cut."""

    format: int = 1
    target: str
    mix: str
    arrivals: str
    seed: int
    elapsed_s: float
    sent: int
    offered_rate: float
    answered_rate: float
    outcomes: dict[str, int]
    full_share: float
    degraded_share: float
    failed_share: float
    cut_share: float
    latency_ms: Quantiles | None
    ended_ms: Quantiles | None
    ttft_ms: Quantiles | None
    #: Content chunks a second within a stream, averaged over streaming time.
    stream_chunks_per_s: float | None
    by_class: dict[str, Group]
    by_rung: dict[str, Group]
    statuses: dict[str, int]
    errors: dict[str, int]
    window_s: float
    series: list[Point]
    series_by_class: dict[str, list[Point]]
    generator: Generator
    limits: list[Limit]
    interrupted: bool
    valid: bool
    #: Why the run does not count, and what to do.
    invalid_reasons: list[str]
    exit_code: int


@dataclass(frozen=True, slots=True)
class Described:
    """How the run was asked for, in words for the report. `duration_s` is the intended length of sending."""

    target: str
    mix: str
    arrivals: str
    seed: int
    duration_s: float


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on a run; None = not asked for. `max_failed` counts failed and cut."""

    max_p99_s: float | None = None
    max_ttft_p95_s: float | None = None
    max_failed: float | None = None


def summarize(run: Described, recorder: Recorder, facts: RunFacts, limits: Limits, options: LoopOptions) -> Summary:
    """The document of a finished run."""
    latency = quantiles(merged(cell.latency for cell in recorder.select(lambda _, __, o: o in ANSWERED)))
    firsts = [c.first for c in recorder.select(lambda _, __, o: o in ANSWERED) if c.first is not None]
    ttft = quantiles(merged(firsts))
    outcomes = recorder.outcomes
    answered = sum(outcomes[outcome] for outcome in ANSWERED)
    sending_s = min(run.duration_s, facts.elapsed_s) or 1.0
    reasons = _invalid(recorder, options)
    checked = _check(limits, outcomes, latency, ttft)
    labels = sorted({label for label, _, _ in recorder.cells})
    rungs = sorted({rung for _, rung, outcome in recorder.cells if outcome is not Outcome.ABANDONED})
    return Summary(
        target=run.target,
        mix=run.mix,
        arrivals=run.arrivals,
        seed=run.seed,
        elapsed_s=round(facts.elapsed_s, 3),
        sent=recorder.sent,
        offered_rate=round(outcomes.total() / sending_s, 2),
        answered_rate=round(answered / facts.elapsed_s, 2) if facts.elapsed_s > 0 else 0.0,
        outcomes={outcome.value: outcomes[outcome] for outcome in Outcome},
        full_share=share_of(outcomes, Outcome.FULL),
        degraded_share=share_of(outcomes, Outcome.DEGRADED),
        failed_share=share_of(outcomes, Outcome.FAILED),
        cut_share=share_of(outcomes, Outcome.CUT),
        latency_ms=latency,
        ended_ms=quantiles(merged(cell.latency for cell in recorder.select(lambda _, __, o: o in COUNTED))),
        ttft_ms=ttft,
        stream_chunks_per_s=round(recorder.chunks / recorder.streaming_s, 2) if recorder.streaming_s > 0 else None,
        by_class={name: _group(recorder, label=name) for name in labels},
        by_rung={name: _group(recorder, rung=name) for name in rungs},
        statuses={str(status): count for status, count in sorted(recorder.statuses.items())},
        errors=dict(recorder.errors.most_common()),
        window_s=recorder.window_s,
        series=_series(recorder, None),
        series_by_class={name: _series(recorder, name) for name in labels} if len(labels) > 1 else {},
        generator=_generator(recorder, facts),
        limits=checked,
        interrupted=facts.interrupted,
        valid=not reasons,
        invalid_reasons=reasons,
        exit_code=_exit_code(facts, reasons, checked),
    )


def quantiles(histogram: Histogram) -> Quantiles | None:
    """In milliseconds; None when nothing was recorded."""
    if histogram.count == 0:
        return None
    p50, p90, p95, p99, p999 = (round(histogram.percentile_s(p) * 1000, 3) for p in (50, 90, 95, 99, 99.9))
    mean, top = round(histogram.mean_s() * 1000, 3), round(histogram.max_s() * 1000, 3)
    return Quantiles(histogram.count, mean, p50, p90, p95, p99, p999, top)


def to_json(summary: Summary) -> bytes:
    return msgspec.json.encode(summary)


def _invalid(recorder: Recorder, options: LoopOptions) -> list[str]:
    reasons = []
    dropped, late = recorder.outcomes[Outcome.DROPPED], recorder.late
    if dropped:
        reasons.append(
            f"{dropped} requests were never sent: {options.max_in_flight} were in flight, or this machine ran out of "
            "sockets; lower the rate, or raise --max-in-flight and `ulimit -n`"
        )
    if late:
        reasons.append(
            f"{late} requests left more than {options.late_after_s * 1000:.0f} ms after their moment: the generator was "
            "the limit; lower the rate, leave it a core of its own, or use wrk"
        )
    if not recorder.sent:
        reasons.append("no request was sent")
    return reasons


def _check(
    limits: Limits, outcomes: Counter[Outcome], latency: Quantiles | None, ttft: Quantiles | None
) -> list[Limit]:
    checked = []
    if limits.max_p99_s is not None:
        checked.append(_limit("latency_p99_ms", None if latency is None else latency.p99, limits.max_p99_s * 1000))
    if limits.max_ttft_p95_s is not None:
        checked.append(_limit("ttft_p95_ms", None if ttft is None else ttft.p95, limits.max_ttft_p95_s * 1000))
    if limits.max_failed is not None:
        counted = any(outcomes[outcome] for outcome in COUNTED)
        failed = share_of(outcomes, Outcome.FAILED, Outcome.CUT) if counted else None
        checked.append(_limit("failed_share", failed, limits.max_failed))
    return checked


def _limit(name: str, value: float | None, limit: float) -> Limit:
    return Limit(name, value, limit, value is not None and value <= limit)


def _exit_code(facts: RunFacts, reasons: list[str], checked: list[Limit]) -> int:
    if facts.interrupted:
        return EXIT_INTERRUPTED
    if reasons:
        return EXIT_INVALID
    return EXIT_VALID if all(limit.ok for limit in checked) else EXIT_LIMIT


def _generator(recorder: Recorder, facts: RunFacts) -> Generator:
    busy = facts.cpu_share > BUSY_SHARE
    return Generator(
        late=recorder.late,
        dropped=recorder.outcomes[Outcome.DROPPED],
        send_lag_ms=quantiles(recorder.send_lag),
        cpu_share=round(facts.cpu_share, 3),
        max_in_flight=recorder.max_in_flight,
        limited=busy or recorder.late > 0,
    )


def _group(recorder: Recorder, label: str | None = None, rung: str | None = None) -> Group:
    cells = {key: cell for key, cell in recorder.cells.items() if label in (None, key[0]) and rung in (None, key[1])}
    outcomes: Counter[str] = Counter()
    for (_, _, outcome), cell in cells.items():
        outcomes[outcome.value] += cell.count
    answered = [cell for key, cell in cells.items() if key[2] in ANSWERED]
    return Group(outcomes.total(), dict(outcomes), *_times(answered))


def _times(cells: Iterable[Cell]) -> tuple[Quantiles | None, Quantiles | None]:
    cells = list(cells)
    firsts = (cell.first for cell in cells if cell.first is not None)
    return quantiles(merged(cell.latency for cell in cells)), quantiles(merged(firsts))


def _series(recorder: Recorder, label: str | None) -> list[Point]:
    width = recorder.window_s
    starts = (index * width for index in range(len(recorder.windows)))
    return [_point(start, recorder.between(start, start + width, label)) for start in starts]


def _point(start_s: float, window: Window) -> Point:
    latency, outcomes = window.latency, {outcome.value: n for outcome, n in window.outcomes.items()}
    if latency is None or latency.count == 0:
        return Point(start_s, outcomes, None, None)
    p50, p99 = (round(latency.percentile_s(percent) * 1000, 3) for percent in (50, 99))
    return Point(start_s, outcomes, p50, p99)
