"""`gateway keys`: make, list and revoke API keys. A running gateway takes a change up within two seconds."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn, cast

import typer
from rich.console import Console
from rich.table import Table

from gateway.cli.sections import flat
from gateway.config import load_config
from gateway.keys import ApiKey, KeyClass, create_key, digest, load_keys, moment_text, new_key, revoke_key
from policies.core.clock import SystemClock
from policies.core.errors import ConfigError
from policies.language.units import UnitError, duration, moment

app = typer.Typer(help="API keys: who may use the gateway.", no_args_is_help=True, pretty_exceptions_show_locals=False)

INVALID = 2
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")

FileOption = Annotated[
    Path | None, typer.Option("--file", "-f", help="The keys file (default: keys_file of the configuration).")
]
ConfigOption = Annotated[Path | None, typer.Option("--config", "-c", help="The operator's gateway.yaml.")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")]


@dataclass(frozen=True, slots=True)
class Grants:
    """What a new key may do."""

    priority: Annotated[str, typer.Option("--class", help="vip, normal or batch.")] = "normal"
    policy: Annotated[list[str] | None, typer.Option(help="A policy the key may use; repeat it. Left out: all.")] = None
    chaos: Annotated[bool, typer.Option("--chaos", hidden=True)] = False
    expires: Annotated[str | None, typer.Option(help="A date (2026-12-31) or a time from now (30d).")] = None


@dataclass(frozen=True, slots=True)
class Place:
    """Which file, and how to print."""

    file: FileOption = None
    config: ConfigOption = None
    as_json: JsonOption = False

    def path(self) -> Path:
        return self.file if self.file is not None else load_config(self.config, os.environ).keys_file


@app.command()
@flat
def create(
    key_id: Annotated[str, typer.Argument(help="A name for the key, such as shop-web.")],
    tenant: Annotated[str, typer.Option(help="Whose requests these are.")],
    grants: Grants,
    place: Place,
) -> None:
    """Make a key. It is printed once and kept nowhere: the file holds its digest."""
    secret = new_key()
    try:
        entry = _entry(key_id, tenant, grants, digest(secret))
        path = place.path()
        create_key(path, entry)
    except ConfigError as error:
        _fail(error.problems)
    if place.as_json:
        typer.echo(json.dumps({**_shown(entry), "key": secret, "file": str(path)}))
        return
    typer.echo(secret)
    typer.echo(f"Key {key_id!r} of tenant {tenant!r} added to {path}. It is shown this once: keep it now.", err=True)
    typer.echo("Use it as: Authorization: Bearer KEY", err=True)


@app.command("list")
@flat
def list_keys(place: Place) -> None:
    """Show the keys, without anything secret."""
    try:
        path = place.path()
        keys = load_keys(path)
    except ConfigError as error:
        _fail(error.problems)
    if place.as_json:
        typer.echo(json.dumps({"file": str(path), "keys": [_shown(key) for key in keys]}))
        return
    if not keys:
        typer.echo(f"There are no keys in {path}. Make one: gateway keys create NAME --tenant TENANT")
        return
    table = Table("id", "tenant", "class", "policies", "expires")
    for key in keys:
        table.add_row(key.id, key.tenant, key.priority, *_cells(key))
    Console().print(table)


@app.command()
@flat
def revoke(
    key_id: Annotated[str, typer.Argument(help="The key's id, as `gateway keys list` shows it.")],
    place: Place,
) -> None:
    """Take a key out of use, in running gateways within two seconds."""
    try:
        path = place.path()
        found = revoke_key(path, key_id)
        known = [key.id for key in load_keys(path)]
    except ConfigError as error:
        _fail(error.problems)
    if not found:
        _fail([f"there is no key {key_id[:80]!r} in {path}; keys: {', '.join(known[:20]) or 'none'}"])
    if place.as_json:
        typer.echo(json.dumps({"revoked": key_id, "file": str(path)}))
    else:
        typer.echo(f"Key {key_id!r} revoked.")


def _entry(key_id: str, tenant: str, grants: Grants, sha256: str) -> ApiKey:
    """The entry to add. Raises ConfigError."""
    if grants.chaos:
        raise ConfigError(["`--chaos` is not available in this version; leave it out"])
    for what, value in (("key id", key_id), ("tenant", tenant), *(("policy", name) for name in grants.policy or ())):
        if not _NAME.fullmatch(value):
            said = "may have letters, digits, dots, dashes and underscores only (64 at most)"
            raise ConfigError([f"the {what} {value[:80]!r} {said}"])
    if grants.priority not in ("vip", "normal", "batch"):
        raise ConfigError([f"the class {grants.priority[:80]!r} is none of vip, normal, batch"])
    return ApiKey(
        id=key_id,
        sha256=sha256,
        tenant=tenant,
        priority=cast(KeyClass, grants.priority),
        policies=tuple(grants.policy) if grants.policy else None,
        expires=None if grants.expires is None else _expiry(grants.expires),
    )


def _expiry(text: str) -> float:
    try:
        if re.fullmatch(r"[\d.]+[a-z]+", text):
            return SystemClock().wall() + duration(text)
        return moment(text)
    except UnitError as error:
        raise ConfigError([f"--expires: {error}"]) from None


def _shown(key: ApiKey) -> dict[str, Any]:
    return {
        "id": key.id,
        "tenant": key.tenant,
        "class": key.priority,
        "policies": None if key.policies is None else list(key.policies),
        "expires": None if key.expires is None else moment_text(key.expires),
    }


def _cells(key: ApiKey) -> tuple[str, str]:
    policies = "all" if key.policies is None else ", ".join(key.policies) or "none"
    expired = key.expires is not None and key.expires <= SystemClock().wall()
    expires = "never" if key.expires is None else moment_text(key.expires) + (" (expired)" if expired else "")
    return policies, expires


def _fail(problems: list[str]) -> NoReturn:
    for line in problems:
        typer.echo(line, err=True)
    raise typer.Exit(INVALID)
