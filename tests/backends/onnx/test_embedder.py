from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest

from backends.api import ChatRequest, EmbeddingsRequest, Role, TensorRequest
from backends.onnx.embedder import MAX_TEXTS, READ_TOKENS, EmbeddingsBackend, MiniLmEmbedder
from backends.onnx.manifest import ModelError
from backends.onnx.store import ModelStore
from policies.core.clock import SystemClock
from policies.core.deadline import Deadline
from policies.core.errors import CannotServe, DeadlineExceeded, InvalidRequest, ModelFailed, ModelNotReady
from tests.support.tiny_bert import WIDTH


@pytest.fixture
async def backend(tiny_store: ModelStore) -> AsyncIterator[EmbeddingsBackend]:
    backend = await EmbeddingsBackend.load(tiny_store.folder("minilm", "fp32"), name="embed", role=Role.LIGHT)
    yield backend
    await backend.aclose()


@pytest.fixture
def embedder(backend: EmbeddingsBackend) -> MiniLmEmbedder:
    return backend.embedder


TEXTS = ["warm tent", "a", "the dog swim the cat run", "", "tent " * 60, "coffee bread"]


async def test_rows_come_in_the_order_of_the_texts(embedder: MiniLmEmbedder, soon: Deadline) -> None:
    together = await embedder.embed(TEXTS, soon)
    assert together.shape == (len(TEXTS), WIDTH) and together.dtype == np.float32
    for index, text in enumerate(TEXTS):
        assert np.abs((await embedder.embed([text], soon))[0] - together[index]).max() < 1e-6
    assert np.abs(np.linalg.norm(together, axis=1) - 1).max() < 1e-6


async def test_no_texts_give_no_rows(embedder: MiniLmEmbedder, soon: Deadline) -> None:
    assert (await embedder.embed([], soon)).shape == (0, WIDTH)


async def test_embed_reads_both_ends_of_a_long_text(embedder: MiniLmEmbedder, soon: Deadline) -> None:
    middle = ["tent", "coffee"]
    long = ["cat " * 200 + word + " dog" * 200 for word in middle]
    short = await embedder.embed(["cat " * 127 + "dog " * 127], soon)
    first, second = await embedder.embed(long, soon)
    assert np.array_equal(first, second), "the middle is not read"
    assert np.abs(first - short[0]).max() < 1e-6, f"of {READ_TOKENS} tokens, half are of either end"


async def test_a_huge_text_is_read_in_bounded_time(embedder: MiniLmEmbedder, soon: Deadline) -> None:
    huge = await embedder.embed(["cat " * 500_000 + "dog " * 500_000], soon)
    assert np.abs(huge - await embedder.embed(["cat " * 300 + "dog " * 300], soon)).max() < 1e-6


async def test_unknown_share_counts_the_texts_own_tokens(embedder: MiniLmEmbedder, soon: Deadline) -> None:
    assert await embedder.unknown_share("tent boots", soon) == 0
    assert await embedder.unknown_share("tent 今 boots 天", soon) == 0.5
    assert await embedder.unknown_share("tent 今 boots 天 " * 200, soon) == 0.5  # on the thread
    assert await embedder.unknown_share("今天", soon) == 1
    assert await embedder.unknown_share("", soon) == 0


async def test_tokens_and_texts_embed_alike(embedder: MiniLmEmbedder, soon: Deadline) -> None:
    rows = [embedder.tokenize(text) for text in TEXTS]
    assert np.array_equal(await embedder.embed_tokens(rows, soon), await embedder.embed(TEXTS, soon))


@pytest.mark.parametrize("row", [[], [2, -1, 3], [2, 10**6, 3], [2] * 513])
async def test_ids_that_the_model_cannot_read_never_reach_it(
    embedder: MiniLmEmbedder, soon: Deadline, row: list[int]
) -> None:
    with pytest.raises(ModelFailed, match="outside what the model reads"):
        await embedder.embed_tokens([[2, 3], row], soon)


async def test_many_texts_keep_to_the_deadline(embedder: MiniLmEmbedder) -> None:
    with pytest.raises(DeadlineExceeded):
        await embedder.embed(["tent " * 250] * 3000, Deadline.after(0.05, SystemClock()))


async def test_a_short_call_gets_its_turn_while_a_long_one_runs(embedder: MiniLmEmbedder, soon: Deadline) -> None:
    long = asyncio.create_task(embedder.embed(["tent " * 250] * 400, soon))
    while embedder._thread.waiting == 0:
        await asyncio.sleep(0)
    await embedder.embed(["tent"], soon)
    assert not long.done(), "the short call waited for one run, not for all"
    long.cancel()
    with pytest.raises(asyncio.CancelledError):
        await long


async def test_the_fingerprint_is_that_of_the_loaded_model(backend: EmbeddingsBackend, tiny_store: ModelStore) -> None:
    manifest = tiny_store.manifest("minilm", "fp32")
    assert backend.info.fingerprint == backend.embedder.fingerprint != manifest.fingerprint
    other = await MiniLmEmbedder.load(tiny_store.folder("minilm", "q8"))
    assert other.fingerprint != backend.info.fingerprint
    await other.aclose()


async def test_a_folder_of_another_kind_is_refused(tiny_store: ModelStore) -> None:
    with pytest.raises(ModelError, match="kind two_tower, not an embedder"):
        await MiniLmEmbedder.load(tiny_store.folder("two-tower", "fp32"))


# --------------------------------------------------------------------------------------------------------- the backend


async def test_the_backend_answers_with_vectors_and_usage(backend: EmbeddingsBackend, soon: Deadline) -> None:
    answer = await backend.infer(EmbeddingsRequest({}, ["warm tent", "a"]), soon)
    assert answer.vectors.shape == (2, WIDTH) and answer.model == "minilm"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (7, 0)
    assert (await backend.health()).ready


async def test_the_backend_reads_whole_texts(backend: EmbeddingsBackend, soon: Deadline) -> None:
    answer = await backend.infer(EmbeddingsRequest({}, ["cat " * 400, "cat " * 510]), soon)
    assert answer.usage.prompt_tokens == 402 + 512


@pytest.mark.parametrize(
    ("body", "texts", "param", "says"),
    [
        ({}, ["a", "cat " * 511], "input", "input 1 has 513 tokens; minilm reads at most 512"),
        ({}, ["a" * 20_000], "input", "input 0 has 20000 characters"),
        ({}, [], "input", "holds 0 texts"),
        ({}, ["a"] * (MAX_TEXTS + 1), "input", "holds 2049 texts"),
        ({"dimensions": 12}, ["a"], "dimensions", "gives 64 dimensions only"),
    ],
)
async def test_what_the_model_cannot_read_is_the_clients_error(
    backend: EmbeddingsBackend, soon: Deadline, body: dict[str, object], texts: list[str], param: str, says: str
) -> None:
    with pytest.raises(InvalidRequest, match=says) as refused:
        await backend.infer(EmbeddingsRequest(body, texts), soon)
    assert refused.value.param == param


async def test_the_dimensions_that_it_has_may_be_asked_for(backend: EmbeddingsBackend, soon: Deadline) -> None:
    assert (await backend.infer(EmbeddingsRequest({"dimensions": WIDTH}, ["a"]), soon)).vectors.shape == (1, WIDTH)


async def test_other_traffic_is_not_served(backend: EmbeddingsBackend, soon: Deadline) -> None:
    with pytest.raises(CannotServe, match="tensor"):
        await backend.infer(TensorRequest("m", []), soon)
    with pytest.raises(CannotServe, match="chat"):
        await anext(backend.stream(ChatRequest({"messages": []}), soon))


async def test_a_closed_model_is_not_ready(tiny_store: ModelStore, soon: Deadline) -> None:
    backend = await EmbeddingsBackend.load(tiny_store.folder("minilm", "fp32"), name="embed", role=Role.LIGHT)
    await backend.aclose()
    assert not (await backend.health()).ready
    with pytest.raises(ModelNotReady):
        await backend.infer(EmbeddingsRequest({}, ["a"]), soon)
