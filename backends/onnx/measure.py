"""How fast a chat model in this process is, and how free the event loop stays meanwhile. For benchmarks and `doctor`."""

from __future__ import annotations

import asyncio
import os
import statistics
from pathlib import Path

from backends.api import Backend, ChatRequest, ChunkKind
from policies.core.clock import Clock
from policies.core.deadline import Deadline

#: The loop is asked to come back after this long; what it takes more is its lag.
_LAG_PROBE_S = 0.002
#: About 30 tokens once SmolLM2's template with its own system line is round it.
_QUESTION = "Tell me a long story about the sea."
_LIMIT_S = 120.0


async def measure_chat(
    backend: Backend, clock: Clock, *, tokens: int = 64, rounds: int = 3, together: int = 4
) -> dict[str, float]:
    """Run a few short answers and return medians.

    Keys: `first_token_s` (one client), `prompt_tokens`, `tokens_per_s` (one client, from the first token on),
    `together_tokens_per_s` (of `together` clients, prompts included), `loop_lag_p50_s`, `loop_lag_p99_s`, `loop_lag_max_s`
    (all that time), `rss_bytes` of the process. Answers are greedy, so that rounds are alike.
    """
    lags: list[float] = []
    probe = asyncio.create_task(_probe_lag(clock, lags))
    try:
        alone = [await _one(backend, clock, tokens) for _ in range(rounds)]
        began = clock.now()
        crowd = await asyncio.gather(*(_one(backend, clock, tokens) for _ in range(together)))
        crowd_s = clock.now() - began
    finally:
        probe.cancel()
    lags.sort()
    return {
        "first_token_s": statistics.median(run[0] for run in alone),
        "prompt_tokens": float(alone[0][3]),
        "tokens_per_s": statistics.median((run[2] - 1) / run[1] for run in alone if run[1] > 0),
        "together_tokens_per_s": sum(run[2] for run in crowd) / crowd_s,
        "loop_lag_p50_s": lags[len(lags) // 2],
        "loop_lag_p99_s": lags[int(len(lags) * 0.99)],
        "loop_lag_max_s": lags[-1],
        "rss_bytes": float(resident_bytes()),
    }


async def _one(backend: Backend, clock: Clock, tokens: int) -> tuple[float, float, int, int]:
    """(seconds to the first content, seconds from it to the last, answer tokens, prompt tokens)."""
    import msgspec

    body = {"messages": [{"role": "user", "content": _QUESTION}], "max_tokens": tokens, "temperature": 0}
    began = clock.now()
    first = last = 0.0
    usage = {"completion_tokens": 0, "prompt_tokens": 0}
    async for chunk in backend.stream(ChatRequest(body), Deadline.after(_LIMIT_S, clock)):
        if chunk.kind is ChunkKind.CONTENT:
            last = clock.now()
            first = first or last
        elif chunk.kind is ChunkKind.USAGE:
            usage = msgspec.json.decode(chunk.data)["usage"]
    return first - began, last - first, usage["completion_tokens"], usage["prompt_tokens"]


async def _probe_lag(clock: Clock, lags: list[float]) -> None:
    while True:
        began = clock.now()
        await clock.sleep(_LAG_PROBE_S)
        lags.append(clock.now() - began - _LAG_PROBE_S)


def resident_bytes() -> int:
    """Memory of this process that is in RAM. 0 where the system has no /proc."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
