"""Which changes of `gateway.yaml` a rolling restart can take up, and which need the whole gateway to start anew."""

from __future__ import annotations

from msgspec.structs import replace

from gateway.config_sections import Config
from gateway.models import in_process_models

#: What belongs to the supervisor, and so lives as long as it does.
FIXED = ("listen", "admin", "workers", "keys_file", "policies_dir", "state_dir", "log")


def taken_up(before: Config, now: Config) -> tuple[Config, list[str]]:
    """The configuration for new workers, and a line for each change that is not in it."""
    notes = [
        f"`{name}` has changed; that is taken up when the whole gateway is started anew"
        for name in FIXED
        if getattr(before, name) != getattr(now, name)
    ]
    config = replace(now, **{name: getattr(before, name) for name in FIXED})
    if config.workers > 1 and bool(in_process_models(before)) != bool(in_process_models(config)):
        kept = {"models": before.models, "backends": before.backends}
        notes.append(
            "models inside the gateway come or go; backends are taken up when the whole gateway is started anew"
        )
        config = replace(config, **kept)
    if now.cache.secret is None:
        config = replace(config, cache=replace(now.cache, secret=before.cache.secret))
    return config, notes
