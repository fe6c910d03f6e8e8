"""The models inside the gateway: from configuration to slots that load them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from backends.api import Backend, BackendInfo, Capabilities, TensorCache
from backends.link.client import ModelLink
from backends.link.linked import LinkedEmbedder, LinkedModel
from backends.onnx.cut_counts import CutCounts
from backends.slot import Slot
from gateway.config_sections import BackendSettings, Config, ModelSettings
from gateway.observe.batches import batch_families
from gateway.observe.metric_store import Family
from gateway.shared_embedder import SharedEmbedder
from policies.core.clock import Clock
from policies.core.events import Observer

if TYPE_CHECKING:
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


def session_settings(spec: ModelSettings | None, on_loop_s: float = 0.0) -> SessionSettings:
    from backends.onnx.session import SessionSettings

    return SessionSettings(provider=spec.provider if spec is not None else "cpu", on_loop_s=on_loop_s)


def in_process_models(config: Config) -> list[str]:
    """The backends whose models run inside the gateway."""
    return [name for name, spec in config.backends.items() if spec.kind in MODEL_KINDS]


def placeholder_info(name: str, spec: BackendSettings) -> BackendInfo:
    """What is known of a backend before its model is loaded."""
    return BackendInfo(
        name=name,
        role=spec.effective_role(),
        model=spec.model or name,
        fingerprint=f"not-loaded:{name}",
        capabilities=Capabilities(surfaces=spec.effective_surfaces()),
    )


class ModelSlots:
    """Makes a Slot for each backend whose model runs in this process. `on_loop_s`: as in SessionSettings."""

    def __init__(
        self,
        config: Config,
        clock: Clock,
        observer: Observer,
        tensors: TensorCache | None = None,
        *,
        on_loop_s: float = 0.0,
    ) -> None:
        """`tensors`: where models that are split keep what they computed [nowhere]."""
        self._tensors = tensors
        self._on_loop_s = on_loop_s
        self.cut_counts = CutCounts()
        self._config = config
        self._clock = clock
        self._observer = observer
        self.embedder: SharedEmbedder | None = None
        name = self._embedder_name = embedder_name(config)
        if name is not None:
            settings = partial(session_settings, config.models.get(name))
            self.embedder = SharedEmbedder(partial(checked_folder, config, name), settings)

    def families(self) -> list[Family]:
        """What the embedder's batcher has done."""
        stats = self.embedder.stats() if self.embedder is not None else None
        return [] if stats is None or self._embedder_name is None else batch_families(self._embedder_name, stats)

    def place(self, name: str, spec: BackendSettings) -> Slot:
        """An empty slot; `fill` loads it."""
        placeholder = placeholder_info(name, spec)
        adjust = partial(_as_configured, spec=spec, model=self._config.models.get(spec.model or name))
        return Slot(placeholder, lambda: self._load(name, spec), self._clock, self._observer, adjust)

    async def _load(self, name: str, spec: BackendSettings) -> Backend:
        model = spec.model or name
        configured = self._config.models.get(model)
        settings = session_settings(configured, self._on_loop_s)
        arguments: dict[str, Any] = {"name": name, "role": spec.effective_role()}
        if spec.kind == "onnx_chat":
            from backends.onnx.chat import ChatSettings, load_chat

            chat = ChatSettings(session=settings)
            return await load_chat(checked_folder(self._config, model), clock=self._clock, settings=chat, **arguments)
        assert self.embedder is not None
        lease = await self.embedder.take()
        arguments["release"] = lease.release
        try:
            if spec.kind == "onnx_embedder":
                from backends.onnx.embedder import EmbeddingsBackend

                backend: Backend = EmbeddingsBackend(lease.embedder, **arguments)
            else:
                from backends.onnx.two_tower import Keep, TwoTowerBackend

                folder = checked_folder(self._config, model)
                keep = Keep(self._tensors, self.cut_counts)
                backend = await TwoTowerBackend.load(folder, lease.embedder, settings=settings, keep=keep, **arguments)
        except BaseException:
            await lease.release()
            raise
        await lease.put_in_force()
        return backend


class LinkedModels:
    """Makes a place for each backend whose model runs in the model host."""

    def __init__(self, config: Config, link: ModelLink, observer: Observer) -> None:
        #: The model host counts.
        self.cut_counts = CutCounts()
        self._link = link
        self._observer = observer
        self.embedder: LinkedEmbedder | None = link.embedder if embedder_name(config) is not None else None

    def families(self) -> list[Family]:
        """The host counts by itself."""
        return []

    def place(self, name: str, spec: BackendSettings) -> LinkedModel:
        """The host's model; `not ready` until the host says so."""
        return self._link.model(placeholder_info(name, spec), self._observer)


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
