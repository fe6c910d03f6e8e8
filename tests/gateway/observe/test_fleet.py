"""Metrics of processes that come and go: no counter ever goes back."""

from __future__ import annotations

from gateway.observe.exposition import exposition, merge
from gateway.observe.fleet import Fleet
from gateway.observe.metric_store import Metrics


def figures(requests: int, seconds: float = 0.01) -> list:
    metrics = Metrics()
    counter = metrics.counter("gateway_requests", "Requests.", ("surface",))
    histogram = metrics.histogram("gateway_seconds", "Seconds.")
    gauge = metrics.gauge("gateway_in_flight", "Now.")
    for _ in range(requests):
        counter.inc(("chat",))
        histogram.observe(seconds)
    gauge.set(float(requests))
    return metrics.plain()


def page(fleet: Fleet) -> str:
    return exposition(merge(fleet.families())).decode()


def test_processes_are_added_up():
    fleet = Fleet()
    fleet.heard("worker-1", figures(3))
    fleet.heard("worker-2", figures(4))
    assert 'gateway_requests_total{surface="chat"} 7.0' in page(fleet)
    assert "gateway_in_flight 7.0" in page(fleet)


def test_what_an_ended_process_had_counted_stays_and_its_gauges_go():
    fleet = Fleet()
    fleet.heard("worker-1", figures(3))
    fleet.heard("worker-2", figures(4))
    fleet.ended("worker-1")
    fleet.heard("worker-1.2", figures(1))
    fleet.ended("worker-1.2")
    told = page(fleet)
    assert 'gateway_requests_total{surface="chat"} 8.0' in told
    assert "gateway_seconds_count 8.0" in told
    assert "gateway_in_flight 4.0" in told


def test_the_latest_figures_of_a_process_replace_the_ones_before():
    fleet = Fleet()
    fleet.heard("worker-1", figures(3))
    fleet.heard("worker-1", figures(5))
    assert 'gateway_requests_total{surface="chat"} 5.0' in page(fleet)


def test_who_was_never_heard_of_ends_without_a_trace():
    fleet = Fleet()
    fleet.ended("worker-1")
    assert page(fleet) == ""


def test_an_answer_does_not_replace_what_was_sent_meanwhile():
    """It has waited for the answer of another process, one that stands still."""
    fleet = Fleet()
    fleet.heard("worker-1", figures(3))
    before = fleet.known()
    fleet.answered("worker-1", figures(4), before)
    fleet.answered("worker-2", figures(1), before)
    assert 'gateway_requests_total{surface="chat"} 5.0' in page(fleet)
    before = fleet.known()
    fleet.heard("worker-1", figures(9))
    fleet.answered("worker-1", figures(5), before)
    assert 'gateway_requests_total{surface="chat"} 10.0' in page(fleet)
    before = fleet.known()
    fleet.ended("worker-1")
    fleet.answered("worker-1", figures(9), before)
    assert 'gateway_requests_total{surface="chat"} 10.0' in page(fleet)
