"""The file of API keys, `keys.yaml`. It holds digests only: a key itself is shown once, when it is made.

    keys:
      - id: shop-web
        sha256: 5d0c...            # of the whole key, 64 hexadecimal digits
        tenant: shop
        class: normal              # vip, normal, batch
        policies: [chatbot]        # left out = all
        expires: 2026-12-31        # left out = never

A key is `gw-` and 43 characters from 32 random bytes, so a plain digest is enough: there is nothing to guess.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import tempfile
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from policies.core.errors import ConfigError
from policies.language.check import check
from policies.language.problems import Problems
from policies.language.schema import Later, Name, Section
from policies.language.yaml_reader import position, read_bytes, read_yaml

PREFIX = "gw-"
_HEADER = "# API keys of the gateway, written by `gateway keys`. Holds digests, not keys. Comments are not kept.\n"

KeyClass = Literal["vip", "normal", "batch"]


class ApiKey(Section, frozen=True, kw_only=True):
    """One key. `expires` is in seconds since 1970-01-01 UTC; None = never."""

    id: Name
    #: Whoever takes it for the place of the key itself must not find it in a log.
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$", extra={"secret": True})]
    tenant: Name
    priority: KeyClass = msgspec.field(default="normal", name="class")
    #: Names of the policies it may use; None = all.
    policies: tuple[Name, ...] | None = None
    chaos: Later = None
    expires: Annotated[float, Meta(extra={"unit": "moment"})] | None = None


class KeyFile(Section, frozen=True, kw_only=True):
    #: A key may stand where its entry belongs.
    keys: Annotated[tuple[Annotated[ApiKey, Meta(extra={"secret": True})], ...], Meta(extra={"secret": True})] = ()


def digest(key: str) -> str:
    """What the file holds of a key: SHA-256 in hexadecimal."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def new_key() -> str:
    return PREFIX + secrets.token_urlsafe(32)


def parse_keys(data: bytes, path: Path) -> tuple[ApiKey, ...]:
    """The keys in `data`; `path` is for messages. Raises ConfigError with every problem."""
    problems = Problems(str(path))
    root = read_yaml(data, problems)
    if root is None:
        raise ConfigError(problems.lines())
    keys = check(root, KeyFile, problems).keys
    for field in ("id", "sha256"):
        seen: set[str] = set()
        for index, key in enumerate(keys):
            value = getattr(key, field)
            where = ("keys", index, field)
            if value and value in seen and not problems.touches(where):
                said = (
                    f"the id `{value}` is taken by a key above"
                    if field == "id"
                    else "this digest is that of a key above"
                )
                problems.add(position(root, where), said, where)
            seen.add(value)
    problems.raise_any()
    return keys


def load_keys(path: Path) -> tuple[ApiKey, ...]:
    """The keys of a file; none when there is no file. Raises ConfigError."""
    if not path.exists():
        return ()
    return parse_keys(read_bytes(path), path)


def create_key(path: Path, key: ApiKey) -> None:
    """Add a key to the file, which is made if need be. Raises ConfigError when its id is taken."""
    with _locked(path):
        keys = load_keys(path)
        if any(other.id == key.id for other in keys):
            raise ConfigError([f"{path}: there is a key `{key.id}` already; revoke it first, or choose another id"])
        _write(path, (*keys, key))


def revoke_key(path: Path, key_id: str) -> bool:
    """Take a key out of the file; False when it has none of that id. Raises ConfigError."""
    with _locked(path):
        keys = load_keys(path)
        left = tuple(key for key in keys if key.id != key_id)
        if len(left) == len(keys):
            return False
        _write(path, left)
        return True


def moment_text(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _as_written(key: ApiKey) -> dict[str, object]:
    written: dict[str, object] = {"id": key.id, "sha256": key.sha256, "tenant": key.tenant, "class": key.priority}
    if key.policies is not None:
        written["policies"] = list(key.policies)
    if key.expires is not None:
        written["expires"] = moment_text(key.expires)
    return written


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold off another `gateway keys` at work on the same file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path.with_name(f".{path.name}.lock"), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError([f"{path}: cannot be written: {error.strerror}"]) from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _write(path: Path, keys: Sequence[ApiKey]) -> None:
    """Replace the file as a whole, so that no reader ever sees half of it. Readable by its owner only."""
    # JSON values are YAML values, and leave no doubt about what is text: an id may be `1e5` or `null`.
    entries = [[f"{name}: {json.dumps(value)}" for name, value in _as_written(key).items()] for key in keys]
    body = "".join("  - " + "\n    ".join(entry) + "\n" for entry in entries)
    text = _HEADER + (f"keys:\n{body}" if body else "keys: []\n")
    real = path.resolve()
    fresh: Path | None = None
    try:
        handle, name = tempfile.mkstemp(prefix=f".{real.name}.", dir=real.parent)  # mode 0600
        fresh = Path(name)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(real)
        fresh = None
    except OSError as error:
        raise ConfigError([f"{path}: cannot be written: {error.strerror}"]) from None
    finally:
        if fresh is not None:
            fresh.unlink(missing_ok=True)
