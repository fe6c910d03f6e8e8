"""`gateway load`: an open-loop load on a gateway, or on anything that speaks the same protocols."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
import uvloop
from rich.console import Console
from rich.live import Live

from gateway.cli.sections import flat
from gateway.load.client import check_target
from gateway.load.mix import Caller, ChatOptions, TensorOptions
from gateway.load.plan import ArrivalPlan, LoadPlan, LoadRun, MixPlan, read_callers
from gateway.load.report import EXIT_USAGE, Limits, Summary, to_json
from gateway.load.runner import LoopOptions, OpenLoop
from gateway.load.terminal import page, progress
from policies.core.clock import SystemClock
from policies.language.units import duration, share

app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)

_WHEN, _WHAT, _LIMITS = "When requests are sent", "What is sent", "Limits: exit code 1 when one is broken"


@dataclass(frozen=True, slots=True)
class WhenOptions:
    arrivals: Annotated[
        str, typer.Option(help="constant, poisson, gamma or trace.", rich_help_panel=_WHEN)
    ] = "poisson"  # fmt: skip
    rate: Annotated[
        float | None,
        typer.Option(help="Requests a second (10; a trace: its own pace).", rich_help_panel=_WHEN),
    ] = None
    run_for: Annotated[str, typer.Option("--duration", help="How long to send.", rich_help_panel=_WHEN)] = "10s"
    max_requests: Annotated[int, typer.Option(help="Send at most this many.", rich_help_panel=_WHEN)] = 100_000
    cv: Annotated[float, typer.Option(help="gamma: coefficient of variation of gaps.", rich_help_panel=_WHEN)] = 4.0
    factor: Annotated[
        float, typer.Option("--step", help="Multiply the rate by this for a while.", rich_help_panel=_WHEN)
    ] = 1.0
    step_start: Annotated[str, typer.Option(help="When the step begins.", rich_help_panel=_WHEN)] = "0s"
    step_for: Annotated[str, typer.Option("--step-duration", help="How long it lasts.", rich_help_panel=_WHEN)] = "10s"
    trace: Annotated[
        Path | None, typer.Option(help="CSV with a column TIMESTAMP or seconds.", rich_help_panel=_WHEN)
    ] = None
    seed: Annotated[int, typer.Option(help="The same seed sends the same run.", rich_help_panel=_WHEN)] = 1

    def plan(self) -> ArrivalPlan:
        process = "trace" if self.trace is not None and self.arrivals == "poisson" else self.arrivals
        rate = 10.0 if self.rate is None and process != "trace" else self.rate
        start_s, length_s = duration(self.step_start), duration(self.step_for)
        return ArrivalPlan(process, rate, self.cv, self.factor, start_s, length_s, self.trace)


@dataclass(frozen=True, slots=True)
class WhatOptions:
    mix: Annotated[str, typer.Option(help="chat, tensor, embeddings or file.", rich_help_panel=_WHAT)] = "chat"
    file: Annotated[Path | None, typer.Option(help="JSONL file of request bodies.", rich_help_panel=_WHAT)] = None
    model: Annotated[
        str | None,
        typer.Option(
            help="Model name or policy alias (auto; tensor: recommend; embeddings: auto-embed).", rich_help_panel=_WHAT
        ),
    ] = None
    prompts: Annotated[int, typer.Option(help="Distinct prompts, or users.", rich_help_panel=_WHAT)] = 200
    zipf: Annotated[float, typer.Option(help="Zipf exponent of their popularity.", rich_help_panel=_WHAT)] = 1.0
    heavy: Annotated[str, typer.Option(help="Share of hard prompts.", rich_help_panel=_WHAT)] = "30%"
    stream: Annotated[str, typer.Option(help="Share of streams.", rich_help_panel=_WHAT)] = "50%"
    unique: Annotated[str, typer.Option(help="Share that can be in no cache.", rich_help_panel=_WHAT)] = "0%"
    max_tokens: Annotated[int, typer.Option(help="max_tokens of chat requests.", rich_help_panel=_WHAT)] = 64

    def plan(self) -> MixPlan:
        kind = "file" if self.file is not None and self.mix == "chat" else self.mix
        shares = share(self.heavy), share(self.stream), share(self.unique)
        chat = ChatOptions(self.model or "auto", self.prompts, self.zipf, *shares, self.max_tokens)
        tensor = TensorOptions(self.model or "recommend", self.prompts, self.zipf)
        return MixPlan(kind, chat, tensor, self.model or "auto-embed", self.file)


@dataclass(frozen=True, slots=True)
class WhoOptions:
    key: Annotated[
        str, typer.Option(help="API key of every request.", envvar="GATEWAY_API_KEY", show_envvar=True)
    ] = ""  # fmt: skip
    keys: Annotated[
        Path | None, typer.Option(help="YAML of traffic classes: `vip: {key: ..., share: 0.2}`.")
    ] = None  # fmt: skip
    allow_remote: Annotated[bool, typer.Option(help="Permit a target that is not this machine.")] = False

    def callers(self) -> tuple[Caller, ...]:
        return read_callers(self.keys) if self.keys is not None else (Caller("default", 1.0, self.key),)


@dataclass(frozen=True, slots=True)
class LimitOptions:
    max_p99: Annotated[str | None, typer.Option(help="p99 latency, as 300ms.", rich_help_panel=_LIMITS)] = None
    max_ttft: Annotated[str | None, typer.Option(help="p95 first token, as 200ms.", rich_help_panel=_LIMITS)] = None
    max_failed: Annotated[str | None, typer.Option(help="Failed and cut, as 0.1%.", rich_help_panel=_LIMITS)] = None

    def plan(self) -> Limits:
        p99, ttft, failed = self.max_p99, self.max_ttft, self.max_failed
        return Limits(
            None if p99 is None else duration(p99),
            None if ttft is None else duration(ttft),
            None if failed is None else share(failed),
        )


@dataclass(frozen=True, slots=True)
class LoopSettings:
    timeout: Annotated[str, typer.Option(help="Longest wait for one answer.")] = "60s"
    max_in_flight: Annotated[int, typer.Option(help="What is sent beyond is dropped: invalid run.")] = 10_000
    max_lag: Annotated[str, typer.Option(help="A later send makes the run invalid.")] = "100ms"
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False


@app.command(name="load")
@flat
def load(
    target: Annotated[str, typer.Argument(help="Base URL.")] = "http://127.0.0.1:8080",
    *,
    when: WhenOptions = WhenOptions(),
    what: WhatOptions = WhatOptions(),
    who: WhoOptions = WhoOptions(),
    limits: LimitOptions = LimitOptions(),
    loop: LoopSettings = LoopSettings(),
) -> None:
    """Send requests at their intended moments, whatever the answers do, and report what became of them.

    Latency counts from the intended moment. Exit codes: 0 valid, 1 a limit was broken, 2 bad arguments, 4 the run is
    invalid (requests dropped or late), 130 interrupted (with a report).
    """
    try:
        remote = check_target(target, who.allow_remote)
        plan = LoadPlan(
            target,
            when.plan(),
            what.plan(),
            who.callers(),
            duration(when.run_for),
            when.max_requests,
            duration(loop.timeout),
            when.seed,
            LoopOptions(duration(loop.max_lag), loop.max_in_flight),
            limits.plan(),
        )
        run = LoadRun(plan, SystemClock())
    except (ValueError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(EXIT_USAGE) from None
    console = Console(stderr=loop.as_json)
    if remote:
        console.print(f"[yellow]warning: {target} is another machine; load only what you may load[/yellow]")
    summary = uvloop.run(_run(run, console))
    if loop.as_json:
        sys.stdout.buffer.write(to_json(summary) + b"\n")
        sys.stdout.flush()
    else:
        console.print(page(summary, console))
    raise typer.Exit(summary.exit_code)


async def _run(run: LoadRun, console: Console) -> Summary:
    """The run, with a live view on a terminal; Ctrl-C and SIGTERM end it early, with its report."""
    loop = asyncio.get_running_loop()

    def started(sending: OpenLoop) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, sending.stop)

    async with _live_view(run, console):
        return await run.run(started)


@contextlib.asynccontextmanager
async def _live_view(run: LoadRun, console: Console) -> AsyncIterator[None]:
    if not console.is_terminal:
        yield
        return
    clock = SystemClock()
    begin, length_s = clock.now(), run.plan.duration_s
    with Live(console=console, auto_refresh=False, transient=True) as live:

        async def redraw() -> None:
            while True:
                live.update(progress(run.recorder, clock.now() - begin, length_s), refresh=True)
                await clock.sleep(0.5)

        task = asyncio.create_task(redraw())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
