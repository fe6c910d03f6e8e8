"""The OpenAI backend against a real socket: each fault becomes its error, and no connection is left behind."""

import asyncio
import contextlib
import os
import resource
from typing import Any

import msgspec
import numpy as np
import pytest

from backends.api import Chunk, ChunkKind, Tensor, TensorRequest
from backends.http_transport import retry_after
from backends.openai_assemble import assemble
from backends.openai_http import OpenAIBackend
from backends.scripted_models import UNICODE_TEXT
from backends.scripted_server import ScriptedServer
from backends.scripted_steps import Head, Step, Tokens, chunk
from policies.core.clock import FakeClock
from policies.core.errors import (
    BackendError,
    CannotServe,
    ClientFault,
    ConnectFailed,
    ContextTooLong,
    DeadlineExceeded,
    FirstTokenTimeout,
    GatewayError,
    IdleTimeout,
    InBandError,
    LimitReached,
    MalformedAnswer,
    TotalTimeout,
    TruncatedAnswer,
    UpstreamMisconfigured,
    UpstreamStatus,
)
from tests.support.redis_server import free_port
from tests.support.upstream import openai_backend, question, scripted_upstream, soon

SSE = Step(head=Head(headers={"content-type": "text/event-stream"}))


async def collect(backend: OpenAIBackend, **body: Any) -> list[Chunk]:
    return [piece async for piece in backend.stream(question(**body), soon())]


async def read_until_error(backend: OpenAIBackend, **body: Any) -> tuple[list[Chunk], GatewayError]:
    got: list[Chunk] = []
    with pytest.raises(GatewayError) as caught:
        async for piece in backend.stream(question(**body), soon()):
            got.append(piece)  # noqa: PERF401  what came before the error counts
    return got, caught.value


async def until(condition: Any) -> None:
    """Wait for something that a peer does; fails after a second."""
    async with asyncio.timeout(1.0):
        while not condition():
            await asyncio.sleep(0.002)


def text(chunks: list[Chunk]) -> str:
    message = msgspec.json.decode(assemble(piece.data for piece in chunks).body)["choices"][0]["message"]
    return str(message["content"])


# ------------------------------------------------------------------------------------------------------- good answers


async def test_what_goes_out_is_allow_listed_and_our_own() -> None:
    async with scripted_upstream() as up:
        backend = openai_backend(up.url, credential="sk-ours")
        request = question(stream=True, stream_options={"include_usage": False}, unknown_field=[1], user="u")
        before = msgspec.json.encode(request.body)
        answer = await backend.infer(request, soon(5.0))
        seen = up.last("ok")
        expected = {**request.body, "model": "ok", "stream": False}
        del expected["stream_options"]
        assert seen.body == expected
        assert msgspec.json.encode(request.body) == before
        left = int(seen.headers.pop("x-request-timeout-ms"))
        assert 4_000 < left <= 4_980
        assert set(seen.headers) == {
            "host",
            "accept",
            "accept-encoding",
            "authorization",
            "content-length",
            "content-type",
            "user-agent",
            "x-request-id",
        }
        assert seen.headers["authorization"] == "Bearer sk-ours"
        assert "sk-ours" not in repr(backend)
        assert answer.model == "ok"
        await backend.aclose()


async def test_a_stream_asks_for_usage_and_passes_chunks_unaltered() -> None:
    async with scripted_upstream() as up:
        backend = openai_backend(up.url)
        chunks = await collect(backend, stream_options={"x": 1})
        assert up.last("ok").body["stream_options"] == {"x": 1, "include_usage": True}
        assert text(chunks) == "hello there, how can I help?"
        assert [piece.kind for piece in chunks[-2:]] == [ChunkKind.FINISH, ChunkKind.USAGE]
        assert backend.in_flight == 0
        await backend.aclose()


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("malformed-line-then-good", "good after all"),
        ("gzip", "unzipped"),
        ("bytewise-unicode", UNICODE_TEXT),
        ("reasoning", "42"),
        ("huge-line", "x" * (600 << 10)),
    ],
)
async def test_odd_but_good_streams(model: str, expected: str) -> None:
    async with scripted_upstream() as up:
        backend = openai_backend(up.url, model)
        assert text(await collect(backend)) == expected
        assert backend.skipped_events == (1 if model == "malformed-line-then-good" else 0)
        if model != "malformed-line-then-good":
            whole = await backend.infer(question(), soon())
            assert msgspec.json.decode(whole.body)["choices"][0]["message"]["content"] == expected
        await backend.aclose()


async def test_interleaved_tool_calls_come_byte_equal() -> None:
    async with scripted_upstream() as up:
        backend = openai_backend(up.url, "tools-interleaved")
        streamed = msgspec.json.decode(assemble([piece.data for piece in await collect(backend)]).body)
        whole = msgspec.json.decode((await backend.infer(question(), soon())).body)
        assert streamed["choices"] == whole["choices"]
        await backend.aclose()


async def test_a_service_that_does_not_stream_is_replayed() -> None:
    whole = (
        b'{"model":"m","choices":[{"index":0,"message":{"role":"assistant","content":"whole"},"finish_reason":"stop"}]}'
    )
    script = (Step(head=Head(headers={"content-type": "application/json"})), Step(send=whole.decode()))
    async with scripted_upstream(whole=script) as up:
        backend = openai_backend(up.url, "whole")
        assert text(await collect(backend)) == "whole"
        await backend.aclose()


async def test_connections_serve_again_after_answers_streams_and_refusals() -> None:
    async with scripted_upstream() as up:
        backend = openai_backend(up.url)
        for _ in range(5):
            await backend.infer(question(), soon())
            await collect(backend)
            await asyncio.sleep(0.01)  # the end of the body is a packet of its own
        assert up.connections_made == 1
        await backend.aclose()


async def test_a_complete_answer_stands_however_the_connection_ends() -> None:
    script = (SSE, Step(tokens=Tokens(count=2)), Step(sse=chunk({}, "stop")), Step(close=True))
    async with scripted_upstream(abrupt=script) as up:
        backend = openai_backend(up.url, "abrupt")
        assert text(await collect(backend)) == "tok0 tok1 "
        await backend.aclose()


async def test_fewer_choices_than_asked_for() -> None:
    async with scripted_upstream() as up:
        backend = openai_backend(up.url)
        assert text(await collect(backend, n=3)) == "hello there, how can I help?"
        await backend.aclose()


# ------------------------------------------------------------------------------------------------------------ faults

FAULTS: list[tuple[str, type[GatewayError], type[GatewayError]]] = [
    # model, error of a whole answer, error of a stream
    ("close-before-content", TruncatedAnswer, TruncatedAnswer),
    ("close-at-once", ConnectFailed, ConnectFailed),
    ("reset", ConnectFailed, ConnectFailed),
    ("cut-after-40", TruncatedAnswer, TruncatedAnswer),
    ("no-finish", MalformedAnswer, TruncatedAnswer),
    ("error-first", InBandError, InBandError),
    ("error-after-content", InBandError, InBandError),
    ("html", MalformedAnswer, MalformedAnswer),
    ("empty", MalformedAnswer, MalformedAnswer),
    ("invalid-json", MalformedAnswer, MalformedAnswer),
    ("not-http", MalformedAnswer, MalformedAnswer),
    ("status-500", UpstreamStatus, UpstreamStatus),
    ("status-503", UpstreamStatus, UpstreamStatus),
    ("status-429", UpstreamStatus, UpstreamStatus),
    ("status-302", UpstreamStatus, UpstreamStatus),
    ("status-401", UpstreamMisconfigured, UpstreamMisconfigured),
    ("status-404", UpstreamMisconfigured, UpstreamMisconfigured),
    ("status-400", ClientFault, ClientFault),
    ("status-422", ClientFault, ClientFault),
    ("status-400-context", ContextTooLong, ContextTooLong),
    ("status-500-endless", UpstreamStatus, UpstreamStatus),
]


@pytest.mark.parametrize(("model", "whole", "streamed"), FAULTS)
async def test_each_fault_is_its_error_after_one_call(
    model: str, whole: type[GatewayError], streamed: type[GatewayError]
) -> None:
    async with scripted_upstream() as up:
        backend = openai_backend(up.url, model, credential="sk-secret")
        with pytest.raises(GatewayError) as caught:
            await backend.infer(question("SECRET prompt"), soon())
        assert up.requests[model] == 1
        got, error = await read_until_error(backend)
        assert (type(caught.value), type(error)) == (whole, streamed)
        assert up.requests[model] == 2
        assert len(got) == {"cut-after-40": 40, "no-finish": 3, "error-after-content": 3}.get(model, 0)
        assert backend.in_flight == 0
        for failure in (caught.value, error):
            assert isinstance(failure, BackendError)
            assert failure.backend == "heavy"
            assert "sk-secret" not in str(failure)
            assert "SECRET" not in str(failure)
        await backend.aclose()


async def test_a_body_whose_framing_breaks_is_garbled_not_cut() -> None:
    head = Step(head=Head(headers={"content-type": "text/event-stream"}))
    async with scripted_upstream(broken=(head, Step(wait_s=0.01), Step(raw="no chunk\r\n"), Step(hang=True))) as up:
        backend = openai_backend(up.url, "broken")
        with pytest.raises(MalformedAnswer, match="cannot be read"):
            await backend.infer(question(), soon())
        _, error = await read_until_error(backend)
        assert isinstance(error, MalformedAnswer)
        await until(lambda: not up.connections)
        await backend.aclose()


async def test_a_client_fault_keeps_status_and_body() -> None:
    async with scripted_upstream() as up:
        backend = openai_backend(up.url, "status-422")
        with pytest.raises(ClientFault) as caught:
            await backend.infer(question(), soon())
        assert (caught.value.status, caught.value.content_type) == (422, "application/json")
        assert msgspec.json.decode(caught.value.body)["error"]["code"] == "unprocessable"
        await backend.aclose()


@pytest.mark.parametrize(("model", "seconds"), [("status-429", 1.0), ("status-503", 2.0), ("status-500", None)])
async def test_retry_after_is_kept(model: str, seconds: float | None) -> None:
    async with scripted_upstream() as up:
        backend = openai_backend(up.url, model)
        with pytest.raises(UpstreamStatus) as caught:
            await backend.infer(question(), soon())
        assert caught.value.retry_after_s == seconds
        await backend.aclose()


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"retry-after": "7"}, 7.0),
        ({"retry-after": "0"}, 0.0),
        ({"retry-after": "Tue, 14 Nov 2023 22:13:50 GMT"}, 30.0),
        ({"retry-after": "Tue, 14 Nov 2000 22:13:50 GMT"}, 0.0),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "-5"}, None),
        ({"retry-after": "1e999"}, None),
        ({"retry-after-ms": "250", "retry-after": "9"}, 0.25),
        ({"retry-after-ms": "nan"}, None),
    ],
)
def test_forms_of_retry_after(headers: dict[str, str], seconds: float | None) -> None:
    from multidict import CIMultiDict

    assert retry_after(CIMultiDict(headers), FakeClock().wall()) == seconds


async def test_nobody_listens() -> None:
    backend = openai_backend(f"http://127.0.0.1:{free_port()}")
    with pytest.raises(ConnectFailed):
        await backend.infer(question(), soon())
    with pytest.raises(ConnectFailed):
        await collect(backend)
    await backend.aclose()


async def test_running_out_of_descriptors_is_no_fault_of_the_backend() -> None:
    """Breakers are shared by all workers: what one of them lacks must not open it for the others."""
    async with scripted_upstream() as server:
        backend = openai_backend(server.url)
        free = os.dup(0)
        os.close(free)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        try:
            with pytest.raises(LimitReached, match=r"this process cannot open a connection \(Too many open files\)"):
                await backend.infer(question(), soon())
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert (await backend.infer(question(), soon())).finish_reason == "stop"
        await backend.aclose()


async def test_the_deadline_ends_a_call_that_never_answers() -> None:
    async with scripted_upstream() as up:
        backend = openai_backend(up.url, "never")
        with pytest.raises(DeadlineExceeded):
            await backend.infer(question(), soon(0.1))
        await until(lambda: up.last("never").closed_at is not None)
        with pytest.raises(FirstTokenTimeout):
            async for _ in backend.stream(question(), soon(0.1)):
                pass
        await until(lambda: up.last("never").closed_at is not None)
        assert backend.in_flight == 0
        await backend.aclose()


async def test_metadata_is_no_first_token() -> None:
    script = (SSE, Step(sse=chunk({"role": "assistant", "content": ""})), Step(hang=True))
    async with scripted_upstream(role=script) as up:
        backend = openai_backend(up.url, "role")
        with pytest.raises(FirstTokenTimeout):
            async for _ in backend.stream(question(), soon(0.1)):
                pass
        await backend.aclose()


async def test_endless_metadata_is_refused() -> None:
    script = (SSE, *(Step(sse=chunk({"role": "x" * 10_000})) for _ in range(10)), Step(hang=True))
    async with scripted_upstream(meta=script) as up:
        backend = openai_backend(up.url, "meta")
        _, error = await read_until_error(backend)
        assert isinstance(error, MalformedAnswer)
        await backend.aclose()


async def test_after_the_first_content_the_deadline_is_over_and_idle_counts() -> None:
    steady = (SSE, Step(tokens=Tokens(count=6, every_s=0.05)), Step(sse=chunk({}, "stop")), Step(sse="[DONE]"))
    stalls = (SSE, Step(tokens=Tokens(count=2)), Step(hang=True))
    async with scripted_upstream(steady=steady, stalls=stalls) as up:
        backend = openai_backend(up.url, "steady")
        assert len([1 async for _ in backend.stream(question(idle_s=1.0), soon(0.15))]) == 7
        await backend.aclose()
        backend = openai_backend(up.url, "stalls")
        got = []
        with pytest.raises(IdleTimeout):
            async for piece in backend.stream(question(idle_s=0.1), soon()):
                got.append(piece)  # noqa: PERF401
        assert len(got) == 2
        await until(lambda: up.last("stalls").closed_at is not None)
        await backend.aclose()


async def test_a_slow_consumer_is_not_an_idle_upstream() -> None:
    script = (SSE, Step(tokens=Tokens(count=3, every_s=0.01)), Step(sse=chunk({}, "stop")), Step(sse="[DONE]"))
    async with scripted_upstream(brisk=script) as up:
        backend = openai_backend(up.url, "brisk")
        got = []
        async for piece in backend.stream(question(idle_s=0.1), soon()):
            got.append(piece)
            await asyncio.sleep(0.12)
        assert got[-1].kind is ChunkKind.FINISH
        await backend.aclose()


async def test_the_total_limit_of_a_stream() -> None:
    script = (SSE, Step(tokens=Tokens(count=1000, every_s=0.01)))
    async with scripted_upstream(endless=script) as up:
        backend = openai_backend(up.url, "endless")
        with pytest.raises(TotalTimeout):
            async for _ in backend.stream(question(total_s=0.1), soon()):
                pass
        await backend.aclose()


# -------------------------------------------------------------------------------------------- leaving, reuse and limits


async def test_leaving_closes_the_connection_at_once() -> None:
    script = (SSE, Step(tokens=Tokens(count=1000, every_s=0.01)))
    async with scripted_upstream(long=script) as up:
        backend = openai_backend(up.url, "long")
        stream = backend.stream(question(), soon())
        await anext(stream)
        await stream.aclose()
        await until(lambda: up.last("long").closed_at is not None)
        assert backend.in_flight == 0
        backend._model = "never"
        for call in (backend.infer(question(), soon()), anext(backend.stream(question(), soon()))):
            task = asyncio.ensure_future(call)
            before = up.requests["never"]
            await until(lambda before=before: up.requests["never"] > before)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            await until(lambda: up.last("never").closed_at is not None)
        assert backend.in_flight == 0
        await backend.aclose()


async def test_a_stale_connection_is_replaced_once() -> None:
    async with scripted_upstream() as up:
        backend = openai_backend(up.url, "keepalive-close")
        for _ in range(3):
            await backend.infer(question(), soon())
        # The first call opened a connection; each further one found it closed and went out again on a fresh one.
        assert (up.requests["keepalive-close"], up.connections_made) == (5, 3)
        assert text(await collect(backend)) == "answered on a fresh connection"
        await backend.aclose()


async def test_bodies_nobody_reads_do_not_hold_connections() -> None:
    async with scripted_upstream() as up:
        backend = openai_backend(up.url, "status-500-endless", max_connections=4)
        for _ in range(200):
            with pytest.raises(UpstreamStatus):
                await backend.infer(question(), soon())
        await until(lambda: not up.connections)
        assert backend.in_flight == 0
        await backend.aclose()


async def test_no_hidden_queue() -> None:
    async with scripted_upstream() as up:
        backend = openai_backend(up.url, "never", max_connections=2)
        tasks = [asyncio.ensure_future(backend.infer(question(), soon())) for _ in range(2)]
        await until(lambda: up.requests["never"] == 2)
        with pytest.raises(LimitReached):
            await backend.infer(question(), soon())
        with pytest.raises(LimitReached):
            await collect(backend)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (backend.in_flight, up.requests["never"]) == (0, 2)
        await backend.aclose()


async def test_an_answer_without_end_is_refused_at_a_bound() -> None:
    big = (
        Step(head=Head(headers={"content-type": "application/json"})),
        *(Step(send="x" * 100_000) for _ in range(30)),
    )
    async with scripted_upstream(big=big) as up:
        backend = openai_backend(up.url, "big", max_body_bytes=1_000_000)
        with pytest.raises(MalformedAnswer, match="larger than"):
            await backend.infer(question(), soon())
        await backend.aclose()


async def test_tensors_are_not_for_a_chat_backend() -> None:
    backend = openai_backend("http://127.0.0.1:9")
    with pytest.raises(CannotServe):
        await backend.infer(TensorRequest("m", [Tensor("x", "FP32", np.float32([1]))]), soon())
    await backend.aclose()


async def test_a_flight_may_extend_the_deadline_of_a_call_under_way() -> None:
    async with scripted_upstream() as up:
        backend = openai_backend(up.url, "slow-first-token")
        deadline = soon(0.15)
        task = asyncio.ensure_future(backend.infer(question(), deadline))
        await until(lambda: up.requests["slow-first-token"] == 1)
        deadline.extend(deadline.at + 5)
        assert (await task).finish_reason == "stop"
        await backend.aclose()


def test_a_server_handle_says_what_it_has_not_seen() -> None:
    from backends.scripted_steps import ScriptFile

    with pytest.raises(LookupError):
        ScriptedServer(ScriptFile(), FakeClock()).last("nothing")
