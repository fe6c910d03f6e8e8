"""How a run looks on a terminal: one live line while it runs, a page of tables at its end."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, RenderableType
from rich.console import Group as Stack
from rich.table import Table
from rich.text import Text

from gateway.load.outcome import Outcome
from gateway.load.recorder import Recorder, share_of
from gateway.load.report import Group, Summary
from gateway.load.stats import sparkline

_SHOWN = ("full", "degraded", "failed", "cut", "client_error", "dropped", "abandoned")


def progress(recorder: Recorder, elapsed_s: float, duration_s: float) -> RenderableType:
    """The state of a running load, in two lines."""
    outcomes = recorder.outcomes
    done = min(1.0, elapsed_s / duration_s) if duration_s > 0 else 1.0
    counts = "  ".join(f"{name} {outcomes[Outcome(name)]}" for name in _SHOWN if outcomes[Outcome(name)])
    recent = recorder.between(max(0.0, elapsed_s - 5), elapsed_s + recorder.window_s).latency
    p99 = f"{recent.percentile_s(99) * 1000:.1f} ms" if recent is not None and recent.count else "-"
    bar = "#" * round(done * 30)
    first = f"[{bar:<30}] {elapsed_s:5.1f} of {duration_s:g} s   sent {recorder.sent}   in flight {recorder.in_flight}"
    failed = share_of(outcomes, Outcome.FAILED, Outcome.CUT)
    return Stack(Text(first), Text(f"p99 of the last 5 s {p99}   failed {failed:.3%}   {counts}"))


def page(summary: Summary, console: Console) -> RenderableType:
    """The report."""
    parts: list[RenderableType] = [_head(summary), _times(summary)]
    if len(summary.by_class) > 1:
        parts.append(_groups("class", summary.by_class))
    parts.append(_groups("rung", summary.by_rung))
    ascii_only = not console.encoding.lower().startswith("utf")
    parts.extend(_plots(summary, ascii_only))
    parts.extend(_verdict(summary))
    return Stack(*parts)


def _head(summary: Summary) -> RenderableType:
    counts = "  ".join(f"{name} {count}" for name, count in summary.outcomes.items() if count)
    shares = f"full {summary.full_share:.2%}   failed {summary.failed_share:.3%}   cut {summary.cut_share:.3%}"
    rate = f"offered {summary.offered_rate:g}/s, answered {summary.answered_rate:g}/s in {summary.elapsed_s:.1f} s"
    lines = [f"{summary.target}   {summary.mix}   {summary.arrivals}   seed {summary.seed}", rate, counts, shares]
    if summary.errors:
        lines.append("errors: " + "  ".join(f"{name} {count}" for name, count in summary.errors.items()))
    return Text("\n".join(lines))


def _times(summary: Summary) -> Table:
    table = _table("ms from intended send", "count", "mean", "p50", "p90", "p95", "p99", "p99.9", "max")
    rows = (
        ("latency", summary.latency_ms),
        ("first token", summary.ttft_ms),
        ("own lag", summary.generator.send_lag_ms),
    )
    for name, values in rows:
        if values is not None:
            figures = (values.mean, values.p50, values.p90, values.p95, values.p99, values.p999, values.max)
            table.add_row(name, str(values.count), *map(_ms, figures))
    return table


def _groups(kind: str, groups: dict[str, Group]) -> Table:
    table = _table(kind, "count", "full", "degraded", "failed", "cut", "p50", "p99", "first token p95")
    for name, group in groups.items():
        counts = (str(group.outcomes.get(outcome, 0)) for outcome in ("full", "degraded", "failed", "cut"))
        latency, first = group.latency_ms, group.ttft_ms
        p50, p99 = ("-", "-") if latency is None else (_ms(latency.p50), _ms(latency.p99))
        table.add_row(name, str(group.count), *counts, p50, p99, "-" if first is None else _ms(first.p95))
    return table


def _plots(summary: Summary, ascii_only: bool) -> list[RenderableType]:
    if len(summary.series) < 3:
        return []
    p99 = [point.p99_ms for point in summary.series]
    failed = [float(point.outcomes.get("failed", 0) + point.outcomes.get("cut", 0)) for point in summary.series]
    rate = [sum(point.outcomes.values()) / summary.window_s for point in summary.series]
    plots: list[tuple[str, Sequence[float | None]]] = [("offered/s", rate), ("p99 ms", p99)]
    if any(failed):
        plots.append(("failed", failed))
    lines = (
        f"{name:<10} {sparkline(values, ascii_only=ascii_only)}  peak {max((v for v in values if v is not None), default=0):g}"
        for name, values in plots
    )
    return [Text("\n".join(lines))]


def _verdict(summary: Summary) -> list[RenderableType]:
    lines: list[RenderableType] = []
    for limit in summary.limits:
        value = "nothing measured" if limit.value is None else f"{limit.value:g}"
        style = "green" if limit.ok else "bold red"
        lines.append(Text(f"{'ok  ' if limit.ok else 'OVER'} {limit.name} {value} (limit {limit.limit:g})", style))
    generator = summary.generator
    if generator.limited:
        words = (
            f"the generator used {generator.cpu_share:.0%} of its core: it may be the limit itself; wrk goes further"
        )
        lines.append(Text(words, "yellow"))
    lines.extend(Text(f"INVALID: {reason}", "bold red") for reason in summary.invalid_reasons)
    if summary.interrupted:
        lines.append(Text("interrupted: the figures are of the part that ran", "yellow"))
    return lines


def _ms(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, title=None)
    table.add_column(first, style="bold", no_wrap=True)
    for name in others:
        table.add_column(name, justify="right")
    return table
