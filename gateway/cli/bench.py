"""`gateway bench`: figures of this machine, beside bare servers in the same run."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NoReturn

import msgspec
import typer
import uvloop
from msgspec.structs import replace
from rich.console import Console

from backends.onnx.manifest import ModelError
from gateway.config import load_config
from gateway.load.bench.classify import classify_goals
from gateway.load.bench.front import Front, FrontOptions
from gateway.load.bench.front_report import page
from gateway.load.bench.goals import Goal, goal_line
from gateway.load.bench.models import (
    ModelsOptions,
    ModelsReport,
    Part,
    light_goals,
    measure_gateway,
    measure_light,
)
from gateway.load.bench.processes import BenchError, Stage
from gateway.load.bench.targets import start_full_gateway
from gateway.load.bench.workers import Workers, WorkersOptions, quicker
from gateway.load.bench.workers_report import page as workers_page
from gateway.load.client import check_target
from gateway.models import model_folder
from policies import language
from policies.core.clock import SystemClock
from policies.core.errors import ConfigError
from policies.language.loader import load_policy

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Measure the gateway on this machine.",
    pretty_exceptions_show_locals=False,
)

Json = Annotated[bool, typer.Option("--json", envvar="JSON", help="The last line is one JSON object.")]
Quick = Annotated[bool, typer.Option("--quick", envvar="QUICK", help="Shorter runs; says what was shortened.")]


@app.command()
def front(
    *,
    quick: Quick = False,
    as_json: Json = False,
    rounds: Annotated[int, typer.Option(min=1, max=50, help="Pairs of runs for each comparison.")] = 3,
    seconds: Annotated[float, typer.Option(min=1, max=600, help="Length of one run.")] = 5.0,
    bare: Annotated[bool, typer.Option("--bare", help="Only the bare servers, without the gateway.")] = False,
) -> None:
    """Proxied misses and cache hits beside a bare aiohttp proxy and a bare aiohttp handler, on one core.

    Exit codes: 0 targets met, 1 one was missed, 2 something is missing, 4 a ratio does not count.
    """
    options = FrontOptions(rounds, seconds, not bare)
    if quick:
        short = f"2 rounds of 2 s instead of {rounds} of {seconds:g} s"
        options = FrontOptions(2, 2.0, not bare, short)
    console = Console(stderr=as_json)
    with _stage() as stage:
        try:
            report = uvloop.run(Front(stage, options, console.print).run())
        except BenchError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(2) from None
    console.print(page(report))
    if as_json:
        sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
    raise typer.Exit(report.exit_code)


@app.command()
def models(
    target: Annotated[str, typer.Argument(help="Base URL of a running gateway; left out: one is started.")] = "",
    *,
    quick: Quick = False,
    as_json: Json = False,
    requests: Annotated[int, typer.Option(min=1, max=10_000, help="Requests of each kind.")] = 40,
    rate: Annotated[float, typer.Option(min=0.01, max=100, help="Requests a second.")] = 1.0,
    key: Annotated[str, typer.Option(envvar="GATEWAY_API_KEY", show_envvar=True, help="API key.")] = "",
    allow_remote: Annotated[bool, typer.Option(help="Permit a target that is not this machine.")] = False,
) -> None:
    """First tokens of simple and of complex answers through a gateway, and the light model by itself.

    Exit codes: 0 targets met, 1 one was missed, 2 something is missing, 4 a figure cannot be judged.
    """
    console = Console(stderr=as_json)
    count = min(10, requests) if quick else requests
    with _stage() as stage:
        try:
            if target:
                check_target(target, allow_remote)
            options = ModelsOptions(target, key=key, requests=count, rate=rate)
            report = uvloop.run(_models(stage, options, console))
        except (BenchError, ConfigError, ValueError) as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(2) from None
    if quick:
        report = replace(report, shortened=f"{count} requests of each kind instead of {requests}")
    for name, part in (("simple", report.simple), ("complex", report.complex)):
        console.print(_part_line(name, part))
    for goal in report.goals:
        console.print(goal_line(goal))
    if report.shortened:
        console.print(f"shortened: {report.shortened}", style="yellow")
    if as_json:
        sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
    raise typer.Exit(report.exit_code)


@app.command()
def workers(
    *,
    quick: Quick = False,
    as_json: Json = False,
    rounds: Annotated[int, typer.Option(min=1, max=50, help="Pairs of runs for each ratio.")] = 5,
    seconds: Annotated[float, typer.Option(min=1, max=600, help="Length of one run.")] = 4.0,
    restarts: Annotated[int, typer.Option(min=1, max=50, help="Rolling restarts, and as many graceful ends.")] = 3,
) -> None:
    """Two workers beside one: speed, the hub's cost, requests lost by restarts and ends, and what the model host adds.

    Exit codes: 0 targets met, 1 one was missed, 2 something is missing, 4 a figure cannot be judged.
    """
    console = Console(stderr=as_json)
    with _stage() as stage:
        try:
            built = load_config(None, os.environ).models_dir
            options = WorkersOptions(built, rounds, seconds, restarts=restarts)
            report = uvloop.run(Workers(stage, quicker(options) if quick else options, console.print).run())
        except (BenchError, ConfigError) as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(2) from None
    console.print(workers_page(report))
    if as_json:
        sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
    raise typer.Exit(report.exit_code)


async def _models(stage: Stage, options: ModelsOptions, console: Console) -> ModelsReport:
    """The light model first, while nothing else runs; then the gateway, started here when none was named."""
    clock, why, found = SystemClock(), "", {}
    console.print("the light model by itself")
    try:
        found = await measure_light(model_folder(load_config(None, os.environ), "smollm2"), clock)
    except ModelError as error:
        why = str(error)
    if not options.target:
        options = dataclasses.replace(options, target=await start_full_gateway(stage))
    report = await measure_gateway(options, clock, console.print)
    return replace(report, in_process=found, goals=[*report.goals, *light_goals(found, why), *_classify()])


def _classify() -> list[Goal]:
    shipped = Path(language.__file__).parents[1] / "chatbot.yaml"
    return classify_goals(load_policy(shipped))


def _part_line(name: str, part: Part) -> str:
    served = ", ".join(f"{rung} {count}" for rung, count in part.served.items())
    first = (
        "" if part.ttft_ms is None else f"first token p50 {part.ttft_ms.p50:.0f} ms, p99 {part.ttft_ms.p99:.0f} ms, "
    )
    speed = "" if part.tokens_per_s is None else f"then {part.tokens_per_s:.0f} tokens/s, "
    return f"{name}: {first}{speed}answered by {served or 'nobody'}; {part.failed} failed"


@contextlib.contextmanager
def _stage() -> Iterator[Stage]:
    """A folder and the processes started in it; both are gone afterwards, also when ended from outside."""
    before = signal.signal(signal.SIGTERM, _stop)
    with tempfile.TemporaryDirectory(prefix="gateway-bench-") as folder:
        stage = Stage(Path(folder), SystemClock())
        try:
            yield stage
        finally:
            stage.end_all()
            signal.signal(signal.SIGTERM, before)


def _stop(_number: int, _frame: object) -> NoReturn:
    raise SystemExit(143)
