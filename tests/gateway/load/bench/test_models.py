"""The models bench against a scripted gateway."""

from __future__ import annotations

import pytest

from gateway.load.bench.models import ModelsOptions, light_goals, measure_gateway
from policies.core.clock import SystemClock
from tests.support.load_target import CUT_STREAM, STREAM, Answer, LoadTarget

COUNT = 4


async def measure(answer):
    async with LoadTarget(answer) as target:
        options = ModelsOptions(target.url, requests=COUNT, rate=100)
        return await measure_gateway(options, SystemClock(), lambda _: None), target.bodies


def by_rung(*rungs, pieces=STREAM):
    return lambda number: Answer(headers={"x-gateway-rung": rungs[number >= COUNT]}, pieces=pieces)


async def test_both_parts_are_judged_by_their_own_rung():
    report, bodies = await measure(by_rung("light", "heavy"))
    assert report.simple.served == {"light": COUNT} and report.complex.served == {"heavy": COUNT // 2}
    assert report.simple.ttft_ms.count == COUNT and [goal.why for goal in report.goals] == ["", ""]
    assert len(set(bodies)) == COUNT + COUNT // 2  # nothing could come from a cache


@pytest.mark.parametrize(
    ("answer", "code"), [(by_rung("heavy", "heavy"), 4), (by_rung("light", "heavy", pieces=CUT_STREAM), 4)]
)
async def test_the_wrong_rung_or_no_answer_cannot_be_judged(answer, code):
    report, _ = await measure(answer)
    assert report.exit_code == code and "fewer than half" in report.simple.goal.why


def test_the_light_model_is_judged_by_speed_first_token_and_loop_lag():
    good = light_goals({"tokens_per_s": 80.0, "first_token_s": 0.05, "loop_lag_p99_s": 0.002})
    assert all(goal.met for goal in good)
    bad = light_goals({"tokens_per_s": 70.0, "first_token_s": 0.1, "loop_lag_p99_s": 0.02})
    assert not any(goal.met for goal in bad)
    assert all(goal.why == "not built" and goal.value is None for goal in light_goals({}, "not built"))
