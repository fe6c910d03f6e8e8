"""A batcher's figures on /metrics."""

from __future__ import annotations

from backends.onnx.batch_stats import Counts
from backends.onnx.batching import BatchLimits
from backends.onnx.latency import LatencyModel, Measured
from gateway.observe.batches import batch_families
from gateway.observe.exposition import exposition, merge


def test_what_a_batcher_did_is_counted_by_model():
    counts = Counts()
    counts.run_over([3, 4], 4)
    counts.refused = 2
    model = LatencyModel([Measured(1, 8, 0.001), Measured(8, 8, 0.004), Measured(8, 64, 0.03)])
    stats = counts.stats(limits=BatchLimits(), model=model, safety=0.7, waiting_rows=5, running=1, instances=1)
    text = exposition(merge({"worker-1": batch_families("minilm", stats)})).decode()
    for line in (
        'gateway_batches_total{model="minilm"} 1.0',
        'gateway_batch_rows_total{model="minilm"} 2.0',
        'gateway_batch_refused_total{model="minilm"} 2.0',
        'gateway_batch_padded_share{model="minilm"} 0.125',
        'gateway_batch_efficiency{model="minilm"} 0.0625',
        'gateway_batch_waiting_rows{model="minilm"} 5.0',
        'gateway_batch_safety{model="minilm"} 0.7',
    ):
        assert line in text, text
