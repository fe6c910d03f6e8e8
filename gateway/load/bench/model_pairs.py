"""What a model host adds to a request: the same requests to a gateway whose models run in the process that answers, and to one
where they run in a process beside it. One request at a time, in short blocks that take turns."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from backends.onnx.manifest import ModelError, read_manifest
from backends.onnx.store import ModelStore
from gateway.load.bench.crews import RECOMMEND, Crew, busy_shares, core_times, own_cpu_s
from gateway.load.bench.processes import BenchError
from gateway.load.bench.steady import Answer, BrokenAnswer, Wire, request
from gateway.load.stats import median, percentile
from policies.core.clock import Clock

NEEDED = ("minilm", "two-tower")
_VARIANT = "q8"
_DIMENSIONS = 384
_ITEMS = 2
_EMBEDDINGS_PATH = "/v1/embeddings"


class Added(msgspec.Struct, frozen=True):
    """One kind of request: the p50 of each side over all blocks, and the median of the differences between the blocks of a
    pair."""

    requests: int
    in_process_p50_ms: float
    model_host_p50_ms: float
    added_p50_ms: float
    #: Processor time a request of all the gateway's processes, which work of others on the same cores hardly changes.
    in_process_cpu_ms: float
    model_host_cpu_ms: float
    #: Cores that others used meanwhile. Each process on a request's way waits for its turn then.
    other_work: float


@dataclass(frozen=True, slots=True)
class Traffic:
    """`raw` gives the bytes of the requests to a base URL, each another one; `counts` says whether an answer is one that the
    model gave."""

    raw: Callable[[str], Iterator[bytes]]
    counts: Callable[[Answer], bool]


def check_models(models: Path) -> None:
    """Raises BenchError when a model that is needed is not built."""
    store = ModelStore(models)
    for name in NEEDED:
        try:
            read_manifest(store.folder(name, _VARIANT))
        except ModelError as error:
            raise BenchError(f"the model host is measured with {' and '.join(NEEDED)}: {error}") from error


def vectors(seed: int) -> Traffic:
    """The recommender with vectors instead of texts: next to no computing, so nearly all of it is the way there and back."""

    def raw(base_url: str) -> Iterator[bytes]:
        rng = random.Random(seed)
        items = [number for _ in range(_ITEMS) for number in _vector(rng)]
        while True:
            inputs = [
                {"name": "user_embedding", "datatype": "FP32", "shape": [_DIMENSIONS], "data": _vector(rng)},
                {"name": "item_embeddings", "datatype": "FP32", "shape": [_ITEMS, _DIMENSIONS], "data": items},
            ]
            yield request(base_url, f"/v2/models/{RECOMMEND}/infer", msgspec.json.encode({"inputs": inputs}))

    return Traffic(raw, lambda answer: answer.status == 200 and answer.rung() == "light")


def texts(seed: int) -> Traffic:
    """Embeddings of one short text, each another one."""

    def raw(base_url: str) -> Iterator[bytes]:
        rng = random.Random(seed)
        while True:
            text = f"Where is parcel {rng.randrange(10**9)} on its way to me?"
            yield request(base_url, _EMBEDDINGS_PATH, msgspec.json.encode({"model": "minilm", "input": text}))

    return Traffic(raw, lambda answer: answer.status == 200 and not answer.rung().startswith("hit"))


def _vector(rng: random.Random) -> list[float]:
    return [round(rng.uniform(-1, 1), 4) for _ in range(_DIMENSIONS)]


class Pairs:
    """Measures two gateways in turn. `block` requests of one, then as many of the other, `count` times."""

    def __init__(self, in_process: Crew, model_host: Crew, clock: Clock) -> None:
        self._crews = in_process, model_host
        self._clock = clock

    async def measure(self, traffic: Traffic, count: int, block: int) -> Added:
        """Raises BenchError when an answer did not come from the model."""
        raws = [traffic.raw(crew.url) for crew in self._crews]
        wires: list[Wire] = []
        try:
            wires += [await Wire.open(self._crews[0].url)]
            wires += [await Wire.open(self._crews[1].url)]
            # Connections, sessions and code paths are warm before anything counts.
            for side in (0, 1):
                await self._block(traffic, wires[side], raws[side], block)
            begin, cores, cpu_s = self._clock.now(), core_times(), self._cpu_s()
            times: tuple[list[float], list[float]] = ([], [])
            differences = []
            for number in range(count):
                p50 = [0.0, 0.0]
                # Who is first takes turns as well.
                for side in (0, 1) if number % 2 == 0 else (1, 0):
                    took = await self._block(traffic, wires[side], raws[side], block)
                    times[side].extend(took)
                    p50[side] = percentile(took, 50)
                differences.append(p50[1] - p50[0])
        except (BrokenAnswer, OSError) as error:
            raise BenchError(f"a gateway with models did not answer: {error or type(error).__name__}") from error
        finally:
            for wire in wires:
                wire.close()
        in_process, model_host = (round(percentile(side, 50), 3) for side in times)
        used_s = [after - before for before, after in zip(cpu_s, self._cpu_s(), strict=True)]
        others = sum(busy_shares(cores, core_times())) - sum(used_s) / (self._clock.now() - begin)
        cost, host_cost = (round(side_s * 1000 / (count * block), 3) for side_s in used_s[:2])
        added = round(median(differences), 3)
        return Added(count * block, in_process, model_host, added, cost, host_cost, round(max(0.0, others), 2))

    def _cpu_s(self) -> list[float]:
        """Processor seconds of both gateways and of this process."""
        return [*(crew.server.cpu_s() for crew in self._crews), own_cpu_s(os.getpid())]

    async def _block(self, traffic: Traffic, wire: Wire, raws: Iterator[bytes], count: int) -> list[float]:
        """Milliseconds of each request."""
        took = []
        for _ in range(count):
            raw = next(raws)
            begin = self._clock.now()
            answer = await wire.ask(raw)
            took.append((self._clock.now() - begin) * 1000)
            if not traffic.counts(answer):
                raise BenchError(
                    f"the model was to answer, but it was {answer.status} from rung {answer.rung() or 'none'!r}: "
                    f"{answer.body[:300].decode(errors='replace')}"
                )
        return took
