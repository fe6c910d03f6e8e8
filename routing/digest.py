"""A digest of all that decides a route, for cache keys: another rule or another head file may send a request elsewhere."""

from __future__ import annotations

import hashlib

import msgspec

from policies.language.schema import Policy
from routing.heads import Heads

_ENCODER = msgspec.json.Encoder(order="sorted")


def route_digest(policy: Policy, heads: Heads) -> bytes:
    """16 bytes: `classify`, `routes`, and the fingerprints of the heads that the signals name.

    The order of signals does not matter, the order of routes does.
    """
    fingerprints = {
        name: head.fingerprint.hex()
        for spec in policy.classify.signals.values()
        for name in [spec.head or spec.kind]
        if (head := heads.get(name)) is not None
    }
    parts = _ENCODER.encode([policy.classify, policy.routes, fingerprints])
    return hashlib.blake2b(parts, digest_size=16, person=b"gw-route").digest()
