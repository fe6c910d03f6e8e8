"""The clients people use, as they come: `openai` and `tritonclient`, against a running gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from tritonclient.utils import InferenceServerException

from tests.support.gateway import EMBEDDED, Gateway, Start, chat_policy, recommender_policy, tensor_policy
from tests.support.gateway_client import EASY, HARD
from tests.support.settable_upstream import SettableUpstream
from tests.support.waiting import until


@pytest.fixture
async def whole(start: Start, tiny_models: Path) -> Gateway:
    """A gateway with every surface: two chat backends, a remote scorer, an embedder and a recommender."""
    return await start(chat_policy(), tensor_policy(), recommender_policy(), models_dir=str(tiny_models), **EMBEDDED)


@pytest.fixture
async def client(whole: Gateway) -> AsyncIterator[openai.AsyncOpenAI]:
    made = openai.AsyncOpenAI(base_url=f"{whole.url}/v1", api_key="none-needed", max_retries=0, timeout=10)
    yield made
    await made.close()


def ask(text: str = HARD, model: str = "auto", **fields: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": text}], **fields}


# ------------------------------------------------------------------------------------------------------------ openai


async def test_chat(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(**ask())
    assert answer.choices[0].message.content == "hello there, how can I help?"
    assert (answer.choices[0].finish_reason, answer.model) == ("stop", "heavy-model")
    assert answer.usage is not None
    assert answer.usage.total_tokens == 18
    raw = await client.chat.completions.with_raw_response.create(**ask())
    assert raw.headers["x-gateway-rung"] == "hit-l1"
    assert raw.parse() == answer


async def test_chat_streamed(client: openai.AsyncOpenAI) -> None:
    for origin in ("model", "cache"):
        chunks = [chunk async for chunk in await client.chat.completions.create(**ask(stream=True))]
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == "hello there, how can I help?", origin
        assert chunks[-1].choices[0].finish_reason == "stop"
        assert all(chunk.usage is None for chunk in chunks)


async def test_chat_streamed_with_usage(client: openai.AsyncOpenAI) -> None:
    asked = ask(stream=True, stream_options={"include_usage": True})
    for origin in ("model", "cache"):
        chunks = [chunk async for chunk in await client.chat.completions.create(**asked)]
        assert chunks[-1].choices == [], origin
        assert chunks[-1].usage is not None
        assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (10, 8)
        assert all(chunk.choices for chunk in chunks[:-1])


async def test_the_streaming_helper_puts_tool_calls_together(client: openai.AsyncOpenAI, up: SettableUpstream) -> None:
    up.play(heavy="tools-interleaved")
    names = ("get_weather", "get_time", "get_news")
    tools = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in names]
    async with client.chat.completions.stream(**ask(tools=tools)) as stream:
        final = await stream.get_final_completion()
    calls = final.choices[0].message.tool_calls or []
    assert [call.function.name for call in calls] == list(names)
    assert final.choices[0].finish_reason == "tool_calls"


async def test_leaving_a_stream_closes_it(client: openai.AsyncOpenAI, up: SettableUpstream) -> None:
    up.play(heavy="cut-after-40")
    stream = await client.chat.completions.create(**ask(stream=True))
    async for _ in stream:
        break
    await stream.close()
    await until(lambda: not up.connections)


async def test_a_cut_stream_is_an_api_error_with_what_came_before(
    client: openai.AsyncOpenAI, up: SettableUpstream
) -> None:
    up.play(heavy="cut-after-40")
    got = []
    with pytest.raises(openai.APIError) as caught:
        async for chunk in await client.chat.completions.create(**ask(stream=True)):
            got.append(chunk)  # noqa: PERF401  what came before the error counts
    assert len(got) == 40
    assert caught.value.code == "upstream_truncated"


async def test_embeddings_as_floats_and_as_base64(client: openai.AsyncOpenAI) -> None:
    texts = ["a question", "another question", "a question"]
    floats = await client.embeddings.create(model="embed", input=texts, encoding_format="float")
    packed = await client.embeddings.create(model="embed", input=texts)  # the client asks for base64 by itself
    vectors = np.array([row.embedding for row in floats.data], np.float32)
    assert [row.index for row in floats.data] == [0, 1, 2]
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-5)
    assert np.array_equal(vectors[0], vectors[2])
    assert np.allclose(vectors, np.array([row.embedding for row in packed.data], np.float32), atol=1e-7)
    assert floats.usage.prompt_tokens > 0
    single = await client.embeddings.create(model="embed", input="a question")
    assert np.allclose(single.data[0].embedding, vectors[0], atol=1e-6)


async def test_models(client: openai.AsyncOpenAI) -> None:
    names = {model.id async for model in client.models.list()}
    assert {"auto", "heavy", "light", "embed"} <= names
    assert (await client.models.retrieve("auto")).id == "auto"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("nobody")


async def test_errors_are_of_the_right_class(client: openai.AsyncOpenAI, up: SettableUpstream) -> None:
    with pytest.raises(openai.NotFoundError) as not_found:
        await client.chat.completions.create(**ask(model="nobody"))
    assert not_found.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        await client.embeddings.create(model="nobody", input="x")
    with pytest.raises(openai.NotFoundError):
        await client.completions.create(model="auto", prompt="x")
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(**ask(temperature=9))
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError):
        await client.embeddings.create(model="embed", input="x", dimensions=3)
    up.play(heavy="status-422")
    with pytest.raises(openai.UnprocessableEntityError):
        await client.chat.completions.create(**ask(HARD + " 422"))
    up.play(heavy="status-500")
    with pytest.raises(openai.InternalServerError):
        await client.chat.completions.create(**ask(extra_headers={"x-gateway-degrade": "off"}))
    up.play(heavy="never")
    with pytest.raises(openai.APIStatusError) as late:
        headers = {"x-gateway-degrade": "off", "x-request-timeout-ms": "100"}
        await client.chat.completions.create(**ask(extra_headers=headers))
    assert late.value.status_code == 504


async def test_the_synchronous_client_works_as_well(whole: Gateway) -> None:
    def talk() -> tuple[str | None, str, int]:
        with openai.OpenAI(base_url=f"{whole.url}/v1", api_key="x", max_retries=0, timeout=10) as client:
            answer = client.chat.completions.create(**ask(EASY))
            stream = client.chat.completions.create(**ask(stream=True))
            text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
            return answer.choices[0].message.content, text, len(list(client.models.list()))

    whole_text, streamed, models = await asyncio.to_thread(talk)
    assert whole_text == streamed == "hello there, how can I help?"
    assert models >= 4


# ------------------------------------------------------------------------------------------------------- tritonclient


def _address(gateway: Gateway) -> str:
    return gateway.url.removeprefix("http://")


def _input(module: Any, name: str, data: np.ndarray, datatype: str, *, binary: bool) -> Any:
    made = module.InferInput(name, list(data.shape), datatype)
    made.set_data_from_numpy(data, binary_data=binary)
    return made


@pytest.mark.parametrize("binary", [False, True], ids=["json", "binary"])
async def test_triton_scores_items_in_the_process(whole: Gateway, binary: bool) -> None:
    history = np.array([b"a book about gardens", "ein Buch über 日本".encode()], dtype=object)
    items = np.array([b"a spade", b"a novel", b"a teapot"], dtype=object)

    def talk() -> tuple[Any, ...]:
        client = triton.InferenceServerClient(_address(whole))
        try:
            inputs = [
                _input(triton, "user_history", history, "BYTES", binary=binary),
                _input(triton, "candidates", items, "BYTES", binary=binary),
            ]
            wanted = [triton.InferRequestedOutput("scores", binary_data=binary)]
            result = client.infer("items", inputs, request_id="mine-1", outputs=wanted)
            return (
                client.is_server_live(), client.is_server_ready(), client.is_model_ready("items"),
                client.get_server_metadata(), client.get_model_metadata("items"), result.as_numpy("scores"),
                result.get_response(),
            )  # fmt: skip
        finally:
            client.close()

    live, ready, model_ready, server, model, scores, response = await asyncio.to_thread(talk)
    assert (live, ready, model_ready) == (True, True, True)
    assert "binary_tensor_data" in server["extensions"]
    assert model["name"] == "items"
    assert {tensor["name"] for tensor in model["inputs"]} >= {"user_history", "candidates"}
    assert [tensor["name"] for tensor in model["outputs"]] == ["scores"]
    assert (scores.shape, scores.dtype) == ((3,), np.float32)
    assert response["id"] == "mine-1"


TENSORS = {
    "FP32": np.array([[1.5, -2.0]], np.float32),
    "FP64": np.array(0.1).reshape(1, 1, 1),
    "INT64": np.array([1 << 40, -1], np.int64),
    "UINT8": np.arange(6, dtype=np.uint8).reshape(2, 3),
    "BOOL": np.array([True, False]),
    "FP16": np.array([[0.5], [1.25]], np.float16),
    "BYTES": np.array([b"a", "日本".encode()], dtype=object),
}
#: The protocol has FP16 in binary only.
FORMS = [(datatype, binary) for datatype in TENSORS for binary in (False, True) if binary or datatype != "FP16"]


@pytest.mark.parametrize(("datatype", "binary"), FORMS)
async def test_triton_tensors_come_back_from_a_remote_backend_as_they_went(
    whole: Gateway, datatype: str, binary: bool
) -> None:
    data = TENSORS[datatype]
    client = triton_aio.InferenceServerClient(_address(whole))
    try:
        tensor = _input(triton_aio, "x", data, datatype, binary=binary)
        wanted = [triton_aio.InferRequestedOutput("x", binary_data=binary)]
        got = (await client.infer("recommend", [tensor], outputs=wanted)).as_numpy("x")
    finally:
        await client.close()
    assert got.shape == data.shape
    texts = [value.encode() if isinstance(value, str) else value for value in got.tolist()]  # JSON has texts
    assert texts == data.tolist()


async def test_triton_versions_compression_and_errors(whole: Gateway, up: SettableUpstream) -> None:
    client = triton_aio.InferenceServerClient(_address(whole))
    try:
        data = np.arange(1000, dtype=np.float32)
        for coding in ("gzip", "deflate"):
            tensor = _input(triton_aio, "x", data, "FP32", binary=True)
            got = await client.infer("recommend", [tensor], model_version="1", request_compression_algorithm=coding)
            assert np.array_equal(got.as_numpy("x"), data)
        assert await client.is_model_ready("recommend", "1")
        assert not await client.is_model_ready("nobody")
        with pytest.raises(InferenceServerException, match="nobody"):
            await client.infer("nobody", [tensor])
        with pytest.raises(InferenceServerException):
            await client.get_model_metadata("nobody")
        wrong = [_input(triton_aio, "surprise", data, "FP32", binary=True)]
        with pytest.raises(InferenceServerException, match="surprise"):
            await client.infer("items", wrong)
        up.play(scorer="bad-input")
        with pytest.raises(InferenceServerException, match="bad shape"):
            await client.infer("recommend", [_input(triton_aio, "x", data[:3], "FP32", binary=False)])
    finally:
        await client.close()
