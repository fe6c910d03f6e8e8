"""Rules: the first that holds decides; no opinion is neither yes nor no."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.api import Surface
from policies.core.errors import ConfigError
from policies.language.schema import Canned, Condition, Policy, Route, SignalSpec
from routing.conditions import compile_condition, describe
from routing.digest import route_digest
from routing.heads import Heads
from routing.reading import UNREAD, Reading, Score, neutral
from routing.router import Router
from tests.support.classify import backends, policy, when

SIGNALS = {name: SignalSpec(kind="keywords", any=(name,)) for name in "abc"}


def reading(**values: float | Score) -> Reading:
    scores = {name: value if isinstance(value, Score) else Score(value, "set") for name, value in values.items()}
    return Reading(Surface.CHAT, scores)


def router(*routes: Route) -> Router:
    return Router(policy(SIGNALS, routes), backends())


def test_the_first_match_wins() -> None:
    made = router(
        Route(name="one", when=when("a"), to="heavy"),
        Route(name="two", when=when("b"), to="tiny"),
        Route(name="rest", to="light"),
    )
    assert made.route(reading(a=1, b=1, c=0)).rule == "one"
    assert made.route(reading(a=0.49, b=0.5, c=0)).first == ("tiny",)
    decision = made.route(reading(a=0, b=0, c=0))
    assert (decision.rule, decision.first, decision.role) == ("rest", ("small", "tiny"), "light")
    assert made.route(reading(a=1, b=0, c=0)).first == ("big", "bigger")
    assert made.route(reading(a=1, b=0, c=0)).reasons == ("a >= 0.5",)
    assert made.first_choices() == ("big", "bigger", "tiny", "small")
    assert made.trivial is None


def test_one_unconditional_route_needs_no_classification() -> None:
    made = router(Route(name="all", to="heavy"), Route(name="never", to="light"))
    assert made.trivial is not None
    assert made.trivial.first == ("big", "bigger")
    assert made.first_choices() == ("big", "bigger")


def test_without_a_default_the_ladder_decides() -> None:
    assert router().trivial.first == ("big", "bigger")
    light_first = Router(policy(SIGNALS, (), ladder=("light", "heavy")), backends())
    assert light_first.trivial.first == ("small", "tiny")


def test_a_canned_route_needs_no_backend() -> None:
    decision = router(Route(name="hours", to="canned", answer=Canned(text="9 to 5"))).trivial
    assert (decision.role, decision.first, decision.canned.text) == ("canned", (), "9 to 5")


def test_each_surface_has_its_own_backends() -> None:
    made = Router(policy(SIGNALS, (Route(name="all", to="light"),)), backends(), Surface.EMBEDDINGS)
    assert made.trivial.first == ("embedder",)


@pytest.mark.parametrize(
    ("route", "says"),
    [
        (Route(name="x", to="hevy"), "did you mean 'heavy'"),
        (Route(name="x", to="embedder"), "does not serve chat"),
        (Route(name="x", to="canned"), "needs its answer"),
        (Route(name="x", when=when("aa"), to="light"), "no signal 'aa'"),
        (Route(name="x", when=Condition(), to="light"), "exactly one of"),
        (Route(name="x", when=Condition(signal="a", all=(when("b"),)), to="light"), "exactly one of"),
    ],
)
def test_a_bad_route_is_named(route: Route, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as raised:
        router(route, Route(name="y", to="nowhere"))
    assert len(raised.value.problems) == 1 + (route.when is not None)
    assert "routes[0] (x)" in raised.value.problems[0]


VALUES = st.sampled_from([0.0, 0.3, 0.5, 1.0, None])
LEAVES = st.builds(Condition, signal=st.sampled_from("abc"), at_least=st.sampled_from([0.3, 0.5])) | st.builds(
    Condition, signal=st.sampled_from("abc"), below=st.sampled_from([0.4, 1.0])
)
CONDITIONS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds(Condition, all=st.lists(inner, min_size=1, max_size=3).map(tuple)),
        st.builds(Condition, any=st.lists(inner, min_size=1, max_size=3).map(tuple)),
        st.builds(Condition, not_=inner),
    ),
    max_leaves=8,
)


def holds(condition: Condition, values: dict[str, float | None]) -> bool | None:
    """Kleene's tables, the slow way: None unless every way of filling in the unknown signals agrees on a leaf."""
    if condition.all or condition.any:
        parts = [{False: 0, None: 1, True: 2}[holds(part, values)] for part in condition.all or condition.any]
        return (False, None, True)[min(parts) if condition.all else max(parts)]
    if condition.not_ is not None:
        inner = holds(condition.not_, values)
        return None if inner is None else not inner
    value = values[condition.signal]
    if value is None:
        return None
    return value >= condition.at_least if condition.below is None else value < condition.below


@given(CONDITIONS, st.fixed_dictionaries(dict.fromkeys("abc", VALUES)))
def test_conditions_follow_the_three_valued_tables(condition: Condition, values: dict[str, float | None]) -> None:
    scores = {name: neutral("none") if value is None else Score(value, "set") for name, value in values.items()}
    assert compile_condition(condition, SIGNALS)(scores) is holds(condition, values)


@given(
    st.lists(CONDITIONS, max_size=4),
    st.fixed_dictionaries(dict.fromkeys("abc", VALUES)),
    st.fixed_dictionaries(dict.fromkeys("abc", st.sampled_from([0.0, 0.35, 1.0]))),
)
def test_settled_means_that_the_rest_cannot_matter(
    conditions: list[Condition], known: dict[str, float | None], late: dict[str, float]
) -> None:
    routes = [Route(name=str(number), when=when, to="heavy") for number, when in enumerate(conditions)]
    made = router(*routes, Route(name="rest", to="light"))
    early = reading(**{name: UNREAD if value is None else Score(value, "set") for name, value in known.items()})
    full = reading(**{name: late[name] if value is None else value for name, value in known.items()})
    if made.settled(early):
        assert made.route(early).rule == made.route(full).rule


def test_a_range_and_the_default_threshold() -> None:
    between = compile_condition(Condition(signal="a", at_least=0.2, below=0.4), SIGNALS)
    assert [between({"a": Score(value, "")}) for value in (0.1, 0.2, 0.39, 0.4)] == [False, True, True, False]
    assert compile_condition(Condition(signal="a"), SIGNALS)({"a": Score(0.5, "")}) is True
    assert describe(Condition(not_=Condition(any=(when("a"), Condition(signal="b", below=0.25))))) == (
        "not(any(a >= 0.5, b < 0.25))"
    )


def test_explain_tells_about_every_rule() -> None:
    made = router(
        Route(name="one", when=when("a"), to="heavy"),
        Route(name="two", when=Condition(any=(when("b"), Condition(not_=when("c")))), to="heavy"),
        Route(name="rest", to="light"),
    )
    told = made.explain(reading(a=neutral("late"), b=0.7, c=0.2))
    assert told["rule"] == "two"
    assert [(rule["rule"], rule["matched"], rule["chosen"]) for rule in told["rules"]] == [
        ("one", None, False),
        ("two", True, True),
        ("rest", True, False),
    ]
    assert told["signals"]["a"] == {"score": None, "reason": "late"}
    inner = told["rules"][1]["when"]["any"]
    assert inner[0] == {"holds": True, "condition": "b >= 0.5", "score": 0.7, "reason": "set"}
    assert inner[1]["not"]["holds"] is False
    msgspec.json.encode(told)


def test_the_digest_changes_with_what_routes(tmp_path: object) -> None:
    def digest(made: Policy, heads: Heads | None = None) -> bytes:
        return route_digest(made, heads or Heads(()))

    base = policy(SIGNALS, (Route(name="x", when=when("a"), to="heavy"), Route(name="y", to="light")))
    assert len(digest(base)) == 16
    assert digest(base) == digest(msgspec.structs.replace(base, version=2, deadline=1.0))
    moved = msgspec.structs.replace(base, routes=(Route(name="x", when=when("a", 0.6), to="heavy"), base.routes[1]))
    assert digest(moved) != digest(base)
    other = policy(SIGNALS | {"a": SignalSpec(kind="keywords", any=("z",))}, base.routes)
    assert digest(other) != digest(base)
    reordered = policy(dict(reversed(SIGNALS.items())), base.routes)
    assert digest(reordered) == digest(base)


def test_the_digest_changes_with_a_head(tmp_path) -> None:
    from tests.support.classify import write_lexical

    made = policy({"hard": SignalSpec(kind="complexity")})
    write_lexical(tmp_path)
    before = route_digest(made, Heads([tmp_path]))
    assert before == route_digest(made, Heads([tmp_path]))
    write_lexical(tmp_path, "other")
    assert before == route_digest(made, Heads([tmp_path]))
    write_lexical(tmp_path, seed=1)
    assert before != route_digest(made, Heads([tmp_path]))
