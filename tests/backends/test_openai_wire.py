"""What is an answer, what kind a chunk is, and that a stream and its whole answer are two forms of one thing."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.api import ChatAnswer, ChunkKind
from backends.openai_assemble import assemble, replay
from backends.openai_wire import ChunkKinds, read_chunk, read_completion
from backends.scripted_steps import chunk, completion
from policies.core.errors import GatewayError, InBandError, MalformedAnswer, TruncatedAnswer


def encode(value: object) -> bytes:
    return msgspec.json.encode(value)


def decode(answer: ChatAnswer) -> Any:
    return msgspec.json.decode(answer.body)


def choice(finish: str | None = "stop", **message: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "message": message, "finish_reason": finish}]}


def test_a_completion_is_read_and_kept_unaltered() -> None:
    body = encode({**completion({"content": "hi"}, model="gpt-x"), "system_fingerprint": "fp_1"})
    answer = read_completion(body)
    assert answer.body is body
    assert (answer.model, answer.finish_reason, answer.system_fingerprint) == ("gpt-x", "stop", "fp_1")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (10, 8)


@pytest.mark.parametrize(
    "message",
    [
        {"content": ""},
        {"content": None, "tool_calls": [{"id": "c"}]},
        {"content": None, "reasoning_content": "hm"},
        {"content": None, "refusal": "no"},
        {"content": [{"type": "text", "text": "hi"}]},
        {"content": None, "function_call": {"name": "f"}},
    ],
)
def test_answers(message: dict[str, Any]) -> None:
    assert read_completion(encode(choice(**message))).finish_reason == "stop"


def test_null_content_is_an_answer_only_when_filtered() -> None:
    assert read_completion(encode(choice("content_filter", content=None))).finish_reason == "content_filter"


def test_one_choice_cut_short_makes_the_answer_a_cut_one() -> None:
    choices = [{"message": {"content": "a"}, "finish_reason": finish} for finish in ("stop", "length", "stop")]
    assert read_completion(encode({"choices": choices})).finish_reason == "length"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"<html>",
        b'{"choices": [',
        b"{}",
        b'{"choices": []}',
        b'{"choices": null}',
        b'{"choices": [{"finish_reason": "stop"}]}',
        encode(choice(None, content="half")),
        encode(choice(content=None)),
        encode(choice(content=None, tool_calls=[])),
        encode(choice(content=None, tool_calls=None)),
        encode(choice(content=5)),
        encode(choice(content="a")) + b" trailing",
        b'{"choices":[{"message":{"content":"\xff"},"finish_reason":"stop"}]}',
        b'{"x":"\xff","choices":[{"message":{"content":"a"},"finish_reason":"stop"}]}',
        b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
)
def test_no_answers(body: bytes) -> None:
    with pytest.raises(MalformedAnswer):
        read_completion(body)


@pytest.mark.parametrize("error", [{"message": "SECRET prompt", "type": "server_error", "code": 500}, "SECRET", [1]])
def test_an_error_inside_a_200_is_an_error_and_its_text_stays_out(error: Any) -> None:
    for read in (read_completion, read_chunk):
        with pytest.raises(InBandError) as caught:
            read(encode({"error": error}))
        assert "SECRET" not in str(caught.value)
    assert read_chunk(encode({**chunk({"content": "a"}), "error": None})).kind is ChunkKind.CONTENT


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (chunk({"role": "assistant", "content": ""}), ChunkKind.META),
        (chunk({"role": "assistant", "content": None, "tool_calls": []}), ChunkKind.META),
        (chunk({}), ChunkKind.META),
        ({"choices": [], "prompt_filter_results": []}, ChunkKind.META),
        ({**chunk(None), "usage": None}, ChunkKind.META),
        (chunk({"content": "a"}), ChunkKind.CONTENT),
        (chunk({"reasoning_content": "a"}), ChunkKind.CONTENT),
        (chunk({"reasoning": "a"}), ChunkKind.CONTENT),
        (chunk({"refusal": "a"}), ChunkKind.CONTENT),
        (chunk({"tool_calls": [{"index": 0}]}), ChunkKind.CONTENT),
        ({**chunk({"content": "a"}), "usage": {"prompt_tokens": 1}}, ChunkKind.CONTENT),
        (chunk({}, "stop"), ChunkKind.FINISH),
        (chunk({"content": "last"}, "stop"), ChunkKind.FINISH),
        ({**chunk({}, "stop"), "usage": {"prompt_tokens": 1}}, ChunkKind.FINISH),
        ({**chunk(None), "usage": {"prompt_tokens": 1}}, ChunkKind.USAGE),
    ],
)
def test_kinds_of_chunks(body: dict[str, Any], kind: ChunkKind) -> None:
    data = encode(body)
    read = read_chunk(data)
    assert read.kind is kind
    assert read.data is data


@pytest.mark.parametrize(
    "data", [b"", b"{", b"5", b'"text"', b'{"choices": 5}', b'{"choices":[{"delta":{"content":5}}]}']
)
def test_what_is_no_chunk(data: bytes) -> None:
    with pytest.raises(MalformedAnswer):
        read_chunk(data)


def test_of_several_choices_only_the_last_finish_is_the_finish() -> None:
    def part(index: int, finish: str | None) -> bytes:
        return encode({"choices": [{"index": index, "delta": {"content": "a"}, "finish_reason": finish}]})

    kinds = ChunkKinds(2)
    read = [kinds.read(part(*which)).kind for which in ((0, None), (1, None), (0, "stop"), (1, None))]
    assert read == [ChunkKind.CONTENT] * 4
    assert not kinds.finished
    assert kinds.read(part(1, "stop")).kind is ChunkKind.FINISH
    assert kinds.finished
    fewer = ChunkKinds(2)  # a backend that ignores `n`
    fewer.read(part(0, "stop"))
    assert fewer.finished


def test_interleaved_tool_calls_are_put_together() -> None:
    def delta(index: int, **call: Any) -> bytes:
        return encode(chunk({"tool_calls": [{"index": index, **call}]}))

    chunks = [
        encode(chunk({"role": "assistant", "content": None})),
        delta(1, id="b", type="function", function={"name": "g", "arguments": ""}),
        delta(0, id="a", type="function", function={"name": "f", "arguments": ""}),
        delta(0, function={"arguments": '{"x"'}),
        delta(1, function={"arguments": "[1"}),
        delta(0, function={"arguments": ":1}"}),
        delta(1, function={"arguments": "]"}),
        encode(chunk({}, "tool_calls")),
    ]
    answer = assemble(chunks)
    assert decode(answer)["choices"][0]["message"] == {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}},
            {"id": "b", "type": "function", "function": {"name": "g", "arguments": "[1]"}},
        ],
    }
    assert answer.finish_reason == "tool_calls"


def test_tool_calls_without_an_index_begin_with_their_id() -> None:
    calls = [
        {"id": "a", "function": {"arguments": "1"}},
        {"function": {"arguments": "2"}},
        {"id": "b", "function": {"arguments": "3"}},
    ]
    answer = assemble([*(encode(chunk({"tool_calls": [call]})) for call in calls), encode(chunk({}, "tool_calls"))])
    made = decode(answer)["choices"][0]["message"]["tool_calls"]
    assert [(call["id"], call["function"]["arguments"]) for call in made] == [("a", "12"), ("b", "3")]


@pytest.mark.parametrize(
    ("chunks", "error"),
    [
        ([], MalformedAnswer),
        ([chunk(None)], MalformedAnswer),
        ([chunk({"content": "a"})], TruncatedAnswer),
        ([chunk({"tool_calls": "x"}), chunk({}, "stop")], MalformedAnswer),
        ([chunk({"tool_calls": [5]}), chunk({}, "stop")], MalformedAnswer),
    ],
)
def test_streams_that_add_up_to_nothing(chunks: list[dict[str, Any]], error: type[GatewayError]) -> None:
    with pytest.raises(error):
        assemble(map(encode, chunks))


texts = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=20)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-1000, 1000) | texts, lambda v: st.lists(v, max_size=3), max_leaves=5
)
calls = st.fixed_dictionaries(
    {
        "id": texts.filter(bool),
        "type": st.just("function"),
        "function": st.fixed_dictionaries({"name": texts, "arguments": texts}),
    }
)
messages = st.fixed_dictionaries(
    {"role": st.just("assistant"), "content": texts | st.none()},
    optional={
        "reasoning_content": texts | st.none(),
        "reasoning": texts,
        "refusal": texts | st.none(),
        "tool_calls": st.lists(calls, max_size=3) | st.none(),
        "annotations": st.lists(texts, max_size=2),
    },
).filter(
    lambda m: (
        m["content"] is not None or any(m.get(k) for k in ("tool_calls", "refusal", "reasoning", "reasoning_content"))
    )
)
logprobs = st.none() | st.fixed_dictionaries(
    {"content": st.none() | st.lists(st.fixed_dictionaries({"token": texts}), max_size=3)}
)


@st.composite
def completions(draw: st.DrawFn) -> dict[str, Any]:
    choices = []
    for index in range(draw(st.integers(1, 3))):
        made = {
            "index": index,
            "message": draw(messages),
            "finish_reason": draw(st.sampled_from(["stop", "length", "tool_calls"])),
        }
        if draw(st.booleans()):
            made["logprobs"] = draw(logprobs)
        choices.append(made)
    body: dict[str, Any] = {"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": choices}
    if draw(st.booleans()):
        body["usage"] = {
            "prompt_tokens": 3,
            "completion_tokens": draw(st.integers(0, 9)),
            "prompt_tokens_details": {"cached_tokens": 1},
        }
    if draw(st.booleans()):
        body["service_tier"] = draw(json_values)
    if draw(st.booleans()):
        body["system_fingerprint"] = draw(texts)
    return body


@given(completions())
def test_a_stored_answer_replays_as_itself(body: dict[str, Any]) -> None:
    answer = read_completion(encode(body))
    chunks = replay(answer, include_usage=True)
    again = assemble(piece.data for piece in chunks)
    assert decode(again) == body
    assert (again.model, again.finish_reason, again.usage, again.system_fingerprint) == (
        answer.model,
        answer.finish_reason,
        answer.usage,
        answer.system_fingerprint,
    )
    kinds = [piece.kind for piece in chunks]
    assert kinds.count(ChunkKind.FINISH) == 1
    assert kinds[0] is not ChunkKind.USAGE
    assert kinds.count(ChunkKind.USAGE) == ("usage" in body)


@given(completions())
def test_replay_without_usage_has_none(body: dict[str, Any]) -> None:
    chunks = replay(read_completion(encode(body)), include_usage=False)
    assert not any(b'"usage"' in piece.data for piece in chunks)
    assert chunks[-1].kind is ChunkKind.FINISH
