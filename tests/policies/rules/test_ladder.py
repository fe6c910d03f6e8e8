from hypothesis import given
from hypothesis import strategies as st

from policies.rules.ladder import RESERVE_SHARE, Step, reserve_s, steps

ROLES = {"heavy": ("big", "bigger"), "light": ("small",)}
LADDER = ("heavy", "light", "stale", "default")


def test_heavy_goes_down_the_ladder() -> None:
    walk = steps([("heavy", "big"), ("heavy", "bigger")], LADDER, ROLES)
    assert walk == (
        Step("heavy", "big"),
        Step("heavy", "bigger"),
        Step("light", "small"),
        Step("stale", ""),
        Step("default", ""),
    )


def test_light_may_still_be_answered_in_full() -> None:
    walk = steps([("light", "small")], LADDER, ROLES)
    assert [step.backend or step.rung for step in walk] == ["small", "big", "bigger", "stale", "default"]


def test_a_policy_may_drop_rungs() -> None:
    assert steps([("heavy", "big")], ("stale",), ROLES) == (Step("heavy", "big"), Step("stale", ""))


@given(
    first=st.lists(
        st.sampled_from([("heavy", "big"), ("heavy", "bigger"), ("light", "small")]), min_size=1, unique=True
    ),
    ladder=st.lists(st.sampled_from(LADDER), unique=True),
)
def test_nothing_is_tried_twice_and_the_choice_comes_first(first: list[tuple[str, str]], ladder: list[str]) -> None:
    walk = steps(first, ladder, ROLES)
    assert len(set(walk)) == len(walk)
    assert [(step.rung, step.backend) for step in walk[: len(first)]] == first


@given(st.floats(-10, 1000), st.none() | st.floats(0, 1000))
def test_the_reserve_is_bounded(remaining: float, p95: float | None) -> None:
    kept = reserve_s(remaining, p95)
    assert 0 <= kept <= max(0.0, remaining) * RESERVE_SHARE
    if p95 is not None:
        assert kept <= p95
