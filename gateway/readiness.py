"""May traffic come here? A missing required model says no; a missing optional one is only named.

Anybody may read `/readyz`, so it tells what is missing in a few words: paths, file contents and the messages of errors
are in the log and on the admin listener.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from backends.slot import ModelPlace


class Readiness:
    """State behind `/readyz`. Redis and remote backends never affect readiness; they are only named as degraded."""

    def __init__(self) -> None:
        self._slots: list[tuple[ModelPlace, bool]] = []
        self._notes: list[Callable[[], str | None]] = []
        #: What is not as the policy files say, one line each; told by the supervisor, shown on the admin listener.
        self.policy_notices: list[str] = []
        self.warming = True
        self.draining = False

    def watch(self, slot: ModelPlace, required: bool) -> None:
        self._slots.append((slot, required))

    def note(self, note: Callable[[], str | None]) -> None:
        """`note()` returns what is not as it should be (a short sentence that anybody may read), or None."""
        self._notes.append(note)

    def models_ready(self) -> bool:
        """Are all required models in place?"""
        return all(slot.ready for slot, required in self._slots if required)

    def model_ready(self, name: str) -> bool | None:
        """None when no in-process model has this name."""
        for slot, _ in self._slots:
            if slot.info.name == name:
                return slot.ready
        return None

    def report(self) -> tuple[bool, bytes]:
        """(ready, JSON body). No upstream is called."""
        missing = [(slot, required) for slot, required in self._slots if not slot.ready]
        reasons = [_missing(slot) for slot, required in missing if required]
        degraded = [_missing(slot) for slot, required in missing if not required]
        degraded += [text for note in self._notes if (text := note()) is not None]
        if self.policy_notices:
            degraded.append("policy files have problems: see the log and the admin API")
        if self.draining:
            reasons.insert(0, "draining")
        elif self.warming:
            reasons.insert(0, "warming up")
        body: dict[str, object] = {"status": "not ready" if reasons else "ready"}
        if reasons:
            body["reasons"] = reasons
        if degraded:
            body["degraded"] = degraded
        return not reasons, json.dumps(body).encode()


def _missing(slot: ModelPlace) -> str:
    return f"the model {slot.info.name} is not there: {slot.state}"
