import msgspec

from gateway.observe.exposition import exposition, merge
from gateway.observe.metric_store import Family, Metrics
from gateway.observe.metrics import MetricsObserver
from policies.core.events import Attempted, BreakerChanged, Completed, Observers


def completed(**changes: object) -> Completed:
    event = Completed(
        surface="chat", policy="chatbot@3", tenant="t", priority="normal", rule="r", rung="light", backend="light",
        outcome="full", status=200, stream=True, seconds=0.2, first_s=0.1, waited_s=0.1996,
        prompt_tokens=5, completion_tokens=7,
    )  # fmt: skip
    return msgspec.structs.replace(event, **changes)


def exposed(metrics: Metrics) -> str:
    # As it travels: through plain values and back.
    families = msgspec.convert(msgspec.to_builtins(metrics.families()), list[Family])
    return exposition(merge({"worker-1": families})).decode()


def test_a_request_is_counted_once_with_bounded_labels() -> None:
    metrics = Metrics()
    observer = Observers([MetricsObserver(metrics)])
    observer.on_event(completed())
    observer.on_event(completed(policy="chatbot@4"))
    text = exposed(metrics)
    labels = 'class="normal",outcome="full",policy="chatbot",rung="light",surface="chat"'
    assert f"gateway_requests_total{{{labels}}} 2.0" in text
    assert 'gateway_overhead_seconds_bucket{le="0.0005",surface="chat"} 2.0' in text
    assert 'gateway_overhead_seconds_bucket{le="+Inf",surface="chat"} 2.0' in text
    assert 'gateway_first_token_seconds_count{policy="chatbot",rung="light"} 2.0' in text
    assert 'gateway_tokens_total{backend="light",direction="out"} 14.0' in text


def test_histogram_buckets_are_cumulative() -> None:
    metrics = Metrics()
    histogram = metrics.histogram("h", "help")
    for value in (0.00005, 0.0001, 0.3, 1000.0):
        histogram.observe(value)
    text = exposed(metrics)
    assert 'h_bucket{le="0.0001"} 2.0' in text
    assert 'h_bucket{le="0.3"} 3.0' in text
    assert 'h_bucket{le="+Inf"} 4.0' in text
    assert "h_count 4.0" in text


def test_workers_are_merged_as_each_gauge_declares() -> None:
    def worker(value: float) -> list[Family]:
        metrics = Metrics()
        metrics.gauge("added", "help").set(value)
        metrics.gauge("largest", "help", merge="max").set(value)
        metrics.gauge("apart", "help", merge="per-worker").set(value)
        return metrics.families()

    text = exposition(merge({"worker-1": worker(2), "worker-2": worker(5)})).decode()
    assert "added 7.0" in text
    assert "largest 5.0" in text
    assert 'apart{worker="worker-1"} 2.0' in text
    assert 'apart{worker="worker-2"} 5.0' in text


def test_breakers_and_attempts() -> None:
    metrics = Metrics()
    observer = Observers([MetricsObserver(metrics)])
    observer.on_event(BreakerChanged(backend="heavy", before="closed", after="open", reason="5 in a row"))
    observer.on_event(Attempted(backend="heavy", outcome="upstream_status", seconds=0.1, first_s=0.1))
    text = exposed(metrics)
    assert 'gateway_breaker_state{backend="heavy"} 2.0' in text
    assert 'gateway_attempts_total{backend="heavy",outcome="upstream_status"} 1.0' in text
