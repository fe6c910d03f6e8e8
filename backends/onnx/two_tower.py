"""The in-process recommender: texts or vectors in, one score per item out.

One graph from token ids to scores, split at its towers (`build/two_tower.py`): what a user's history and each item came to
is kept in the subgraph cache, where there is one, and the rest is run.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from backends.api import (
    Answer,
    BackendInfo,
    ChatRequest,
    Chunk,
    Health,
    Request,
    Role,
    Tensor,
    TensorAnswer,
    TensorCache,
    TensorRequest,
)
from backends.onnx.cut_counts import CutCounts
from backends.onnx.embedder import MiniLmEmbedder
from backends.onnx.fingerprint import digest_parts, loaded_fingerprint
from backends.onnx.manifest import Manifest, ModelError, backend_info, read_manifest
from backends.onnx.segmented import SegmentedModel
from backends.onnx.segments import Bound, Value
from backends.onnx.session import PROVIDERS, SessionSettings
from backends.onnx.tensor_inputs import check_outputs, exactly_one, named_inputs, texts_of, vectors_of
from policies.core.deadline import Deadline
from policies.core.errors import CannotServe, ModelFailed

MAX_CANDIDATES = 1_024


@dataclass(frozen=True, slots=True)
class Keep:
    """Where a model keeps its inner tensors, and who counts what happens at its cuts."""

    cache: TensorCache | None = None
    counts: CutCounts | None = None


class TwoTowerBackend:
    """`backends.api.Backend` for tensor traffic; made by `load`. Closing it leaves the embedder open: it is shared.

    Inputs: exactly one of `user_history` BYTES [n] (oldest first) and `user_embedding` FP32 [d]; exactly one of `candidates`
    BYTES [m] and `item_embeddings` FP32 [m, d]. Output: `scores` FP32 [m], cosine of user and item, in the order of the items.
    """

    def __init__(
        self,
        manifest: Manifest,
        model: SegmentedModel,
        embedder: MiniLmEmbedder,
        info: BackendInfo,
        release: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`release`: what is to be done with the embedder at the end."""
        self._manifest = manifest
        self._model = model
        self._embedder = embedder
        self._info = info
        self._max_history: int = manifest.architecture["max_history"]
        self._release = release
        self._closed = False

    @classmethod
    async def load(
        cls,
        folder: Path,
        embedder: MiniLmEmbedder,
        *,
        name: str,
        role: Role,
        settings: SessionSettings | None = None,
        release: Callable[[], Awaitable[None]] | None = None,
        keep: Keep | None = None,
    ) -> TwoTowerBackend:
        """Load in a thread. Raises ModelError, also when `embedder` is not the model it was built for.

        `embedder` reads the texts, and its session runs the encoders of both towers when it is on the same provider.
        `release` is called when the backend is closed: it needs the embedder no longer. `keep`: where tensors are kept
        [nowhere].
        """
        settings = settings or SessionSettings()
        keep = keep or Keep()
        manifest, model = await asyncio.to_thread(_load, folder, embedder, name, settings, keep)
        return cls(manifest, model, embedder, _info(manifest, model, embedder, name, role), release)

    @property
    def info(self) -> BackendInfo:
        return self._info

    @property
    def counts(self) -> CutCounts:
        """What happened at the model's cuts."""
        return self._model.counts

    async def infer(self, request: Request, deadline: Deadline) -> Answer:
        """Scores for each item. Raises InvalidRequest (naming the input) before anything runs."""
        if not isinstance(request, TensorRequest):
            raise CannotServe(f"{self._info.name} scores tensors; it does not serve {request.surface} traffic")
        found = named_inputs(request, self._manifest.inputs)
        check_outputs(request, self._manifest.outputs)
        user = exactly_one(found, "user_history", "user_embedding")
        items = exactly_one(found, "candidates", "item_embeddings")
        feeds = await self._feeds(user, items, deadline)
        scores = (await self._model.run(feeds, deadline))["scores"]
        if not np.isfinite(scores).all():
            raise ModelFailed("the scores are not finite", self._info.name)
        return TensorAnswer(self._info.model, [Tensor("scores", "FP32", scores)])

    async def _feeds(self, user: Tensor, items: Tensor, deadline: Deadline) -> dict[str, Value]:
        """Texts as rows of token ids for a tower; vectors in place of what that tower gives."""
        history = texts_of(user, self._max_history) if user.datatype == "BYTES" else []
        candidates = texts_of(items, MAX_CANDIDATES) if items.datatype == "BYTES" else []
        feeds: dict[str, Value] = {}
        if not history:
            feeds["user_sum"] = vectors_of(user, 1)
        if not candidates:
            feeds["item_embedding"] = vectors_of(items, MAX_CANDIDATES)
        distinct = {text: index for index, text in enumerate(dict.fromkeys([*history, *candidates]))}
        rows = await self._embedder.read(list(distinct), deadline) if distinct else []
        for tower, texts in (("history", history), ("item", candidates)):
            if texts:
                ids = [np.array(rows[distinct[text]], np.int64) for text in texts]
                feeds[f"{tower}_ids"] = ids
                feeds[f"{tower}_mask"] = [np.ones_like(row) for row in ids]
        return feeds

    async def stream(self, request: ChatRequest, deadline: Deadline) -> AsyncIterator[Chunk]:
        """Scores do not stream: always CannotServe."""
        del deadline
        raise CannotServe(f"{self._info.name} scores tensors; it does not serve {request.surface} traffic")
        yield  # makes this a generator, as the protocol wants

    async def health(self) -> Health:
        return Health(ready=False, reason="the model is unloaded") if self._closed else Health(ready=True)

    async def aclose(self) -> None:
        self._closed = True
        await self._model.aclose()
        if self._release is not None:
            await self._release()


def _load(
    folder: Path, embedder: MiniLmEmbedder, name: str, settings: SessionSettings, keep: Keep
) -> tuple[Manifest, SegmentedModel]:
    manifest = read_manifest(folder)
    if manifest.kind != "two_tower":
        raise ModelError(f"{folder} holds a model of kind {manifest.kind}, not a two-tower recommender")
    if not _built_for(manifest, embedder):
        raise ModelError(
            f"{folder} was built for another encoder than {manifest.requires} as loaded; run `gateway models build {manifest.reference}`"
        )
    encoder = manifest.architecture["encoder"]
    shared = {}
    if embedder.provider == PROVIDERS.get(settings.provider):
        shared[encoder["digest"]] = Bound(embedder.session, tuple(encoder["inputs"]), ("embedding",))
    model = SegmentedModel.load(
        folder / "model.onnx",
        manifest.cuts,
        list(_probes(embedder.manifest.architecture["vocabulary"])),
        name=name,
        settings=settings,
        shared=shared,
        cache=keep.cache,
        counts=keep.counts,
    )
    return manifest, model


def _probes(vocabulary: int) -> Iterator[dict[str, Value]]:
    """Token ids: texts of one length, of many lengths, and one alone."""
    source = np.random.default_rng(0)
    for shortest, longest, read, offered in ((6, 6, 3, 5), (2, 14, 5, 9), (4, 4, 1, 1)):
        probe: dict[str, Value] = {}
        for tower, count in (("history", read), ("item", offered)):
            ids = [source.integers(1, vocabulary, source.integers(shortest, longest + 1)) for _ in range(count)]
            probe[f"{tower}_ids"], probe[f"{tower}_mask"] = list(ids), [np.ones_like(row) for row in ids]
        yield probe


def _built_for(manifest: Manifest, embedder: MiniLmEmbedder) -> bool:
    known = {loaded_fingerprint(manifest.requires_fingerprint, provider) for provider in PROVIDERS.values()}
    return embedder.fingerprint in known and embedder.dimensions == manifest.architecture["dimensions"]


def _info(manifest: Manifest, model: SegmentedModel, embedder: MiniLmEmbedder, name: str, role: Role) -> BackendInfo:
    plain = backend_info(manifest, name=name, role=role, provider=model.provider)
    both = digest_parts([("model", plain.fingerprint), ("encoder", embedder.fingerprint)])
    return msgspec.structs.replace(plain, fingerprint=both, cuts=model.verdicts)
