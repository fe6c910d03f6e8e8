"""What workers tell each other (`SharedState`), carried by the hub: a breaker that opened here is open there within moments.

Each fact belongs to the worker that told it; the supervisor keeps the latest of each, passes it on, and hands all of them to
a worker that starts. Without a supervisor that listens, everybody goes on with what they have.
"""

from __future__ import annotations

from gateway.control.hub import Hub, Payload, WorkerPort
from policies.core.shared_state import Fact, Heard

TOPIC = "fact"
#: All facts there are, for a worker that may have missed some.
ALL_TOPIC = "facts"


class HubSharedState:
    """A worker's end. Implements `policies.core.shared_state.SharedState`."""

    def __init__(self, port: WorkerPort, known: list[tuple[str, str, Fact]]) -> None:
        self._port = port
        self._own: dict[str, Fact] = {}
        self._others: dict[str, dict[str, Fact]] = {}
        self._listeners: dict[str, list[Heard]] = {}
        for teller, key, fact in known:
            self._others.setdefault(key, {})[teller] = fact
        port.told[TOPIC] = self._on_told
        port.told[ALL_TOPIC] = self._on_all_told
        port.on_connected.append(self._tell_all)

    def tell(self, key: str, fact: Fact) -> None:
        self._own[key] = fact
        self._port.publish(TOPIC, {"key": key, "fact": fact})

    def listen(self, key: str, heard: Heard) -> None:
        self._listeners.setdefault(key, []).append(heard)
        for teller, fact in self._others.get(key, {}).items():
            heard(teller, fact)

    def _on_told(self, payload: Payload) -> None:
        self._take(payload["teller"], payload["key"], payload["fact"])

    def _on_all_told(self, payload: Payload) -> None:
        """What is not among all facts has ended; the others may be news, and hearing one again does no harm."""
        present = {(teller, key): fact for teller, key, fact in payload["facts"]}
        gone = [
            (teller, key) for key, facts in self._others.items() for teller in facts if (teller, key) not in present
        ]
        for teller, key in gone:
            self._take(teller, key, None)
        for (teller, key), fact in present.items():
            self._take(teller, key, fact)

    def _take(self, teller: str, key: str, fact: Fact | None) -> None:
        known = self._others.setdefault(key, {})
        if fact is None:
            known.pop(teller, None)
        else:
            known[teller] = fact
        for heard in self._listeners.get(key, ()):
            heard(teller, fact)

    def _tell_all(self) -> None:
        for key, fact in self._own.items():
            self._port.publish(TOPIC, {"key": key, "fact": fact})


class FactBoard:
    """The supervisor's end: the latest fact of each worker and key."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._facts: dict[str, dict[str, Fact]] = {}
        hub.subscribe(self._on_published)

    def told_by_others(self, worker: str) -> Payload:
        """Of the topic `facts`, for one worker."""
        return {"facts": [known for known in self.known() if known[0] != worker]}

    def known(self) -> list[tuple[str, str, Fact]]:
        """(teller, key, fact) of everybody."""
        return [(teller, key, fact) for teller, facts in self._facts.items() for key, fact in facts.items()]

    def gone(self, teller: str) -> None:
        """A worker has ended, and its facts with it."""
        for key in self._facts.pop(teller, {}):
            self._pass_on(teller, key, None)

    def _on_published(self, worker: str, topic: str, payload: Payload) -> None:
        if topic == TOPIC:
            self._facts.setdefault(worker, {})[payload["key"]] = payload["fact"]
            self._pass_on(worker, payload["key"], payload["fact"])

    def _pass_on(self, teller: str, key: str, fact: Fact | None) -> None:
        self._hub.tell_others(teller, TOPIC, {"teller": teller, "key": key, "fact": fact})
