"""The front bench: what it starts, and when a ratio counts."""

from __future__ import annotations

import asyncio
import io
import json

import aiohttp
import msgspec
import pytest
from rich.console import Console

from gateway.config import load_config
from gateway.known import known_names
from gateway.load.bench import targets
from gateway.load.bench.bare import COMPLETION
from gateway.load.bench.closed import ClosedLoop
from gateway.load.bench.front_report import FrontReport, cpu_ratio, page, ratio_goal
from gateway.load.bench.generator import Measured, body
from gateway.load.bench.goals import Goal
from gateway.load.bench.processes import BenchError, Stage, is_free
from gateway.load.bench.wrk import _parse
from policies.core.clock import SystemClock
from policies.language.loader import load_policies
from routing.heads import Heads
from tests.support.load_target import Answer, LoadTarget


@pytest.fixture
def stage(tmp_path):
    made = Stage(tmp_path, SystemClock())
    yield made
    made.end_all()


def run(server="s", rate=100.0, *, busy=1.0, load=0.3, failed=0) -> Measured:
    return Measured(server, 32, rate, 1.0, 2.0, failed, busy, load)


def test_the_ratio_is_the_median_of_pairs():
    pairs = [(run(rate=100), run(rate=rate)) for rate in (50, 70, 90)]
    goal = ratio_goal("miss_ratio", pairs, 0.6)
    assert (goal.value, goal.met, goal.why) == (0.7, True, "")


def test_processor_time_makes_a_ratio_where_the_core_was_shared():
    assert cpu_ratio([(run(rate=100, busy=0.5), run(rate=100, busy=1.0))]) == 0.5
    assert cpu_ratio([(run(busy=0.0), run())]) is None and cpu_ratio([]) is None


def test_pairs_that_do_not_count_are_left_out_while_they_are_few():
    pairs = [(run(rate=100), run(rate=70)), (run(rate=100), run(rate=70)), (run(rate=100, busy=0.5), run(rate=300))]
    assert (ratio_goal("r", pairs, 0.6).value, ratio_goal("r", pairs, 0.6).why) == (0.7, "")


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (run("nginx", busy=0.8), "nginx had only 80%"),
        (run("g", load=0.99), "generator"),
        (run("g", failed=3), "3 requests"),
    ],
)
def test_a_ratio_does_not_count_when_something_else_was_the_limit(bad, why):
    goal = ratio_goal("r", [(run(), bad)], 0.6)
    assert why in goal.why and goal.value == 1.0


@pytest.mark.parametrize(
    ("goals", "code"),
    [
        ([Goal("a", 0.7, 0.6, True), Goal("b", 3, 5, False)], 0),
        ([Goal("a", 0.5, 0.6, True), Goal("b", 3, 5, False)], 1),
        ([Goal("a", 0.5, 0.6, True, "noise"), Goal("b", 3, 5, False)], 4),
        ([Goal("a", 0.5, 0.6, True, "noise"), Goal("b", 6, 5, False)], 1),
    ],
)
def test_goals_decide_the_exit_code_and_are_printed(goals, code):
    report = FrontReport(
        generator="wrk", upstream="nginx", pinned=True, rounds=1, seconds=1, shortened="much", goals=goals, notes=["n"], runs=[run()]
    )  # fmt: skip
    assert report.exit_code == code
    console = Console(file=io.StringIO(), width=120, record=True)
    console.print(page(report))
    text = console.export_text()
    assert "shortened: much" in text and "note: n" in text and "a 0." in text
    keys = set(json.loads(msgspec.json.encode(report)))
    assert {"miss_ratio", "hit_ratio", "added_p50_ms", "rss_mb", "ready_s", "goals", "runs"} <= keys


def test_the_bench_s_own_files_are_valid(tmp_path):
    config = load_config(targets.write_gateway_files(tmp_path, 1, 2, "http://127.0.0.1:3"), {"HOME": str(tmp_path)})
    assert set(config.backends) == {"heavy"} and config.models == {}
    assert load_policies(config.policies_dir, known_names(config, Heads()))


def test_the_salt_is_all_that_differs():
    assert b"hours? #7" in body("auto", 7) and body("auto", 7).replace(b" #7", b"") == body("auto")
    assert json.loads(body("auto"))["temperature"] == 0


def test_the_result_of_wrk_is_read_or_shown():
    line = 'RESULT {"requests":5,"duration_us":10,"p50_us":1.5,"p99_us":2.5,"failed":0}'
    assert _parse(f"Running\n\n{line}\n").p99_us == 2.5
    with pytest.raises(BenchError, match="address already"):
        _parse("unable to bind: address already in use")


async def test_bare_servers_answer_as_asked_and_are_ended(stage):
    like = targets.Sample(
        "hit-l1", '{"a":1}', {"Content-Type": "application/json", "Date": "d", "x-one": "1", "x-two": "2"}
    )
    port = targets.free_port()
    url = f"http://127.0.0.1:{port}"
    upstream = stage.python("upstream", "gateway.load.bench.bare", "upstream", str(port))
    constant, _ = await asyncio.gather(targets.start_constant(stage, like), stage.until_answers(upstream, url))
    proxy = await targets.start_proxy(stage, url)
    async with aiohttp.ClientSession() as session:
        async with session.post(proxy.url + "/v1/chat/completions", data=b"{}") as answer:
            assert await answer.read() == COMPLETION
        async with session.post(constant.url + "/v1/chat/completions", data=b"{}") as answer:
            assert await answer.text() == '{"a":1}' and answer.headers["x-two"] == "2"
            # With aiohttp's own: content-type, content-length, date, server.
            assert len(answer.headers) == 6
    measured = await ClosedLoop(stage, upstream, "auto").measure(constant.server, constant.url, 4, 0.3, True)
    assert measured.requests_per_s > 50 and measured.failed == 0 and 0 < measured.p50_ms <= measured.p99_ms
    assert constant.server.rss_mb() > 5 and constant.server.cpu_s() > 0
    stage.end_all()
    assert not constant.server.running() and not proxy.server.running()


async def test_a_server_that_ends_at_once_is_reported_with_its_words(stage):
    server = stage.python("broken", "gateway.load.bench.bare", "nonsense", "1")
    with pytest.raises(BenchError, match="unknown server 'nonsense'"):
        await stage.until_answers(server, "http://127.0.0.1:9/")


async def test_a_port_in_use_is_seen():
    async with LoadTarget() as target:
        port = int(target.url.rpartition(":")[2])
        assert not is_free(port)
    assert is_free(port)


def rungs(*names):
    return lambda number: Answer(headers={"x-gateway-rung": names[number]})


async def test_the_bench_checks_that_hits_are_hits():
    async with LoadTarget(rungs("heavy", "heavy", "hit-l1")) as target:
        assert (await targets.check_rungs(target.url, 1)).rung == "hit-l1"
    async with LoadTarget(rungs("heavy", "heavy", "heavy")) as target:
        with pytest.raises(BenchError, match="store"):
            await targets.check_rungs(target.url, 1)
    async with LoadTarget(lambda _: Answer(404)) as target:
        with pytest.raises(BenchError, match="404"):
            await targets.check_rungs(target.url, 1)
