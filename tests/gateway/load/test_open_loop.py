"""The loop on real sockets: moments are kept whatever the server does, and every end has its outcome."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from gateway.load.client import check_target
from gateway.load.mix import Caller, ChatOptions, Shot
from gateway.load.outcome import Outcome
from gateway.load.plan import ArrivalPlan, LoadPlan, LoadRun, MixPlan
from gateway.load.report import Limits
from gateway.load.runner import LoopOptions
from policies.core.clock import SystemClock
from tests.support.load_target import CUT_STREAM, ERROR_STREAM, STREAM, Answer, LoadTarget

#: Far above any hiccup of a shared machine: these tests are about the rules, not about its speed.
PATIENT = LoopOptions(late_after_s=30.0)


def plan(url, *, rate=100.0, duration_s=0.3, stream=0.0, loop=PATIENT, **more):
    mix = MixPlan("chat", ChatOptions(stream_share=stream))
    return LoadPlan(url, ArrivalPlan("constant", rate), mix, duration_s=duration_s, loop=loop, **more)


class LeapingClock(SystemClock):
    """Real time, moved forward at once."""

    ahead_s = 0.0

    def now(self):
        return super().now() + self.ahead_s


async def run(load_plan):
    return await LoadRun(load_plan, SystemClock()).run()


async def test_a_stalled_server_is_seen_by_every_request_that_was_due_meanwhile():
    """No coordinated omission: the stall shows once for each intended moment, not once for each connection."""
    async with LoadTarget() as target:
        target.gate.clear()
        sending = asyncio.create_task(run(plan(target.url, rate=100, duration_s=0.5)))
        while target.requests < 50:  # an open loop goes on sending without a single answer
            target.arrived.clear()
            await target.arrived.wait()
        target.gate.set()
        summary = await sending
    latency = summary.latency_ms
    assert summary.sent == 50 and summary.full_share == 1.0
    assert summary.generator.max_in_flight == 50
    # The first waited for the whole of the sending time, the one in the middle for half of it.
    assert latency.max >= 480 and latency.p50 >= 230
    assert latency.p90 - latency.p50 > 150


async def test_latency_counts_from_the_intended_moment_not_from_the_send():
    """A generator that is held up itself does not hide it."""
    clock = LeapingClock()

    class HeldUp:
        def shot(self, arrival):
            clock.ahead_s = 0.2  # making the first body took this long
            return Shot("/v1/chat/completions", b"{}")

    async with LoadTarget() as target:
        late = LoopOptions(late_after_s=0.1)
        summary = await LoadRun(plan(target.url, rate=50, duration_s=0.1, loop=late), clock, HeldUp()).run()
    assert summary.latency_ms.max >= 200
    assert summary.generator.late >= 1
    assert (summary.valid, summary.exit_code) == (False, 4)


async def test_a_request_without_a_slot_is_dropped_and_the_run_is_invalid():
    async with LoadTarget() as target:
        target.gate.clear()
        loop = LoopOptions(late_after_s=30.0, max_in_flight=3)
        load_run = LoadRun(plan(target.url, rate=200, duration_s=0.1, loop=loop), SystemClock())
        sending = asyncio.create_task(load_run.run())
        while load_run.recorder.outcomes[Outcome.DROPPED] < 17 or target.requests < 3:
            await asyncio.sleep(0)
        target.gate.set()
        summary = await sending
    assert summary.sent == 3 and summary.outcomes["dropped"] == 17
    assert (summary.valid, summary.exit_code) == (False, 4)
    assert "--max-in-flight" in summary.invalid_reasons[0]


GATEWAY = {"x-gateway-rung": "heavy"}
DEGRADED = {"x-gateway-rung": "light", "x-gateway-degraded": "deadline"}
QUOTA = b'{"error":{"message":"m","code":"quota_exceeded"}}'


@pytest.mark.parametrize(
    ("answer", "stream", "outcome", "rung", "error"),
    [
        (Answer(headers=GATEWAY), False, "full", "heavy", ""),
        (Answer(headers=DEGRADED), False, "degraded", "light", ""),
        (Answer(headers=GATEWAY, body=b""), False, "failed", "heavy", "empty_answer"),
        (Answer(503, body=b'{"error":{"code":"no_answer"}}'), False, "failed", "none", "no_answer"),
        (Answer(429, body=b'{"error":{"code":"limit_reached"}}'), False, "failed", "none", "limit_reached"),
        (Answer(429, body=QUOTA), False, "client_error", "none", "quota_exceeded"),
        (Answer(404, body=b"no"), False, "client_error", "none", "status_404"),
        (Answer(302, {"location": "http://127.0.0.1:1/"}), False, "failed", "none", ""),
        (Answer(headers=GATEWAY, pieces=STREAM), True, "full", "heavy", ""),
        (Answer(headers=GATEWAY, pieces=CUT_STREAM), True, "cut", "heavy", "stream_not_finished"),
        (Answer(headers=GATEWAY, pieces=CUT_STREAM, abort=True), True, "cut", "heavy", "ClientPayloadError"),
        (Answer(headers=GATEWAY, pieces=ERROR_STREAM), True, "cut", "heavy", "error_event"),
        (Answer(headers=GATEWAY, pieces=STREAM[:1], abort=True), True, "failed", "heavy", "ClientPayloadError"),
        (Answer(503, body=b'{"error":{"code":"no_answer"}}'), True, "failed", "none", "no_answer"),
    ],
)
async def test_every_answer_has_its_outcome(answer, stream, outcome, rung, error):
    async with LoadTarget(lambda _: answer) as target:
        summary = await run(plan(target.url, stream=float(stream), max_requests=3))
    assert {name: count for name, count in summary.outcomes.items() if count} == {outcome: 3}
    assert set(summary.by_rung) == {rung} and set(summary.errors) == ({error} - {""})


async def test_the_first_token_of_a_stream_is_timed_and_its_chunks_counted():
    async with LoadTarget(lambda _: Answer(pieces=STREAM)) as target:
        summary = await run(plan(target.url, stream=1.0, max_requests=5))
    assert summary.ttft_ms.count == 5 and summary.ttft_ms.p50 <= summary.latency_ms.p50
    assert summary.stream_chunks_per_s > 0


async def test_nobody_there_is_failed_and_named():
    async with LoadTarget() as target:
        url = target.url
    summary = await run(plan(url, max_requests=4))
    assert summary.outcomes["failed"] == 4 and summary.valid
    assert summary.errors == {"ClientConnectorError": 4}


async def test_a_server_that_never_answers_fails_by_timeout():
    async with LoadTarget() as target:
        target.gate.clear()
        summary = await run(plan(target.url, max_requests=2, timeout_s=0.2, limits=Limits(max_failed=0.5)))
    assert summary.outcomes["failed"] == 2 and summary.exit_code == 1
    assert summary.latency_ms is None and summary.ended_ms.p50 >= 200


async def test_classes_send_their_own_keys_and_are_told_apart():
    callers = (Caller("vip", 0.3, "k-vip"), Caller("normal", 0.7, "k-normal"))
    async with LoadTarget() as target:
        summary = await run(plan(target.url, rate=400, callers=callers))
        seen = Counter(target.authorizations)
    assert seen == {f"Bearer k-{name}": group.count for name, group in summary.by_class.items()}
    assert set(summary.by_class) == {"vip", "normal"}


async def test_the_same_seed_sends_the_same_bodies_at_the_same_moments():
    sent = []
    for _ in range(2):
        async with LoadTarget() as target:
            await run(plan(target.url, max_requests=20, rate=500, seed=7))
            sent.append(sorted(target.bodies))
    assert sent[0] == sent[1] and len(sent[0]) == 20


async def test_stopping_ends_the_run_with_what_was_in_flight_abandoned():
    async with LoadTarget() as target:
        target.gate.clear()
        loops = []
        load_run = LoadRun(plan(target.url, rate=100, duration_s=60), SystemClock())
        sending = asyncio.create_task(load_run.run(loops.append))
        while target.requests < 3:
            target.arrived.clear()
            await target.arrived.wait()
        loops[0].stop()
        summary = await asyncio.wait_for(sending, 5)
    assert summary.interrupted and summary.exit_code == 130
    assert summary.outcomes["abandoned"] == summary.sent >= 3
    assert summary.failed_share == 0.0


async def test_a_mistake_of_our_own_is_raised_not_counted():
    class Broken:
        def shot(self, arrival):
            raise RuntimeError("our own mistake")

    async with LoadTarget() as target:
        with pytest.raises(RuntimeError, match="our own mistake"):
            await LoadRun(plan(target.url), SystemClock(), Broken()).run()


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:8080", "http://localhost/x", "http://[::1]:9", "https://a.localhost"]
)
def test_this_machine_needs_no_permission(url):
    assert check_target(url, allow_remote=False) is False


@pytest.mark.parametrize("url", ["http://10.0.0.1", "http://example.com", "http://127.0.0.1.example.com"])
def test_another_machine_needs_it(url):
    with pytest.raises(ValueError, match="--allow-remote"):
        check_target(url, allow_remote=False)
    assert check_target(url, allow_remote=True) is True


@pytest.mark.parametrize("url", ["127.0.0.1:8080", "ftp://localhost", "http://", "http://localhost/?a=b"])
def test_what_is_no_base_url_is_refused(url):
    with pytest.raises(ValueError, match="URL"):
        check_target(url, allow_remote=True)
