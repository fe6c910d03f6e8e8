"""Several workers of one host in one event loop: `Host().worker("worker-1")` is a worker's `SharedState`."""

from __future__ import annotations

import msgspec

from policies.core.shared_state import Fact, Heard


class Host:
    """Carries facts at once, through msgpack. `connected = False`: nothing arrives until `deliver_all`."""

    def __init__(self) -> None:
        self.connected = True
        #: (teller, key) of everything told, in order.
        self.told: list[tuple[str, str]] = []
        self._facts: dict[tuple[str, str], bytes] = {}
        self._listeners: list[tuple[str, str, Heard]] = []

    def worker(self, name: str) -> Told:
        return Told(self, name)

    def deliver_all(self) -> None:
        """Everybody hears everybody's current facts, again or for the first time."""
        for teller, key in self._facts:
            self._pass_on(teller, key)

    def gone(self, name: str) -> None:
        """A worker has ended."""
        for teller, key in [known for known in self._facts if known[0] == name]:
            del self._facts[teller, key]
            self._pass_on(teller, key)

    def _tell(self, teller: str, key: str, fact: Fact) -> None:
        self.told.append((teller, key))
        self._facts[teller, key] = msgspec.msgpack.encode(fact)
        if self.connected:
            self._pass_on(teller, key)

    def _listen(self, listener: str, key: str, heard: Heard) -> None:
        self._listeners.append((listener, key, heard))
        for teller, known in self._facts:
            if known == key and teller != listener:
                heard(teller, self._fact(teller, key))

    def _pass_on(self, teller: str, key: str) -> None:
        for listener, wanted, heard in self._listeners:
            if wanted == key and listener != teller:
                heard(teller, self._fact(teller, key))

    def _fact(self, teller: str, key: str) -> Fact | None:
        packed = self._facts.get((teller, key))
        return None if packed is None else msgspec.msgpack.decode(packed, type=Fact)


class Told:
    """One worker's end."""

    def __init__(self, host: Host, name: str) -> None:
        self._host = host
        self._name = name

    def tell(self, key: str, fact: Fact) -> None:
        self._host._tell(self._name, key, fact)

    def listen(self, key: str, heard: Heard) -> None:
        self._host._listen(self._name, key, heard)
