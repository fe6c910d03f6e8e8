"""The in-process recommender: texts or vectors in, one score per item out.

The towers go through a `backends.api.Embedder`: the plain one, or one that keeps the embeddings of items it has seen.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import msgspec
import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from backends.api import (
    Answer,
    BackendInfo,
    ChatRequest,
    Chunk,
    Embedder,
    Health,
    Request,
    Role,
    Tensor,
    TensorAnswer,
    TensorRequest,
)
from backends.onnx.fingerprint import digest_parts, loaded_fingerprint
from backends.onnx.manifest import Manifest, ModelDamaged, ModelError, backend_info, read_manifest
from backends.onnx.session import PROVIDERS, OneThread, SessionSettings, check_names, create_session, provider_of
from backends.onnx.tensor_inputs import check_outputs, exactly_one, named_inputs, texts_of, vectors_of
from policies.core.deadline import Deadline
from policies.core.errors import CannotServe, ModelFailed

MAX_CANDIDATES = 1_024

FloatArray = NDArray[np.float32]


class TwoTowerBackend:
    """`backends.api.Backend` for tensor traffic; made by `load`. Closing it leaves the embedder open: it is shared.

    Inputs: exactly one of `user_history` BYTES [n] (oldest first) and `user_embedding` FP32 [d]; exactly one of `candidates`
    BYTES [m] and `item_embeddings` FP32 [m, d]. Output: `scores` FP32 [m], cosine of user and item, in the order of the items.
    """

    def __init__(
        self,
        manifest: Manifest,
        head: ort.InferenceSession,
        embedder: Embedder,
        info: BackendInfo,
        on_loop_s: float = 0.0,
    ) -> None:
        self._manifest = manifest
        self._head = head
        self._embedder = embedder
        self._info = info
        self._max_history: int = manifest.architecture["max_history"]
        self._thread = OneThread(info.name, on_loop_s=on_loop_s)
        self._closed = False
        #: What is to be done with the embedder at the end.
        self._release: Callable[[], Awaitable[None]] | None = None

    @classmethod
    async def load(
        cls,
        folder: Path,
        embedder: Embedder,
        *,
        name: str,
        role: Role,
        settings: SessionSettings | None = None,
        release: Callable[[], Awaitable[None]] | None = None,
    ) -> TwoTowerBackend:
        """Load the head in a thread. Raises ModelError, also when `embedder` is not the model it was built for.

        `release` is called when the backend is closed: it needs the embedder no longer.
        The encoder may run on another execution provider than the head, so its loaded fingerprint is part of ours.
        """
        manifest, head = await asyncio.to_thread(_load_head, folder, settings)
        if not _built_for(manifest, embedder):
            raise ModelError(
                f"{folder} was built for another encoder than {manifest.requires} as loaded; run `gateway models build {manifest.reference}`"
            )
        on_loop_s = settings.on_loop_s if settings is not None else 0.0
        backend = cls(manifest, head, embedder, _info(manifest, head, embedder, name, role), on_loop_s)
        backend._release = release
        return backend

    @property
    def info(self) -> BackendInfo:
        return self._info

    async def infer(self, request: Request, deadline: Deadline) -> Answer:
        """Scores for each item. Raises InvalidRequest (naming the input) before anything runs."""
        if not isinstance(request, TensorRequest):
            raise CannotServe(f"{self._info.name} scores tensors; it does not serve {request.surface} traffic")
        found = named_inputs(request, self._manifest.inputs)
        check_outputs(request, self._manifest.outputs)
        user = exactly_one(found, "user_history", "user_embedding")
        items = exactly_one(found, "candidates", "item_embeddings")
        history_rows, item_rows = await self._embeddings(user, items, deadline)
        scores = await self._thread.run(self._score, deadline, history_rows, item_rows)
        if not np.isfinite(scores).all():
            raise ModelFailed("the scores are not finite", self._info.name)
        return TensorAnswer(self._info.model, [Tensor("scores", "FP32", scores)])

    async def _embeddings(self, user: Tensor, items: Tensor, deadline: Deadline) -> tuple[FloatArray, FloatArray]:
        """Both towers. Texts of both go to the encoder in one call, each distinct one once."""
        history = texts_of(user, self._max_history) if user.datatype == "BYTES" else []
        candidates = texts_of(items, MAX_CANDIDATES) if items.datatype == "BYTES" else []
        user_rows = vectors_of(user, 1) if not history else None
        item_rows = vectors_of(items, MAX_CANDIDATES) if not candidates else None
        distinct = {text: index for index, text in enumerate(dict.fromkeys([*history, *candidates]))}
        if distinct:
            vectors = await self._embedder.embed(list(distinct), deadline)
            if user_rows is None:
                user_rows = vectors[[distinct[text] for text in history]]
            if item_rows is None:
                item_rows = vectors[[distinct[text] for text in candidates]]
        assert user_rows is not None and item_rows is not None
        return user_rows, item_rows

    def _score(self, options: ort.RunOptions, history: FloatArray, items: FloatArray) -> FloatArray:
        scores: FloatArray = self._head.run(["scores"], {"history": history, "items": items}, options)[0]
        return scores

    async def stream(self, request: ChatRequest, deadline: Deadline) -> AsyncIterator[Chunk]:
        """Scores do not stream: always CannotServe."""
        del deadline
        raise CannotServe(f"{self._info.name} scores tensors; it does not serve {request.surface} traffic")
        yield  # makes this a generator, as the protocol wants

    async def health(self) -> Health:
        return Health(ready=False, reason="the model is unloaded") if self._closed else Health(ready=True)

    async def aclose(self) -> None:
        self._closed = True
        await self._thread.aclose()
        if self._release is not None:
            await self._release()


def _load_head(folder: Path, settings: SessionSettings | None) -> tuple[Manifest, ort.InferenceSession]:
    manifest = read_manifest(folder)
    if manifest.kind != "two_tower":
        raise ModelError(f"{folder} holds a model of kind {manifest.kind}, not a two-tower head")
    head = create_session(folder / "head.onnx", settings)
    check_names(head, ["history", "items"], ["scores"])
    row = np.ones((1, manifest.architecture["dimensions"]), np.float32)
    score = head.run(["scores"], {"history": row, "items": row})[0]
    if score.shape != (1,) or abs(float(score[0]) - 1) > 1e-3:
        raise ModelDamaged(
            f"{folder}: a vector scores {score} against itself, not 1; run `gateway models build --force`"
        )
    return manifest, head


def _built_for(manifest: Manifest, embedder: Embedder) -> bool:
    known = {loaded_fingerprint(manifest.requires_fingerprint, provider) for provider in PROVIDERS.values()}
    return embedder.fingerprint in known and embedder.dimensions == manifest.architecture["dimensions"]


def _info(manifest: Manifest, head: ort.InferenceSession, embedder: Embedder, name: str, role: Role) -> BackendInfo:
    plain = backend_info(manifest, name=name, role=role, provider=provider_of(head))
    both = digest_parts([("head", plain.fingerprint), ("encoder", embedder.fingerprint)])
    return msgspec.structs.replace(plain, fingerprint=both)
