"""Intended send times."""

from __future__ import annotations

import itertools
import random
import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.load import arrivals as a
from gateway.load.plan import ArrivalPlan


def first(times, count):
    return list(itertools.islice(times, count))


def gaps(times):
    return [later - earlier for earlier, later in itertools.pairwise(times)]


def test_constant_arrivals_are_evenly_spaced_from_zero():
    assert first(a.steady(4.0).warp(a.constant()), 5) == [0.0, 0.25, 0.5, 0.75, 1.0]


def test_poisson_gaps_have_mean_and_spread_one():
    found = gaps(first(a.poisson(random.Random(3)), 20_000))
    assert statistics.mean(found) == pytest.approx(1.0, rel=0.03)
    assert statistics.stdev(found) == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize("cv", [0.5, 1.0, 4.0])
def test_gamma_gaps_have_the_asked_coefficient_of_variation(cv):
    found = gaps(first(a.gamma(random.Random(5), cv), 60_000))
    assert statistics.mean(found) == pytest.approx(1.0, rel=0.08)
    assert statistics.stdev(found) / statistics.mean(found) == pytest.approx(cv, rel=0.08)


def test_a_step_multiplies_the_rate_for_its_duration_only():
    times = [t for t in first(a.step(10, 10, 2.0, 1.0).warp(a.constant()), 1000) if t < 5]
    counts = [sum(second <= t < second + 1 for t in times) for second in range(5)]
    assert counts == [10, 10, 100, 10, 10]


def test_a_step_from_the_start_has_no_time_before_it():
    assert a.step(1, 5, 0.0, 1.0).segments[0] == a.Segment(0.0, 5)


def test_a_pause_sends_nothing_and_loses_nothing():
    times = first(a.step(10, 0, 1.0, 2.0).warp(a.constant()), 20)
    assert times[9] < 1.0 and times[10] == pytest.approx(3.0)


@given(
    rates=st.lists(st.floats(0.1, 100), min_size=1, max_size=5),
    lengths=st.lists(st.floats(0.1, 10), min_size=5, max_size=5),
    seed=st.integers(0, 2**32),
)
def test_warped_times_rise_and_follow_the_profile(rates, lengths, seed):
    starts = [0.0, *itertools.accumulate(lengths)][: len(rates)]
    profile = a.Profile(tuple(map(a.Segment, starts, rates)))
    units = first(a.poisson(random.Random(seed)), 200)
    times = list(profile.warp(units))
    assert times == sorted(times)

    def expected(at):  # the integral of the rate from 0 to `at`
        ends = [*starts[1:], float("inf")]
        return sum(r * (min(at, e) - s) for r, s, e in zip(rates, starts, ends, strict=True) if at > s)

    assert [expected(t) for t in times] == pytest.approx(units, rel=1e-6, abs=1e-6)


@given(seed=st.integers(), process=st.sampled_from(["poisson", "gamma"]))
def test_a_seed_gives_the_same_times_again(seed, process):
    plan = ArrivalPlan(process, 50.0)
    once, again = (first(plan.build(random.Random(seed)), 50) for _ in range(2))
    assert once == again
    assert once != first(plan.build(random.Random(seed + 1)), 50)


@given(duration=st.floats(0.01, 20), most=st.integers(1, 100))
def test_bounds_hold_whichever_comes_first(duration, most):
    sent = list(a.bounded(a.plain(a.steady(10).warp(a.constant())), duration, most))
    assert len(sent) <= most and all(arrival.at_s < duration for arrival in sent)
    assert len(sent) == most or sent[-1].at_s + 0.1 >= duration - 1e-9


@pytest.mark.parametrize(
    "segments", [(), ((1.0, 1.0),), ((0.0, 1.0), (0.0, 2.0)), ((0.0, -1.0), (1.0, 1.0)), ((0.0, 1.0), (1.0, 0.0))]
)
def test_a_profile_that_makes_no_sense_is_refused(segments):
    with pytest.raises(ValueError, match="rate"):
        a.Profile(tuple(a.Segment(*segment) for segment in segments))


def write(folder: Path, text: str) -> Path:
    path = folder / "trace.csv"
    path.write_text(text)
    return path


def test_a_trace_gives_times_and_token_counts(tmp_path):
    path = write(
        tmp_path,
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9051690,396,109\n",
    )
    one, two = a.read_trace(path)
    assert two.at_s - one.at_s == pytest.approx(4.224579, abs=1e-5)
    assert (two.prompt_tokens, two.answer_tokens) == (396, 109)


def test_a_trace_in_seconds_is_sorted_and_may_lack_counts(tmp_path):
    assert [x.at_s for x in a.read_trace(write(tmp_path, "seconds\n3\n1\n2\n"))] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("time\n1\n", ":1: .*TIMESTAMP"),
        ("seconds\n1\nsoon\n", ":3: "),
        ("seconds\n-1\n", ":2: "),
        ("seconds,prompt_tokens\n1,-5\n", ":2: .*negative"),
        ("seconds\n", "no arrival"),
    ],
)
def test_a_bad_trace_is_refused_with_its_line(tmp_path, text, where):
    with pytest.raises(ValueError, match=where):
        a.read_trace(write(tmp_path, text))


@given(st.lists(st.integers(0, 10**9).map(lambda us: us / 1e6), min_size=2, max_size=50), st.floats(0.5, 500))
def test_a_replayed_trace_has_the_asked_mean_rate_and_goes_on_for_ever(times, rate):
    trace = [a.Arrival(t) for t in sorted(times)]
    count = len(trace) * 20
    played = first(a.replay(trace, rate), count + 1)
    assert played[0].at_s == 0.0 and [x.at_s for x in played] == sorted(x.at_s for x in played)
    assert count / played[count].at_s == pytest.approx(rate, rel=1e-6)


def test_without_a_rate_a_trace_keeps_its_own_pace():
    trace = [a.Arrival(10.0), a.Arrival(11.0), a.Arrival(14.0)]
    assert [x.at_s for x in first(a.replay(trace), 4)] == [0.0, 1.0, 4.0, 6.0]
