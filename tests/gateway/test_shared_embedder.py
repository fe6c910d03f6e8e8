"""One encoder for classification, embeddings and the recommender, and what a reload does to each of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from backends.api import EmbeddingsRequest, Tensor, TensorRequest
from backends.onnx.prepare import prepare
from backends.onnx.store import ModelStore
from backends.slot import Slot
from gateway.config import Config, load_config
from gateway.models import ModelSlots
from policies.core.clock import SystemClock
from policies.core.deadline import Deadline
from policies.core.errors import ModelNotReady
from policies.core.events import Observers
from tests.support.tiny_bert import write_tiny_bert
from tests.support.waiting import until

SCORE = TensorRequest(
    "two-tower",
    [
        Tensor("user_history", "BYTES", np.array([b"tent"], object)),
        Tensor("candidates", "BYTES", np.array([b"boots", b"dog"], object)),
    ],
)


class Gateway:
    """The models of a gateway with an embedder and a recommender, built from random weights."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = folder / "gateway.yaml"
        path.write_text(
            "models_dir: models\n"
            "models: {minilm: {}, two-tower: {}}\n"
            "backends:\n"
            "  embed: {kind: onnx_embedder, model: minilm}\n"
            "  recommender: {kind: onnx_two_tower, model: two-tower}\n"
        )
        self.config: Config = load_config(path, {"HOME": str(folder)})
        self.build("minilm:q8", "two-tower:q8", seed=0)
        models = ModelSlots(self.config, SystemClock(), Observers())
        assert models.embedder is not None
        self.shared = models.embedder
        self.embed: Slot = models.place("embed", self.config.backends["embed"])
        self.recommender: Slot = models.place("recommender", self.config.backends["recommender"])

    def build(self, *names: str, seed: int) -> None:
        weights = write_tiny_bert(self.folder / f"weights-{seed}", seed)
        prepare(ModelStore(self.config.models_dir), names, sources={"minilm": f"file:{weights}"}, force=True)

    def encoders(self) -> list[bool]:
        """All encoders that were loaded: is each still open?"""
        return [not encoder.embedder.closed for encoder in self.shared._encoders]

    async def works(self) -> None:
        soon = Deadline.after(5, SystemClock())
        await self.shared.embed(["tent"], soon)
        assert await self.shared.unknown_share("tent", soon) == 0
        await self.embed.infer(EmbeddingsRequest({}, ["tent"]), soon)
        await self.recommender.infer(SCORE, soon)


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    gateway = Gateway(tmp_path)
    yield gateway
    await gateway.embed.aclose()
    await gateway.recommender.aclose()
    await gateway.shared.aclose()
    assert not any(gateway.encoders())


async def test_an_encoder_that_is_the_same_is_kept(gateway: Gateway) -> None:
    assert not gateway.shared.ready
    with pytest.raises(ModelNotReady):
        _ = gateway.shared.fingerprint
    with pytest.raises(ModelNotReady):
        await gateway.shared.embed(["x"], Deadline.after(5, SystemClock()))
    assert await gateway.embed.fill() and await gateway.recommender.fill()
    for slot in (gateway.embed, gateway.recommender, gateway.embed):
        told = await slot.reload()
        assert told["error"] == ""
        assert told["before"] == told["after"]
        assert gateway.encoders() == [True]
        await gateway.works()


async def test_another_encoder_comes_with_the_first_model_that_can_use_it(gateway: Gateway) -> None:
    assert await gateway.embed.fill() and await gateway.recommender.fill()
    first = gateway.shared.fingerprint
    embed, recommender = gateway.embed.info.fingerprint, gateway.recommender.info.fingerprint
    gateway.build("minilm:q8", seed=1)
    # The recommender on disk belongs to the old encoder: everything stays as it is, and what was loaded in vain is closed.
    told = await gateway.recommender.reload()
    assert "built for another encoder" in told["error"]
    assert gateway.shared.fingerprint == first
    assert gateway.encoders() == [True, False]
    await gateway.works()
    # The embedder alone can follow. The recommender goes on with the encoder that it was built for.
    told = await gateway.embed.reload()
    assert (told["before"], told["error"]) == (embed, "")
    assert gateway.shared.fingerprint != first
    assert gateway.encoders() == [True, True]
    assert gateway.recommender.info.fingerprint == recommender
    await gateway.works()
    # The recommender follows, and nobody needs the old encoder any more.
    gateway.build("two-tower:q8", seed=1)
    told = await gateway.recommender.reload()
    assert (told["before"], told["error"]) == (recommender, "")
    assert told["after"] != recommender
    await until(lambda: gateway.encoders() == [False, True])
    await gateway.works()


async def test_the_recommender_may_be_first(gateway: Gateway) -> None:
    assert await gateway.embed.fill() and await gateway.recommender.fill()
    first = gateway.shared.fingerprint
    gateway.build("minilm:q8", "two-tower:q8", seed=1)
    assert (await gateway.recommender.reload())["error"] == ""
    assert gateway.shared.fingerprint != first
    assert gateway.encoders() == [True, True]
    await gateway.works()
    assert (await gateway.embed.reload())["error"] == ""
    await until(lambda: gateway.encoders() == [False, True])
    await gateway.works()


async def test_a_damaged_model_changes_nothing(gateway: Gateway) -> None:
    assert await gateway.embed.fill() and await gateway.recommender.fill()
    first = gateway.embed.info.fingerprint
    store = ModelStore(gateway.config.models_dir)
    (store.folder("minilm", "q8") / "model.onnx").write_bytes(b"not a graph")
    told = await gateway.embed.reload()
    assert "ModelDamaged" in told["error"]
    assert (told["before"], told["after"]) == (first, first)
    await gateway.works()
