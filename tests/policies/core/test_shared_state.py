"""The promises of `SharedState`, kept by what tests use for it; and `Alone`."""

from policies.core.shared_state import Alone, Fact, SharedState
from tests.support.shared_state import Host

Heard = list[tuple[str, Fact | None]]


def listening(shared: SharedState, key: str) -> Heard:
    heard: Heard = []
    shared.listen(key, lambda teller, fact: heard.append((teller, fact)))
    return heard


def test_each_hears_the_others_facts_of_its_key_and_not_its_own() -> None:
    host = Host()
    one, two = host.worker("one"), host.worker("two")
    own, heard = listening(one, "breaker/heavy"), listening(two, "breaker/heavy")
    one.tell("breaker/heavy", {"until": 12.5})
    one.tell("breaker/light", {"until": 99.0})
    one.tell("breaker/heavy", {"until": 13.0})
    assert heard == [("one", {"until": 12.5}), ("one", {"until": 13.0})]
    assert own == []


def test_who_listens_later_is_told_what_is_current() -> None:
    host = Host()
    for name in ("one", "two"):
        host.worker(name).tell("budget/heavy", {"spent": 1})
    host.worker("one").tell("budget/heavy", {"spent": 2})
    assert listening(host.worker("three"), "budget/heavy") == [("one", {"spent": 2}), ("two", {"spent": 1})]


def test_facts_end_with_their_teller() -> None:
    host = Host()
    heard = listening(host.worker("two"), "breaker/heavy")
    host.worker("one").tell("breaker/heavy", {})
    host.gone("one")
    assert heard == [("one", {}), ("one", None)]
    assert listening(host.worker("three"), "breaker/heavy") == []


def test_alone_there_is_nobody() -> None:
    alone = Alone()
    heard = listening(alone, "breaker/heavy")
    alone.tell("breaker/heavy", {})
    assert heard == []
    assert repr(alone) == "Alone()"
