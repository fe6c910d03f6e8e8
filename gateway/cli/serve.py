"""`gateway serve`: run the gateway, if asked with a stand-in heavy backend beside it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Optional
from urllib.parse import urlsplit

import structlog
import typer
import uvloop
from msgspec.structs import replace

from gateway.config import HEAVY, STAND_IN_URL, config_path, load_config
from gateway.config_sections import MOST_WORKERS, Config
from gateway.control.crew import CannotServeAtAll
from gateway.control.process import settle_garbage_collector
from gateway.control.supervisor import Supervisor
from gateway.listening import CannotListen, address
from gateway.observe import logs
from gateway.observe.log_sink import LogSink
from policies.core.clock import SystemClock

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_show_locals=False)
_log = structlog.get_logger("gateway")

#: Seconds that the stand-in may take to end after SIGTERM before it is killed.
_STAND_IN_GRACE_S = 5.0


@app.command()
def serve(
    config_file: Annotated[
        Optional[Path],  # noqa: UP045  typer reads it at run time
        typer.Option("--config", help="The operator's file [./gateway.yaml, else built-in defaults]."),
    ] = None,
    policies: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--policies", help="Folder of policy files, instead of the configured one."),
    ] = None,
    workers: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            "--workers", min=1, max=MOST_WORKERS, help="Processes that answer [`workers` of the file, else 1]."
        ),
    ] = None,
    with_stand_in: Annotated[
        bool, typer.Option(help="Also run a stand-in heavy backend, unless `heavy` is another service.")
    ] = False,
) -> None:
    """Run the gateway until SIGTERM or Ctrl-C. SIGHUP reads the file again and replaces the workers."""

    configured = reader(config_file, policies, workers)
    config = configured()
    sink = logs.configure(config.log.level, human=config.log.format == "console")
    stand_in = _start_stand_in(config) if with_stand_in else None
    try:
        uvloop.run(run(config, configured, sink))
    except (CannotListen, CannotServeAtAll) as error:
        print(f"gateway serve: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    except OSError as error:
        print(f"gateway serve: the operating system refused something: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    finally:
        if stand_in is not None:
            _stop(stand_in)


def reader(config_file: Path | None, policies: Path | None, workers: int | None) -> Callable[[], Config]:
    """Reads the configuration, each time anew, with what the command line changes. Each call may raise ConfigError."""
    # Found once: a file that has gone meanwhile is a mistake to be told of, not a wish for the built-in defaults.
    found = config_file or config_path(os.environ)

    def configured() -> Config:
        config = load_config(found, os.environ)
        if policies is not None:
            config = replace(config, policies_dir=policies.absolute())
        return config if workers is None else replace(config, workers=workers)

    return configured


async def run(config: Config, reread: Callable[[], Config], sink: LogSink) -> None:
    """Build and run the gateway. `reread`: the configuration as it is at a rolling restart.

    Raises ConfigError, CannotListen, CannotServeAtAll.
    """
    from gateway.app import build_supervisor

    supervisor = build_supervisor(config, SystemClock(), reread)
    supervisor.metrics.source(sink.families)
    await supervisor.run(_announcer(config))


def _announcer(config: Config) -> Callable[[Supervisor], None]:
    def announce(supervisor: Supervisor) -> None:
        settle_garbage_collector()
        base = f"http://{address(config.listen.host, supervisor.crew.data_port)}"
        admin = address(config.admin.host, supervisor.admin_port)
        _log.info("ready", data=base, admin=admin, workers=config.workers)
        if sys.stderr.isatty() or os.environ.get("GATEWAY_HINTS"):
            print(_hints(base, supervisor.admin_port), file=sys.stderr, flush=True)

    return announce


def _hints(base: str, admin_port: int) -> str:
    return f"""
The gateway is ready. Try:

  curl -si {base}/v1/chat/completions -H 'content-type: application/json' \\
    -d '{{"model":"auto","messages":[{{"role":"user","content":"Hello!"}}]}}'
  curl -s {base}/readyz
  curl -s http://127.0.0.1:{admin_port}/metrics | grep gateway_requests

Every answer says in its x-gateway-* headers who answered and why; `gateway why REQUEST_ID` tells the whole story.
"""


def no_stand_in(config: Config, env: Mapping[str, str]) -> str:
    """Why no stand-in is to be started; empty when one is."""
    if env.get("HEAVY_BASE_URL"):
        return "HEAVY_BASE_URL is set"
    heavy = config.backends.get(HEAVY)
    if heavy is None:
        return f"there is no backend `{HEAVY}`"
    if heavy.kind != "openai":
        return f"the backend `{HEAVY}` is of kind {heavy.kind}"
    if heavy.base_url != STAND_IN_URL:
        return f"the backend `{HEAVY}` is at {heavy.base_url}, not at {STAND_IN_URL}"
    return ""


def _start_stand_in(config: Config) -> subprocess.Popen[bytes] | None:
    """The stand-in where backend `heavy` expects it, or None. Its own process, ended with ours."""
    reason = no_stand_in(config, os.environ)
    if reason:
        print(f"gateway serve: no stand-in is started: {reason}", file=sys.stderr)
        return None
    address = urlsplit(STAND_IN_URL)
    return subprocess.Popen(
        [
            sys.executable, "-m", "gateway.cli.main", "model-server",
            "--host", str(address.hostname), "--port", str(address.port), "--end-with-parent",
        ],
        # A Ctrl-C at the terminal is ours to handle: the gateway needs the stand-in until it has drained.
        start_new_session=True,
    )  # fmt: skip


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_STAND_IN_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
