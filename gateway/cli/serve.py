"""`gateway serve`: run the gateway, if asked with a stand-in heavy backend beside it."""

from __future__ import annotations

import gc
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

from gateway.config import HEAVY, STAND_IN_URL, load_config
from gateway.config_sections import Config
from gateway.control.hub import InProcessHub, WorkerPort
from gateway.control.policy_store import PolicyStore
from gateway.control.supervisor import Supervisor
from gateway.control.worker import Worker
from gateway.listening import CannotListen
from gateway.observe import logs
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
    with_stand_in: Annotated[
        bool, typer.Option(help="Also run a stand-in heavy backend, unless `heavy` is another service.")
    ] = False,
) -> None:
    """Run the gateway until SIGTERM or Ctrl-C."""
    import msgspec

    config = load_config(config_file, os.environ)
    if policies is not None:
        config = msgspec.structs.replace(config, policies_dir=policies.absolute())
    logs.configure(config.log.level, human=config.log.format == "console")
    stand_in = _start_stand_in(config) if with_stand_in else None
    try:
        uvloop.run(run(config))
    except CannotListen as error:
        print(f"gateway serve: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    except OSError as error:
        print(f"gateway serve: the operating system refused something: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    finally:
        if stand_in is not None:
            _stop(stand_in)


async def run(config: Config) -> None:
    """Build and run everything in this process."""
    from gateway.app import build_worker, builtin_policies
    from gateway.control.policy_store import keep_folder
    from gateway.known import known_names
    from routing.heads import Heads

    clock = SystemClock()
    heads = Heads.shipped()
    store = PolicyStore.open(
        config.policies_dir,
        known_names(config, heads),
        clock,
        builtin_policies(config),
        keep_folder(config.state_dir, config.policies_dir),
    )
    for line in store.notices():
        _log.error("policy_notice", problem=line)
    hub, port = InProcessHub(), WorkerPort("worker-1")
    hub.attach(port)
    worker = build_worker(config, store.current, heads, clock, port)
    await Supervisor(config, store, clock, hub).run(worker, _announcer(config))


def _announcer(config: Config) -> Callable[[Worker, Supervisor], None]:
    def announce(worker: Worker, supervisor: Supervisor) -> None:
        _settle_garbage_collector()
        host = config.listen.host
        _log.info(
            "ready", data=f"http://{host}:{worker.bound_port}", admin=f"{config.admin.host}:{supervisor.admin_port}"
        )
        if sys.stderr.isatty() or os.environ.get("GATEWAY_HINTS"):
            print(_hints(f"http://{host}:{worker.bound_port}", supervisor.admin_port), file=sys.stderr, flush=True)

    return announce


def _settle_garbage_collector() -> None:
    """What start-up made stays for good: take it out of every later collection, and collect less often.

    A request makes a few dozen short-lived containers; with the default thresholds the collector's share of a cached
    answer is larger than the cache's.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


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
        ]
    )  # fmt: skip


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_STAND_IN_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
