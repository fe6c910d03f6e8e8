"""The degradation ladder as a pure rule: which rungs to try, in which order, and how much time to keep for those below.

A walk starts at what the route chose and then goes down the policy's ladder; each rung and each backend comes once. Where
the route chose `light`, the heavy rung may still follow it: a request that light cannot serve is better answered in full
than not at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

#: At most this share of the remaining time is kept for the rungs below the one being tried.
RESERVE_SHARE = 0.30


class Step(NamedTuple):
    """One rung to try. `backend` is empty for `stale` and `default`."""

    rung: str
    backend: str


def steps(
    first: Iterable[tuple[str, str]], ladder: Sequence[str], roles: Mapping[str, Sequence[str]]
) -> tuple[Step, ...]:
    """The walk: `first` = (role, backend) pairs the route chose, then the ladder's rungs.

    `roles` maps "heavy" and "light" to the backends of that role that serve this kind of traffic, in their order.
    """
    walk = [Step(role, backend) for role, backend in first]
    used = {step.backend for step in walk}
    for rung in ladder:
        if rung in ("stale", "default"):
            if all(step.rung != rung for step in walk):
                walk.append(Step(rung, ""))
            continue
        for backend in roles.get(rung, ()):
            if backend not in used:
                used.add(backend)
                walk.append(Step(rung, backend))
    return tuple(walk)


def reserve_s(remaining_s: float, next_p95_s: float | None) -> float:
    """Seconds to keep for the next rung: its p95 of the first usable output, at most 30 % of what is left.

    `next_p95_s` None = the next rung has not been measured yet: the full 30 % is kept.
    """
    most = max(0.0, remaining_s) * RESERVE_SHARE
    return most if next_p95_s is None else min(most, next_p95_s)
