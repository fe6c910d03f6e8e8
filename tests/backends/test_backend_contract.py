"""What every Backend promises, whatever it is: one suite over all of them, alone and wrapped."""

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from backends.api import (
    Backend,
    ChatAnswer,
    ChunkKind,
    Surface,
    Tensor,
    TensorAnswer,
    TensorRequest,
)
from backends.guarded import Guarded, GuardOptions
from backends.openai_assemble import assemble
from backends.scripted import Outcome, ScriptedBackend, chat
from chaos.injector import Injector
from policies.core.clock import SystemClock
from policies.core.errors import BackendError, DeadlineExceeded, FirstTokenTimeout, GatewayError
from policies.core.events import Observers
from tests.support.link import OverLink
from tests.support.upstream import info, oip_backend, openai_backend, question, scripted_upstream, soon

TENSOR = Surface.TENSOR


def scripted(good: bool, surface: Surface = Surface.CHAT) -> Backend:
    outcome = Outcome(chat("hello there")) if good else Outcome(chat("hello there"), delay_s=3600)
    return ScriptedBackend(info("scripted", surface=surface), [outcome], SystemClock())


def guarded(backend: Backend) -> Backend:
    return Guarded(Injector(backend), GuardOptions(), clock=SystemClock(), observer=Observers(), random=lambda: 0.5)


#: (url of the scripted upstream, is it to be good?) -> Backend, or what gives one when awaited
Make = Callable[[str, bool], Backend | Awaitable[Backend]]
CHAT: dict[str, Make] = {
    "openai_http": lambda url, good: openai_backend(url, "ok" if good else "never"),
    "scripted": lambda _, good: scripted(good),
    "injector": lambda _, good: Injector(scripted(good)),
    "guarded": lambda _, good: guarded(scripted(good)),
    "linked": lambda _, good: OverLink.of(scripted(good)),
    "guarded_openai_http": lambda url, good: guarded(openai_backend(url, "ok" if good else "never")),
}
TENSORS: dict[str, Make] = {
    "oip_http": lambda url, good: oip_backend(url, "ok" if good else "never"),
    "scripted": lambda _, good: scripted(good, TENSOR),
    "linked": lambda _, good: OverLink.of(scripted(good, TENSOR)),
    "guarded_oip_http": lambda url, good: guarded(oip_backend(url, "ok" if good else "never")),
}


async def built(make: Make, url: str, good: bool) -> Backend:
    backend = make(url, good)
    return await backend if inspect.isawaitable(backend) else backend


@asynccontextmanager
async def made(make: Make, good: bool) -> AsyncIterator[Backend]:
    async with scripted_upstream() as up:
        backend = await built(make, up.url, good)
        try:
            yield backend
        finally:
            await backend.aclose()


def tensor_request() -> TensorRequest:
    return TensorRequest("any", [Tensor("x", "FP32", np.float32([[1, 2], [3, 4]]))])


@pytest.mark.parametrize("make", CHAT.values(), ids=CHAT)
async def test_whole_and_streamed_answers_agree(make: Make) -> None:
    async with made(make, True) as backend:
        whole = await backend.infer(question(), soon())
        chunks = [piece async for piece in backend.stream(question(), soon())]
        assert isinstance(whole, ChatAnswer)
        again = assemble(piece.data for piece in chunks)
        assert (again.finish_reason, again.usage) == (whole.finish_reason, whole.usage)
        kinds = [piece.kind for piece in chunks]
        assert kinds.count(ChunkKind.FINISH) == 1
        assert kinds.count(ChunkKind.CONTENT) >= 1
        assert kinds.count(ChunkKind.USAGE) <= 1
        assert ChunkKind.CONTENT not in kinds[kinds.index(ChunkKind.FINISH) :]
        assert (await backend.health()).ready
        assert backend.info.name == "heavy"
        assert "heavy" in repr(backend)


@pytest.mark.parametrize("make", CHAT.values(), ids=CHAT)
async def test_many_calls_at_once(make: Make) -> None:
    async with made(make, True) as backend:
        answers = await asyncio.gather(*(backend.infer(question(), soon()) for _ in range(50)))
        assert len({answer.finish_reason for answer in answers if isinstance(answer, ChatAnswer)}) == 1


@pytest.mark.parametrize("make", CHAT.values(), ids=CHAT)
async def test_the_deadline_is_kept(make: Make) -> None:
    async with made(make, False) as backend:
        async with asyncio.timeout(1.0):
            with pytest.raises(DeadlineExceeded):
                await backend.infer(question(), soon(0.05))
            with pytest.raises(FirstTokenTimeout):
                await anext(backend.stream(question(), soon(0.05)))
            with pytest.raises((DeadlineExceeded, FirstTokenTimeout)):
                await anext(backend.stream(question(), soon(-1.0)))
            with pytest.raises(DeadlineExceeded):
                await backend.infer(question(), soon(-1.0))


@pytest.mark.parametrize("make", CHAT.values(), ids=CHAT)
async def test_a_cancelled_call_ends_at_once(make: Make) -> None:
    async with made(make, False) as backend:
        task: asyncio.Future[Any]
        for task in (
            asyncio.ensure_future(backend.infer(question(), soon())),
            asyncio.ensure_future(anext(backend.stream(question(), soon()))),
        ):
            await asyncio.sleep(0)
            task.cancel()
            async with asyncio.timeout(1.0):
                with pytest.raises(asyncio.CancelledError):
                    await task


@pytest.mark.parametrize("make", CHAT.values(), ids=CHAT)
async def test_the_body_of_a_request_is_never_changed(make: Make) -> None:
    async with made(make, True) as backend:
        request = question(stream=False, stream_options={})
        before = dict(request.body)
        await backend.infer(request, soon())
        async for _ in backend.stream(request, soon()):
            pass
        assert request.body == before


@pytest.mark.parametrize("make", TENSORS.values(), ids=TENSORS)
async def test_tensors(make: Make) -> None:
    async with made(make, True) as backend:
        answer = await backend.infer(tensor_request(), soon())
        assert isinstance(answer, TensorAnswer)
        assert answer.outputs[0].data.tolist() == [[1, 2], [3, 4]]
    async with made(make, False) as backend:
        with pytest.raises(DeadlineExceeded):
            await backend.infer(tensor_request(), soon(0.05))


@pytest.mark.parametrize("make", [CHAT["openai_http"], TENSORS["oip_http"]], ids=["openai_http", "oip_http"])
async def test_requests_of_another_surface_are_refused(make: Make) -> None:
    async with made(make, True) as backend:
        wrong = tensor_request() if Surface.CHAT in backend.info.capabilities.surfaces else question()
        with pytest.raises(GatewayError, match="only"):
            await backend.infer(wrong, soon())


@pytest.mark.parametrize("make", CHAT.values(), ids=CHAT)
async def test_only_our_own_errors_come_out(make: Make) -> None:
    """The upstream goes away between making the backend and calling it."""
    async with scripted_upstream() as up:
        backend = await built(make, up.url, True)
        await backend.infer(question(), soon())
    try:
        await backend.infer(question(), soon(1.0))
    except BackendError as error:
        assert error.backend == "heavy"
    await backend.aclose()
