"""Small pieces for the routing tests."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backends.api import BackendInfo, Capabilities, ChatRequest, Role, Surface
from policies.core.deadline import Deadline
from policies.language.schema import Classify, Condition, Match, Policy, Route, SignalSpec
from routing.heads import Calibration, Header, write_head
from routing.train import PROBE
from routing.view import RequestView

DIMENSIONS = 8


def chat(content: Any, **body: Any) -> RequestView:
    return RequestView(ChatRequest({"messages": [{"role": "user", "content": content}], **body}))


def policy(signals: dict[str, SignalSpec], routes: tuple[Route, ...] = (), **more: Any) -> Policy:
    return Policy(
        policy="test",
        version=1,
        match=Match(aliases=("auto",)),
        classify=Classify(signals=signals),
        routes=routes,
        **more,
    )


def backends() -> dict[str, BackendInfo]:
    """Two light, two heavy, and an embedder, in the operator's order."""
    chat_only, embeds = frozenset({Surface.CHAT}), frozenset({Surface.EMBEDDINGS})
    rows = (
        ("small", Role.LIGHT, chat_only),
        ("embedder", Role.LIGHT, embeds),
        ("big", Role.HEAVY, chat_only),
        ("tiny", Role.LIGHT, chat_only),
        ("bigger", Role.HEAVY, chat_only),
    )
    return {
        name: BackendInfo(
            name=name, role=role, model=name, fingerprint=name, capabilities=Capabilities(surfaces=surfaces)
        )
        for name, role, surfaces in rows
    }


def when(signal: str, at_least: float = 0.5) -> Condition:
    return Condition(signal=signal, at_least=at_least)


def vector(text: str) -> NDArray[np.float32]:
    """A fixed direction for each text."""
    direction = np.random.default_rng(list(text.encode())).normal(size=DIMENSIONS)
    return (direction / np.linalg.norm(direction)).astype(np.float32)


def write_lexical(folder: Path, name: str = "complexity", seed: int = 0) -> Path:
    path = folder / f"{name}.head"
    table = np.random.default_rng(seed).normal(size=1 << 10).astype(np.float16)
    write_head(path, Header(kind="lexical", arrays=(), calibration=Calibration(), bias=0.1), {"table": table})
    return path


def write_embedding(folder: Path, weights: NDArray[np.float32], name: str = "meaning") -> Path:
    path = folder / f"{name}.head"
    header = Header(kind="embedding", arrays=(), calibration=Calibration(scale=4.0), bias=0.0, probe_text=PROBE)
    write_head(path, header, {"weights": weights, "probe": vector(PROBE)})
    return path


class FakeEmbedder:
    """Implements `backends.api.Embedder`: `vector` of each text; Chinese is unknown to it. Counts what it embeds."""

    fingerprint = "fake"
    dimensions = DIMENSIONS

    def __init__(self, error: Exception | None = None, *, sign: float = 1.0, hang: bool = False) -> None:
        self.seen: list[str] = []
        self._error = error
        self._sign = sign
        self._hang = hang

    async def embed(self, texts: Sequence[str], deadline: Deadline) -> NDArray[np.float32]:
        if self._error is not None:
            raise self._error
        if self._hang:
            await asyncio.get_running_loop().create_future()
        self.seen.extend(texts)
        return self._sign * np.stack([vector(text) for text in texts])

    async def unknown_share(self, text: str, deadline: Deadline) -> float:
        return sum(character > "\u2e80" for character in text) / max(1, len(text))
