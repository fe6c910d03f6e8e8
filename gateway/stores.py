"""The stores of a process, from configuration: Redis, and the subgraph cache where models run."""

from __future__ import annotations

import hashlib
import random

from backends.onnx.cut_counts import CutCounts
from cache.redis import RedisOptions, RedisStore
from cache.subgraph import SubgraphCache
from gateway.config_sections import Config
from gateway.observe.metric_store import Family, Sample, stats_families
from policies.core.clock import Clock

#: The backends whose models are split.
_SPLIT_KINDS = ("onnx_two_tower",)


def redis_store(config: Config, clock: Clock) -> RedisStore | None:
    """The configured Redis; nothing is connected yet. None = there is none."""
    if config.redis is None or config.redis.url is None:
        return None
    secret = config.cache.secret
    assert secret is not None, "the supervisor fills in what the file leaves out"
    # Gateways with other cache secrets cannot read each other's entries; under the same names they would only
    # overwrite them in turns.
    apart = hashlib.blake2b(secret.reveal().encode(), digest_size=4, person=b"redis-names").hexdigest()
    options = RedisOptions(
        url=config.redis.url.reveal(),
        namespace=f"{config.redis.namespace}-{apart}",
        limit_s=config.redis.timeout_s,
    )
    return RedisStore(options, clock, random.random)


def subgraph_cache(config: Config, clock: Clock, store: RedisStore | None) -> SubgraphCache | None:
    """For the process that runs the models. None when no configured model is split."""
    if not any(spec.kind in _SPLIT_KINDS for spec in config.backends.values()):
        return None
    return SubgraphCache(config.cache.subgraph_bytes, clock, random.random, store)


def subgraph_families(cache: SubgraphCache, counts: CutCounts) -> list[Family]:
    """Metrics: the cache as a whole, and what happened at each cut of each model."""
    at_cuts = Family(
        "gateway_subgraph_cuts",
        "Where models are split: tensors found and not found, runs of a segment, rows in them.",
        "counter",
        ("backend", "cut", "what"),
        "sum",
        [Sample(labels, [float(value)]) for labels, value in counts.values.items()],
    )
    return [*stats_families(cache.stats(), "gateway_subgraph_cache", "Subgraph cache"), at_cuts]
