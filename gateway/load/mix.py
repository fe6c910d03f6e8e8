"""What is sent: a mix turns an arrival into one request body. Seeded, so the same run can be sent again."""

from __future__ import annotations

import random
from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import msgspec

from gateway.load.arrivals import Arrival
from gateway.load.prompts import heavy_pool, light_pool, sized

#: A file of bodies is read whole.
MAX_FILE_BYTES = 256 * 1024 * 1024
#: Prompts drawn out to lengths of a trace are kept below this many tokens.
MAX_PROMPT_TOKENS = 100_000

CHAT_PATH = "/v1/chat/completions"
EMBEDDINGS_PATH = "/v1/embeddings"
_SURFACE_PATHS = {"chat": CHAT_PATH, "embeddings": EMBEDDINGS_PATH}


@dataclass(frozen=True, slots=True)
class Shot:
    """One request to send. `path` is relative to the base URL; `stream` = the answer comes as events."""

    path: str
    body: bytes
    stream: bool = False


class Mix(Protocol):
    def shot(self, arrival: Arrival) -> Shot: ...


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """`prompts`: distinct prompts of each kind, drawn with Zipf exponent `zipf` (0 = all alike).

    `heavy_share`, `stream_share`, `unique_share` are 0..1; a unique prompt carries a number and can be in no cache.
    """

    model: str = "auto"
    prompts: int = 200
    zipf: float = 1.0
    heavy_share: float = 0.3
    stream_share: float = 0.5
    unique_share: float = 0.0
    max_tokens: int | None = 64


class Zipf:
    """Draws ranks 0..count-1 with probability proportional to 1 / (rank + 1) ** exponent."""

    __slots__ = ("_edges", "_rng")

    def __init__(self, count: int, exponent: float, rng: random.Random) -> None:
        if count < 1:
            raise ValueError(f"a pool needs at least 1 prompt, not {count}")
        weights = [(rank + 1) ** -exponent for rank in range(count)]
        total = sum(weights)
        self._edges = [edge / total for edge in accumulate(weights)]
        self._edges[-1] = 1.0
        self._rng = rng

    def draw(self) -> int:
        return bisect(self._edges, self._rng.random())


class ChatMix:
    """Chat completions: light and heavy prompts, whole and streamed answers."""

    def __init__(self, options: ChatOptions, rng: random.Random) -> None:
        for name in ("heavy_share", "stream_share", "unique_share"):
            share(name, getattr(options, name))
        self._options = options
        self._rng = rng
        self._rank = Zipf(options.prompts, options.zipf, rng)
        self._light = light_pool(options.prompts, rng)
        self._heavy = heavy_pool(options.prompts, rng)
        # Ready bodies of the pool, by (heavy, rank, stream): at most 4 x prompts of them.
        self._ready: dict[tuple[bool, int, bool], Shot] = {}
        self._salt = 0

    def shot(self, arrival: Arrival) -> Shot:
        rng, options = self._rng, self._options
        heavy = rng.random() < options.heavy_share
        stream = rng.random() < options.stream_share
        unique = options.unique_share > 0 and rng.random() < options.unique_share
        rank = self._rank.draw()
        if not unique and arrival.prompt_tokens is None and arrival.answer_tokens is None:
            key = (heavy, rank, stream)
            shot = self._ready.get(key)
            if shot is None:
                shot = self._ready[key] = self._shot(self._pool(heavy)[rank], stream, options.max_tokens)
            return shot
        prompt = self._pool(heavy)[rank]
        if arrival.prompt_tokens is not None:
            prompt = sized(prompt, min(arrival.prompt_tokens, MAX_PROMPT_TOKENS))
        if unique:
            self._salt += 1
            prompt = f"{prompt} #{self._salt}"
        limit = options.max_tokens if arrival.answer_tokens is None else max(1, arrival.answer_tokens)
        return self._shot(prompt, stream, limit)

    def _pool(self, heavy: bool) -> Sequence[str]:
        return self._heavy if heavy else self._light

    def _shot(self, prompt: str, stream: bool, max_tokens: int | None) -> Shot:
        body: dict[str, Any] = {
            "model": self._options.model,
            "messages": [
                {"role": "system", "content": "You are a helpful assistant."},
                {"role": "user", "content": prompt},
            ],
            "temperature": 0,
        }
        if max_tokens is not None:
            body["max_tokens"] = max_tokens
        if stream:
            body["stream"] = True
        return Shot(CHAT_PATH, msgspec.json.encode(body), stream)


@dataclass(frozen=True, slots=True)
class TensorOptions:
    """Two-tower scoring: `history_input` and `candidate_input` are BYTES inputs of texts, one score a candidate."""

    model: str = "recommend"
    users: int = 200
    zipf: float = 1.0
    history: int = 4
    candidates: int = 16
    history_input: str = "user_history"
    candidate_input: str = "candidates"


class TensorMix:
    """Open Inference Protocol `infer` in JSON: users drawn by Zipf, each with a history; candidates at random."""

    def __init__(self, options: TensorOptions, rng: random.Random) -> None:
        self._options = options
        self._rng = rng
        self._rank = Zipf(options.users, options.zipf, rng)
        self._items = light_pool(200, rng)
        self._histories = [rng.choices(self._items, k=options.history) for _ in range(options.users)]

    def shot(self, arrival: Arrival) -> Shot:
        del arrival
        options = self._options
        history = self._histories[self._rank.draw()]
        candidates = self._rng.choices(self._items, k=options.candidates)
        inputs = [
            {"name": name, "datatype": "BYTES", "shape": [len(texts)], "data": texts}
            for name, texts in ((options.history_input, history), (options.candidate_input, candidates))
        ]
        return Shot(f"/v2/models/{options.model}/infer", msgspec.json.encode({"inputs": inputs}))


class EmbeddingsMix:
    """Embeddings of one text a request."""

    def __init__(self, model: str, prompts: int, zipf: float, rng: random.Random) -> None:
        self._rank = Zipf(prompts, zipf, rng)
        self._shots = [
            Shot(EMBEDDINGS_PATH, msgspec.json.encode({"model": model, "input": text}))
            for text in light_pool(prompts, rng)
        ]

    def shot(self, arrival: Arrival) -> Shot:
        del arrival
        return self._shots[self._rank.draw()]


class FileMix:
    """Bodies of a JSONL file, in order and over again.

    A line is a body; or `{"path": ..., "body": {...}}`; or a request line of a traffic log (`surface` and `body`).
    """

    def __init__(self, path: Path, default_path: str = CHAT_PATH) -> None:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ValueError(f"{path}: larger than {MAX_FILE_BYTES} bytes; cut the file")
        with path.open("rb") as file:
            lines = [(number, line) for number, line in enumerate(file, start=1) if line.strip()]
        shots = [_file_shot(line, default_path, f"{path}:{number}") for number, line in lines]
        self._shots = [shot for shot in shots if shot is not None]
        if not self._shots:
            raise ValueError(f"{path}: holds no request body")
        self._next = 0

    def shot(self, arrival: Arrival) -> Shot:
        del arrival
        shot = self._shots[self._next % len(self._shots)]
        self._next += 1
        return shot


def _file_shot(line: bytes, default_path: str, where: str) -> Shot | None:
    """The request of one line; None for a line of a traffic log that holds none (feedback, redacted)."""
    try:
        value: Any = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{where}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{where}: a line must be a JSON object")  # noqa: TRY004 - one kind of error for a bad file
    if "type" in value and "v" in value:
        body, path = value.get("body"), _SURFACE_PATHS.get(str(value.get("surface")), default_path)
        if value["type"] != "request" or body is None:
            return None
    else:
        body, path = value.get("body", value), value.get("path", default_path)
    if not isinstance(body, dict) or not isinstance(path, str) or not path.startswith("/"):
        raise ValueError(f'{where}: "body" must be an object and "path" must begin with "/"')
    return Shot(path, msgspec.json.encode(body), body.get("stream") is True)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sends: a traffic class's label, its share of the requests, and its API key (empty = none)."""

    label: str
    share: float = 1.0
    key: str = ""


def pick_caller(callers: Sequence[Caller], rng: random.Random) -> Callable[[], Caller]:
    """A function that draws callers by their shares; the shares need not add up to 1."""
    if not callers or sum(caller.share for caller in callers) <= 0 or any(caller.share < 0 for caller in callers):
        raise ValueError("class shares must not be negative, and at least one must be above 0")
    if len(callers) == 1:
        only = callers[0]
        return lambda: only
    edges = list(accumulate(caller.share for caller in callers))
    return lambda: callers[min(bisect(edges, rng.random() * edges[-1]), len(callers) - 1)]


def share(name: str, value: float) -> float:
    """`value`, or ValueError when it is not between 0 and 1."""
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must be between 0 and 1, not {value}")
    return value
