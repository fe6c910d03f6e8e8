from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from backends.onnx.sampling import Sampler, Sampling, choose, draw, nucleus, softmax

logits = hnp.arrays(np.float32, st.integers(2, 60), elements=st.floats(-30, 30, width=32))
uniforms = st.floats(0, 1, exclude_max=True)
shares = st.floats(0.01, 0.999)


def smallest_set(probabilities: np.ndarray, top_p: float) -> list[int]:
    """The definition, word for word: add the most probable until they hold `top_p`."""
    kept, mass = [], 0.0
    for index in sorted(range(len(probabilities)), key=lambda i: (-probabilities[i], i)):
        kept.append(index)
        mass += probabilities[index]
        if mass >= top_p - 1e-9:
            break
    return kept


@given(logits, uniforms)
def test_greedy_takes_the_largest_whatever_the_random_number(values, uniform):
    assert choose(values, Sampling(temperature=0.0), uniform) == int(np.argmax(values))


@given(logits, shares)
def test_nucleus_is_the_smallest_set_with_that_mass(values, top_p):
    probabilities = softmax(values, 1.0)
    kept = nucleus(probabilities, top_p).tolist()
    expected = smallest_set(probabilities, top_p)
    assert kept[: len(expected)] == expected
    # Rounding may add one more exactly at the border, never lose one.
    assert len(kept) - len(expected) <= 1
    assert probabilities[kept].sum() >= top_p * (1 - 1e-9)


@given(logits, uniforms, shares, st.floats(0.1, 2))
def test_what_is_drawn_is_in_the_nucleus(values, uniform, top_p, temperature):
    token = choose(values, Sampling(temperature=temperature, top_p=top_p), uniform)
    assert token in nucleus(softmax(values, temperature), top_p)


@given(logits, st.floats(0.1, 2))
def test_softmax_is_a_distribution_even_for_huge_logits(values, temperature):
    probabilities = softmax(values * 1e6, temperature)
    assert np.isfinite(probabilities).all()
    assert probabilities.sum() == pytest.approx(1.0)


def test_draws_follow_the_probabilities():
    probabilities = np.array([0.5, 0.0, 0.2, 0.3])
    grid = (np.arange(10_000) + 0.5) / 10_000
    counts = np.bincount([draw(probabilities, u) for u in grid], minlength=4)
    assert counts.tolist() == [5000, 0, 2000, 3000]


def test_a_token_without_probability_is_never_drawn_at_the_very_end():
    assert draw(np.array([0.1, 0.2, 0.7, 0.0]), np.nextafter(1.0, 0.0)) == 2


@given(st.integers(-(2**63), 2**64 - 1))
def test_the_same_seed_gives_the_same_tokens(seed):
    values = np.random.default_rng(0).normal(size=(20, 50)).astype(np.float32)
    first, second = Sampler(Sampling(seed=seed)), Sampler(Sampling(seed=seed))
    assert [first.next(row.copy()) for row in values] == [second.next(row.copy()) for row in values]


def test_other_seeds_give_other_tokens():
    values = np.zeros((30, 50), np.float32)
    texts = {tuple(Sampler(Sampling(seed=seed)).next(row.copy()) for row in values[:5]) for seed in (-1, 0, 1, 2, 3)}
    assert len(texts) == 5


def test_low_temperature_approaches_greedy_and_high_temperature_spreads():
    values = np.array([1.0, 0.0, 0.5], np.float32)
    uniform_grid = (np.arange(500) + 0.5) / 500
    cold = {choose(values, Sampling(temperature=0.02), u) for u in uniform_grid}
    hot = {choose(values, Sampling(temperature=2.0), u) for u in uniform_grid}
    assert (cold, hot) == ({0}, {0, 1, 2})


def test_penalties_follow_the_formula():
    sampler = Sampler(Sampling(temperature=0.0, frequency_penalty=0.4, presence_penalty=0.3))
    values = np.array([2.0, 1.0, 0.0], np.float32)
    # Token 0 falls to 2-.7=1.3, then 2-1.1=.9 < 1: token 1, which falls to .3 while 0 stays at .9, then at .5.
    assert [sampler.next(values.copy()) for _ in range(5)] == [0, 0, 1, 0, 0]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_no_numbers_are_an_error(bad):
    values = np.zeros(8, np.float32)
    values[3] = bad
    with pytest.raises(FloatingPointError, match="not finite"):
        Sampler(Sampling(temperature=0.0)).next(values)
