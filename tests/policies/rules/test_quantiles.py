import math

from hypothesis import given
from hypothesis import strategies as st

from policies.rules.quantiles import SlidingQuantiles

seconds = st.floats(1e-4, 100)


@given(st.lists(seconds, min_size=1, max_size=200), st.floats(0, 1))
def test_within_two_percent_of_the_true_quantile(values: list[float], q: float) -> None:
    quantiles = SlidingQuantiles()
    for value in values:
        quantiles.add(value, 1000.0)
    true = sorted(values)[math.floor(q * (len(values) - 1))]
    found = quantiles.quantile(q, 1000.0)
    assert found is not None
    assert abs(found - true) <= 0.021 * true


def test_old_samples_leave_a_tenth_at_a_time() -> None:
    quantiles = SlidingQuantiles(window_s=10)
    for second in range(10):
        quantiles.add(1.0, float(second))
    assert quantiles.count(9.5) == 10
    assert quantiles.count(12.5) == 7
    assert quantiles.count(100.0) == 0
    assert quantiles.quantile(0.5, 100.0) is None


def test_a_long_gap_empties_the_window() -> None:
    quantiles = SlidingQuantiles(window_s=10)
    quantiles.add(1.0, 0.0)
    quantiles.add(3.0, 1e9)
    assert quantiles.count(1e9) == 1
