"""What whoever runs models does when the hub asks: tell of them, and load one anew."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from backends.slot import ModelPlace, Slot
from gateway.control.hub import Payload, WorkerPort


def offer_models(port: WorkerPort, places: Sequence[ModelPlace]) -> None:
    """Register the actions. Only models that run in this process can be loaded anew here."""

    async def models(_payload: Payload) -> Any:
        return [place_status(place) for place in places]

    port.queries["models"] = models
    slots = {place.info.name: place for place in places if isinstance(place, Slot)}
    if not slots:
        return

    async def reload(payload: Payload) -> Any:
        name = payload["name"]
        found = [slot for slot in slots.values() if name in (slot.info.name, slot.info.model)]
        if not found:
            raise LookupError(f"no model {name[:100]!r} runs here; there are {', '.join(sorted(slots))}")
        return {"models": [await _reload(slot) for slot in found]}

    port.commands["models.reload"] = reload


async def _reload(slot: Slot) -> dict[str, Any]:
    """Raises RuntimeError when the old model stays in force."""
    done = await slot.reload()
    if done["error"]:
        raise RuntimeError(f"{slot.info.name} goes on as before: {done['error']}")
    return {"name": slot.info.name, **done}


def place_status(place: ModelPlace) -> dict[str, Any]:
    """One model, for people."""
    return {
        "name": place.info.name,
        "model": place.info.model,
        "ready": place.ready,
        "state": place.state,
        "reason": place.reason,
        "fingerprint": place.info.fingerprint,
        "cuts": msgspec.to_builtins(place.info.cuts),
    }
