"""Verbs that ask a running gateway's admin API: `why`, `backends`, `cache`, `workers`."""

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
from gateway.listening import address

backends_app = typer.Typer(
    add_completion=False, rich_markup_mode=None, no_args_is_help=True, pretty_exceptions_show_locals=False
)
cache_app = typer.Typer(
    add_completion=False, rich_markup_mode=None, no_args_is_help=True, pretty_exceptions_show_locals=False
)
workers_app = typer.Typer(
    add_completion=False, rich_markup_mode=None, no_args_is_help=True, pretty_exceptions_show_locals=False
)
why_app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_show_locals=False)

AdminUrl = Annotated[str, typer.Option("--admin", help="Admin API [from the configuration, else 127.0.0.1:8081].")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]

#: How long an operator waits at most.
_LIMIT_S = 10.0
#: A rolling restart waits for what is under way in each worker.
_RESTART_LIMIT_S = 3600.0


def ask(admin: str, path: str) -> Any:
    """GET a path of the admin API. Ends the command with 1 and a sentence when that fails."""
    return _send(admin, path, None, _LIMIT_S)


def change(admin: str, path: str, limit_s: float = _LIMIT_S) -> Any:
    """POST to a path of the admin API. What the API refuses with an answer of its own (422, 500) is returned too."""
    return _send(admin, path, b"{}", limit_s)


def _send(admin: str, path: str, body: bytes | None, limit_s: float) -> Any:
    config = load_config(None, os.environ)
    base = (admin or f"http://{address(config.admin.host, config.admin.port)}").rstrip("/")
    request = urllib.request.Request(base + path, body)  # noqa: S310  the operator gives the address
    if body is not None:
        request.add_header("Content-Type", "application/json")
    token = config.admin.token or (config.admin.view_token if body is None else None)
    if token is not None:
        request.add_header("Authorization", f"Bearer {token.reveal()}")
    try:
        with urllib.request.urlopen(request, timeout=limit_s) as answer:  # noqa: S310
            return json.load(answer)
    except urllib.error.HTTPError as error:
        try:
            told = json.load(error)
            if body is not None and "error" not in told:
                return told
            reason = told["error"]
        except (ValueError, KeyError):
            reason = f"status {error.code}"
        print(f"gateway: {reason}", file=sys.stderr)
    except OSError as error:
        print(f"gateway: no admin API at {base} ({error}). Is the gateway running? --admin URL.", file=sys.stderr)
    raise typer.Exit(1)


def _answers(told: dict[str, Any]) -> list[tuple[str, Any]]:
    """What each worker answered; those that could not are named on standard error."""
    found = []
    for worker, answer in told.items():
        if isinstance(answer, dict) and set(answer) == {"error"}:
            print(f"gateway: no answer of {worker}: {answer['error']}", file=sys.stderr)
        else:
            found.append((worker, answer))
    return found


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
    table = Table("worker", "backend", "role", "model", "ready", "breaker", "in use", "fingerprint")
    for worker, backends in _answers(told):
        for item in backends:
            ready = "yes" if item["ready"] else item["reason"]
            used = f"{item.get('in_use', '')}/{item.get('limit', '')}"
            table.add_row(
                worker, item["name"], item["role"], item["model"], ready, item.get("breaker", ""), used,
                item["fingerprint"][:12],
            )  # fmt: skip
    Console().print(table)


@cache_app.command()
def stats(admin: AdminUrl = "", as_json: Json = False) -> None:
    """Hits, misses, bytes and the like."""
    told = ask(admin, "/cache")
    if as_json:
        print(json.dumps(told, indent=2))
        return
    table = Table("worker", "what", "value")
    for worker, caches in _answers(told):
        for name, figure in caches["result"].items():
            table.add_row(worker, name, f"{figure:g}")
    Console().print(table)


@workers_app.callback()
def _workers() -> None:
    """The processes that answer requests."""


@workers_app.command(name="list")
def list_workers(admin: AdminUrl = "", as_json: Json = False) -> None:
    """Every process, what it does, and how often one of its place has ended by itself."""
    told = ask(admin, "/workers")
    if as_json:
        print(json.dumps(told, indent=2))
        return
    Console().print(_workers_table(told["workers"]))


@workers_app.command()
def restart(admin: AdminUrl = "", as_json: Json = False) -> None:
    """Replace every process by a new one, one after another, without dropping a request. The same as SIGHUP.

    Exit codes: 0 all replaced, 1 something went wrong: what was not replaced goes on as before.
    """
    told = change(admin, "/workers/restart", _RESTART_LIMIT_S)
    if as_json:
        print(json.dumps(told, indent=2))
    else:
        Console().print(_workers_table(told["workers"]))
        for problem in told["problems"]:
            print(f"gateway: {problem}", file=sys.stderr)
    raise typer.Exit(1 if told["problems"] else 0)


def _workers_table(places: list[dict[str, Any]]) -> Table:
    table = Table("place", "process", "pid", "state", "up", "in flight", "ended", "note")
    for place in places:
        again = f"; again in {place['again_in_s']:g} s" if "again_in_s" in place else ""
        leaving = "; ".join(f"{name} is leaving" for name in place["leaving"])
        notes = [("keeps ending: " if place["crash_loop"] else "") + place.get("reason", "") + again, leaving]
        note = "; ".join(filter(None, notes))
        table.add_row(
            place["name"], place["process"], str(place["pid"] or "-"), place["state"], f"{place['up_s']:.0f} s",
            str(place["in_flight"]), str(place["ended"]), note,
        )  # fmt: skip
    return table
