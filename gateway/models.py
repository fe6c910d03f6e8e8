"""The models inside the gateway: from configuration to slots that load them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from numpy import float32
from numpy.typing import NDArray

from backends.api import Backend, BackendInfo, Capabilities
from backends.slot import Slot
from gateway.config_sections import BackendSettings, Config, ModelSettings
from policies.core.clock import Clock
from policies.core.deadline import Deadline
from policies.core.errors import ModelNotReady
from policies.core.events import Observer

if TYPE_CHECKING:
    from backends.onnx.embedder import MiniLmEmbedder
    from backends.onnx.session import SessionSettings

MODEL_KINDS = ("onnx_chat", "onnx_two_tower", "onnx_embedder")
_BUILD = "run `gateway models build`"


def model_reference(config: Config, name: str) -> str:
    """`name:variant` of a configured model, as the model store knows it."""
    spec = config.models.get(name)
    return f"{name}:{spec.variant}" if spec is not None else name


def model_folder(config: Config, name: str) -> Path:
    """Where the built model lies, or will lie."""
    from backends.onnx.catalogue import resolve
    from backends.onnx.store import ModelStore

    spec = resolve(model_reference(config, name))
    return ModelStore(config.models_dir).folder(spec.entry.name, spec.variant)


def model_sources(config: Config) -> dict[str, str]:
    """The configured weights by model name, where they are not the catalogue's."""
    return {
        # The model that another one is made from has the variant of that one.
        name: f"{spec.source}:{spec.variant}" if spec.source.startswith("model:") and spec.source.count(":") == 1
        else spec.source
        for name, spec in config.models.items()
        if spec.source
    }  # fmt: skip


def checked_folder(config: Config, name: str) -> Path:
    """The built model's folder. Raises ModelError when it was built from other weights than the configured ones."""
    from backends.onnx.manifest import ModelError, read_manifest

    folder = model_folder(config, name)
    wanted = model_sources(config).get(name)
    if wanted is not None:
        built = read_manifest(folder).source
        if built != wanted:
            raise ModelError(f"{folder} was built from {built}, but the configuration says {wanted}; {_BUILD}")
    return folder


def embedder_name(config: Config) -> str | None:
    """The model of the one embedder that this configuration needs; None = none."""
    from backends.onnx.catalogue import CATALOGUE

    for spec in config.backends.values():
        if spec.kind == "onnx_embedder" and spec.model:
            return spec.model
    for spec in config.backends.values():
        entry = CATALOGUE.get(spec.model)
        if spec.kind == "onnx_two_tower" and entry is not None and entry.requires is not None:
            return entry.requires
    return None


class SharedEmbedder:
    """The one MiniLM of this process: classification, the embeddings surface and the recommender use the same session.

    Implements `backends.api.Embedder`; before it is loaded, calls raise ModelNotReady.
    """

    def __init__(self, folder: Callable[[], Path], settings: ModelSettings | None) -> None:
        #: Called for each try to load. Raises ModelError.
        self._folder = folder
        self._settings = settings
        self._lock = asyncio.Lock()
        self._loaded: MiniLmEmbedder | None = None

    async def load(self) -> MiniLmEmbedder:
        """Load once, however many ask. Raises ModelError."""
        from backends.onnx.embedder import MiniLmEmbedder

        async with self._lock:
            if self._loaded is None:
                self._loaded = await MiniLmEmbedder.load(self._folder(), settings=session_settings(self._settings))
        return self._loaded

    def _ready(self) -> MiniLmEmbedder:
        if self._loaded is None:
            raise ModelNotReady("the embedder is not ready")
        return self._loaded

    @property
    def ready(self) -> bool:
        return self._loaded is not None

    @property
    def fingerprint(self) -> str:
        return self._ready().fingerprint

    @property
    def dimensions(self) -> int:
        return self._ready().dimensions

    async def embed(self, texts: Sequence[str], deadline: Deadline) -> NDArray[float32]:
        return await self._ready().embed(texts, deadline)

    def unknown_share(self, text: str) -> float:
        return self._ready().unknown_share(text)

    async def aclose(self) -> None:
        if self._loaded is not None:
            await self._loaded.aclose()


def session_settings(spec: ModelSettings | None) -> SessionSettings:
    from backends.onnx.session import SessionSettings

    return SessionSettings(provider=spec.provider if spec is not None else "cpu")


class ModelSlots:
    """Makes a Slot for each backend whose model runs in this process."""

    def __init__(self, config: Config, clock: Clock, observer: Observer) -> None:
        self._config = config
        self._clock = clock
        self._observer = observer
        self.embedder: SharedEmbedder | None = None
        name = embedder_name(config)
        if name is not None:
            self.embedder = SharedEmbedder(partial(checked_folder, config, name), config.models.get(name))

    def slot(self, name: str, spec: BackendSettings) -> Slot:
        """An empty slot; `fill` loads it."""
        placeholder = BackendInfo(
            name=name,
            role=spec.effective_role(),
            model=spec.model or name,
            fingerprint=f"not-loaded:{name}",
            capabilities=Capabilities(surfaces=spec.effective_surfaces()),
        )
        adjust = partial(_as_configured, spec=spec, model=self._config.models.get(spec.model or name))
        return Slot(placeholder, lambda: self._load(name, spec), self._clock, self._observer, adjust)

    async def _load(self, name: str, spec: BackendSettings) -> Backend:
        model = spec.model or name
        configured = self._config.models.get(model)
        settings = session_settings(configured)
        arguments: dict[str, Any] = {"name": name, "role": spec.effective_role()}
        if spec.kind == "onnx_chat":
            from backends.onnx.chat import ChatSettings, load_chat

            chat = ChatSettings(session=settings)
            return await load_chat(checked_folder(self._config, model), clock=self._clock, settings=chat, **arguments)
        assert self.embedder is not None
        embedder = await self.embedder.load()
        if spec.kind == "onnx_embedder":
            from backends.onnx.embedder import EmbeddingsBackend

            return EmbeddingsBackend(embedder, **arguments)
        from backends.onnx.two_tower import TwoTowerBackend

        return await TwoTowerBackend.load(checked_folder(self._config, model), embedder, settings=settings, **arguments)


def _as_configured(info: BackendInfo, spec: BackendSettings, model: ModelSettings | None) -> BackendInfo:
    """The manifest's word, narrowed or widened by the operator's: first the model's section, then the backend's."""
    capabilities = info.capabilities
    for section in (model, spec):
        if section is None:
            continue
        said = section.capabilities
        changes: dict[str, Any] = {}
        if said.surfaces is not None:
            changes["surfaces"] = said.surfaces
        if said.context_tokens is not None:
            changes["context_tokens"] = said.context_tokens
        if said.features is not None:
            changes["features"] = frozenset(said.features)
        if section.languages is not None:
            changes["languages"] = section.languages
        capabilities = msgspec.structs.replace(capabilities, **changes)
    return msgspec.structs.replace(info, capabilities=capabilities)
