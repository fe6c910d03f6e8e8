"""Identities that follow a keys file, as the supervisor and a worker do together."""

from __future__ import annotations

from pathlib import Path

from gateway.control.key_store import KeyStore
from gateway.edge.identity import Identities
from policies.core.clock import Clock


class FileKeys(Identities):
    """The keys of one file. Raises ConfigError when it cannot be used at the start."""

    def __init__(self, path: Path, clock: Clock, *, anonymous: bool = True) -> None:
        super().__init__(clock, anonymous=anonymous)
        self._store = KeyStore.open(path)
        self.take(self._store.in_force.data)

    def reload(self) -> bool:
        """Read the file again; True when other keys are in force afterwards."""
        before = self._store.in_force
        self._store.reload()
        now = self._store.in_force
        self.take(now.data, now.problem)
        return now.data != before.data
