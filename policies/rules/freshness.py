"""May a stored answer of this age be served, and should it be computed anew? One pure function.

age        0 ......... expiry (ttl) ......... ttl + swr ......... stale ......
verdict    FRESH   (some) REFRESH | REFRESH             | STALE       | DEAD
"""

from __future__ import annotations

import math
from enum import IntEnum

from policies.language.schema import ResultCache


class Freshness(IntEnum):
    """Ordered from best to worst."""

    #: Serve it.
    FRESH = 0
    #: Serve it, and compute it anew behind the answer.
    REFRESH = 1
    #: Only as the ladder's `stale` rung.
    STALE = 2
    #: Never.
    DEAD = 3


#: -ln(u) of the smallest u that a double in (0, 1] from 53 random bits can take, rounded up.
_MOST_EARLY = 37.0


def freshness(
    age_s: float, life: ResultCache, *, jitter: float = 1.0, delta_s: float = 0.0, beta: float = 1.0, u: float = 1.0
) -> Freshness:
    """The verdict for an answer `age_s` old (a negative age counts as 0).

    `jitter` scales the ttl (entries written together do not expire together); `delta_s` is what computing it took;
    `u` is uniform in (0, 1]. Early refresh follows XFetch (Vattani, Chierichetti, Lowenstein 2015): refresh when
    now - delta * beta * ln(u) >= expiry, so that, of many readers, about one refreshes shortly before the expiry.
    `life.stale` is a hard limit and wins over everything, jitter included.
    """
    if age_s > life.stale:
        return Freshness.DEAD
    expiry_s = life.ttl * jitter
    if age_s < expiry_s:
        early = delta_s > 0.0 and age_s - delta_s * beta * math.log(u) >= expiry_s
        return Freshness.REFRESH if early else Freshness.FRESH
    if age_s <= expiry_s + life.swr:
        return Freshness.REFRESH
    return Freshness.STALE


def may_be_early(age_s: float, life: ResultCache, jitter: float, delta_s: float, beta: float = 1.0) -> bool:
    """Can any draw of `u` make `freshness` refresh early? If not, no random number need be drawn."""
    return age_s + delta_s * beta * _MOST_EARLY >= life.ttl * jitter
