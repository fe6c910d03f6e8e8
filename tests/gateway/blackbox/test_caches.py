"""Stored answers through the whole gateway: what is the same question, for whom, how long, and what is never stored."""

from __future__ import annotations

import asyncio
import json
import unicodedata
from typing import Any

import pytest

from backends.scripted_steps import Head, Step
from tests.support.gateway import Gateway, Start, chat_policy, tensor_policy
from tests.support.gateway_client import HARD, Client, question
from tests.support.settable_upstream import SettableUpstream
from tests.support.waiting import until

BOTH = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
SSE = Step(head=Head(headers={"content-type": "text/event-stream"}))


def says(text: str) -> tuple[Step, ...]:
    return (Step(answer=text),)


# ------------------------------------------------------------------------------------------------ the same question?

CHANGES: dict[str, Any] = {
    "temperature": 0.5, "top_p": 0.5, "seed": 7, "max_tokens": 9, "max_completion_tokens": 9, "n": 2, "stop": ["x"],
    "presence_penalty": 1, "frequency_penalty": 1, "logit_bias": {"1": 2}, "logprobs": True, "top_logprobs": 2,
    "tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none", "parallel_tool_calls": False,
    "response_format": {"type": "json_object"}, "reasoning_effort": "low", "verbosity": "low", "modalities": ["text"],
    "prediction": {"type": "content", "content": "x"}, "service_tier": "flex", "some_future_field": 1,
    "functions": [{"name": "f"}], "function_call": "none",
}  # fmt: skip


async def test_every_field_that_may_change_an_answer_makes_another_question(
    client: Client, up: SettableUpstream
) -> None:
    await client.chat(HARD)
    for number, (field, value) in enumerate(CHANGES.items()):
        got = await client.chat(HARD, **{field: value})
        assert got.said("rung") == "heavy", field
        assert up.calls("heavy") == number + 2, field
        assert (await client.chat(HARD, **{field: value})).said("rung") == "hit-l1", field
    assert (await client.chat(HARD)).said("rung") == "hit-l1"


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": HARD}],
        [{"role": "system", "content": HARD}],
        [{"role": "user", "content": HARD, "name": "ann"}],
        [{"role": "user", "content": HARD + " "}],
        [{"role": "user", "content": HARD.upper()}],
        [{"role": "user", "content": [{"type": "text", "text": HARD}]}],
        [{"role": "user", "content": HARD}, {"role": "assistant", "content": "no"}],
        [{"role": "user", "content": ""}, {"role": "user", "content": HARD}],
    ],
)
async def test_other_messages_are_another_question(client: Client, messages: list[dict[str, Any]]) -> None:
    await client.chat(HARD)
    assert not str((await client.chat(HARD, messages=messages)).said("rung")).startswith("hit")


@BOTH
async def test_ignored_fields_and_the_form_of_transport_do_not_matter(
    client: Client, up: SettableUpstream, stream: bool
) -> None:
    await client.chat(HARD, stream=stream)
    for fields in (
        {"user": "ann"}, {"safety_identifier": "bob"}, {"metadata": {"trace": "1"}}, {"store": True}, {"stream": False},
        {"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}, {"stream": None},
    ):  # fmt: skip
        assert (await client.chat(HARD, **fields)).said("rung") == "hit-l1", fields
    for headers in ({"User-Agent": "other"}, {"X-Request-Id": "unique-1"}, {"Accept-Language": "de"}):
        assert (await client.chat(HARD, headers=headers)).said("rung") == "hit-l1", headers
    assert up.calls("heavy") == 1


async def test_the_same_meaning_in_other_bytes_hits(client: Client, up: SettableUpstream) -> None:
    """Keys permuted, 1 and 1.0, composed and decomposed characters, escapes, blanks."""
    text = "prove that é equals é"
    forms = [
        json.dumps({**question(text), "temperature": 1, "seed": 5}),
        json.dumps({"seed": 5, "temperature": 1.0, **question(text)}),
        json.dumps({"temperature": 1, **dict(reversed(question(text).items())), "seed": 5.0}, indent=3),
        json.dumps({**question(unicodedata.normalize("NFD", text)), "temperature": 1, "seed": 5}, ensure_ascii=False),
        json.dumps({**question(text), "temperature": 1, "seed": 5}).replace('"seed": 5', '"seed": 0.5e1'),
    ]
    rungs = [(await client.send("POST", "/v1/chat/completions", form.encode())).said("rung") for form in forms]
    assert rungs == ["heavy", "hit-l1", "hit-l1", "hit-l1", "hit-l1"]
    assert up.calls("heavy") == 1


async def test_true_and_one_are_not_the_same(client: Client) -> None:
    """In Python they are equal; in JSON they are not."""
    await client.chat(HARD, some_field=1)
    assert (await client.chat(HARD, some_field=True)).said("rung") == "heavy"
    assert (await client.chat(HARD, some_field="1")).said("rung") == "heavy"
    assert (await client.chat(HARD, some_field=None)).said("rung") == "heavy"


async def test_tensors_differ_by_shape_type_name_values_outputs_and_parameters(
    client: Client, up: SettableUpstream
) -> None:
    def body(**changes: Any) -> dict[str, Any]:
        tensor = {"name": "x", "shape": [2, 3], "datatype": "INT32", "data": [0, 0, 0, 0, 0, 0], **changes}
        return {"inputs": [tensor]}

    bodies = [
        body(), body(shape=[3, 2]), body(shape=[6]), body(datatype="FP32"), body(datatype="UINT32"), body(name="y"),
        body(data=[0, 0, 0, 0, 0, 1]), {**body(), "outputs": [{"name": "x"}]}, {**body(), "parameters": {"k": 5}},
    ]  # fmt: skip
    for number, sent in enumerate(bodies):
        got = await client.send("POST", "/v2/models/recommend/infer", sent)
        assert (got.status, got.said("rung")) == (200, "heavy"), sent
        assert up.calls("scorer") == number + 1
    for sent in bodies:
        assert (await client.send("POST", "/v2/models/recommend/infer", sent)).said("rung") == "hit-l1", sent


async def test_a_tensor_requests_id_and_transport_do_not_matter(client: Client, up: SettableUpstream) -> None:
    await client.infer([1.0], id="first")
    for fields in (
        {"id": "second"},
        {"id": ""},
        {},
        {"parameters": {"timeout": 3_000_000}},
        {"parameters": {"priority": 1}},
    ):
        got = await client.infer([1.0], **fields)
        assert got.said("rung") == "hit-l1", fields
        assert got.json.get("id") == fields.get("id")
    assert up.calls("scorer") == 1


async def test_buckets_and_dropped_fields(start: Start, up: SettableUpstream) -> None:
    rules = {"cache": {"bucket": {"age": 10}, "drop": ["trace"]}}
    gateway = await start(chat_policy(**rules), tensor_policy(**rules))
    client = gateway.client
    rungs = [(await client.chat(HARD, age=age)).said("rung") for age in (31, 38, 29, 39.9, 30)]
    assert rungs == ["heavy", "hit-l1", "heavy", "hit-l1", "hit-l1"]
    assert (await client.chat(HARD, age=31, trace="abc")).said("rung") == "hit-l1"

    async def score(age: int, trace: int) -> str | None:
        inputs = [
            {"name": n, "shape": [1], "datatype": "INT64", "data": [v]} for n, v in (("age", age), ("trace", trace))
        ]
        return (await client.send("POST", "/v2/models/recommend/infer", {"inputs": inputs})).said("rung")

    assert [await score(31, 1), await score(38, 2), await score(29, 3)] == ["heavy", "hit-l1", "heavy"]


# ---------------------------------------------------------------------------------------------------------- for whom


async def test_headers_a_policy_varies_by_tell_answers_apart(start: Start) -> None:
    gateway = await start(chat_policy(cache={"vary": ["accept-language"]}))
    client = gateway.client
    assert (await client.chat(HARD, headers={"Accept-Language": "de"})).said("rung") == "heavy"
    assert (await client.chat(HARD, headers={"Accept-Language": "fr"})).said("rung") == "heavy"
    assert (await client.chat(HARD)).said("rung") == "heavy"
    assert (await client.chat(HARD, headers={"accept-language": "de"})).said("rung") == "hit-l1"


async def test_user_scope_keeps_users_apart_and_stores_nothing_for_nobody(start: Start, up: SettableUpstream) -> None:
    gateway = await start(chat_policy(cache={"scope": "user"}))
    client = gateway.client
    assert [(await client.chat(HARD)).said("rung") for _ in range(2)] == ["heavy", "heavy"]
    assert [(await client.chat(HARD, user="ann")).said("rung") for _ in range(2)] == ["heavy", "hit-l1"]
    assert (await client.chat(HARD, user="bob")).said("rung") == "heavy"
    assert (await client.chat(HARD, safety_identifier="ann")).said("rung") == "hit-l1"
    assert "ann" not in json.dumps((await client.admin("/debug/requests")).json)


async def test_policies_do_not_share_answers(start: Start) -> None:
    other = chat_policy(policy="other", match={"aliases": ["other"], "backends": []})
    gateway = await start(chat_policy(), other)
    await gateway.client.chat(HARD)
    assert (await gateway.client.chat(HARD, model="other")).said("rung") == "heavy"


# --------------------------------------------------------------------------------------------------------- how long


@BOTH
async def test_past_ttl_it_is_served_at_once_and_renewed_behind(
    gateway: Gateway, up: SettableUpstream, stream: bool
) -> None:
    client, clock = gateway.client, gateway.clock
    up.play(heavy=says("old"))
    await client.chat(HARD, stream=stream)
    clock.advance(530)  # within ttl, whatever the jitter
    assert (await client.chat(HARD, stream=stream)).text == "old"
    assert up.calls("heavy") == 1  # fresh: nothing is fetched behind
    clock.advance(170)  # 700 s: past ttl, within ttl + swr, whatever the jitter
    up.play(heavy=says("new"))
    served = await client.chat(HARD, stream=stream)
    assert (served.text, served.said("age"), served.said("degraded")) == ("old", "700", None)
    assert str(served.said("rung")).startswith("hit")
    await until(lambda: up.calls("heavy") == 2)

    async def text() -> str:
        return (await client.chat(HARD, stream=stream)).text

    while await text() != "new":
        await asyncio.sleep(0)
    assert up.calls("heavy") == 2
    assert (await client.chat(HARD, stream=stream)).said("age") == "0"


async def test_one_refresh_at_a_time_however_many_ask(gateway: Gateway, up: SettableUpstream) -> None:
    client, clock = gateway.client, gateway.clock
    await client.chat(HARD)
    await client.infer([1.0])
    clock.advance(700)
    up.play(heavy="slow-first-token", scorer="never")
    got = await asyncio.gather(*(client.chat(HARD) for _ in range(50)), *(client.infer([1.0]) for _ in range(50)))
    assert {str(answer.said("rung"))[:3] for answer in got} == {"hit"}
    await until(lambda: up.calls("heavy") == 2 and up.calls("scorer") == 2)
    await asyncio.gather(*(client.chat(HARD) for _ in range(50)), *(client.infer([1.0]) for _ in range(50)))
    assert (up.calls("heavy"), up.calls("scorer")) == (2, 2)


async def test_a_refresh_that_hangs_does_not_prolong_a_life(start: Start, up: SettableUpstream) -> None:
    gateway = await start(chat_policy(deadline="2s"))
    client, clock = gateway.client, gateway.clock
    up.play(heavy=says("old"))
    await client.chat(HARD)
    clock.advance(700)
    up.play(heavy="never", light="status-500")
    assert (await client.chat(HARD)).text == "old"
    clock.advance(3600)
    got = await client.chat(HARD, headers={"x-request-timeout-ms": "300"})
    assert got.said("rung") == "default"


async def test_a_refresh_that_fails_is_tried_again_later(gateway: Gateway, up: SettableUpstream) -> None:
    client, clock = gateway.client, gateway.clock
    up.play(heavy=says("old"))
    await client.chat(HARD)
    clock.advance(700)
    up.play(heavy="status-500")
    assert (await client.chat(HARD)).text == "old"
    await until(lambda: up.calls("heavy") == 2)
    for _ in range(5):
        assert (await client.chat(HARD)).text == "old"
    assert up.calls("heavy") == 2  # not at once
    clock.advance(5)
    up.play(heavy=says("new"))
    assert (await client.chat(HARD)).text == "old"
    await until(lambda: up.calls("heavy") == 3)
    while (await client.chat(HARD)).text != "new":
        await asyncio.sleep(0)


async def test_past_swr_it_is_no_hit_any_more(gateway: Gateway, up: SettableUpstream) -> None:
    await gateway.client.chat(HARD)
    gateway.clock.advance(20 * 60)
    assert (await gateway.client.chat(HARD)).said("rung") == "heavy"
    assert up.calls("heavy") == 2
