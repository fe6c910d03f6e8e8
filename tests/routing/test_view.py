"""What classification sees of a request."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.api import ChatRequest, EmbeddingsRequest, Surface, TensorRequest
from routing.view import HEAD_CHARS, PASSAGE_CHARS, TAIL_CHARS, RequestView, fold_text, without_harness
from tests.support.classify import chat


def view_of(*messages: object, **body: object) -> RequestView:
    return RequestView(ChatRequest({"messages": list(messages), **body}))


def test_the_last_user_message_decides() -> None:
    view = view_of(
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "an answer"},
        {"role": "user", "content": "second"},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "tool", "content": "a result"},
    )
    assert view.text == "second"
    assert (view.turns, view.has_tool_messages) == (2, True)


def test_parts_are_joined_and_images_counted() -> None:
    parts = [
        {"type": "text", "text": "what is"},
        {"type": "image_url", "image_url": {}},
        {"type": "text", "text": "this"},
    ]
    view = chat(parts)
    assert view.text == "what is\nthis"
    assert view.images == 1


def test_facts() -> None:
    view = chat("x", tools=[{"type": "function"}], response_format={"type": "json_schema"})
    assert view.has_tools
    assert view.wants_json
    assert not chat("x", response_format={"type": "text"}, tools=[]).has_tools


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("<system-reminder>prove a theorem</system-reminder>hello", "hello"),
        ("a<system-reminder>x</system-reminder>b<environment_details>y</environment_details>c", "abc"),
        ("<system-reminder>x <system-reminder>y</system-reminder> z</system-reminder> hi", "hi"),
        ('<additional_data kind="file">x</additional_data> hi', "hi"),
        ("what is <system-reminder> for?", "what is <system-reminder> for?"),
        ("<system-reminder> <environment_details>x</environment_details> b", "<system-reminder>  b"),
        ("</system-reminder> b", "</system-reminder> b"),
        ("<b>bold</b>", "<b>bold</b>"),
    ],
)
def test_harness_blocks_do_not_decide(text: str, left: str) -> None:
    assert without_harness(text) == left


def test_a_message_of_harness_alone_leaves_the_one_before() -> None:
    view = view_of(
        {"role": "user", "content": "the question"},
        {"role": "user", "content": "<system-reminder>be brief</system-reminder>"},
    )
    assert view.text == "the question"


def test_long_text_is_judged_by_its_ends() -> None:
    view = chat("a" * 300_000 + "z" * 300_000)
    assert len(view.text) == HEAD_CHARS + TAIL_CHARS + 1
    assert view.truncated
    assert (view.text[0], view.text[-1], view.full_chars) == ("a", "z", 600_000)
    assert len(view.passage) == 2 * PASSAGE_CHARS + 1
    assert not chat("short").truncated


@pytest.mark.parametrize("content", [None, 3, [], {}, [None, 5, {"text": 7}], "", "\ud800"])
def test_odd_content_is_no_error(content: object) -> None:
    view = chat(content)
    assert isinstance(view.text, str)
    assert isinstance(view.utf8, bytes)
    assert isinstance(view.folded, str)


@pytest.mark.parametrize("messages", [None, 7, {}, [], [None, "x"]])
def test_odd_messages_are_no_error(messages: object) -> None:
    view = RequestView(ChatRequest({"messages": messages}))
    assert (view.text, view.turns, view.images, view.has_tool_messages) == ("", 0, 0, False)


def test_only_chat_has_a_text() -> None:
    embeddings = RequestView(EmbeddingsRequest({"input": "x"}, ["x"]))
    tensors = RequestView(TensorRequest("m", []))
    assert (embeddings.text, embeddings.surface) == ("", Surface.EMBEDDINGS)
    assert (tensors.text, tensors.surface) == ("", Surface.TENSOR)


@given(st.text(st.sampled_from("aZ１ｐ，？！：；（）…。、 \n\t发票É́ﬁ")))
def test_folding_is_nfkc_casefold_with_single_blanks(text: str) -> None:
    whole = unicodedata.normalize("NFKC", text).casefold()
    assert "".join(fold_text(text).split()) == "".join(whole.split())
