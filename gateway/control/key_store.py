"""The keys in force, kept up with their file by the supervisor: workers are given them and never read the file."""

from __future__ import annotations

from pathlib import Path

from gateway.control.start import KeysInForce
from gateway.keys import parse_keys
from policies.core.errors import ConfigError
from policies.language.yaml_reader import read_bytes


class KeyStore:
    """The last good version of one keys file. A file that is missing at the start means that there are no keys."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.in_force = KeysInForce()

    @classmethod
    def open(cls, path: Path) -> KeyStore:
        """Raises ConfigError when the file is there but cannot be used: at a start there is no last good one."""
        store = cls(path)
        store.reload()
        if store.in_force.problem:
            raise ConfigError(store.in_force.problem.split("\n"))
        return store

    def reload(self) -> bool:
        """Read the file again; True when `in_force` is another than before. Never raises: see its `problem`."""
        before = self.in_force
        self.in_force = self._read()
        return self.in_force != before

    def _read(self) -> KeysInForce:
        held = self.in_force.data
        if not self._path.exists():
            # Gone after it was there: an editor in between two steps, or a mistake. Revoke with an empty list instead.
            gone = f"{self._path}: the file has gone; the keys that it held are still in force"
            return KeysInForce(held, gone if held is not None else "")
        try:
            data = read_bytes(self._path)
            parse_keys(data, self._path)
        except ConfigError as error:
            return KeysInForce(held, "\n".join(error.problems))
        return KeysInForce(data)
