from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.onnx.latency import LatencyModel, Measured, Safety

SHAPES = ((1, 4), (1, 16), (4, 16), (16, 16), (1, 128), (1, 256))


def true_seconds(rows: int, longest: int) -> float:
    return 0.0004 + 0.0001 * rows * longest + 1e-7 * rows * longest**2


def exact() -> LatencyModel:
    return LatencyModel([Measured(rows, longest, true_seconds(rows, longest)) for rows, longest in SHAPES])


def close(model: LatencyModel, times: float, within: float) -> bool:
    shapes = [*SHAPES, (32, 16), (8, 40)]
    return all(1 / within < model.expected(*s) / (times * true_seconds(*s)) < within for s in shapes)


def test_the_measurement_at_load_gives_the_coefficients() -> None:
    model = exact()
    assert (model.c0, model.c1, model.c2) == pytest.approx((0.0004, 0.0001, 1e-7), rel=1e-3)
    assert model.p99(4, 20) == pytest.approx(1.25 * true_seconds(4, 20), rel=1e-3), "of no run the spread is assumed"
    assert model.padding(3, 10, 20) == pytest.approx(3 * (10 * 0.0001 + 300 * 1e-7), rel=1e-3)


@pytest.mark.parametrize("seed", range(3))
def test_noise_is_no_lesson(seed: int) -> None:
    """A process that takes the core now and then, for longer than a short run takes."""
    source, model = random.Random(seed), exact()
    for _ in range(1500):
        rows, longest = source.randint(1, 16), source.randint(5, 40)
        seconds = true_seconds(rows, longest) * math.exp(source.gauss(0, 0.1))
        if source.random() < seconds / 0.02:
            seconds += 0.004
        model.observe(rows, longest, seconds)
    assert close(model, 1.12, 1.35)
    assert model.spread > 1.2, "but the spread knows of it"


def test_a_machine_that_gets_slower_is_followed_for_every_shape() -> None:
    source, model = random.Random(0), exact()
    for _ in range(60):
        model.observe(16, 16, 2 * true_seconds(16, 16) * math.exp(source.gauss(0, 0.05)))
    assert close(model, 2, 1.15), "runs of one shape tell about the machine, not about the other shapes"


def test_one_stall_moves_little() -> None:
    model = exact()
    for _ in range(50):
        model.observe(4, 16, true_seconds(4, 16))
    model.observe(4, 16, 60.0)
    assert close(model, 1, 1.2)


def test_a_shape_that_costs_more_than_thought_is_learnt() -> None:
    source, model = random.Random(0), exact()
    for _ in range(2000):
        rows, longest = source.choice([(1, 8), (32, 32)])
        model.observe(rows, longest, true_seconds(rows, longest) + (0.004 if rows == 1 else 0))
    assert model.c0 > 0.0015


def test_the_spread_is_that_of_the_99th_of_100_runs() -> None:
    source, model = random.Random(1), exact()
    ratios = []
    for _ in range(400):
        seconds = true_seconds(8, 16) * source.choice([1.0] * 49 + [1.6])
        ratios.append(seconds / model.p99(8, 16))
        model.observe(8, 16, seconds)
    assert sum(ratio > 1 for ratio in ratios[200:]) <= 6
    assert 1.0 <= model.spread < 1.8


runs = st.lists(st.tuples(st.integers(1, 64), st.integers(1, 512), st.floats(1e-6, 10)), max_size=60)


@given(st.lists(st.tuples(st.integers(1, 64), st.integers(1, 512), st.floats(1e-6, 10)), min_size=1, max_size=6), runs)
def test_whatever_is_seen_predictions_are_finite_positive_and_grow(
    load: list[tuple[int, int, float]], seen: list[tuple[int, int, float]]
) -> None:
    model = LatencyModel([Measured(*run) for run in load])
    for run in seen:
        model.observe(*run)
    assert model.c0 > 0 and model.c1 > 0 and model.c2 >= 0
    times = [model.expected(1, 1), model.expected(2, 1), model.expected(2, 300), model.expected(64, 300)]
    assert times == sorted(times) and all(math.isfinite(t) and t > 0 for t in times)
    assert 1 <= model.spread <= 5


def test_nothing_measured_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one measured run"):
        LatencyModel([])


def test_a_miss_takes_a_third_and_a_hundred_clean_runs_give_back_a_twentieth() -> None:
    safety = Safety()
    safety.run_over(missed=True)
    assert safety.factor == pytest.approx(0.7)
    for _ in range(99):
        safety.run_over(missed=False)
    assert safety.factor == pytest.approx(0.7)
    safety.run_over(missed=False)
    assert safety.factor == pytest.approx(0.735)
    for _ in range(99):
        safety.run_over(missed=False)
    safety.run_over(missed=True)
    assert safety.factor == pytest.approx(0.735 * 0.7), "a miss begins the count anew"


@given(st.lists(st.booleans(), max_size=2000))
def test_safety_stays_in_bounds(misses: list[bool]) -> None:
    safety = Safety()
    for missed in misses:
        safety.run_over(missed)
        assert 0.3 <= safety.factor <= 1
