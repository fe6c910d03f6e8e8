"""The real models: how soon the first token comes, and how fast the rest.

Through a running gateway every prompt is new, so no cache answers, and arrivals are spaced out, so nobody queues behind
somebody else; first tokens count from the intended send time. In process, the light model is measured by itself,
together with the event loop it shares.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from backends.api import Role
from gateway.load.bench.goals import Goal, exit_code
from gateway.load.mix import Caller, ChatOptions
from gateway.load.outcome import Outcome
from gateway.load.plan import ArrivalPlan, LoadPlan, LoadRun, MixPlan
from gateway.load.report import Quantiles, Summary
from policies.core.clock import Clock


@dataclass(frozen=True, slots=True)
class ModelsOptions:
    """`requests` short questions at `rate` a second; half as many long tasks at a quarter of it, since the stand-in takes
    more than two seconds for one. `max_tokens` bounds the work of one answer."""

    target: str
    model: str = "auto"
    key: str = ""
    requests: int = 40
    rate: float = 1.0
    max_tokens: int = 24
    seed: int = 1


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of prompt through the gateway. `served` counts answers by rung; times are of the rung that was meant."""

    ttft_ms: Quantiles | None
    #: Content chunks (tokens, for most backends) a second within a stream.
    tokens_per_s: float | None
    served: dict[str, int]
    failed: int
    goal: Goal


class ModelsReport(msgspec.Struct, frozen=True, kw_only=True):
    """The document of `gateway bench models --json`."""

    format: int = 1
    target: str
    requests: int
    rate: float
    shortened: str = ""
    simple: Part
    complex: Part
    #: What `backends.onnx.measure` found in this process (seconds, tokens a second); empty = not measured.
    in_process: dict[str, float] = {}
    goals: list[Goal]
    #: How late the generator itself was.
    send_lag_p99_ms: float | None

    @property
    def exit_code(self) -> int:
        """0 targets met, 1 one was missed, 4 a figure cannot be judged."""
        return exit_code(self.goals)


async def measure_gateway(options: ModelsOptions, clock: Clock, say: Callable[[str], None]) -> ModelsReport:
    """Two runs, one after the other: short questions for the light model, long tasks for the heavy one."""
    say(f"{options.requests} short questions, {options.rate:g} a second")
    easy = await LoadRun(_plan(options, 0.0), clock).run()
    patient = replace(options, requests=max(1, options.requests // 2), rate=options.rate / 4)
    say(f"{patient.requests} long tasks, {patient.rate:g} a second")
    hard = await LoadRun(_plan(patient, 1.0), clock).run()
    parts = _part(easy, "simple", "light", 200.0), _part(hard, "complex", "heavy", 2000.0)
    lags = [run.generator.send_lag_ms.p99 for run in (easy, hard) if run.generator.send_lag_ms is not None]
    return ModelsReport(
        target=options.target,
        requests=options.requests,
        rate=options.rate,
        simple=parts[0],
        complex=parts[1],
        goals=[part.goal for part in parts],
        send_lag_p99_ms=max(lags, default=None),
    )


async def measure_light(folder: Path, clock: Clock) -> dict[str, float]:
    """The chat model of `folder`, by itself in this process. Raises ModelError when it is not built."""
    from backends.onnx.chat import load_chat
    from backends.onnx.measure import measure_chat

    backend = await load_chat(folder, name="light", role=Role.LIGHT, clock=clock)
    try:
        return await measure_chat(backend, clock)
    finally:
        await backend.aclose()


def light_goals(found: dict[str, float], why: str = "") -> list[Goal]:
    """One thread's speed, and how free the event loop stays; `why` = why nothing was found."""
    lag, first = found.get("loop_lag_p99_s"), found.get("first_token_s")
    return [
        Goal("light_tokens_per_s", _rounded(found.get("tokens_per_s")), 75.0, at_least=True, why=why),
        Goal("light_first_token_ms", _rounded(first, 1000), 90.0, at_least=False, why=why),
        Goal("loop_lag_p99_ms", _rounded(lag, 1000), 10.0, at_least=False, why=why),
    ]


def _rounded(value: float | None, factor: float = 1.0) -> float | None:
    return None if value is None else round(value * factor, 2)


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


def _part(summary: Summary, name: str, rung: str, target_ms: float) -> Part:
    served = {name: group.count for name, group in summary.by_rung.items()}
    group = summary.by_rung.get(rung)
    ttft = None if group is None else group.ttft_ms
    why = ""
    if not summary.valid:
        why = "; ".join(summary.invalid_reasons)
    elif ttft is None or ttft.count < 0.5 * summary.sent:
        why = f"fewer than half had an answer from rung {rung}; rungs {served}, errors {summary.errors}"
    p95 = None if ttft is None else ttft.p95
    return Part(
        ttft_ms=ttft,
        tokens_per_s=summary.stream_chunks_per_s,
        served=served,
        failed=sum(summary.outcomes[outcome] for outcome in (Outcome.FAILED, Outcome.CUT, Outcome.CLIENT_ERROR)),
        goal=Goal(f"{name}_ttft_p95_ms", p95, target_ms, at_least=False, why=why),
    )
