"""Notices changes of files and folders: saves, renames, swaps of a symbolic link, folders that come and go.

The truth is a signature (inode, size, time) of everything watched, taken once a second at least; the operating
system's notifications only make it quicker. So it also works where there are none: network file systems, a swapped link
above the folder, too many watches.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

from watchfiles import awatch

from policies.core.clock import Clock

#: Called with the files that changed; returns seconds after which it wants to be called again, or None.
OnChange = Callable[[frozenset[Path]], Awaitable[float | None]]
#: What identifies the content of one file.
_Stamp = tuple[int, int, int, int]
_Signature = dict[Path, _Stamp]

POLL_S = 1.0
#: Changes are reported once nothing has moved for this long, but not later than MAX_SETTLE_S after the first.
SETTLE_S = 0.1
MAX_SETTLE_S = 0.8


class Watcher:
    """Watches `paths` (files, or folders with the files in them) until it is cancelled.

    on_change
        Awaited for each settled change, one at a time; what it raises ends the watch.
    """

    def __init__(self, paths: Iterable[Path], on_change: OnChange, clock: Clock) -> None:
        self._paths = tuple(paths)
        self._on_change = on_change
        self._clock = clock
        self._signature = _signature(self._paths)
        self._wake = asyncio.Event()
        self._again_at: float | None = None

    async def run(self) -> None:
        """Call `on_change` for every change since this object was made."""
        notices = asyncio.create_task(self._notice())
        try:
            while True:
                await self._pause()
                changed = await self._settled_change()
                due = self._again_at is not None and self._clock.now() >= self._again_at
                if changed or due:
                    again_s = await self._on_change(changed)
                    self._again_at = None if again_s is None else self._clock.now() + again_s
        finally:
            notices.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await notices

    async def _pause(self) -> None:
        """Until something may have changed: a notification, the next poll, or the time `on_change` asked for."""
        wait_s = POLL_S if self._again_at is None else min(POLL_S, max(0.0, self._again_at - self._clock.now()))
        sleep = asyncio.ensure_future(self._clock.sleep(wait_s))
        woken = asyncio.ensure_future(self._wake.wait())
        try:
            await asyncio.wait((sleep, woken), return_when=asyncio.FIRST_COMPLETED)
        finally:
            sleep.cancel()
            woken.cancel()
        self._wake.clear()

    async def _settled_change(self) -> frozenset[Path]:
        """What differs from the last time, once it has stopped moving; empty when nothing does."""
        now = await asyncio.to_thread(_signature, self._paths)
        if now == self._signature:
            return frozenset()
        latest = self._clock.now() + MAX_SETTLE_S
        while self._clock.now() < latest:
            await self._clock.sleep(SETTLE_S)
            before, now = now, await asyncio.to_thread(_signature, self._paths)
            if now == before:
                break
        last, self._signature = self._signature, now
        return frozenset(path for path in last.keys() | now.keys() if last.get(path) != now.get(path))

    async def _notice(self) -> None:
        """Turn notifications into wake-ups. Without them (no such folder, no watches left) polling goes on alone."""
        while True:
            folders = {path if path.is_dir() else path.parent for path in self._paths}
            present = [folder for folder in folders if folder.is_dir()]
            try:
                if present:
                    # Everything counts, also the `..data` link of a mounted ConfigMap: no filter. Each step wakes a thread, so
                    # short ones would be the most that an idle supervisor does.
                    async for _ in awatch(*present, watch_filter=None, debounce=400, step=400, recursive=False):
                        self._wake.set()
                        if not all(folder.is_dir() for folder in present):
                            break
            except (OSError, RuntimeError):
                pass  # polling goes on; try again below
            await self._clock.sleep(POLL_S)


def _signature(paths: Iterable[Path]) -> _Signature:
    signature: _Signature = {}
    for path in paths:
        try:
            files = [path, *(f for f in path.iterdir() if not f.name.startswith("."))] if path.is_dir() else [path]
        except OSError:
            files = [path]
        for file in files:
            stamp = _stamp(file)
            if stamp is not None:
                signature[file] = stamp
    return signature


def _stamp(path: Path) -> _Stamp | None:
    """A folder counts only by being there: what is in it has stamps of its own."""
    try:
        found = path.stat()
    except OSError:
        return None
    if path.is_dir():
        return (found.st_dev, 0, 0, 0)
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
