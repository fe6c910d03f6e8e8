"""The names that policies may use, gathered from the operator's configuration and the registries."""

from __future__ import annotations

from gateway.config import Config, known_backends
from policies.language.semantics import Known


def known_names(config: Config) -> Known:
    """What a policy of this gateway may name."""
    return Known(backends=known_backends(config))
