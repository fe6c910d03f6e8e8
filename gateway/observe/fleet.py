"""The metrics of processes that come and go, as one whole whose counters never go back.

Of each process the latest figures are kept: those it was asked for just now, or the last it sent by itself. When it ends, its
counters and histograms are added to what all ended processes had counted; its gauges go with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from gateway.observe.exposition import merge
from gateway.observe.metric_store import Family

#: Under this name the ended processes stand among the others.
ENDED = "ended"


class Fleet:
    """Figures by process."""

    def __init__(self) -> None:
        #: As they were sent; read only when somebody asks.
        self._latest: dict[str, Any] = {}
        self._ended: list[Family] = []

    def heard(self, process: str, families: Any) -> None:
        """The figures of a process: msgpack, or plain values."""
        self._latest[process] = families

    def known(self) -> Mapping[str, Any]:
        """The figures by process, as they are now: for `answered`."""
        return dict(self._latest)

    def answered(self, process: str, families: Any, before: Mapping[str, Any]) -> None:
        """The figures of a process that was asked when `before` was known. Of no use when it has sent some by itself since
        then: they may be later, and an answer waits for those of all the others."""
        if self._latest.get(process) is before.get(process):
            self._latest[process] = families

    def ended(self, process: str) -> None:
        latest = self._latest.pop(process, None)
        if latest is not None:
            kept = [family for family in _families(latest) if family.kind != "gauge"]
            self._ended = merge({ENDED: self._ended, process: kept})

    def families(self) -> Mapping[str, list[Family]]:
        return {ENDED: self._ended, **{process: _families(latest) for process, latest in self._latest.items()}}


def _families(told: Any) -> list[Family]:
    if isinstance(told, bytes):
        return msgspec.msgpack.decode(told, type=list[Family])
    return msgspec.convert(told, list[Family])
