"""`gateway worker` and `gateway model-host`: the processes that `gateway serve` starts. Not for people."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
import uvloop

from gateway.control.hub import WorkerPort
from gateway.control.hub_client import NoSupervisor
from gateway.control.process import Life, Place, run_process
from gateway.control.start import Start
from policies.core.clock import SystemClock

worker_app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_show_locals=False)
model_host_app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_show_locals=False)

Hub = Annotated[Path, typer.Option(help="The supervisor's socket.")]
Name = Annotated[str, typer.Option(help="This process's name.")]
Supervisor = Annotated[int, typer.Option(help="The supervisor's process id.")]


@worker_app.command()
def worker(
    *,
    hub: Hub,
    name: Name,
    supervisor: Supervisor,
    sockets: Annotated[str, typer.Option(help="File descriptors of all workers' sockets: 3,4;5,6.")],
    own: Annotated[int, typer.Option(help="Which of them are this worker's.")],
) -> None:
    """One worker of a running gateway."""
    from gateway.control.sockets import inherited
    from gateway.control.worker_process import Doors, worker_life

    clock = SystemClock()
    doors = Doors(inherited(sockets), own)
    _run(Place(hub, name, supervisor), lambda start, port: worker_life(start, port, doors, clock))


@model_host_app.command()
def model_host(*, hub: Hub, name: Name, supervisor: Supervisor) -> None:
    """The models of a running gateway."""
    from gateway.control.model_host import model_host_life

    clock = SystemClock()
    _run(Place(hub, name, supervisor), lambda start, port: model_host_life(start, port, clock))


def _run(place: Place, build: Callable[[Start, WorkerPort], Life]) -> None:
    try:
        uvloop.run(run_process(place, SystemClock(), build))
    except NoSupervisor as error:
        print(f"gateway {place.name}: no supervisor: {error}. It is started by `gateway serve`.", file=sys.stderr)
        raise typer.Exit(1) from None
