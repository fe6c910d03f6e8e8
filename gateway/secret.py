"""Secrets that cannot be printed by accident, and one that the gateway keeps for itself."""

from __future__ import annotations

import hmac
import os
import secrets
from pathlib import Path

from policies.core.errors import ConfigError


class Secret:
    """A text that shows as `***` wherever it is printed, logged or formatted. `reveal()` is the only way to it."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def reveal(self) -> str:
        return self._value

    def __repr__(self) -> str:
        return "***"

    __str__ = __repr__

    def __bool__(self) -> bool:
        return bool(self._value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and hmac.compare_digest(self._value.encode(), other._value.encode())

    def __hash__(self) -> int:
        return hash(self._value)

    def __reduce__(self) -> str:
        raise TypeError("a Secret is not to be pickled")


def kept_secret(path: Path) -> Secret:
    """The random secret kept in `path` (0600), made on first use. Raises ConfigError when it can be neither read nor
    written.

    Processes that start at the same moment agree: the first to link its file into place wins.
    """
    try:
        kept = _kept(path)
    except OSError as error:
        raise ConfigError([f"{path}: the cache's secret cannot be kept here: {error.strerror or error}"]) from None
    except UnicodeDecodeError:
        kept = Secret("")
    if not kept:
        raise ConfigError([f"{path}: this is no secret of the cache; remove the file, and a new one is made"])
    return kept


def _kept(path: Path) -> Secret:
    try:
        return Secret(path.read_text("ascii").strip())
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w", encoding="ascii") as file:
            file.write(secrets.token_urlsafe(32) + "\n")
        try:
            os.link(fresh, path)
        except FileExistsError:
            pass  # another process was first; its secret holds
    finally:
        fresh.unlink(missing_ok=True)
    return Secret(path.read_text("ascii").strip())
