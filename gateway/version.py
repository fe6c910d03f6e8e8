"""Which release this is."""

from __future__ import annotations

from importlib.metadata import version as installed


def version() -> str:
    """The installed release, as it lies on disk now."""
    return installed("hybrid-routing-gateway")
