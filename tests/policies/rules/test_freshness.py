"""The rule of what may be served, over all ages, lives and draws."""

import math

from hypothesis import given
from hypothesis import strategies as st

from policies.language.schema import ResultCache
from policies.rules.freshness import Freshness, freshness, may_be_early

LIFE = ResultCache(ttl=600.0, swr=60.0, stale=3600.0)

seconds = st.floats(0.0, 1e6, allow_nan=False)
ages = st.floats(-10.0, 1e6, allow_nan=False)
draws = st.floats(2.0**-53, 1.0)
jitters = st.floats(0.9, 1.1)
lives = st.builds(ResultCache, ttl=st.floats(1e-3, 1e5), swr=seconds, stale=seconds)


def test_the_four_ages_of_an_answer() -> None:
    verdicts = [freshness(age, LIFE) for age in (-1.0, 0.0, 599.9, 600.0, 660.0, 660.1, 3600.0, 3600.1)]
    assert verdicts == [
        Freshness.FRESH,
        Freshness.FRESH,
        Freshness.FRESH,
        Freshness.REFRESH,
        Freshness.REFRESH,
        Freshness.STALE,
        Freshness.STALE,
        Freshness.DEAD,
    ]


def test_early_refresh_is_the_published_formula() -> None:
    # now - delta * beta * ln(u) >= expiry, 3 s before expiry, delta 2 s: u <= exp(-1.5).
    edge = math.exp(-1.5)
    assert freshness(597.0, LIFE, delta_s=2.0, u=edge * 0.999) is Freshness.REFRESH
    assert freshness(597.0, LIFE, delta_s=2.0, u=edge * 1.001) is Freshness.FRESH
    assert freshness(597.0, LIFE, delta_s=2.0, beta=0.5, u=edge * 0.999) is Freshness.FRESH


@given(ages, lives, jitters, seconds, draws)
def test_beyond_stale_is_never_served_whatever_else_holds(
    age: float, life: ResultCache, jitter: float, delta: float, u: float
) -> None:
    verdict = freshness(age, life, jitter=jitter, delta_s=delta, u=u)
    assert (verdict is Freshness.DEAD) == (age > life.stale)


@given(ages, ages, lives, jitters, seconds, draws)
def test_an_older_answer_is_never_judged_better(
    a: float, b: float, life: ResultCache, jitter: float, delta: float, u: float
) -> None:
    young, old = sorted((a, b))
    judged = [freshness(age, life, jitter=jitter, delta_s=delta, u=u) for age in (young, old)]
    assert judged[0] <= judged[1]


@given(ages, lives, jitters, seconds, draws)
def test_early_refresh_still_serves_and_comes_only_before_expiry(
    age: float, life: ResultCache, jitter: float, delta: float, u: float
) -> None:
    plain = freshness(age, life, jitter=jitter)
    drawn = freshness(age, life, jitter=jitter, delta_s=delta, u=u)
    assert drawn is plain or (plain is Freshness.FRESH and drawn is Freshness.REFRESH)
    if drawn is not plain:
        assert may_be_early(age, life, jitter, delta)
