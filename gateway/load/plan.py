"""A load run from words to result: what `gateway load` and the benches ask for, checked, built and run."""

from __future__ import annotations

import random
import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from gateway.load import arrivals as arriving
from gateway.load.arrivals import Arrival, Profile
from gateway.load.client import LoadClient
from gateway.load.mix import (
    Caller,
    ChatMix,
    ChatOptions,
    EmbeddingsMix,
    FileMix,
    Mix,
    TensorMix,
    TensorOptions,
    pick_caller,
)
from gateway.load.recorder import Recorder
from gateway.load.report import Described, Limits, Summary, summarize
from gateway.load.runner import LoopOptions, OpenLoop, Traffic
from policies.core.clock import Clock

#: Sockets kept for everything that is not a request in flight.
_SPARE_FILES = 64


@dataclass(frozen=True, slots=True)
class ArrivalPlan:
    """`process`: constant, poisson, gamma or trace. A step multiplies the rate by `factor` for a while.

    `rate` None with a trace = the trace's own pace.
    """

    process: str = "poisson"
    rate: float | None = 10.0
    cv: float = 4.0
    factor: float = 1.0
    step_start_s: float = 0.0
    step_duration_s: float = 0.0
    trace: Path | None = None

    def describe(self) -> str:
        rate = "" if self.rate is None else f" {self.rate:g}/s"
        cv = f" cv {self.cv:g}" if self.process == "gamma" else ""
        step = f", {self.factor:g} x from {self.step_start_s:g} s for {self.step_duration_s:g} s"
        return f"{self.process}{rate}{cv}{step if self.factor != 1.0 else ''}"

    def build(self, rng: random.Random) -> Iterator[Arrival]:
        """The endless arrivals. Raises ValueError when the plan makes no sense."""
        if self.rate is not None and not 0 < self.rate <= 1e6:
            raise ValueError(f"the rate must be above 0 and at most 1000000 a second, not {self.rate:g}")
        if self.process == "trace":
            if self.trace is None:
                raise ValueError("arrivals from a trace need --trace FILE")
            if self.factor != 1.0:
                raise ValueError("a step cannot be laid over a recorded trace")
            return arriving.replay(arriving.read_trace(self.trace), self.rate)
        units = self._units(rng)
        return arriving.plain(self._profile().warp(units))

    def _units(self, rng: random.Random) -> Iterator[float]:
        if self.process == "constant":
            return arriving.constant()
        if self.process == "poisson":
            return arriving.poisson(rng)
        if self.process == "gamma":
            return arriving.gamma(rng, self.cv)
        raise ValueError(f"unknown arrivals {self.process!r}; there are constant, poisson, gamma and trace")

    def _profile(self) -> Profile:
        if self.rate is None:
            raise ValueError("a rate is needed")
        if self.factor == 1.0:
            return arriving.steady(self.rate)
        if self.factor < 0 or self.step_start_s < 0 or self.step_duration_s <= 0:
            raise ValueError("a step needs a factor and a start that are not negative, and a duration above 0")
        return arriving.step(self.rate, self.factor, self.step_start_s, self.step_duration_s)


@dataclass(frozen=True, slots=True)
class MixPlan:
    """`kind`: chat, tensor, embeddings or file (with `file`). Only the options of that kind are read."""

    kind: str = "chat"
    chat: ChatOptions = ChatOptions()
    tensor: TensorOptions = TensorOptions()
    embeddings_model: str = "auto-embed"
    file: Path | None = None

    def build(self, rng: random.Random) -> Mix:
        if self.kind == "chat":
            return ChatMix(self.chat, rng)
        if self.kind == "tensor":
            return TensorMix(self.tensor, rng)
        if self.kind == "embeddings":
            return EmbeddingsMix(self.embeddings_model, self.chat.prompts, self.chat.zipf, rng)
        if self.kind == "file":
            if self.file is None:
                raise ValueError("the mix file needs --file FILE")
            return FileMix(self.file)
        raise ValueError(f"unknown mix {self.kind!r}; there are chat, tensor, embeddings and file")


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """A whole run. It sends for `duration_s`, or until `max_requests`; one request may last `timeout_s`."""

    target: str
    arrivals: ArrivalPlan = field(default_factory=ArrivalPlan)
    mix: MixPlan = field(default_factory=MixPlan)
    callers: tuple[Caller, ...] = (Caller("default"),)
    duration_s: float = 10.0
    max_requests: int = 100_000
    timeout_s: float = 60.0
    seed: int = 1
    loop: LoopOptions = field(default_factory=LoopOptions)
    limits: Limits = field(default_factory=Limits)


class LoadRun:
    """A plan made ready: bad plans raise ValueError or OSError here, before anything is sent.

    `mix` replaces the plan's own mix.
    """

    def __init__(self, plan: LoadPlan, clock: Clock, mix: Mix | None = None) -> None:
        if not 0 < plan.duration_s <= 86_400:
            raise ValueError(f"the duration must be above 0 and at most a day, not {plan.duration_s:g} s")
        if plan.max_requests < 1 or plan.timeout_s <= 0 or plan.loop.max_in_flight < 1:
            raise ValueError("the number of requests, the timeout and the requests in flight must be above 0")
        self.plan = plan
        self.recorder = Recorder(plan.duration_s)
        self._clock = clock
        # Streams of their own, so that another mix does not move the arrivals.
        times, bodies, classes = (random.Random(f"{plan.seed}/{use}") for use in ("arrivals", "mix", "class"))
        self._arrivals = arriving.bounded(plan.arrivals.build(times), plan.duration_s, plan.max_requests)
        self._traffic = Traffic(mix or plan.mix.build(bodies), pick_caller(plan.callers, classes))

    async def run(self, started: Callable[[OpenLoop], None] | None = None) -> Summary:
        """Send, wait, sum up. `started` gets the loop, for stopping it."""
        plan, clock = self.plan, self._clock
        options = LoopOptions(plan.loop.late_after_s, min(plan.loop.max_in_flight, _sockets()))
        async with LoadClient(plan.target, clock, plan.timeout_s) as client:
            loop = OpenLoop(client, self._traffic, self.recorder, clock, options)
            if started is not None:
                started(loop)
            facts = await loop.run(self._arrivals)
        described = Described(plan.target, plan.mix.kind, plan.arrivals.describe(), plan.seed, plan.duration_s)
        return summarize(described, self.recorder, facts, plan.limits, options)


class _CallerLine(msgspec.Struct, forbid_unknown_fields=True):
    key: str = ""
    share: float = 1.0


def read_callers(path: Path) -> tuple[Caller, ...]:
    """Traffic classes of a YAML file: `vip: {key: gw-..., share: 0.2}`. Raises ValueError that never shows a key."""
    try:
        lines = msgspec.yaml.decode(path.read_bytes(), type=dict[str, _CallerLine])
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path}: write one line a class, such as vip: {{key: ..., share: 0.2}} ({error})") from None
    if not 1 <= len(lines) <= 20:
        raise ValueError(f"{path}: between 1 and 20 classes, not {len(lines)}")
    return tuple(Caller(label, line.share, line.key) for label, line in lines.items())


def _sockets() -> int:
    """How many requests may be in flight: one file descriptor each. Raises the soft limit as far as allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and (hard == resource.RLIM_INFINITY or soft < hard):
        wanted = 65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)
        if wanted > soft:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return 1_000_000 if soft == resource.RLIM_INFINITY else max(1, soft - _SPARE_FILES)
