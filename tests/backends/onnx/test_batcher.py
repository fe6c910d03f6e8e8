from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest

from backends.api import Priority
from backends.onnx.batch_run import Answered
from backends.onnx.batcher import MOST_INSTANCES, Batcher
from backends.onnx.batching import BatchLimits
from policies.core.clock import FakeClock, SystemClock
from policies.core.deadline import Deadline
from policies.core.errors import DeadlineExceeded, InvalidRequest, LimitReached, ModelFailed, ModelNotReady
from tests.support.batch_calls import model
from tests.support.scripted_runs import HeldExecutor, ScriptedRunner, turns

Asked = asyncio.Task[Answered]


class Bench:
    """A batcher whose runs the test ends one by one."""

    def __init__(self, limits: BatchLimits | None = None, *, seconds: float = 0.01, **more: Any) -> None:
        self.clock, self.executor = FakeClock(), HeldExecutor()
        self.runner = ScriptedRunner(self.clock, seconds)
        self.asked: list[Asked] = []
        self.batcher = Batcher(
            self.runner, model(), self.clock, name="m", limits=limits, executor=self.executor, **more
        )

    def ask(
        self, rows: Any, *, within_s: float = 30.0, length: int = 16, priority: Priority = Priority.NORMAL
    ) -> Asked:
        rows = rows if isinstance(rows, list) else [rows]
        deadline = Deadline.after(within_s, self.clock)
        asked = asyncio.create_task(
            self.batcher.submit(rows, [length] * len(rows), deadline, priority=priority, size_bytes=100)
        )
        self.asked.append(asked)
        return asked

    async def aclose(self) -> None:
        self.executor.jobs.clear()
        for asked in self.asked:
            asked.cancel()
        await asyncio.gather(*self.asked, return_exceptions=True)
        await self.batcher.aclose()

    async def busy(self, rows: Any = "first") -> Asked:
        """A run is on its way."""
        asked = self.ask(rows)
        await turns()
        assert len(self.executor.jobs) == 1
        return asked

    @property
    def runs(self) -> list[list[Any]]:
        return self.runner.runs


@pytest.fixture
async def make() -> AsyncIterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def bench(*args: Any, **kwargs: Any) -> Bench:
        made.append(Bench(*args, **kwargs))
        return made[-1]

    yield bench
    for one in made:
        await one.aclose()


Make = Callable[..., Bench]


async def results(asked: Sequence[Asked]) -> list[Any]:
    """What each came to: its results, or its error."""
    got = await asyncio.gather(*asked, return_exceptions=True)
    return [one if isinstance(one, BaseException) else one.results for one in got]


# -------------------------------------------------------------------------------------------------------------- batching


async def test_what_comes_at_once_or_while_a_run_goes_on_shares_a_run(make: Make) -> None:
    bench = make()
    first = [bench.ask(n) for n in range(3)]
    await turns()
    second = [bench.ask(n) for n in range(3, 7)]
    await turns()
    await bench.executor.run_all()
    assert bench.runs == [[0, 1, 2], [3, 4, 5, 6]]
    assert await results([*first, *second]) == [[n] for n in range(7)]


async def test_nothing_is_waited_for_when_the_model_is_free(make: Make) -> None:
    bench = make()
    asked = bench.ask("alone")
    await turns()
    assert len(bench.executor.jobs) == 1
    await bench.executor.step()
    assert (await asked).results == ["alone"]


async def test_no_rows_give_no_results(make: Make) -> None:
    bench = make()
    assert (await bench.ask([])).results == []
    assert not bench.executor.jobs


async def test_large_requests_are_split_and_runs_stay_small(make: Make) -> None:
    bench = make(BatchLimits(rows=32, run_s=10))
    asked = [bench.ask([(call, row) for row in range(32)]) for call in range(10)]
    asked.append(bench.ask([(10, row) for row in range(100)]))
    await turns()
    await bench.executor.run_all()
    assert max(map(len, bench.runs)) == 32 and len(bench.runs) == 14
    assert await results(asked) == [[(c, r) for r in range(100 if c == 10 else 32)] for c in range(11)]


async def test_an_answer_says_where_its_time_went(make: Make) -> None:
    bench = make()
    await bench.busy()
    asked = bench.ask("a")
    await turns()
    await bench.executor.run_all()
    got = await asked
    # It waited for the first run (1 ms to make its input, 10 ms), and then had one of its own.
    assert (got.queue_s, got.to_device_s, got.compute_s) == pytest.approx((0.011, 0.001, 0.010))
    assert got.at == bench.clock.now()


async def test_the_stages_of_a_split_request_add_up(make: Make) -> None:
    bench = make(BatchLimits(rows=2))
    asked = bench.ask(["a", "b", "c"])
    await turns()
    await bench.executor.run_all()
    got = await asked
    assert (got.queue_s, got.to_device_s, got.compute_s) == pytest.approx((0, 0.002, 0.020))


# ------------------------------------------------------------------------------------------------------------- isolation


async def test_one_bad_row_fails_alone(make: Make) -> None:
    bench = make()
    asked = [bench.ask("bad" if n == 5 else n) for n in range(8)]
    await turns()
    await bench.executor.run_all()
    got = await results(asked)
    assert [one for n, one in enumerate(got) if n != 5] == [[n] for n in range(8) if n != 5]
    assert isinstance(got[5], ModelFailed) and str(got[5]) == "a run failed: indices element out of data bounds"
    assert got[5].backend == "m" and len(bench.runs) <= 7


async def test_a_request_with_a_bad_row_fails_whole_and_nobody_else(make: Make) -> None:
    bench = make()
    asked = [bench.ask([1, "bad", 2]), bench.ask([3, 4])]
    await turns()
    await bench.executor.run_all()
    bad, good = await results(asked)
    assert isinstance(bad, ModelFailed) and good == [3, 4]


async def test_the_models_own_refusal_passes_unchanged(make: Make) -> None:
    bench = make()
    asked = bench.ask(InvalidRequest("no", param="x"))
    await turns()
    await bench.executor.run_all()
    with pytest.raises(InvalidRequest):
        await asked


async def test_a_run_that_gives_another_number_of_results_has_failed(make: Make) -> None:
    bench = make()
    bench.runner.run = lambda _options, packed: packed[1:]  # type: ignore[method-assign]
    asked = bench.ask("a")
    await turns()
    await bench.executor.run_all()
    with pytest.raises(ModelFailed, match="1 rows went in and 0 came out"):
        await asked


# ------------------------------------------------------------------------------------------------ deadlines and leaving


async def test_a_deadline_passes_while_another_ones_run_goes_on(make: Make) -> None:
    bench = make(seconds=2.0)
    first = await bench.busy()
    second = bench.ask("second", within_s=0.2)
    await turns()
    bench.clock.advance(0.19)
    await turns()
    assert not second.done()
    bench.clock.advance(0.01)
    await turns()
    with pytest.raises(DeadlineExceeded):
        await second
    assert not first.done()
    await bench.executor.run_all()
    assert (await first).results == ["first"] and bench.runs == [["first"]]
    assert bench.batcher.stats().missed == 1


async def test_a_deadline_that_has_passed_runs_nothing(make: Make) -> None:
    bench = make()
    with pytest.raises(DeadlineExceeded):
        await bench.ask("late", within_s=0.0)
    assert not bench.executor.jobs


async def test_a_deadline_may_be_moved_later(make: Make) -> None:
    bench = make()
    await bench.busy()
    deadline = Deadline.after(0.2, bench.clock)
    asked = asyncio.create_task(bench.batcher.submit(["a"], [16], deadline))
    await turns()
    deadline.extend(bench.clock.now() + 1.0)
    bench.clock.advance(0.5)
    await turns()
    assert not asked.done()
    bench.clock.advance(0.5)
    await turns()
    with pytest.raises(DeadlineExceeded):
        await asked


async def test_deadlines_of_any_order_are_kept_by_one_timer(make: Make) -> None:
    bench = make()
    await bench.busy()
    waits = [0.5, 0.2, 0.9, 0.2, 0.7]
    asked = [bench.ask(n, within_s=wait) for n, wait in enumerate(waits)]
    await turns()
    ended: dict[float, list[int]] = {}
    for tenth in range(1, 11):
        bench.clock.advance(0.1001)
        await turns()
        ended[tenth / 10] = [n for n, one in enumerate(asked) if one.done()]
    assert ended[0.1] == [] and ended[0.2] == [1, 3] and ended[0.5] == [0, 1, 3] and ended[0.7] == [0, 1, 3, 4]
    assert all(isinstance(one, DeadlineExceeded) for one in await results(asked))


async def test_callers_who_time_out_leave_nothing_behind(make: Make) -> None:
    bench = make()
    await bench.busy()
    gone = [bench.ask(f"gone {n}", within_s=0.05 if n else 0.04) for n in range(20)]
    for _ in range(9):
        gone += [bench.ask("gone", within_s=0.05) for _ in range(20)]
    await turns()
    bench.clock.advance(0.06)
    await turns()
    assert all(isinstance(one, (DeadlineExceeded, LimitReached)) for one in await results(gone))
    await bench.executor.run_all()
    assert bench.batcher.stats().waiting_rows == 0 and bench.runs == [["first"]]
    asked = [bench.ask(n) for n in range(50)]
    await turns()
    await bench.executor.run_all()
    assert await results(asked) == [[n] for n in range(50)]


async def test_cancelled_calls_are_never_run(make: Make) -> None:
    bench = make()
    first = await bench.busy()
    gone = [bench.ask("gone") for _ in range(100)]
    await turns()
    for one in gone:
        one.cancel()
    await turns()
    kept = bench.ask("kept")
    await turns()
    await bench.executor.run_all()
    assert bench.runs == [["first"], ["kept"]] and (await kept).results == ["kept"] and first.done()
    assert bench.batcher.stats().cancelled == 100


async def test_a_run_whose_members_have_all_left_is_stopped(make: Make) -> None:
    bench = make()
    gone = [bench.ask(n) for n in range(3)]
    await turns()
    next_one = bench.ask("next")
    await turns()
    (run,) = bench.batcher._running
    for one in gone:
        assert not run.options.terminate
        one.cancel()
        await turns()
    assert run.options.terminate and bench.batcher.stats().stopped == 1
    await bench.executor.run_all()
    assert (await next_one).results == ["next"]
    assert bench.runs == [[0, 1, 2], ["next"]], "nobody is left to be run again"


async def test_survivors_of_a_stopped_run_are_run_again(make: Make) -> None:
    bench = make()
    asked = [bench.ask(n) for n in range(20)]
    await turns()
    for one in asked[1:]:
        one.cancel()
    await turns()
    await bench.executor.run_all()
    assert (await asked[0]).results == [0]
    assert [len(run) for run in bench.runs] == [20, 1], "19 of 20 left: it is quicker to begin anew"


async def test_a_run_that_was_over_before_it_could_be_stopped_counts(make: Make) -> None:
    bench = make()
    bench.runner.run = lambda _options, packed: packed  # type: ignore[method-assign]
    asked = [bench.ask(n) for n in range(20)]
    await turns()
    for one in asked[1:]:
        one.cancel()
    await turns()
    await bench.executor.step()
    assert (await asked[0]).results == [0] and not bench.executor.jobs


async def test_a_run_goes_on_for_those_who_stay(make: Make) -> None:
    bench = make()
    asked = [bench.ask(n) for n in range(4)]
    await turns()
    asked[0].cancel()
    await turns()
    await bench.executor.run_all()
    assert await results(asked[1:]) == [[1], [2], [3]] and bench.batcher.stats().stopped == 0


async def test_a_split_request_that_is_cancelled_runs_no_further(make: Make) -> None:
    bench = make(BatchLimits(rows=8))
    asked = bench.ask(list(range(100)))
    await turns()
    await bench.executor.step()
    asked.cancel()
    await turns()
    await bench.executor.run_all()
    assert len(bench.runs) == 2 and bench.batcher.stats().waiting_rows == 0


# ----------------------------------------------------------------------------------------------------------- admission


async def test_a_full_queue_refuses_exactly_what_is_too_much(make: Make) -> None:
    bench = make(BatchLimits(waiting_rows=4))
    first = await bench.busy()
    asked = [bench.ask(n) for n in range(8)]
    await turns()
    refused = [one for one in asked if one.done()]
    assert len(refused) == 4
    for one in refused:
        with pytest.raises(LimitReached, match="'m' is too busy: 4 rows wait already") as error:
            await one
        assert error.value.retry_after_s
    await bench.executor.run_all()
    assert sum(one.exception() is None for one in [first, *asked]) == 5
    assert bench.batcher.stats().refused == 4


async def test_what_would_be_late_is_refused_at_once(make: Make) -> None:
    bench = make(seconds=0.05)
    await bench.busy(list(range(30)))
    asked = [bench.ask(list(range(30))) for _ in range(4)]
    await turns()
    late = bench.ask("late", within_s=0.04)
    await turns()
    with pytest.raises(LimitReached, match="the answer is expected in"):
        await late
    assert not any(one.done() for one in asked)


async def test_an_idle_model_that_is_said_to_be_too_slow_is_tried_once_a_second(make: Make) -> None:
    bench = make()

    async def ask() -> list[Any]:
        asked = bench.ask("long", length=512, within_s=0.04)  # 51 ms are expected
        await turns()
        await bench.executor.run_all()
        return await results([asked])

    assert await ask() == [["long"]]
    assert isinstance((await ask())[0], LimitReached)
    bench.clock.advance(1.0)
    assert await ask() == [["long"]]
    assert bench.batcher.stats().safety == 1.0


async def test_misses_make_it_careful(make: Make) -> None:
    bench = make(seconds=0.5)
    asked = [bench.ask(n, within_s=0.3) for n in range(4)]
    await turns()
    await bench.executor.run_all()
    await asyncio.gather(*asked, return_exceptions=True)
    assert bench.batcher.stats().missed == 4
    assert bench.batcher.stats().safety == pytest.approx(0.7), "one run, one miss"


async def test_misses_of_those_admitted_before_do_not_count_twice(make: Make) -> None:
    bench = make(BatchLimits(rows=1), seconds=0.5)
    asked = [bench.ask(n, within_s=0.3 + n) for n in range(3)]
    await turns()
    await bench.executor.step()  # the first is late
    bench.clock.advance(1.0)
    await turns()
    await bench.executor.run_all()  # and the second, who came with it
    await asyncio.gather(*asked, return_exceptions=True)
    assert bench.batcher.stats().missed == 2
    assert bench.batcher.stats().safety == pytest.approx(0.7)


# ------------------------------------------------------------------------------------------------------------- classes


async def test_vips_go_first_and_wait_for_one_capped_run_at_most(make: Make) -> None:
    """Ten times too much other traffic: a VIP's wait is the rest of the run under way, and its own run holds VIPs only."""
    bench = make(BatchLimits(rows=16, run_s=0.02, vip_run_s=0.02))
    flood = [bench.ask(("flood", n)) for n in range(1000)]
    await turns()
    vips: list[Asked] = []
    for n in range(30):
        vips.append(bench.ask(("vip", n), priority=Priority.VIP))
        await turns()
        before = len(bench.runs)
        while not vips[-1].done():
            await bench.executor.step()
        running, own = bench.runs[before:]
        assert own == [("vip", n)]
        assert model().expected(len(running), 16) <= 0.02
    assert max(vip.result().queue_s for vip in vips) <= 0.02
    assert not all(one.done() for one in flood)


# ----------------------------------------------------------------------------------------------------------- instances


async def test_instances_may_be_changed_while_it_runs(make: Make) -> None:
    bench = make(BatchLimits(rows=1), instances=2)
    asked = [bench.ask(n) for n in range(8)]
    await turns()
    assert len(bench.executor.jobs) == 2
    bench.batcher.instances = 4
    await turns()
    assert len(bench.executor.jobs) == 4
    bench.batcher.instances = 1
    await bench.executor.step()
    assert len(bench.executor.jobs) == 3, "no new run, and those under way end in peace"
    await bench.executor.step()
    await bench.executor.step()
    await bench.executor.step()
    assert len(bench.executor.jobs) == 1
    await bench.executor.run_all()
    assert await results(asked) == [[n] for n in range(8)]


@pytest.mark.parametrize("number", [0, MOST_INSTANCES + 1])
async def test_numbers_of_instances_that_make_no_sense_are_refused(make: Make, number: int) -> None:
    bench = make()
    with pytest.raises(ValueError, match="may have 1 to"):
        bench.batcher.instances = number


# -------------------------------------------------------------------------------------------------------------- closing


async def test_closing_ends_what_runs_and_refuses_the_rest(make: Make) -> None:
    bench = make(BatchLimits(rows=2))
    running, waiting, half = bench.ask("a"), bench.ask("b", within_s=29), bench.ask(["c", "d"])
    await turns()
    closing = asyncio.create_task(bench.batcher.aclose())
    with pytest.raises(ModelNotReady, match="unloaded"):
        await half
    with pytest.raises(ModelNotReady, match="unloaded"):
        await bench.ask("e")
    await closing
    await turns()
    assert await results([running, waiting]) == [["a"], ["b"]]
    assert bench.runs == [["b", "a"]]


async def test_a_run_that_fails_while_closing_is_not_tried_again(make: Make) -> None:
    bench = make()
    asked = [bench.ask("bad"), bench.ask("good")]
    await turns()
    await bench.batcher.aclose()
    await turns()
    assert all(isinstance(one, ModelNotReady) for one in await results(asked))


# ----------------------------------------------------------------------------------------------------------- for real


class Echo:
    def pack(self, rows: Sequence[Any]) -> Sequence[Any]:
        return rows

    def run(self, _options: object, packed: Sequence[Any]) -> Sequence[Any]:
        return packed


async def test_on_real_threads_every_caller_has_its_own_rows() -> None:
    clock = SystemClock()
    batcher = Batcher(Echo(), model(), clock, name="m", limits=BatchLimits(rows=4), instances=3)

    async def caller(n: int) -> None:
        for turn in range(20):
            rows = [(n, turn, row) for row in range(n % 7 + 1)]
            got = await batcher.submit(rows, [16 + n] * len(rows), Deadline.after(10, clock))
            assert got.results == rows

    await asyncio.gather(*(caller(n) for n in range(20)))
    stats = batcher.stats()
    assert stats.rows == 20 * sum(n % 7 + 1 for n in range(20)) and stats.batches < stats.rows
    assert (stats.waiting_rows, stats.running, stats.missed, stats.refused) == (0, 0, 0, 0)
    assert 0 < stats.efficiency <= 1 and 0 <= stats.padded_share < 0.2
    await batcher.aclose()
