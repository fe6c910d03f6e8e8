"""The real models through a running gateway: how soon the first token comes, and how fast the rest.

Every prompt is new, so no cache answers; arrivals are spaced out, so nobody queues behind somebody else. First tokens
count from the intended send time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from gateway.load.mix import Caller, ChatOptions
from gateway.load.outcome import Outcome
from gateway.load.plan import ArrivalPlan, LoadPlan, LoadRun, MixPlan
from gateway.load.report import Quantiles, Summary
from policies.core.clock import Clock


@dataclass(frozen=True, slots=True)
class ModelsOptions:
    """`requests` of each kind, at `rate` a second; `max_tokens` bounds the work of one answer."""

    target: str
    model: str = "auto"
    key: str = ""
    requests: int = 40
    rate: float = 1.0
    max_tokens: int = 24
    seed: int = 1
    shortened: str = ""


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of prompt. `served` counts answers by rung; figures are of the rung that was meant."""

    ttft_ms: Quantiles | None
    ttft_p95_ms: float | None
    target_p95_ms: float
    #: Content chunks (tokens, for most backends) a second within a stream.
    tokens_per_s: float | None
    served: dict[str, int]
    failed: int
    met: bool
    #: Why the part cannot be judged; empty = it can.
    why: str


class ModelsReport(msgspec.Struct, frozen=True, kw_only=True):
    """The document of `gateway bench models --json`."""

    format: int = 1
    target: str
    requests: int
    rate: float
    shortened: str
    simple: Part
    complex: Part
    #: Event-loop lag of the generator: what its own figures may be off by.
    send_lag_p99_ms: float | None

    @property
    def exit_code(self) -> int:
        """0 targets met, 1 one was missed, 4 a part cannot be judged."""
        parts = (self.simple, self.complex)
        if any(not part.met and not part.why for part in parts):
            return 1
        return 4 if any(part.why for part in parts) else 0


async def measure_models(options: ModelsOptions, clock: Clock, say: Callable[[str], None]) -> ModelsReport:
    """Two runs, one after the other: short questions for the light model, long tasks for the heavy one."""
    say(f"{options.requests} short questions, {options.rate:g} a second")
    simple = await LoadRun(_plan(options, 0.0), clock).run()
    say(f"{options.requests} long tasks, {options.rate:g} a second")
    complex_ = await LoadRun(_plan(options, 1.0), clock).run()
    lags = [s.generator.send_lag_ms.p99 for s in (simple, complex_) if s.generator.send_lag_ms is not None]
    return ModelsReport(
        target=options.target,
        requests=options.requests,
        rate=options.rate,
        shortened=options.shortened,
        simple=_part(simple, "light", 200.0),
        complex=_part(complex_, "heavy", 2000.0),
        send_lag_p99_ms=max(lags, default=None),
    )


def _plan(options: ModelsOptions, heavy_share: float) -> LoadPlan:
    chat = ChatOptions(
        model=options.model,
        prompts=max(200, options.requests),
        zipf=0.0,
        heavy_share=heavy_share,
        stream_share=1.0,
        unique_share=1.0,
        max_tokens=options.max_tokens,
    )
    return LoadPlan(
        options.target,
        ArrivalPlan("constant", options.rate),
        MixPlan("chat", chat),
        (Caller("default", 1.0, options.key),),
        # One more arrival's time, so that the last one is not cut off by rounding.
        duration_s=(options.requests + 1) / options.rate,
        max_requests=options.requests,
        seed=options.seed,
    )


def _part(summary: Summary, rung: str, target_ms: float) -> Part:
    served = {name: group.count for name, group in summary.by_rung.items()}
    group = summary.by_rung.get(rung)
    ttft = group.ttft_ms if group is not None else None
    failed = summary.outcomes[Outcome.FAILED] + summary.outcomes[Outcome.CUT] + summary.outcomes[Outcome.CLIENT_ERROR]
    why = ""
    if not summary.valid:
        why = "; ".join(summary.invalid_reasons)
    elif ttft is None or served.get(rung, 0) < 0.5 * summary.sent:
        why = f"fewer than half were answered by rung {rung}: {served}, errors {summary.errors}"
    p95 = None if ttft is None else ttft.p95
    met = p95 is not None and p95 <= target_ms and failed == 0
    return Part(
        ttft_ms=ttft,
        ttft_p95_ms=p95,
        target_p95_ms=target_ms,
        tokens_per_s=summary.stream_chunks_per_s,
        served=served,
        failed=failed,
        met=met,
        why=why,
    )
