"""`gateway policy`: check policy files, print the JSON Schema that editors use."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from gateway.config import load_config
from gateway.known import known_names
from policies.core.errors import ConfigError
from policies.language.json_schema import policy_schema
from policies.language.loader import PolicyFile, conflicts, inside_bytes, parse_policy, policy_paths
from policies.language.semantics import Known
from routing.heads import Heads

app = typer.Typer(help="Check and describe policy files.", no_args_is_help=True, pretty_exceptions_show_locals=False)

INVALID = 2
_LINE = re.compile(r"(?P<file>.+?):(?P<line>\d+):(?P<column>\d+): (?P<message>.*)", re.DOTALL)

ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="The operator's gateway.yaml (default: $GATEWAY_CONFIG, ./gateway.yaml)."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")]


@app.command()
def check(
    paths: Annotated[
        list[Path] | None, typer.Argument(help="Policy files or folders; left out: the configured policies folder.")
    ] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check policy files and report every mistake at once, as file:line:column. Exit 0: all good, 2: not."""
    problems: list[str] = []
    files: list[PolicyFile] = []
    try:
        operator = load_config(config, os.environ)
        known = known_names(operator, Heads())
        for folder, path in _expand(paths or [_shown(operator.policies_dir)]):
            problems += _check_one(path, folder, known, files)
    except ConfigError as error:
        problems += error.problems
    report(problems, [f"{file.path}: ok, {file.policy.policy}@{file.policy.version}" for file in files], as_json)


@app.command()
def schema(
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write it to this file instead of printing it.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Accepted for scripts; the schema is JSON anyway.")] = False,
) -> None:
    """Print the JSON Schema of a policy file, for completion and checks in an editor."""
    del as_json
    text = json.dumps(policy_schema(), indent=2, ensure_ascii=False) + "\n"
    if out is None:
        sys.stdout.write(text)
        return
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        typer.echo(f"{out}: cannot be written: {error.strerror}", err=True)
        raise typer.Exit(INVALID) from None


def _check_one(path: Path, folder: Path, known: Known, files: list[PolicyFile]) -> list[str]:
    """Problems of one file, also with those before it; a good one joins `files`."""
    try:
        file = parse_policy(path, inside_bytes(path, folder), known)
    except ConfigError as error:
        return error.problems
    clashes = conflicts(file, files)
    if not clashes:
        files.append(file)
    return clashes


def _expand(paths: list[Path]) -> list[tuple[Path, Path]]:
    """(folder, file) for every file that is named or lies in a named folder. Raises ConfigError."""
    found: list[tuple[Path, Path]] = []
    for path in paths:
        if not path.is_dir():
            found.append((path.resolve().parent, path))
            continue
        inside = policy_paths(path)
        if not inside:
            raise ConfigError([f"{path}:1:1: there is no policy file (*.yaml) in this folder"])
        found += [(path, file) for file in inside]
    return list(dict.fromkeys(found))


def _shown(path: Path) -> Path:
    """Shorter where that is possible: people read it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def report(problems: list[str], good: list[str], as_json: bool) -> None:
    """Print what was found and leave with exit code 2 if there were problems."""
    if as_json:
        typer.echo(
            json.dumps(
                {"ok": not problems, "good": good, "problems": [_fields(p) for p in problems]}, ensure_ascii=False
            )
        )
    else:
        for line in good:
            typer.echo(line)
        for line in problems:
            typer.echo(line, err=True)
        if problems:
            typer.echo(f"{len(problems)} problem{'s' if len(problems) > 1 else ''}", err=True)
    if problems:
        raise typer.Exit(INVALID)


def _fields(problem: str) -> dict[str, Any]:
    match = _LINE.fullmatch(problem)
    if match is None:
        return {"file": "", "line": 1, "column": 1, "message": problem}
    return {**match.groupdict(), "line": int(match["line"]), "column": int(match["column"])}
