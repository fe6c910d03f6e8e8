"""The one encoder that classification, the embeddings surface and the recommender share, and how it is loaded anew.

A reload takes what lies on disk now. An encoder with the same fingerprint would answer the same and is kept. Another one is
loaded beside the old one; classification moves to it with the first model that has been loaded with it, the other models
when they are loaded anew themselves (their answers, and so their fingerprints, depend on it). An encoder is closed when the
last model and the last call have left it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from numpy import float32
from numpy.typing import NDArray

from backends.api import Embedder
from policies.core.deadline import Deadline
from policies.core.errors import ModelNotReady

if TYPE_CHECKING:
    from backends.onnx.batch_stats import BatcherStats
    from backends.onnx.embedder import MiniLmEmbedder
    from backends.onnx.manifest import Manifest
    from backends.onnx.session import SessionSettings


class EmbedderPlace(Embedder, Protocol):
    """An embedder that may not be there yet: then its methods raise ModelNotReady."""

    @property
    def ready(self) -> bool: ...

    async def aclose(self) -> None: ...


class SharedEmbedder:
    """Implements `EmbedderPlace` with the encoder in force. `folder` is called for each load; raises ModelError."""

    def __init__(self, folder: Callable[[], Path], settings: Callable[[], SessionSettings]) -> None:
        self._folder = folder
        self._settings = settings
        self._lock = asyncio.Lock()
        self._encoders: list[_Encoder] = []
        self._in_force: _Encoder | None = None

    async def take(self) -> Lease:
        """The encoder that lies on disk now, loaded unless it is there already. Raises ModelError."""
        from backends.onnx.embedder import MiniLmEmbedder

        async with self._lock:
            folder, manifest = await asyncio.to_thread(self._on_disk)
            self._encoders = [encoder for encoder in self._encoders if encoder.uses]
            for encoder in self._encoders:
                if encoder.embedder.manifest.fingerprint == manifest.fingerprint:
                    break
            else:
                encoder = _Encoder(await MiniLmEmbedder.load(folder, settings=self._settings()))
                self._encoders.append(encoder)
            lease = Lease(self, encoder)
            if self._in_force is None:
                await self.put_in_force(encoder)
        return lease

    def _on_disk(self) -> tuple[Path, Manifest]:
        from backends.onnx.manifest import read_manifest

        folder = self._folder()
        return folder, read_manifest(folder)

    async def put_in_force(self, encoder: _Encoder) -> None:
        before = self._in_force
        if encoder is before:
            return
        encoder.uses += 1
        self._in_force = encoder
        if before is not None:
            await before.left()

    @property
    def ready(self) -> bool:
        return self._in_force is not None

    @property
    def fingerprint(self) -> str:
        return self._encoder().embedder.fingerprint

    @property
    def dimensions(self) -> int:
        return self._encoder().embedder.dimensions

    async def embed(self, texts: Sequence[str], deadline: Deadline) -> NDArray[float32]:
        encoder = self._encoder()
        encoder.uses += 1
        try:
            return await encoder.embedder.embed(texts, deadline)
        finally:
            await encoder.left()

    async def unknown_share(self, text: str, deadline: Deadline) -> float:
        encoder = self._encoder()
        encoder.uses += 1
        try:
            return await encoder.embedder.unknown_share(text, deadline)
        finally:
            await encoder.left()

    def stats(self) -> BatcherStats | None:
        """Of the batcher of the encoder in force; None while there is none."""
        return None if self._in_force is None else self._in_force.embedder.stats()

    async def aclose(self) -> None:
        """Models that were loaded with it give it back when they are closed."""
        before, self._in_force = self._in_force, None
        if before is not None:
            await before.left()

    def _encoder(self) -> _Encoder:
        if self._in_force is None:
            raise ModelNotReady("the embedder is not ready")
        return self._in_force


class _Encoder:
    """An encoder and how many models and calls use it."""

    __slots__ = ("embedder", "uses")

    def __init__(self, embedder: MiniLmEmbedder) -> None:
        self.embedder = embedder
        self.uses = 0

    async def left(self) -> None:
        self.uses -= 1
        if not self.uses:
            await self.embedder.aclose()


class Lease:
    """A model's use of an encoder; ended once."""

    def __init__(self, shared: SharedEmbedder, encoder: _Encoder) -> None:
        self._shared = shared
        self._encoder: _Encoder | None = encoder
        self.embedder = encoder.embedder
        encoder.uses += 1

    async def put_in_force(self) -> None:
        """The model is in place: classification uses this encoder too from now on."""
        if self._encoder is not None:
            await self._shared.put_in_force(self._encoder)

    async def release(self) -> None:
        encoder, self._encoder = self._encoder, None
        if encoder is not None:
            await encoder.left()
