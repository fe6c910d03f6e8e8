"""The shipped fakes do what their scripts say, byte for byte."""

import asyncio
from pathlib import Path

import aiohttp
import msgspec
import pytest

from backends.api import ChatAnswer
from backends.scripted import Outcome, OutcomeSpec, ScriptedBackend, chat, outcome
from backends.scripted_models import MODELS, TENSOR_MODELS
from backends.scripted_server import serve_scripts
from backends.scripted_steps import Step, load_scripts
from policies.core import errors
from policies.core.clock import FakeClock
from policies.core.deadline import Deadline
from tests.support.upstream import info, openai_backend, question, scripted_upstream, soon


def backend(outcomes: object) -> tuple[ScriptedBackend, Deadline]:
    clock = FakeClock()
    return ScriptedBackend(info("m"), outcomes, clock), Deadline.after(10, clock)  # type: ignore[arg-type]


async def test_outcomes_come_in_order_and_the_last_repeats() -> None:
    it, deadline = backend([Outcome(error=errors.UpstreamStatus(500)), Outcome(chat("a")), Outcome(chat("b"))])
    with pytest.raises(errors.UpstreamStatus):
        await it.infer(question(), deadline)
    answers = [await it.infer(question(), deadline) for _ in range(3)]
    assert [b'"a"' in answer.body for answer in answers if isinstance(answer, ChatAnswer)] == [True, False, False]
    assert len(it.calls) == 4


async def test_outcomes_by_model_name() -> None:
    it, deadline = backend({"auto": [Outcome(chat("a"))]})
    await it.infer(question(), deadline)
    with pytest.raises(errors.UpstreamMisconfigured):
        await it.infer(question(model="other"), deadline)


@pytest.mark.parametrize(
    "kind", ["connect", "status", "misconfigured", "client", "malformed", "truncated", "in_band", "model"]
)
async def test_errors_by_name_in_configuration(kind: str) -> None:
    spec = msgspec.convert({"error": kind, "status": 503, "chunks": 1}, OutcomeSpec)
    it, deadline = backend([outcome(spec, info("m"))])
    with pytest.raises(errors.BackendError):
        await it.infer(question(), deadline)
    stream = it.stream(question(), deadline)
    await anext(stream)
    with pytest.raises(errors.BackendError):
        await anext(stream)


def test_mistakes_in_a_script_are_refused() -> None:
    with pytest.raises(ValueError, match="'nope' is not one of client, connect"):
        outcome(OutcomeSpec(error="nope"), info("m"))
    with pytest.raises(ValueError, match="at least one"):
        backend([])
    for steps in ({}, {"wait_s": 1.0, "end": True}):
        with pytest.raises(ValueError, match="exactly one action"):
            Step(**steps).action()  # type: ignore[arg-type]


FILE = """
default: slow
scripts:
  slow:
    - head: {headers: {content-type: text/event-stream}}
    - sse: {choices: [{index: 0, delta: {content: "héllo"}, finish_reason: null}]}
      bytewise: true
    - wait_s: 0.01
    - tokens: {count: 2, every_s: 0.005, text: " {i}"}
    - sse: {choices: [{index: 0, delta: {}, finish_reason: stop}]}
    - sse: "[DONE]"
  raw:
    - raw: "HTTP/1.1 200 OK\\r\\nContent-Length: 2\\r\\n\\r\\nhi"
  bytes:
    - head: {headers: {content-length: "3"}, framing: length}
    - send_base64: AAEC
  until-close:
    - head: {framing: close}
    - send: all there is
    - close: true
"""


async def test_a_script_file(tmp_path: Path) -> None:
    path = tmp_path / "script.yaml"
    path.write_text(FILE)
    server = await serve_scripts("127.0.0.1", 0, load_scripts(path))
    try:
        it = openai_backend(server.url, "whatever")
        chunks = [piece async for piece in it.stream(question(), soon())]
        deltas = [msgspec.json.decode(piece.data)["choices"][0]["delta"] for piece in chunks]
        assert deltas == [{"content": "héllo"}, {"content": " 0"}, {"content": " 1"}, {}]
        await it.aclose()
        async with aiohttp.ClientSession() as session:
            for model, body in (("raw", b"hi"), ("bytes", b"\0\1\2"), ("until-close", b"all there is")):
                async with session.post(server.url + "/v1/x", json={"model": model}) as response:
                    assert await response.read() == body
            async with session.get(server.url + "/_seen") as response:
                report = await response.json()
        assert report["requests"] == {"whatever": 1, "raw": 1, "bytes": 1, "until-close": 1}
        assert report["latest"][0]["headers"]["x-request-id"] == "req-1"
    finally:
        await server.close()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("scripts: {a: [{nope: 1}]}", "nope"),
        ("scripts: {a: [{wait_s: 1, end: true}]}", r"scripts.a\[0\].*exactly one action"),
        ("scripts: {a: [{}]}", r"scripts.a\[0\].*exactly one action"),
        ("scripts: {a: [{send_base64: '*'}]}", r"scripts.a\[0\]"),
        ("scripts: {a: [{head: {framing: x}}]}", "framing"),
        ("scripts: [", "script.yaml"),
    ],
)
def test_a_bad_script_file_says_where(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "script.yaml"
    path.write_text(text)
    with pytest.raises(errors.ConfigError, match=problem):
        load_scripts(path)
    with pytest.raises(errors.ConfigError, match="cannot be read"):
        load_scripts(tmp_path / "absent.yaml")


async def test_every_built_in_model_is_described() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "scripted-upstream.md").read_text()
    for name in (*MODELS, *TENSOR_MODELS):
        assert f"`{name}`" in guide, f"docs/scripted-upstream.md does not mention {name}"


async def test_the_server_knows_when_a_client_left() -> None:
    async with scripted_upstream() as up:
        _, writer = await asyncio.open_connection("127.0.0.1", up.port)
        writer.write(b'POST /v1/x HTTP/1.1\r\ncontent-length: 17\r\n\r\n{"model":"never"}')
        async with asyncio.timeout(1.0):
            while not up.requests["never"]:
                await asyncio.sleep(0.001)
        assert up.last("never").closed_at is None
        writer.close()
        await writer.wait_closed()
        async with asyncio.timeout(1.0):
            while up.last("never").closed_at is None:
                await asyncio.sleep(0.001)
