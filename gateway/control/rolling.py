"""The rolling restart of processes: the model host first, then one worker after another.

    a second host beside the first      for the workers to come; it listens at a path of its own
    for each worker                     its successor accepts from the same socket, then it finishes what it has and ends
    the first host ends                 nobody uses it any more

When the first worker cannot be replaced, the others could not either: everything is put back. When a later one cannot, what
has been replaced goes on, and both hosts with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from signal import Signals

from gateway.control.crew import Restarted
from gateway.control.seat import Child, Seat


class ModelSocket:
    """Where the model host listens: at another path after each restart, for two of them live side by side then."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._number = self._before = 1

    @property
    def path(self) -> str:
        return str(self._folder / f"models-{self._number}.sock")

    def next(self) -> None:
        self._before = self._number
        self._number += 1

    def back(self) -> None:
        self._number = self._before

    @property
    def moved(self) -> bool:
        return self._number != self._before


async def replace_all(
    host: Seat | None, workers: Sequence[Seat], models: ModelSocket, ends_within_s: float
) -> Restarted:
    """Replace what runs in these seats. `ends_within_s`: what a process that leaves may take before it is killed."""
    problems: list[str] = []
    if host is not None:
        models.next()
        try:
            await host.succeed()
        except (RuntimeError, OSError) as error:
            models.back()
            problems.append(f"the model host was not replaced: {error}")
    for number, seat in enumerate(workers):
        try:
            old = await seat.succeed()
        except (RuntimeError, OSError) as error:
            problems.append(f"{seat.name} was not replaced, nor were those after it: {error}")
            if number == 0 and host is not None and models.moved and host.put_back():
                models.back()
            return Restarted(problems, taken_up=number > 0)
        if old is not None:
            await _see_off(seat, old, ends_within_s)
    for leaving in tuple(host.leaving) if host is not None else ():
        assert host is not None
        leaving.signal(Signals.SIGTERM)
        await host.ended(leaving, ends_within_s)
    return Restarted(problems)


async def _see_off(seat: Seat, old: Child, ends_within_s: float) -> None:
    """Its successor serves: it finishes what it has and ends."""
    ack = await old.member.ask("command", "leave", {}) if old.member is not None else None
    if ack is None or ack.error:
        # It has only just been launched, has lost its connection, or stands still: a signal waits for it.
        old.signal(Signals.SIGTERM)
    await seat.ended(old, ends_within_s)
