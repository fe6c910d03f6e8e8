"""`gateway bench`: figures of this machine, beside bare servers in the same run."""

from __future__ import annotations

import signal
import sys
import tempfile
from pathlib import Path
from typing import Annotated, NoReturn

import msgspec
import typer
import uvloop
from rich.console import Console

from gateway.load.bench.front import Front, FrontOptions
from gateway.load.bench.front_report import page
from gateway.load.bench.models import ModelsOptions, Part, measure_models
from gateway.load.bench.processes import BenchError, Stage
from gateway.load.client import check_target
from policies.core.clock import SystemClock

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Measure the gateway on this machine.")

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
    with tempfile.TemporaryDirectory(prefix="gateway-bench-") as folder:
        stage = Stage(Path(folder), SystemClock())
        # Ended from outside, it still ends what it started.
        signal.signal(signal.SIGTERM, _stop)
        try:
            report = uvloop.run(Front(stage, options, console.print).run())
        except BenchError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(2) from None
        finally:
            stage.end_all()
    console.print(page(report))
    if as_json:
        sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
    raise typer.Exit(report.exit_code)


@app.command()
def models(
    target: Annotated[str, typer.Argument(help="Base URL of a running gateway.")] = "http://127.0.0.1:8080",
    *,
    quick: Quick = False,
    as_json: Json = False,
    requests: Annotated[int, typer.Option(min=1, max=10_000, help="Requests of each kind.")] = 40,
    rate: Annotated[float, typer.Option(min=0.01, max=100, help="Requests a second.")] = 1.0,
    model: Annotated[str, typer.Option(help="Policy alias.")] = "auto",
    key: Annotated[str, typer.Option(envvar="GATEWAY_API_KEY", show_envvar=True, help="API key.")] = "",
    allow_remote: Annotated[bool, typer.Option(help="Permit a target that is not this machine.")] = False,
) -> None:
    """First token of simple and of complex answers through a running gateway (`make serve` in another terminal).

    Exit codes: 0 targets met, 1 one was missed, 2 bad arguments, 4 a figure cannot be judged.
    """
    options = ModelsOptions(target, model, key, requests, rate)
    if quick:
        short = f"10 requests of each kind instead of {requests}"
        options = ModelsOptions(target, model, key, 10, rate, shortened=short)
    console = Console(stderr=as_json)
    try:
        check_target(target, allow_remote)
        report = uvloop.run(measure_models(options, SystemClock(), console.print))
    except ValueError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    for name, part in (("simple", report.simple), ("complex", report.complex)):
        console.print(_part_line(name, part), style="yellow" if part.why else "green" if part.met else "bold red")
    if report.shortened:
        console.print(f"shortened: {report.shortened}", style="yellow")
    if as_json:
        sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
    raise typer.Exit(report.exit_code)


def _part_line(name: str, part: Part) -> str:
    if part.ttft_ms is None:
        return f"CANNOT BE JUDGED {name}: {part.why}"
    first = (
        f"first token p50 {part.ttft_ms.p50:.0f} ms, p95 {part.ttft_ms.p95:.0f} ms (target {part.target_p95_ms:g} ms)"
    )
    speed = "" if part.tokens_per_s is None else f", then {part.tokens_per_s:.0f} tokens/s"
    served = ", ".join(f"{rung} {count}" for rung, count in part.served.items())
    verdict = "CANNOT BE JUDGED" if part.why else "ok  " if part.met else "MISS"
    failed = f"; {part.failed} failed" if part.failed else ""
    return f"{verdict} {name}: {first}{speed}; answered by {served}{failed}{'; ' + part.why if part.why else ''}"


def _stop(_number: int, _frame: object) -> NoReturn:
    raise SystemExit(143)
