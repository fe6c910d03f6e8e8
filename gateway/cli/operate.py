"""Verbs that ask a running gateway's admin API: `why`, `backends`, `cache`."""

from __future__ import annotations

import json
import os
import sys
import urllib.error
import urllib.request
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.tree import Tree

from gateway.config import load_config

backends_app = typer.Typer(
    add_completion=False, rich_markup_mode=None, no_args_is_help=True, pretty_exceptions_show_locals=False
)
cache_app = typer.Typer(
    add_completion=False, rich_markup_mode=None, no_args_is_help=True, pretty_exceptions_show_locals=False
)
why_app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_show_locals=False)

AdminUrl = Annotated[str, typer.Option("--admin", help="Admin API [from the configuration, else 127.0.0.1:8081].")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]

#: How long an operator waits at most.
_LIMIT_S = 10.0


def ask(admin: str, path: str) -> Any:
    """GET a path of the admin API. Ends the command with 1 and a sentence when that fails."""
    config = load_config(None, os.environ)
    base = (admin or f"http://{config.admin.host}:{config.admin.port}").rstrip("/")
    request = urllib.request.Request(base + path)  # noqa: S310  the operator gives the address
    token = config.admin.token or config.admin.view_token
    if token is not None:
        request.add_header("Authorization", f"Bearer {token.reveal()}")
    try:
        with urllib.request.urlopen(request, timeout=_LIMIT_S) as answer:  # noqa: S310
            return json.load(answer)
    except urllib.error.HTTPError as error:
        try:
            reason = json.load(error)["error"]
        except (ValueError, KeyError):
            reason = f"status {error.code}"
        print(f"gateway: {reason}", file=sys.stderr)
    except OSError as error:
        print(f"gateway: no admin API at {base} ({error}). Is the gateway running? --admin URL.", file=sys.stderr)
    raise typer.Exit(1)


@why_app.command()
def why(
    request_id: Annotated[str, typer.Argument(help="The answer's x-gateway-request-id.")],
    admin: AdminUrl = "",
    as_json: Json = False,
) -> None:
    """Explain one recent request: scores, rule, look-ups, attempts, ladder."""
    told = ask(admin, f"/debug/requests/{request_id}")
    if as_json:
        print(json.dumps(told, indent=2))
        return
    tree = Tree(
        f"{told.pop('request_id')}: {told['outcome']} from {told['served_by'] or '-'} ({told['rung'] or 'none'})"
    )
    _grow(tree, told)
    Console().print(tree)


def _grow(tree: Tree, value: Any) -> None:
    """A nested value as a tree."""
    pairs = value.items() if isinstance(value, dict) else ((str(i + 1), item) for i, item in enumerate(value))
    for key, item in pairs:
        if isinstance(item, dict | list):
            if item:
                _grow(tree.add(str(key)), item)
        elif item not in (None, ""):
            tree.add(f"{key}: {item}")


@backends_app.callback()
def _backends() -> None:
    """What stands behind the gateway."""


@cache_app.callback()
def _cache() -> None:
    """What the caches hold and how they do."""


@backends_app.command(name="list")
def list_backends(admin: AdminUrl = "", as_json: Json = False) -> None:
    """Every backend, whether it may be called, and its breaker."""
    told = ask(admin, "/backends")
    if as_json:
        print(json.dumps(told, indent=2))
        return
    table = Table("worker", "backend", "role", "model", "ready", "guard")
    for worker, backends in told.items():
        for item in backends:
            ready = "yes" if item["ready"] else item["reason"]
            table.add_row(worker, item["name"], item["role"], item["model"], ready, item["guard"])
    Console().print(table)


@cache_app.command()
def stats(admin: AdminUrl = "", as_json: Json = False) -> None:
    """Hits, misses, bytes and the like."""
    told = ask(admin, "/cache")
    if as_json:
        print(json.dumps(told, indent=2))
        return
    table = Table("worker", "what", "value")
    for worker, caches in told.items():
        for name, figure in caches["result"].items():
            table.add_row(worker, name, f"{figure:g}")
    Console().print(table)
