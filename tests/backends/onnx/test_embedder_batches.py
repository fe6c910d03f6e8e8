"""The embedder's texts in shared runs, on a real (tiny) model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest

from backends.api import EmbeddingsRequest, Priority, Role
from backends.onnx.batching import BatchLimits
from backends.onnx.embedder import EmbeddingsBackend, MiniLmEmbedder
from backends.onnx.store import ModelStore
from policies.core.deadline import Deadline
from policies.core.errors import LimitReached, ModelFailed

#: What a variant publishes: rows do not depend on their mates beyond rounding.
TOLERANCE = 1e-6
WORDS = [
    "warm tent",
    "a",
    "the dog swim the cat run",
    "coffee bread knife",
    "lamp",
    "rain " * 40,
    "song " * 9,
    "cold tea",
]


@pytest.fixture(params=["fp32", "q8"])
async def embedder(request: pytest.FixtureRequest, tiny_store: ModelStore) -> AsyncIterator[MiniLmEmbedder]:
    made = await MiniLmEmbedder.load(tiny_store.folder("minilm", request.param), limits=BatchLimits(run_s=1.0))
    yield made
    await made.aclose()


def rows_of(embedder: MiniLmEmbedder, count: int, length: int | None = None) -> list[list[int]]:
    source = np.random.default_rng(0)
    vocabulary = embedder.manifest.architecture["vocabulary"]
    return [source.integers(4, vocabulary, length or source.integers(2, 40)).tolist() for _ in range(count)]


async def alone(embedder: MiniLmEmbedder, rows: list[list[int]], soon: Deadline) -> np.ndarray:
    return np.concatenate([await embedder.embed_tokens([row], soon) for row in rows])


async def test_a_row_has_the_same_answer_alone_and_in_a_run_of_32(embedder: MiniLmEmbedder, soon: Deadline) -> None:
    rows = rows_of(embedder, 32, 16)
    single = await alone(embedder, rows, soon)
    before = embedder.stats()
    together = await asyncio.gather(*(embedder.embed_tokens([row], soon) for row in rows))
    after = embedder.stats()
    assert (after.batches - before.batches, after.rows - before.rows) == (1, 32)
    assert np.abs(np.concatenate(together) - single).max() < TOLERANCE


async def test_callers_of_any_length_get_their_own_vectors(embedder: MiniLmEmbedder, soon: Deadline) -> None:
    rows = rows_of(embedder, 60)
    single = await alone(embedder, rows, soon)
    parts = [rows[start : start + size] for start, size in ((0, 1), (1, 30), (31, 4), (35, 25))]
    together = await asyncio.gather(*(embedder.embed_tokens(part, soon) for part in parts))
    assert np.abs(np.concatenate(together) - single).max() < TOLERANCE


@pytest.mark.parametrize("bad", [[2, -1, 3], [2, 10**6, 3], [], [2] * 513])
async def test_bad_ids_are_refused_before_they_meet_others(
    embedder: MiniLmEmbedder, soon: Deadline, bad: list[int]
) -> None:
    good = rows_of(embedder, 7, 3)
    single = await alone(embedder, good, soon)
    got = await asyncio.gather(*(embedder.embed_tokens([row], soon) for row in [*good, bad]), return_exceptions=True)
    assert isinstance(got[7], ModelFailed)
    assert np.abs(np.concatenate(got[:7]) - single).max() < TOLERANCE
    assert embedder.stats().failed_runs == 0


async def test_a_row_that_fails_its_run_fails_alone(embedder: MiniLmEmbedder, soon: Deadline) -> None:
    """Past the embedder's own check: the graph itself refuses an id that is not in its table, and with it the whole run."""
    rows = rows_of(embedder, 8, 5)
    single = await alone(embedder, rows[:7], soon)
    rows[7] = [2, 10**6, 3, 3, 3]
    asked = (embedder.batcher.submit([row], [5], soon) for row in rows)
    *good, bad = await asyncio.gather(*asked, return_exceptions=True)
    assert isinstance(bad, ModelFailed)
    assert np.abs(np.stack([one.results[0] for one in good]) - single).max() < TOLERANCE
    assert embedder.stats().failed_runs >= 2


async def test_a_run_that_everybody_has_left_is_stopped(embedder: MiniLmEmbedder, soon: Deadline) -> None:
    long = asyncio.create_task(embedder.embed_tokens(rows_of(embedder, 32, 500), soon))
    while not embedder.stats().running:
        await asyncio.sleep(0)
    long.cancel()
    assert (await embedder.embed_tokens([[2, 3]], soon)).shape == (1, embedder.dimensions)
    stats = embedder.stats()
    assert (stats.stopped, stats.cancelled) == (1, 1)


async def test_texts_are_tokenised_while_a_run_goes_on(embedder: MiniLmEmbedder, soon: Deadline) -> None:
    running = asyncio.create_task(embedder.embed_tokens(rows_of(embedder, 400, 400), soon))
    while not embedder.stats().running:
        await asyncio.sleep(0)
    await embedder.tokenize_all(["coffee " * 1000] * 5, soon)
    assert not running.done()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_priorities_decide_who_is_next(tiny_store: ModelStore, soon: Deadline) -> None:
    embedder = await MiniLmEmbedder.load(tiny_store.folder("minilm", "fp32"), limits=BatchLimits(rows=4))
    order: list[str] = []

    async def ask(name: str, priority: Priority | None, count: int = 1) -> None:
        await embedder.embed([name] * count, soon, priority=priority)
        order.append(name)

    first = asyncio.create_task(ask("first", Priority.NORMAL))
    while not embedder.stats().running:
        await asyncio.sleep(0)
    names = [("bulk", None, 5), ("batch", Priority.BATCH, 1), ("normal", Priority.NORMAL, 1), ("few", None, 2)]
    await asyncio.gather(first, *(ask(*one) for one in names))
    assert order == ["first", "few", "normal", "bulk", "batch"] or order == ["first", "few", "normal", "batch", "bulk"]
    await embedder.aclose()


async def test_an_answer_carries_its_stage_times(tiny_store: ModelStore, soon: Deadline) -> None:
    backend = await EmbeddingsBackend.load(tiny_store.folder("minilm", "fp32"), name="embed", role=Role.LIGHT)
    answer = await backend.infer(EmbeddingsRequest({}, ["warm tent", "a " * 200], priority=Priority.VIP), soon)
    stages = answer.stages
    assert stages is not None and stages.from_device_s == 0
    for name in ("tokenise_s", "queue_s", "to_device_s", "compute_s", "post_s"):
        assert 0 < getattr(stages, name) < 1, name
    await backend.aclose()


async def test_a_deadline_that_cannot_be_kept_is_refused_at_once(tiny_store: ModelStore, soon: Deadline) -> None:
    embedder = await MiniLmEmbedder.load(tiny_store.folder("minilm", "fp32"))
    long = asyncio.create_task(embedder.embed_tokens([[2] * 500] * 2000, soon))
    while not embedder.stats().running:
        await asyncio.sleep(0)
    with pytest.raises(LimitReached, match="'embedder' is too busy") as refused:
        await embedder.embed_tokens([[2] * 500] * 200, soon.within(0.02))
    assert refused.value.retry_after_s
    long.cancel()
    await asyncio.gather(long, return_exceptions=True)
    await embedder.aclose()
