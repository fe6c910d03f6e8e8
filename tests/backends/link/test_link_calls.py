"""Calls over the link: answers, errors, cancelling, deadlines, pace."""

from __future__ import annotations

import asyncio
import gc

import numpy as np
import pytest

from backends.api import (
    ChatRequest,
    Chunk,
    ChunkKind,
    EmbeddingsAnswer,
    EmbeddingsRequest,
    StreamLimits,
    Tensor,
    TensorAnswer,
    TensorRequest,
)
from backends.link.calls import PAUSE_AT
from backends.scripted import Outcome, ScriptedBackend, chat
from policies.core import errors as er
from policies.core.clock import FakeClock, SystemClock
from policies.core.deadline import Deadline
from tests.support.link import FrozenHost, Worker, info, linked
from tests.support.waiting import until

REQUEST = ChatRequest({"model": "auto", "messages": [{"role": "user", "content": "hi"}]}, id="req-1")


def scripted(*outcomes: Outcome, clock=None) -> ScriptedBackend:
    return ScriptedBackend(info(), outcomes or [Outcome(chat("hello there, you"))], clock or FakeClock())


def within(seconds: float = 5.0) -> Deadline:
    return Deadline.after(seconds, SystemClock())


class Asked:
    """A backend that answers when told, and keeps what it was asked."""

    def __init__(self) -> None:
        self.info = info()
        self.deadline: Deadline | None = None
        self.go = asyncio.Event()
        self.sent = 0
        self.ended: list[str] = []
        self.answer: object = chat("told")

    async def infer(self, request, deadline):
        self.deadline = deadline
        try:
            await self.go.wait()
            return self.answer
        except asyncio.CancelledError:
            self.ended.append("cancelled")
            raise

    async def stream(self, request, deadline):
        self.deadline = deadline
        try:
            while True:
                self.sent += 1
                yield Chunk(b"%d" % self.sent + b"." * 1000, ChunkKind.CONTENT)
                await asyncio.sleep(0)
        finally:
            self.ended.append("closed")

    async def aclose(self) -> None:
        pass


# ---------------------------------------------------------------------------------------------------------- answers


async def test_a_call_is_what_it_is_without_the_link(tmp_path):
    backend = scripted()
    async with linked(tmp_path, backend) as (_, [worker]):
        assert await worker.light.infer(REQUEST, within()) == chat("hello there, you")
        assert backend.calls == [REQUEST]
        got = [chunk async for chunk in worker.light.stream(REQUEST, within())]
        assert got == [chunk async for chunk in backend.stream(REQUEST, within())]
        assert worker.light.info == info()
        assert (await worker.light.health()).ready
        assert repr(worker.light) == "LinkedModel(light: ready)"


async def test_tensors_and_vectors(tmp_path):
    vectors = np.float32([[0.5, 1.5]])
    backend = scripted(Outcome(), Outcome(EmbeddingsAnswer(vectors, "m")))
    async with linked(tmp_path, backend) as (_, [worker]):
        large = np.arange(1_000_000, dtype=np.float32)
        request = TensorRequest("m", [Tensor("x", "FP32", large), Tensor("b", "BYTES", np.array([b"\xff"], object))])
        answer = await worker.light.infer(request, within())
        assert isinstance(answer, TensorAnswer)
        assert np.array_equal(answer.outputs[0].data, large)
        assert answer.outputs[1].data.tolist() == [b"\xff"]
        answer = await worker.light.infer(EmbeddingsRequest({"input": "x"}, ["x"]), within())
        assert isinstance(answer, EmbeddingsAnswer)
        assert answer.vectors.tolist() == vectors.tolist()


async def test_integers_of_any_size_cross(tmp_path):
    backend = scripted()
    async with linked(tmp_path, backend) as (_, [worker]):
        request = ChatRequest({"messages": [], "seed": 10**30})
        await worker.light.infer(request, within())
        assert [chunk async for chunk in worker.light.stream(request, within())]
        assert backend.calls == [request, request]


async def test_many_calls_at_once_get_their_own_answers(tmp_path):
    async with linked(tmp_path, scripted(), workers=2) as (host, workers):

        async def ask(worker: Worker, number: int) -> None:
            tensor = Tensor("x", "INT64", np.full(number % 7, number))
            answer = await worker.light.infer(TensorRequest("m", [tensor]), within())
            assert answer.outputs[0].data.tolist() == [number] * (number % 7)

        await asyncio.gather(*(ask(workers[number % 2], number) for number in range(100)))
        await until(lambda: not host.server.in_flight)


# ----------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    "error",
    [
        er.InvalidRequest("no", param="messages"),
        er.ContextTooLong(400, b"{}", "application/json", "light"),
        er.ModelFailed("it broke", "light"),
        er.LimitReached("full", retry_after_s=1.5),
        er.CannotServe("not this"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_errors_keep_their_class_and_their_fields(tmp_path, error):
    async with linked(tmp_path, scripted(Outcome(error=error, chunks=2))) as (_, [worker]):
        with pytest.raises(type(error)) as caught:
            await worker.light.infer(REQUEST, within())
        assert (caught.value.args, caught.value.__dict__) == (error.args, error.__dict__)
        got = []
        with pytest.raises(type(error)) as caught:
            async for chunk in worker.light.stream(REQUEST, within()):
                got += [chunk]
        assert caught.value.__dict__ == error.__dict__
        assert len(got) == 2  # what came before the error is not lost


class Broken(Asked):
    async def infer(self, request, deadline):
        raise KeyError("the prompt")

    async def stream(self, request, deadline):
        raise asyncio.CancelledError
        yield


async def test_a_defect_of_a_model_is_a_failed_model(tmp_path):
    async with linked(tmp_path, Broken()) as (_, [worker]):
        with pytest.raises(er.ModelFailed, match="the model raised KeyError"):
            await worker.light.infer(REQUEST, within())
        with pytest.raises(er.ModelFailed, match="cancelled from within"):
            await anext(worker.light.stream(REQUEST, within()))


async def test_what_no_message_can_carry(tmp_path):
    backend = Asked()
    backend.answer = TensorAnswer("m", [], parameters={"n": 10**30})
    backend.go.set()
    async with linked(tmp_path, backend) as (host, [worker]):
        with pytest.raises(er.CannotServe, match="cannot be handed to the model host: UnicodeEncodeError"):
            await worker.light.infer(TensorRequest("\ud800", []), within())
        huge = np.zeros(65 << 20, np.uint8)
        with pytest.raises(er.CannotServe, match="at most 67108864 are sent"):
            await worker.light.infer(TensorRequest("m", [Tensor("x", "UINT8", huge)]), within())
        with pytest.raises(er.ModelFailed, match="answer cannot be handed on"):
            await worker.light.infer(REQUEST, within())
        backend.answer = TensorAnswer("m", [Tensor("x", "UINT8", huge)])
        with pytest.raises(er.ModelFailed, match="answer cannot be handed on"):
            await worker.light.infer(REQUEST, within())
        assert worker.link.in_flight == host.server.in_flight == 0


async def test_only_chat_is_streamed(tmp_path):
    async with linked(tmp_path, scripted()) as (_, [worker]):
        with pytest.raises(er.CannotServe, match="only chat answers are streamed"):
            await anext(worker.light.stream(TensorRequest("m", []), within()))  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------ cancelling and deadlines


async def test_a_caller_that_leaves_stops_the_work(tmp_path):
    backend = Asked()
    async with linked(tmp_path, backend) as (host, [worker]):
        task = asyncio.create_task(worker.light.infer(REQUEST, within()))
        await until(lambda: backend.deadline)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: backend.ended == ["cancelled"])
        stream = worker.light.stream(REQUEST, within())
        await anext(stream)
        await stream.aclose()
        await until(lambda: backend.ended == ["cancelled", "closed"])
        await until(lambda: not host.server.in_flight)
        assert worker.link.in_flight == 0


async def test_the_seconds_left_are_sent_and_an_extension_too(tmp_path):
    backend = Asked()
    async with linked(tmp_path, backend, SystemClock()) as (_, [worker]):
        for ask in (worker.light.infer, lambda *call: anext(worker.light.stream(*call))):
            backend.deadline = None
            deadline = within(3.0)
            task = asyncio.ensure_future(ask(REQUEST, deadline))
            there = await until(lambda: backend.deadline)
            assert abs(there.at - deadline.at) < 0.5
            if ask == worker.light.infer:
                deadline.extend(deadline.at + 7.0)
                await until(lambda: abs(there.at - deadline.at) < 0.5)
                backend.go.set()
            await task


async def test_a_deadline_that_moved_is_kept_here_too(tmp_path):
    host = await FrozenHost().start(tmp_path / "models.sock")
    worker = Worker(tmp_path / "models.sock", SystemClock())
    worker.link.start()
    await until(lambda: worker.light.ready)
    for ask in (worker.light.infer, lambda *call: anext(worker.light.stream(*call))):
        deadline = within(0.05)
        task = asyncio.ensure_future(ask(REQUEST, deadline))
        await asyncio.sleep(0)
        deadline.extend(deadline.at + 30.0)
        number = (await until(lambda: host.calls("extend")))[-1][1]
        assert host.calls("extend")[-1][2] == pytest.approx(30, abs=0.5)
        await asyncio.wait([task], timeout=0.1)
        assert not task.done()
        host.say("error", number, ["ModelFailed", ["told"], {"backend": "light"}, [], None])
        with pytest.raises(er.ModelFailed, match="told"):
            await task
        host.asked.clear()
        deadline = within(0.05)
        task = asyncio.ensure_future(ask(REQUEST, deadline))
        await asyncio.sleep(0)
        deadline.extend(deadline.at + 0.1)
        with pytest.raises((er.DeadlineExceeded, er.FirstTokenTimeout)):
            await asyncio.wait_for(task, 1.0)
        assert deadline.expired()
        host.asked.clear()
    await worker.link.aclose()
    await host.aclose()


async def test_a_frozen_host_holds_nobody(tmp_path):
    host = await FrozenHost().start(tmp_path / "models.sock")
    worker = Worker(tmp_path / "models.sock", SystemClock())
    worker.link.start()
    await until(lambda: worker.light.ready)
    with pytest.raises(er.DeadlineExceeded):
        await worker.light.infer(REQUEST, within(0.02))
    with pytest.raises(er.FirstTokenTimeout) as caught:
        await anext(worker.light.stream(REQUEST, within(0.02)))
    assert caught.value.backend == "light"
    with pytest.raises(er.FirstTokenTimeout):
        await anext(worker.light.stream(REQUEST, within(-1)))
    with pytest.raises(er.DeadlineExceeded):
        await worker.light.infer(REQUEST, within(-1))
    await until(lambda: len(host.calls("cancel")) == 2)  # it is told to stop, should it wake up
    assert [call[1] for call in host.calls("cancel")] == [host.calls("infer")[0][1], host.calls("stream")[0][1]]
    for limits, error in (
        (StreamLimits(idle_s=0.02, total_s=60), er.IdleTimeout),
        (StreamLimits(idle_s=60, total_s=0.02), er.TotalTimeout),
    ):
        stream = worker.light.stream(ChatRequest(REQUEST.body, limits=limits), within())
        first = asyncio.ensure_future(anext(stream))
        before = len(host.calls("stream"))
        await until(lambda before=before: len(host.calls("stream")) == before + 1)
        host.say("chunk", host.calls("stream")[-1][1], b"1", "content")
        assert (await first).data == b"1"
        with pytest.raises(error):
            await anext(stream)
    await worker.link.aclose()
    await host.aclose()


async def test_what_has_arrived_counts_for_nothing_after_the_total(tmp_path):
    host = await FrozenHost().start(tmp_path / "models.sock")
    worker = Worker(tmp_path / "models.sock", SystemClock())
    worker.link.start()
    await until(lambda: worker.light.ready)
    clock = FakeClock()
    stream = worker.light.stream(REQUEST, Deadline.after(5, clock))
    first = asyncio.ensure_future(anext(stream))
    number = (await until(lambda: host.calls("stream")))[0][1]
    for text in (b"1", b"2", b"3"):
        host.say("chunk", number, text, "content")
    assert (await first).data == b"1"
    assert (await anext(stream)).data == b"2"
    clock.advance(StreamLimits().total_s)
    with pytest.raises(er.TotalTimeout):
        await anext(stream)
    await worker.link.aclose()
    await host.aclose()


async def test_an_end_behind_what_came_too_late_does_not_make_it_whole(tmp_path):
    """The reader is slow: all of the stream is here when its total is over, and only a part has been read."""
    host = await FrozenHost().start(tmp_path / "models.sock")
    worker = Worker(tmp_path / "models.sock", SystemClock())
    worker.link.start()
    await until(lambda: worker.light.ready)
    clock = FakeClock()
    stream = worker.light.stream(REQUEST, Deadline.after(5, clock))
    first = asyncio.ensure_future(anext(stream))
    number = (await until(lambda: host.calls("stream")))[0][1]
    for text in (b"1", b"2", b"3"):
        host.say("chunk", number, text, "content")
    host.say("end", number)
    assert (await first).data == b"1"
    assert (await anext(stream)).data == b"2"
    call = worker.link._calls._open[number]
    await until(lambda: call.over)
    clock.advance(StreamLimits().total_s)
    with pytest.raises(er.TotalTimeout):
        await anext(stream)
    await worker.link.aclose()
    await host.aclose()


async def test_a_stream_that_never_ends_is_cut_at_its_total(tmp_path):
    backend = Asked()
    async with linked(tmp_path, backend) as (_, [worker]):
        request = ChatRequest(REQUEST.body, limits=StreamLimits(idle_s=60, total_s=0.05))
        with pytest.raises(er.TotalTimeout, match=r"past 0\.05 s"):
            async for _ in worker.light.stream(request, within()):
                pass
        await until(lambda: backend.ended == ["closed"])


async def test_a_host_that_does_not_read_is_not_asked_for_ever(tmp_path):
    host = await FrozenHost().start(tmp_path / "models.sock")
    worker = Worker(tmp_path / "models.sock", SystemClock())
    worker.link.start()
    await until(lambda: worker.light.ready)
    host.ends[-1].transport.pause_reading()
    request = TensorRequest("m", [Tensor("x", "UINT8", np.zeros(10 << 20, np.uint8))])
    tasks = [asyncio.create_task(worker.light.infer(request, within(30))) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(er.ModelNotReady, match="does not read"):
        await worker.light.infer(request, within(30))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    host.ends[-1].transport.abort()
    await worker.link.aclose()
    await host.aclose()


async def test_an_error_that_nobody_looks_at_makes_no_noise(tmp_path, caplog):
    """The caller is cancelled in the same moment in which the error arrives."""
    host = await FrozenHost().start(tmp_path / "models.sock")
    worker = Worker(tmp_path / "models.sock", SystemClock())
    worker.link.start()
    await until(lambda: worker.light.ready)
    task = asyncio.create_task(worker.light.infer(REQUEST, within()))
    number = (await until(lambda: host.calls("infer")))[0][1]
    worker.link._verbs["error"](number, ["ModelFailed", ["x"], {}, [], None])
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gc.collect()
    assert not caplog.records
    await worker.link.aclose()
    await host.aclose()


# -------------------------------------------------------------------------------------------------------------- pace


async def test_a_reader_that_is_slow_pauses_its_stream_alone(tmp_path):
    backend = Asked()
    backend.go.set()
    async with linked(tmp_path, backend) as (_, [worker]):
        stream = worker.light.stream(REQUEST, within())
        assert (await anext(stream)).data.startswith(b"1.")
        before = -1
        while before != backend.sent:  # until the host stands still
            before = backend.sent
            for _ in range(20):
                await worker.light.infer(REQUEST, within())  # other calls go on
        assert PAUSE_AT <= backend.sent < 20 * PAUSE_AT
        for number in range(2, 5 * PAUSE_AT):
            assert (await anext(stream)).data.startswith(b"%d." % number)
        await stream.aclose()
        await until(lambda: backend.ended == ["closed"])


async def test_a_worker_that_does_not_read_pauses_its_streams(tmp_path):
    backend = Asked()
    async with linked(tmp_path, backend) as (host, [worker]):
        worker.link._connection.transport.pause_reading()
        stream = worker.light.stream(REQUEST, within())
        reading = asyncio.ensure_future(anext(stream))
        before = -1
        while before != backend.sent:
            before = backend.sent
            for _ in range(200):
                await asyncio.sleep(0)
        assert backend.sent < 2000  # what the system keeps for a socket, and no more
        assert backend.sent > 10
        worker.link._connection.transport.resume_reading()
        await reading
        await stream.aclose()
        await until(lambda: not host.server.in_flight)
