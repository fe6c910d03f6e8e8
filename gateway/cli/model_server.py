"""`gateway model-server`: serve the embedded models, or a script of faults, as a backend of its own."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Optional

import structlog
import typer
import uvloop

from gateway.config import load_config
from gateway.config_sections import BackendSettings, Config, ModelSettings
from gateway.listening import CannotListen, listening_on
from gateway.observe import logs
from policies.core.clock import SystemClock

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_show_locals=False)
_log = structlog.get_logger("gateway.model_server")

#: Names that the served chat model answers to; any other name reaches it too.
CHAT_NAME = "stand-in"


@app.command()
def model_server(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 = any free one.")] = 9100,
    script: Annotated[
        Optional[Path],  # noqa: UP045  typer reads it at run time
        typer.Option(help="Serve this script of answers and faults instead of models; `-` = the built-in ones."),
    ] = None,
    variant: Annotated[str, typer.Option(help="Variant of the chat model: fp32 or q8.")] = "fp32",
    end_with_parent: Annotated[bool, typer.Option(help="End when the starting process ends.", hidden=True)] = False,
) -> None:
    """Serve chat (OpenAI API) and the recommender (Open Inference Protocol) until SIGTERM or Ctrl-C."""
    logs.configure("info")
    if end_with_parent:
        _end_with_parent()
    try:
        if script is not None:
            asyncio.run(_serve_script(host, port, script))
        else:
            uvloop.run(_serve_models(host, port, variant))
    except CannotListen as error:
        print(f"gateway model-server: {error}", file=sys.stderr)
        raise typer.Exit(1) from None


def _end_with_parent() -> None:
    """Linux: the kernel sends SIGTERM when the parent is gone, even after SIGKILL."""
    pr_set_pdeathsig = 1
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


async def _until_signal() -> None:
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    await stop.wait()


async def _serve_script(host: str, port: int, script: Path) -> None:
    from backends.scripted_server import serve_scripts
    from backends.scripted_steps import load_scripts

    scripts = None if str(script) == "-" else load_scripts(script)
    with listening_on(host, port):
        server = await serve_scripts(host, port, scripts)
    _log.info("serving_script", address=server.url)
    try:
        await _until_signal()
    finally:
        await server.close()


def _config(variant: str) -> Config:
    """The embedded models as backends named after what they serve."""
    import msgspec

    base = load_config(None, os.environ)
    chat = msgspec.structs.replace(base.models.get("smollm2", ModelSettings()), variant=variant)
    return msgspec.structs.replace(
        base,
        models={**base.models, "smollm2": chat},
        backends={
            CHAT_NAME: BackendSettings(kind="onnx_chat", model="smollm2"),
            "two-tower": BackendSettings(kind="onnx_two_tower", model="two-tower"),
            "minilm": BackendSettings(kind="onnx_embedder", model="minilm"),
        },
    )


async def _serve_models(host: str, port: int, variant: str) -> None:
    from gateway.app import Surroundings, build_backends
    from gateway.control.hub import WorkerPort
    from gateway.control.sockets import bind_sockets, close_groups
    from gateway.direct import DirectHandler
    from gateway.edge.http_server import EdgeLimits, HttpEdge
    from gateway.edge.listener import Listener
    from gateway.observe.logs import LogObserver
    from gateway.readiness import Readiness
    from policies.core.events import Observers
    from policies.core.shared_state import Alone

    clock = SystemClock()
    around = Surroundings(clock, WorkerPort("model-server"))
    built = build_backends(_config(variant), around, Observers([LogObserver(clock)]), Alone())
    readiness = Readiness()
    for place in built.places:
        readiness.watch(place, required=place.info.name == CHAT_NAME)
    limits = EdgeLimits()
    edge = HttpEdge(DirectHandler(built.backends, CHAT_NAME, clock), readiness, clock, limits, "basic")
    listener = Listener(edge, limits)
    groups = bind_sockets(host, port, 1)
    bound = await listener.start(groups[0])
    close_groups(groups)
    loading = [asyncio.create_task(place.run(), name=f"model-{place.info.name}") for place in built.places]
    await asyncio.gather(*(place.first_try() for place in built.places))
    readiness.warming = False
    _log.info("ready", address=f"http://{host}:{bound}/v1", models=list(built.backends))
    try:
        await _until_signal()
    finally:
        readiness.draining = True
        await listener.lame_duck(5.0)
        await listener.drain(10.0, 0.25)
        await listener.close()
        for task in loading:
            task.cancel()
        await asyncio.gather(*loading, return_exceptions=True)
        for backend in built.backends.values():
            await backend.aclose()
