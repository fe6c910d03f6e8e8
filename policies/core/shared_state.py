"""What the workers of one host tell each other: breakers, later ejected replicas and retry budgets.

A fact is a small dict of plain values (what msgpack can carry) under a key such as `breaker/heavy`. Each worker has one
current fact for each key: telling replaces it. So nothing has to be counted, acknowledged or sent twice, a fact may be lost,
late, repeated or overtaken by another, and whoever connects again needs only the current ones. What is a sum over workers
(a budget) is built from everybody's latest fact.

Moments in facts are monotonic seconds: the processes of one host share that clock. Nothing here crosses hosts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

Fact = dict[str, Any]
#: `heard(teller, fact)`: another worker's current fact, or None when that worker is gone. Runs on the event loop: must be
#: quick, must not raise, and must not tell again what it heard.
Heard = Callable[[str, Fact | None], None]


class SharedState(Protocol):
    """One worker's end. Whatever carries it may fail: then each worker goes on with what it knows."""

    def tell(self, key: str, fact: Fact) -> None:
        """Replace this worker's fact for `key` and let the others know soon. Never waits, never raises."""
        ...

    def listen(self, key: str, heard: Heard) -> None:
        """`heard` gets the other workers' facts for `key`: at once what is known already, then each new one.

        Nobody hears their own facts. A worker that ends takes its facts along: `heard` gets None once for it.
        """
        ...


class Alone:
    """There is nobody to tell and nobody to hear."""

    __slots__ = ()

    def tell(self, key: str, fact: Fact) -> None:
        """Nobody listens."""

    def listen(self, key: str, heard: Heard) -> None:
        """Nobody will ever say anything."""

    def __repr__(self) -> str:
        return "Alone()"
