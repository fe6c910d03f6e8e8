"""The workers of one gateway, whether they are processes or run in the supervisor's own.

A crew knows how to start, replace and end workers; what they must agree on is in the `Agreement`, which changes under its lock
only: a worker that joins in the middle of a change is brought up to date before it serves anybody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from gateway.config_sections import Config
from gateway.control.facts import FactBoard
from gateway.control.hub import Hub
from gateway.control.start import Standing
from gateway.observe.metric_store import Family


class Agreement:
    """What all workers agree on now."""

    def __init__(self, standing: Standing) -> None:
        self.standing = standing
        self.changing = asyncio.Lock()


class Restarted(NamedTuple):
    """What a rolling restart came to. `taken_up`: do processes of the new configuration serve now?"""

    problems: list[str]
    taken_up: bool = True


class Crew(Protocol):
    """What the supervisor drives."""

    @property
    def hub(self) -> Hub: ...

    @property
    def data_port(self) -> int: ...

    @property
    def in_flight(self) -> int:
        """Requests under way, as far as is known."""
        ...

    async def start(self, agreement: Agreement, board: FactBoard) -> None:
        """Begin to listen and to serve. Raises CannotListen, OSError."""
        ...

    async def ready(self) -> None:
        """Return once every worker has been ready. Raises CannotServeAtAll when they keep ending before that."""
        ...

    async def restart(self, config: Config) -> Restarted:
        """Replace every process by one of `config`, one after another, without dropping a request. When not even the first
        can be, everything is as before."""
        ...

    def hurry(self) -> None:
        """No longer wait for what is under way."""
        ...

    async def stop(self) -> None:
        """The graceful end: not ready from now on, then all that is under way, then every process."""
        ...

    async def families(self) -> Mapping[str, list[Family]]:
        """Metrics by worker, those of workers that have ended among them: no counter ever goes back."""
        ...

    def status(self) -> list[dict[str, Any]]:
        """One entry a place, for people."""
        ...


class CannotServeAtAll(Exception):
    """The workers end before they are ready; the message says which, and where to look."""
