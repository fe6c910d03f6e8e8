import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.api import (
    BackendInfo,
    Capabilities,
    ChatRequest,
    EmbeddingsRequest,
    Role,
    Surface,
    Tensor,
    TensorRequest,
    TensorSpec,
)
from backends.needs import estimated_tokens, missing, same_answer_space, script_language


def chat(content: object, **fields: object) -> ChatRequest:
    return ChatRequest({"messages": [{"role": "user", "content": content}], **fields})


def info(**capabilities: object) -> BackendInfo:
    return BackendInfo(
        name="light", role=Role.LIGHT, model="m", fingerprint="f", capabilities=Capabilities(**capabilities)
    )


@pytest.mark.parametrize(
    ("request_", "lacks"),
    [
        (chat("hi", tools=[{"type": "function"}]), "tools"),
        (chat("hi", response_format={"type": "json_schema"}), "json_schema"),
        (chat("hi", n=2), "n"),
        (chat("hi", logprobs=True), "logprobs"),
        (chat([{"type": "image_url", "image_url": {}}]), "images"),
        (chat([{"type": "input_audio"}]), "audio"),
    ],
)
def test_features(request_: ChatRequest, lacks: str) -> None:
    assert missing(request_, info()) == f"has no {lacks}"
    assert missing(request_, info(features=frozenset({lacks}))) is None


def test_plain_chat_needs_nothing() -> None:
    assert missing(chat("hi", n=1, tools=[], response_format={"type": "text"}), info()) is None


def test_language_and_context() -> None:
    english = info(languages=frozenset({"en"}), context_tokens=100)
    assert missing(chat("What are your opening hours?"), english) is None
    assert "zh" in (missing(chat("你们几点开门？"), english) or "")
    assert "context" in (missing(chat("word " * 200), english) or "")


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("", "en"),
        ("12345 !?", "en"),
        ("Où est la gare ?", "en"),
        ("今日の天気はどうですか", "ja"),
        ("오늘 날씨 어때", "ko"),
        ("Какая сегодня погода", "ru"),
        ("请用python写一个排序函数", "zh"),
        ("The word 咖啡 means coffee, and this sentence is otherwise English", "en"),
    ],
)
def test_language_by_script(text: str, language: str) -> None:
    assert script_language(text) == language


@given(st.text(max_size=2000))
def test_estimates_never_fail(text: str) -> None:
    assert 0 <= estimated_tokens(text) <= len(text)
    assert len(script_language(text)) == 2


def test_another_surface() -> None:
    assert "tensor" in (missing(TensorRequest("m", []), info()) or "")


def tensor_info(name: str, **more: object) -> BackendInfo:
    return BackendInfo(
        name=name,
        role=Role.LIGHT,
        model=name,
        fingerprint=name,
        capabilities=Capabilities(surfaces=frozenset({Surface.TENSOR})),
        inputs=(TensorSpec("x", "FP32", (-1,)),),
        outputs=(TensorSpec("y", "FP32", (-1,)),),
        **more,
    )


def test_tensor_names() -> None:
    good = TensorRequest("m", [Tensor("x", "FP32", np.zeros(1))], ("y",))
    assert missing(good, tensor_info("a")) is None
    assert "'z'" in (missing(TensorRequest("m", [Tensor("z", "FP32", np.zeros(1))]), tensor_info("a")) or "")
    assert "'w'" in (missing(TensorRequest("m", [], ("w",)), tensor_info("a")) or "")


def test_who_may_stand_in() -> None:
    first, other = tensor_info("a"), tensor_info("b")
    tensors, embeddings = TensorRequest("m", []), EmbeddingsRequest({}, ["x"])
    assert same_answer_space(first, other, tensors)
    assert same_answer_space(first, tensor_info("b", substitutes="a"), tensors) is None
    assert same_answer_space(first, other, embeddings) == "embeddings never change model"
    assert same_answer_space(first, first, embeddings) is None
    assert same_answer_space(first, other, chat("hi")) is None
