from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from backends.api import Role
from backends.onnx.catalogue import resolve
from backends.onnx.chat import OnnxChatBackend, load_chat
from backends.onnx.generation import Generator
from backends.onnx.prepare import prepare
from backends.onnx.store import ModelStore
from policies.core.clock import SystemClock
from policies.core.deadline import Deadline
from tests.support.chat_asks import SETTINGS
from tests.support.scripted_decoder import ScriptedRooms
from tests.support.tiny_bert import write_tiny_bert
from tests.support.tiny_llama import write_tiny_llama


@pytest.fixture(scope="session")
def models_home() -> Path:
    """Where the real models are: what `make` prepares, in $GATEWAY_HOME or ~/.cache/gateway."""
    home = os.environ.get("GATEWAY_HOME")
    return (Path(home) if home else Path.home() / ".cache" / "gateway") / "models"


@pytest.fixture(scope="session")
def real_model(models_home: Path) -> Callable[[str], Path]:
    """Folder of a real model by reference (`minilm:fp32`), built now if it is missing."""
    store = ModelStore(models_home)

    def folder(reference: str) -> Path:
        prepare(store, [reference])
        spec = resolve(reference)
        return store.folder(spec.entry.name, spec.variant)

    return folder


@pytest.fixture(scope="session")
def tiny_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_bert(tmp_path_factory.mktemp("tiny-bert"))


@pytest.fixture(scope="session")
def tiny_store(tmp_path_factory: pytest.TempPathFactory, tiny_weights: Path) -> ModelStore:
    """A store with minilm and two-tower, both variants, from random weights. Tests only read it."""
    store = ModelStore(tmp_path_factory.mktemp("tiny-models"))
    names = ["minilm:fp32", "minilm:q8", "two-tower:fp32", "two-tower:q8"]
    prepare(store, names, sources={"minilm": f"file:{tiny_weights}"})
    return store


@pytest.fixture(scope="session")
def tiny_chat_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def tiny_chat_store(tmp_path_factory: pytest.TempPathFactory, tiny_chat_weights: Path) -> ModelStore:
    """A store with smollm2, both variants, from random weights. Tests only read it."""
    store = ModelStore(tmp_path_factory.mktemp("tiny-chat-models"))
    prepare(store, ["smollm2:fp32", "smollm2:q8"], sources={"smollm2": f"file:{tiny_chat_weights}"})
    return store


@pytest.fixture(scope="session")
def tiny_chat(tiny_chat_store: ModelStore) -> Path:
    """The model folder of its fp32 variant."""
    return tiny_chat_store.folder("smollm2", "fp32")


@pytest.fixture
async def chat_backend(tiny_chat: Path) -> AsyncIterator[OnnxChatBackend]:
    made = await load_chat(tiny_chat, name="light", role=Role.LIGHT, clock=SystemClock(), settings=SETTINGS)
    yield made
    await made.aclose()


@pytest.fixture
async def held_chat(tiny_chat: Path) -> AsyncIterator[tuple[OnnxChatBackend, ScriptedRooms]]:
    """A backend whose decoder is scripted and held up until the test lets it run."""
    made = await load_chat(tiny_chat, name="light", role=Role.LIGHT, clock=SystemClock(), settings=SETTINGS)
    await made.generator.aclose()
    rooms = ScriptedRooms()
    rooms.hold()
    made.generator = Generator("light", rooms, frozenset({2}), SystemClock(), SETTINGS.limits)
    yield made, rooms
    rooms.free()
    await made.aclose()


@pytest.fixture
def soon() -> Deadline:
    """A real deadline that a test never reaches unless something hangs."""
    return Deadline.after(30.0, SystemClock())
