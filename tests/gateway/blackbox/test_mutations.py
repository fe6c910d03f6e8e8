"""Good requests with one or two places changed at random: whatever comes, it is an answer or a client error, never a defect."""

from __future__ import annotations

import asyncio
import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.support.gateway import EMBEDDED, Start, chat_policy, recommender_policy, tensor_policy
from tests.support.gateway_client import HARD, JSON, Client
from tests.support.settable_upstream import SettableUpstream

CHAT = {
    "model": "auto",
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": HARD}, {"type": "image_url", "image_url": {"url": "x"}}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "result"},
    ],
    "temperature": 0.5,
    "max_tokens": 10,
    "n": 1,
    "stop": ["a"],
    "stream": False,
    "stream_options": {"include_usage": True},
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}},
    "logit_bias": {"5": 1},
    "user": "ann",
    "metadata": {"a": "b"},
}
EMBED = {"model": "embed", "input": ["one", "two"], "encoding_format": "float", "dimensions": None, "user": "ann"}
TEXTS = {"shape": [2], "datatype": "BYTES", "data": ["a", "b"]}
INFER = {
    "id": "mine",
    "inputs": [{"name": "user_history", **TEXTS}, {"name": "candidates", "parameters": {}, **TEXTS}],
    "outputs": [{"name": "scores", "parameters": {"binary_data": False}}],
    "parameters": {"timeout": 1_000_000, "priority": 1},
}
REMOTE = {**INFER, "inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [[1, 2]]}], "outputs": []}
PATHS = {
    "chat": ("/v1/chat/completions", CHAT),
    "embeddings": ("/v1/embeddings", EMBED),
    "recommender": ("/v2/models/items/infer", INFER),
    "remote tensors": ("/v2/models/recommend/infer", REMOTE),
}
ROUNDS = 30
JUNK: list[Any] = [
    None, True, False, 0, -1, 1, 2, 1.5, -0.0, 1e308, 1 << 31, 1 << 53, 1 << 63, 1 << 64, -(1 << 70), "", "x", "auto", "true", "1",
    "\x00", "\ud800", "é", "e\u0301", "👨‍👩‍👧", "\u2028", "x" * 5000, [], {}, [None], [[]], [{}], {"": None}, [1, "a"], {"a": {"b": [1]}},
    "FP32", "BYTES", "INT64", "FP16", "BF16", "BOOL", "light", "heavy", [-1], [0], [1 << 40], [2, 2], {"type": "text"}, {"binary_data_size": 4},
]  # fmt: skip


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, member in members:
        found += _places(member, (*path, key))
    return found


def _mutated(body: dict[str, Any], source: random.Random) -> bytes:
    changed = copy.deepcopy(body)
    for _ in range(source.choice((1, 1, 2))):
        *above, last = source.choice(_places(changed))
        holder: Any = changed
        for key in above:
            holder = holder[key]
        what = source.randrange(8)
        if what == 0 and isinstance(holder, dict):
            del holder[last]
        elif what == 1 and isinstance(holder, dict):
            holder[source.choice(("extra", "", "model", "\ud800", "é"))] = copy.deepcopy(source.choice(JUNK))
        elif what == 2 and isinstance(holder, list):
            holder.append(copy.deepcopy(source.choice(JUNK)))
        else:
            holder[last] = copy.deepcopy(source.choice(JUNK))
        if not changed:
            break
    return json.dumps(changed).encode()


@pytest.mark.parametrize("surface", PATHS)
async def test_no_mutation_is_a_defect(start: Start, up: SettableUpstream, tiny_models: Path, surface: str) -> None:
    gateway = await start(chat_policy(), tensor_policy(), recommender_policy(), models_dir=str(tiny_models), **EMBEDDED)
    client: Client = gateway.client
    path, body = PATHS[surface]
    source = random.Random(f"mutations of {surface}")

    statuses = set()

    async def sends(sent: bytes) -> None:
        got = await client.send("POST", path, sent, JSON)
        assert got.status in (200, 400, 404, 413, 422), (got.status, got.body[:300], sent[:2000])
        statuses.add(got.status)
        if got.status != 200:
            assert got.oip_error if "/v2/" in path else got.error["message"]

    for _ in range(ROUNDS):
        await asyncio.gather(*(sends(sent) for sent in [_mutated(body, source) for _ in range(10)]))
    assert {200, 400} <= statuses
    assert await client.metric("gateway_breaker_changes_total", to="open") == 0
    assert (await client.chat(HARD)).status == 200
