"""Policies that hold when no file says otherwise."""

from __future__ import annotations

from collections.abc import Sequence

from policies.language.schema import Cache, Match, Policy, ResultCache, Route

DAY_S = 86_400.0


def embeddings_policy(backend_name: str, aliases: Sequence[str]) -> Policy:
    """How the embeddings surface is served: always by `backend_name`, since vectors of two models cannot be mixed.

    `aliases` are the names that clients may use, besides the backend's own. Vectors never go out of date, and the same
    text has the same vector for everyone.
    """
    names = tuple(dict.fromkeys(alias for alias in aliases if alias != backend_name))
    return Policy(
        policy="embeddings",
        version=1,
        match=Match(aliases=names, surfaces=("embeddings",), backends=(backend_name,)),
        deadline=10.0,
        routes=(Route(name="embedder", to=backend_name),),
        ladder=("stale",),
        cache=Cache(scope="all", store="all", result=ResultCache(ttl=DAY_S, swr=0.0, stale=DAY_S)),
    )
