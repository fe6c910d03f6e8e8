"""What recurs in every process recurs at the same moments: an idle machine wakes once for all of it."""

from __future__ import annotations

from policies.core.clock import Clock

#: Of everything that a process does by itself now and then.
EVERY_S = 0.5


async def tick(clock: Clock) -> float:
    """Sleep until the next multiple of EVERY_S on the clock that all processes of this machine share. Returns by how many
    seconds too late it woke."""
    now = clock.now()
    due = (now // EVERY_S + 1.0) * EVERY_S
    await clock.sleep(due - now)
    return max(0.0, clock.now() - due)
