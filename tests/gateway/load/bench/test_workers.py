"""The workers bench: its files, its figures, and what it does without models."""

from __future__ import annotations

import asyncio
import io
import json
import os

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from gateway.cli.bench import app
from gateway.config import load_config
from gateway.known import known_names
from gateway.load.bench import crews
from gateway.load.bench.crews import Crew, busy_shares, core_times, own_cpu_s
from gateway.load.bench.generator import Measured
from gateway.load.bench.hub_cost import worker_share
from gateway.load.bench.model_pairs import Added, Pairs, check_models, texts, vectors
from gateway.load.bench.processes import BenchError, Stage
from gateway.load.bench.workers import WorkersOptions, quicker
from gateway.load.bench.workers_report import (
    Found,
    Idle,
    Run,
    Setting,
    Steadily,
    WorkersReport,
    cost_ratio,
    lost_goal,
    make_report,
    page,
    rate_ratio,
)
from policies.core.clock import SystemClock
from policies.language.loader import load_policies
from routing.heads import Heads
from tests.support.load_target import Answer, LoadTarget


@pytest.fixture
def stage(tmp_path):
    made = Stage(tmp_path, SystemClock())
    yield made
    made.end_all()


def run(workers=1, path="hit", rate=100.0, us=70.0, *, one_core=False, share=None, failed=0) -> Run:
    measured = Measured("g", 32, rate, 1.0, 2.0, failed, 1.0, 0.3)
    return Run(
        workers=workers, path=path, one_core=one_core, measured=measured, cpu_us=us, cores=[0.9, 0.8], supervisor_share=share
    )  # fmt: skip


def steadily(requests=1000, **failed) -> Steadily:
    return Steadily(requests=requests, answered={"kept": requests}, failed=failed, slowest_s=0.3, took_s=2.0)


def report(
    *, supervisor=0.004, worker=0.002, restart=None, stop=None, added_ms=0.2, others=0.1, failed=0, shortened=""
) -> WorkersReport:
    setting = Setting(
        generator="wrk", upstream="nginx", cores=2, rounds=1, seconds=1, shortened=shortened, notes=["a note"]
    )
    pairs = [
        (run(), run(2, rate=150, us=90, share=supervisor)),
        (run(path="miss", rate=50), run(2, "miss", 60, share=supervisor, failed=failed)),
        *(
            (run(path=path, one_core=True), run(2, path, us=us, one_core=True))
            for path, us in (("hit", 77), ("miss", 63))
        ),
    ]
    idle = Idle(0.03, 0.03, 0.02)
    added = Added(100, 0.8, 0.8 + added_ms, added_ms, 0.7, 1.0, others)
    loads = [restart or steadily()], [stop or steadily()]
    return make_report(setting, Found(pairs, idle, worker, *loads, added, added))


def test_ratios_are_medians_of_pairs_on_all_cores_and_costs_of_those_on_one():
    pairs = [(run(rate=100), run(2, rate=rate, us=140)) for rate in (120, 160, 200)]
    assert (rate_ratio(pairs), cost_ratio(pairs)) == (1.6, 2.0)
    pairs.append((run(rate=100, one_core=True), run(2, rate=90, us=70, one_core=True)))
    assert (rate_ratio(pairs), cost_ratio(pairs)) == (1.6, 1.0)
    assert cost_ratio([(run(us=0.0), run(2))]) is None


def test_all_good_is_exit_code_0():
    found = report()
    assert found.exit_code == 0 and all(goal.met for goal in found.goals)
    assert (found.hit_2_to_1, found.miss_2_to_1, found.hit_cpu_2_to_1, found.miss_cpu_2_to_1) == (1.5, 1.2, 1.1, 0.9)
    assert (found.hub_core_share, found.rolling_restart_s) == (0.006, 2.0)


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({"supervisor": 0.011}, "hub_core_share"),
        ({"worker": 0.011}, "hub_core_share"),
        ({"restart": steadily(**{"kept: refused": 1})}, "rolling_restart_failed"),
        ({"stop": steadily(**{"new: closed": 2})}, "graceful_stop_failed"),
        ({"added_ms": 0.31}, "model_host_added_p50_ms"),
    ],
)
def test_each_target_can_be_missed(changes, missed):
    found = report(**changes)
    assert [goal.name for goal in found.goals if not goal.met] == [missed] and found.exit_code == 1


def test_hardly_a_request_proves_nothing():
    assert "only 3 requests" in lost_goal("r", [steadily(), steadily(3)]).why
    assert report(stop=steadily(3)).exit_code == 4


def test_a_miss_of_the_model_host_does_not_count_on_a_busy_machine():
    assert report(added_ms=0.5, others=1.2).exit_code == 4
    assert report(added_ms=0.2, others=1.2).exit_code == 0


def test_the_page_and_the_document_say_it_all():
    found = report(restart=steadily(**{"kept: refused": 7}), failed=5, shortened="much")
    console = Console(file=io.StringIO(), width=400, record=True)
    console.print(page(found))
    text = console.export_text()
    for words in (
        "kept: refused (7)",
        "shortened: much",
        "note: a note",
        "90% 80%",
        "0.40%",
        "no target",
        "hub_core_share",
    ):
        assert words in text
    document = json.loads(msgspec.json.encode(found))
    assert document["rolling_restart_failed"] == 7 and document["graceful_stop_failed"] == 0
    assert {"model_host_added_p50_ms", "hub_core_share", "hit_2_to_1", "miss_2_to_1", "goals"} <= set(document)


def test_a_quick_run_says_what_it_shortened(tmp_path):
    options = WorkersOptions(tmp_path, 5, 4.0, restarts=3)
    short = quicker(options)
    assert "2 rounds of 1 s instead of 5 of 4 s" in short.shortened and short.models == options.models
    assert (short.rounds, short.restarts) < (options.rounds, options.restarts) and not options.shortened


def test_the_bench_s_own_files_are_valid(tmp_path):
    for name in ("remote", "models"):
        (tmp_path / name).mkdir()
    remote = crews.write_crew_files(tmp_path / "remote", (1, 2), "http://127.0.0.1:3", "http://127.0.0.1:4")
    inside = crews.write_model_crew_files(tmp_path / "models", (1, 2), tmp_path / "it's: built")
    for path, backends in ((remote, {"heavy", "dawdler"}), (inside, {"embed", "recommender"})):
        config = load_config(path, {"HOME": str(tmp_path)})
        assert set(config.backends) == backends and config.drain_s == 5.0
        assert load_policies(config.policies_dir, known_names(config, Heads()))
    assert config.models_dir == tmp_path / "it's: built"


def test_processor_time_is_of_one_process():
    before = own_cpu_s(os.getpid())
    sum(number * number for number in range(200_000))
    assert 0 < own_cpu_s(os.getpid()) - before < 5
    # Process ids end at 2**22.
    assert own_cpu_s(2**23) == 0.0


def test_a_process_is_pinned_with_all_its_threads(stage):
    server = stage.start("idler", None, ["sleep", "60"])
    core = min(os.sched_getaffinity(0))
    crews.pin([server.pid, 2**23], {core})
    assert os.sched_getaffinity(server.pid) == {core}


def test_the_cores_busy_shares_are_differences():
    assert busy_shares([(10, 100), (0, 100)], [(30, 140), (0, 140)]) == [0.5, 0.0]
    assert len(core_times()) == len(os.sched_getaffinity(0))


def places(*seen: dict[str, object]) -> Answer:
    return Answer(
        body=json.dumps({"workers": [{"name": "worker-1", "leaving": [], **place} for place in seen]}).encode()
    )


async def test_a_replaced_process_is_waited_for(stage):
    told = [
        Answer(body=b"not yet"),
        places({"state": "serving", "pid": 7}),
        places({"state": "serving", "pid": 8, "leaving": ["worker-1"]}),
        places({"state": "starting", "pid": 8}),
        places({"state": "serving", "pid": 8}),
    ]
    async with LoadTarget(lambda number: told[min(number, 4)]) as admin:
        crew = Crew(stage.start("idler", None, ["sleep", "60"]), "", admin.url, 2)
        await crews.until_serving(stage, crew, {"worker-1": 7})
        assert admin.requests == 5 and await crew.pids() == {"worker-1": 8}
        with pytest.raises(BenchError, match=r"worker-1.*serving"):
            await crews.until_serving(stage, crew, {"worker-1": 8}, limit_s=0.1)
    crew.server.end()
    with pytest.raises(BenchError, match="/workers did not answer"):
        await crews.until_serving(stage, crew, {})


def rungs(*names: str) -> LoadTarget:
    """Answers by these rungs, the last of them for good."""
    return LoadTarget(lambda number: Answer(headers={"x-gateway-rung": names[min(number, len(names) - 1)]}))


async def test_every_worker_must_have_the_answer_before_hits_are_measured(stage):
    server = stage.start("idler", None, ["sleep", "60"])
    async with rungs("heavy", "heavy", "hit-l1", "heavy", "hit-l1") as target:
        await crews.warm(Crew(server, target.url, "", 2))
        assert target.requests == 16
    async with rungs("heavy", "stale") as target:
        with pytest.raises(BenchError, match="'stale'"):
            await crews.warm(Crew(server, target.url, "", 2))


async def test_what_the_model_host_adds_is_the_difference_of_the_two(stage):
    server, clock = stage.start("idler", None, ["sleep", "60"]), SystemClock()
    light = {"x-gateway-rung": "light"}
    async with LoadTarget(lambda _: Answer(headers=light)) as near, LoadTarget(lambda _: Answer(headers=light)) as far:
        pairs = Pairs(Crew(server, near.url, "", 1), Crew(server, far.url, "", 2), clock)
        added = await pairs.measure(vectors(1), 3, 4)
        # Both got the same requests, each another one.
        assert near.bodies == far.bodies and len(set(near.bodies)) == 4 * 4
        assert added.requests == 12 and 0 < added.in_process_p50_ms < 1000 > abs(added.added_p50_ms)
        assert (await pairs.measure(texts(1), 1, 2)).requests == 2
    async with rungs("hit-l1") as other:
        pairs = Pairs(Crew(server, other.url, "", 1), Crew(server, other.url, "", 2), clock)
        for traffic in (vectors(1), texts(1)):
            with pytest.raises(BenchError, match="hit-l1"):
                await pairs.measure(traffic, 1, 1)
    with pytest.raises(BenchError, match="did not answer"):
        await asyncio.wait_for(pairs.measure(vectors(1), 1, 1), 5)


def test_without_models_it_says_what_is_missing(tmp_path):
    with pytest.raises(BenchError, match=r"minilm and two-tower.*gateway models build"):
        check_models(tmp_path)
    told = CliRunner().invoke(app, ["workers", "--quick"], env={"GATEWAY_HOME": str(tmp_path), "GATEWAY_CONFIG": ""})
    assert told.exit_code == 2 and "gateway models build" in told.output


async def test_a_worker_s_part_in_the_hub_is_small_and_not_nothing():
    assert 0.0 < await worker_share() < 0.01
