"""The link's life: coming and going of host and workers, what each is told, reload, the end."""

from __future__ import annotations

import asyncio
import os
import stat

import numpy as np
import pytest

from backends.api import ChatRequest
from backends.link.client import FIRST_WAIT_S, LAST_WAIT_S, UNREACHED_S
from backends.scripted import Outcome, ScriptedBackend, chat
from policies.core import errors as er
from policies.core.clock import FakeClock, SystemClock
from policies.core.deadline import Deadline
from tests.support.link import Host, Worker, info, linked
from tests.support.waiting import until

REQUEST = ChatRequest({"model": "auto", "messages": [{"role": "user", "content": "hi"}]})


def within(seconds: float = 5.0) -> Deadline:
    return Deadline.after(seconds, SystemClock())


def answering(text: str = "hello", fingerprint: str = "one", **outcome: float) -> ScriptedBackend:
    return ScriptedBackend(info(fingerprint=fingerprint), [Outcome(chat(text), **outcome)], FakeClock())


def silent(fingerprint: str = "one") -> ScriptedBackend:
    """Answers when its clock is moved, which nobody does."""
    return answering(fingerprint=fingerprint, delay_s=3600)


async def failed(worker: Worker) -> list[BaseException]:
    """A whole call and a stream that are under way, and what they come to."""
    tasks = [
        asyncio.ensure_future(worker.light.infer(REQUEST, within())),
        asyncio.ensure_future(anext(worker.light.stream(REQUEST, within()))),
    ]
    return await asyncio.gather(*tasks, return_exceptions=True)


# ---------------------------------------------------------------------------------------------- coming and going


async def test_calls_fail_at_once_when_the_host_dies_and_work_when_it_is_back(tmp_path):
    clock = FakeClock()
    async with linked(tmp_path, silent(), clock) as (host, [worker]):
        calls = asyncio.create_task(failed(worker))
        await until(lambda: host.server.in_flight == 2)
        for end in tuple(host.server._ends):
            end.connection.transport.abort()
        errors = await asyncio.wait_for(calls, 1.0)
        assert [type(error) for error in errors] == [er.ModelFailed, er.ModelFailed]
        assert all(error.backend == "light" for error in errors)
        assert (worker.light.state, worker.light.ready) == ("gone", False)
        assert "not connected" in worker.light.reason
        assert worker.light.info.fingerprint == "one"  # what is in the cache goes on being found
        with pytest.raises(er.ModelNotReady, match="gone"):
            await worker.light.infer(REQUEST, within())
        with pytest.raises(er.ModelNotReady):
            await anext(worker.light.stream(REQUEST, within()))
        with pytest.raises(er.ModelNotReady):
            await worker.link.embedder.embed(["x"], within())
        assert not worker.link.connected
        clock.advance(FIRST_WAIT_S)
        await until(lambda: worker.light.ready)
        for end in tuple(host.server._ends):
            end.connection.transport.abort()
        await until(lambda: worker.light.state == "gone")
        await asyncio.sleep(0.002)
        clock.advance(FIRST_WAIT_S)  # the waits begin anew with each loss
        await until(lambda: worker.light.ready)
        assert worker.seen.states == ["ready", "gone", "ready", "gone", "ready"]
        assert worker.filled == [(None, "one")]  # it is the same model
        await until(lambda: not host.server.in_flight)


async def test_another_host_with_another_model_takes_over(tmp_path):
    clock, path = FakeClock(), tmp_path / "models.sock"
    first = await Host(path, clock, light=answering).start()
    worker = Worker(path, clock)
    worker.link.start()
    await until(lambda: worker.light.ready)
    await first.aclose()
    assert not path.exists()
    await until(lambda: worker.light.state == "gone")
    wait_s = FIRST_WAIT_S
    for _ in range(8):  # it goes on trying, and the waits end at one second
        await asyncio.sleep(0.002)
        clock.advance(wait_s)
        wait_s = min(2 * wait_s, LAST_WAIT_S)
    second = await Host(path, clock, light=lambda: answering("from the second", "two")).start()
    await until(lambda: clock.advance(LAST_WAIT_S) or worker.light.ready)
    assert worker.light.info.fingerprint == "two"
    assert worker.filled == [(None, "one"), ("one", "two")]
    assert await worker.light.infer(REQUEST, within()) == chat("from the second")
    await worker.link.aclose()
    await second.aclose()


async def test_a_worker_that_goes_takes_only_its_own_calls(tmp_path):
    backend = silent()
    async with linked(tmp_path, backend, workers=2) as (host, [one, other]):
        tasks = [asyncio.create_task(worker.light.infer(REQUEST, within())) for worker in (one, other)]
        await until(lambda: backend.in_flight == 2)
        await one.link.aclose()
        with pytest.raises(er.ModelFailed):
            await tasks[0]
        await until(lambda: backend.in_flight == 1)
        assert backend.cancelled == 1
        assert not tasks[1].done()
        assert one.seen.states == ["ready"]  # whoever leaves does not complain
        tasks[1].cancel()
        await until(lambda: host.server.in_flight == 0)


async def test_what_makes_no_sense_ends_the_connection_and_nothing_else(tmp_path, caplog):
    clock = FakeClock()
    async with linked(tmp_path, answering(), clock, workers=2) as (_, [one, other]):
        one.link._connection.send(["dance"])
        await until(lambda: one.light.state == "gone")
        assert other.light.ready
        clock.advance(FIRST_WAIT_S)
        await until(lambda: one.light.ready)


# ----------------------------------------------------------------------------------------------------- what is told


async def test_workers_hear_how_loading_goes(tmp_path):
    clock, path = FakeClock(), tmp_path / "models.sock"
    loading, given = asyncio.Event(), [OSError("no such file: /models/x"), answering()]

    def give():
        if isinstance(given[0], Exception):
            raise given.pop(0)
        return given[0]

    host = Host(path, clock, light=give)
    host.slots["light"]._load = _after(loading, host.slots["light"]._load)
    await host.server.start(path)
    worker = Worker(path, clock, ("light", "other"))
    worker.link.start()
    await until(lambda: worker.models["other"].state == "failed")
    assert "no model of this name" in worker.models["other"].reason
    trying = asyncio.create_task(worker.light.first_try())
    assert worker.light.state == "loading"
    assert worker.light.info.fingerprint == "placeholder"
    filling = asyncio.create_task(host.slots["light"].run())
    with pytest.raises(er.ModelNotReady, match="loading"):
        await worker.light.infer(REQUEST, within())
    assert not trying.done()
    loading.set()
    await asyncio.wait_for(trying, 1.0)
    assert (worker.light.state, worker.light.reason) == ("failed", "OSError: no such file: /models/x")
    assert worker.light.info.fingerprint == "placeholder"
    clock.advance(1.0)  # the host tries again
    await until(lambda: worker.light.ready)
    assert worker.light.reason == ""
    await filling
    assert await worker.light.run() is None
    await worker.light.aclose()  # neither the model nor the link is the backend's to close
    assert await worker.light.infer(REQUEST, within()) == chat("hello")
    await worker.link.aclose()
    await host.aclose()


def _after(event, load):
    async def wait_and_load():
        await event.wait()
        return await load()

    return wait_and_load


async def test_nobody_waits_for_ever_for_a_host_that_does_not_come(tmp_path):
    clock = FakeClock()
    worker = Worker(tmp_path / "nobody.sock", clock)
    worker.link.start()
    trying = asyncio.create_task(worker.light.first_try())
    await asyncio.sleep(0)
    clock.advance(UNREACHED_S - 0.1)
    await asyncio.sleep(0.002)
    assert not trying.done()
    clock.advance(0.2)
    await asyncio.wait_for(trying, 1.0)
    assert worker.light.state == "loading"
    assert "not been reached" in worker.light.reason
    assert worker.seen.states == []
    await worker.link.aclose()


async def test_the_embedder(tmp_path):
    async with linked(tmp_path, answering()) as (host, [worker]):
        embedder = worker.link.embedder
        assert (embedder.ready, embedder.fingerprint, embedder.dimensions) == (True, "encoder-1", 2)
        vectors = await embedder.embed(["one", "three"], within())
        assert (vectors.dtype, vectors.tolist()) == (np.float32, [[3, 1], [5, 1]])
        assert await embedder.unknown_share("a?b?", within()) == 0.5
        host.embedder.error = er.LimitReached("full", retry_after_s=1.0)
        with pytest.raises(er.LimitReached, match="full"):
            await embedder.embed(["x"], within())
        host.embedder.told = ("encoder-2", 3)
        await host.slots["light"].reload()  # it changes with the models that use it
        await until(lambda: embedder.fingerprint == "encoder-2")
        assert embedder.dimensions == 3
        host.embedder.told = None
        await host.slots["light"].reload()
        await until(lambda: not embedder.ready)
        for value in ("fingerprint", "dimensions"):
            with pytest.raises(er.ModelNotReady):
                getattr(embedder, value)
        with pytest.raises(er.ModelNotReady):
            await embedder.unknown_share("x", within())


# ----------------------------------------------------------------------------------------------------------- reload


async def test_a_reload_lets_calls_end_and_is_known_before_its_first_answer(tmp_path):
    clock, path = FakeClock(), tmp_path / "models.sock"
    models = [answering(delay_s=2.0), answering("from the new one", "two")]
    given = iter(models)
    host = await Host(path, clock, light=lambda: next(given)).start()
    workers = [Worker(path, clock) for _ in range(2)]
    for worker in workers:
        worker.link.start()
        await until(lambda worker=worker: worker.light.ready)
    known: list[str] = []

    async def ask(worker: Worker):
        answer = await worker.light.infer(REQUEST, within())
        known.append(worker.light.info.fingerprint)
        return answer

    before = [asyncio.create_task(ask(worker)) for worker in workers]
    await until(lambda: models[0].in_flight == 2)
    told = await host.slots["light"].reload()
    assert (told["before"], told["after"], told["error"]) == ("one", "two", "")
    assert [await ask(worker) for worker in workers] == [chat("from the new one")] * 2
    assert known == ["two", "two"]
    assert workers[0].filled == [(None, "one"), ("one", "two")]
    assert not models[0].closed
    models[0]._clock.advance(2.0)
    assert await asyncio.gather(*before) == [chat("hello")] * 2
    await until(lambda: models[0].closed)
    assert all(worker.seen.states == ["ready", "ready"] for worker in workers)
    for worker in workers:
        await worker.link.aclose()
    await host.aclose()


# ---------------------------------------------------------------------------------------------------------- the end


async def test_the_end_of_the_host_is_told_to_calls_under_way(tmp_path):
    backend = silent()
    async with linked(tmp_path, backend) as (host, [worker]):
        calls = asyncio.create_task(failed(worker))
        await until(lambda: host.server.in_flight == 2)
        await host.server.aclose()
        errors = await asyncio.wait_for(calls, 1.0)
        assert [type(error) for error in errors] == [er.ModelNotReady, er.ModelNotReady]
        assert (backend.in_flight, host.server.in_flight) == (0, 0)


async def test_a_drain_waits_for_workers_until_the_limit_or_somebody_is_in_a_hurry(tmp_path):
    clock, backend = FakeClock(), silent()
    async with linked(tmp_path, backend, clock) as (host, [worker]):
        task = asyncio.create_task(worker.light.infer(REQUEST, within()))
        await until(lambda: host.server.in_flight)
        drain = asyncio.create_task(host.server.drain(10.0))
        await asyncio.sleep(0.002)
        clock.advance(9.9)
        await asyncio.sleep(0.002)
        assert not drain.done()
        clock.advance(0.2)
        assert await asyncio.wait_for(drain, 1.0) == 1
        drain = asyncio.create_task(host.server.drain(10.0))
        await asyncio.sleep(0.002)
        host.server.hurry()
        assert await asyncio.wait_for(drain, 1.0) == 1
        task.cancel()


async def test_a_drain_waits_for_a_worker_that_has_no_call_now(tmp_path):
    """It may still have requests that will need a model."""
    async with linked(tmp_path, silent()) as (host, [worker]):
        drain = asyncio.create_task(host.server.drain(10.0))
        await asyncio.sleep(0.002)
        assert not drain.done()
        await worker.link.aclose()
        assert await asyncio.wait_for(drain, 1.0) == 0


async def test_the_socket_is_this_users_alone_and_an_old_one_is_taken_away(tmp_path):
    path = tmp_path / "models.sock"
    path.write_text("left by a host that was killed")
    before = os.umask(0)
    try:
        async with linked(tmp_path, answering()):
            mode = path.stat().st_mode
            assert stat.S_ISSOCK(mode)
            assert stat.S_IMODE(mode) == 0o600
            assert os.umask(0) == 0  # as it was
    finally:
        os.umask(before)
    assert not path.exists()
