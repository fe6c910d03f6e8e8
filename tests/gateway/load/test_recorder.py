"""Counts, histograms and the document made of them."""

from __future__ import annotations

import json
import random

import pytest

from gateway.load.outcome import Outcome
from gateway.load.recorder import MAX_WINDOWS, Histogram, Record, Recorder, share_of
from gateway.load.report import Described, Limits, summarize, to_json
from gateway.load.runner import LoopOptions, RunFacts
from gateway.load.stats import median, percentile, sparkline

FACTS = RunFacts(10.0, 0.2, interrupted=False)
RUN = Described("http://127.0.0.1:1", "chat", "poisson 10/s", 1, 10.0)


def recorded(*records: Record, lag_s: float = 0.001) -> Recorder:
    recorder = Recorder(10.0)
    for record in records:
        recorder.issued(lag_s, 0.1)
        recorder.ended(record)
    return recorder


def ok(at_s=0.0, latency_s=0.01, label="normal", rung="heavy", outcome=Outcome.FULL, **more) -> Record:
    return Record(at_s, label, rung, outcome, latency_s, status=200, **more)


def summary(recorder, limits=None, facts=FACTS):
    return summarize(RUN, recorder, facts, limits or Limits(), LoopOptions())


def test_percentiles_of_a_histogram_are_within_its_precision():
    rng = random.Random(1)
    values = [rng.lognormvariate(-4, 1) for _ in range(5000)]
    histogram = Histogram()
    for value in values:
        histogram.record(value)
    for percent in (50, 90, 99, 99.9):
        assert histogram.percentile_s(percent) == pytest.approx(percentile(values, percent), rel=0.005)


@pytest.mark.parametrize(("seconds", "kept"), [(-1.0, 1e-6), (0.0, 1e-6), (1e9, 3600.0)])
def test_values_out_of_range_are_kept_at_the_edge(seconds, kept):
    histogram = Histogram()
    histogram.record(seconds)
    assert histogram.count == 1 and histogram.percentile_s(100) == pytest.approx(kept, rel=0.01)


def test_shares_leave_out_what_is_not_the_service_s_doing():
    many = {Outcome.FULL: 6, Outcome.DEGRADED: 2, Outcome.FAILED: 1, Outcome.CUT: 1, Outcome.CLIENT_ERROR: 50}
    recorder = recorded(*(ok(outcome=outcome) for outcome, count in many.items() for _ in range(count)))
    recorder.dropped(1.0, "normal")
    found = summary(recorder)
    assert (found.full_share, found.degraded_share, found.failed_share, found.cut_share) == (0.6, 0.2, 0.1, 0.1)
    assert share_of(Recorder(1).outcomes, Outcome.FULL) == 0.0


def test_a_failing_service_does_not_look_fast():
    recorder = recorded(
        *(ok(latency_s=1.0) for _ in range(5)), *(ok(latency_s=0.001, outcome=Outcome.FAILED) for _ in range(95))
    )
    found = summary(recorder)
    assert found.latency_ms.p50 == pytest.approx(1000, rel=0.01) and found.latency_ms.count == 5
    assert found.ended_ms.count == 100


def test_figures_are_kept_by_class_and_by_rung():
    recorder = recorded(
        ok(label="vip", latency_s=0.1, first_s=0.05),
        ok(label="normal", rung="light", latency_s=0.9, outcome=Outcome.DEGRADED),
    )
    found = summary(recorder)
    assert found.by_class["vip"].latency_ms.p99 == pytest.approx(100, rel=0.01)
    assert found.by_class["vip"].ttft_ms.p50 == pytest.approx(50, rel=0.01)
    assert found.by_rung["light"].outcomes == {"degraded": 1} and found.by_rung["light"].ttft_ms is None
    assert set(found.series_by_class) == {"vip", "normal"}


def test_the_series_goes_by_intended_moment():
    recorder = recorded(ok(0.5, latency_s=0.02), ok(2.5, latency_s=5.0), ok(2.6, outcome=Outcome.FAILED))
    points = summary(recorder).series
    assert [point.outcomes for point in points] == [{"full": 1}, {}, {"full": 1, "failed": 1}]
    assert points[0].p99_ms == pytest.approx(20, rel=0.02) and points[2].p99_ms == pytest.approx(5000, rel=0.02)
    assert points[1].p99_ms is None
    burst = recorder.between(2.0, 3.0)
    assert burst.outcomes == {Outcome.FULL: 1, Outcome.FAILED: 1} and burst.latency.count == 1
    assert recorder.between(2.0, 3.0, "vip").outcomes.total() == 0


def test_memory_is_bounded_whatever_the_length_and_the_names():
    recorder = Recorder(86_400.0)
    for n in range(3000):
        recorder.issued(0.0, 0.1)
        recorder.ended(Record(n * 28.8, "c", "heavy", Outcome.FAILED, 0.1, error=f"error {n}"))
    assert len(recorder.windows) <= MAX_WINDOWS + 1
    assert len(recorder.errors) <= 51 and recorder.errors["other"] == 2950
    assert recorder.window_s == 144.0


@pytest.mark.parametrize(
    ("limits", "code"),
    [
        (Limits(), 0),
        (Limits(max_p99_s=0.1, max_failed=0.5), 0),
        (Limits(max_p99_s=0.005), 1),
        (Limits(max_failed=0.4), 1),
        (Limits(max_ttft_p95_s=1.0), 1),  # nothing was streamed: a limit that was not measured is not met
    ],
)
def test_limits_decide_the_exit_code(limits, code):
    assert summary(recorded(ok(), ok(outcome=Outcome.FAILED)), limits).exit_code == code


def test_drops_and_late_sends_make_a_run_invalid_before_any_limit():
    recorder = recorded(ok())
    recorder.dropped(0.1, "normal")
    found = summary(recorder, Limits(max_p99_s=1e-6))
    assert (found.exit_code, found.valid, found.generator.dropped) == (4, False, 1)
    late = summary(recorded(ok(), lag_s=0.2))
    assert (late.exit_code, late.generator.late, late.generator.limited) == (4, 1, True)
    assert "100 ms" in late.invalid_reasons[0]


def test_a_run_that_sent_nothing_is_invalid():
    assert summary(Recorder(1.0)).exit_code == 4


def test_an_interrupted_run_says_so():
    found = summary(recorded(ok()), facts=RunFacts(1.0, 0.1, interrupted=True))
    assert (found.exit_code, found.interrupted) == (130, True)


def test_a_busy_generator_says_that_it_may_be_the_limit():
    assert summary(recorded(ok()), facts=RunFacts(1.0, 0.97, interrupted=False)).generator.limited


def test_the_document_has_its_keys():
    document = json.loads(
        to_json(summary(recorded(ok(first_s=0.002, chunks=5, streaming_s=0.1)), Limits(max_p99_s=1.0)))
    )
    assert {
        "format", "target", "mix", "arrivals", "seed", "elapsed_s", "sent", "offered_rate", "outcomes", "full_share",
        "failed_share", "latency_ms", "ttft_ms", "by_class", "by_rung", "series", "generator", "limits", "valid", "exit_code",
    } <= set(document)  # fmt: skip
    assert set(document["outcomes"]) == {outcome.value for outcome in Outcome}
    assert set(document["latency_ms"]) == {"count", "mean", "p50", "p90", "p95", "p99", "p999", "max"}
    assert document["limits"] == [
        {"name": "latency_p99_ms", "value": document["latency_ms"]["p99"], "limit": 1000.0, "ok": True}
    ]
    assert document["stream_chunks_per_s"] == 40.0


def test_small_statistics():
    assert median([3, 1, 2]) == 2 and median([4, 1, 2, 3]) == 2.5
    assert percentile([1, 2, 3, 4], 50) == 2 and percentile([1, 2, 3, 4], 99) == 4
    for empty in (median, lambda values: percentile(values, 50)):
        with pytest.raises(ValueError, match="no value"):
            empty([])


def test_a_sparkline_keeps_peaks_and_gaps():
    assert sparkline([0, None, 7, 14]) == "▁ ▅█"
    assert len(sparkline([1.0] * 1000)) <= 60 and sparkline([0] * 99 + [5] + [0] * 100, width=10).count("█") == 1
    assert sparkline([0, 0], ascii_only=True) == "__" and sparkline([]) == ""
