"""Known secrets forced through every error path of a real process: none of them is ever shown."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from backends.scripted_steps import Reply, Step
from gateway.keys import ApiKey, create_key, digest
from tests.support.gateway import CREDENTIAL, GatewayProcess, Serve, chat_policy, tensor_policy
from tests.support.gateway_client import JSON, Client, Got, open_raw, question, raw, tensors
from tests.support.redis_server import free_port
from tests.support.settable_upstream import SettableUpstream

API_KEY = "gw-MARKER-api-key"
PROMPT = "prove MARKER-prompt"
REDIS_PASSWORD = "MARKER-redis-password"
ADMIN_TOKEN = "MARKER-admin-token"
SECRETS = ("MARKER", CREDENTIAL, API_KEY, REDIS_PASSWORD)
FAULTS = (
    "close-before-content", "close-at-once", "reset", "cut-after-40", "no-finish", "error-first", "error-after-content",
    "html", "empty", "invalid-json", "not-http", "status-500", "status-503", "status-429", "status-401", "status-404",
    "status-302", "never",
)  # fmt: skip


def _repeats_everything(seen):  # what a debugging proxy or an over-helpful service may say
    told = {"error": {"message": f"{seen.headers} {seen.body}", "type": str(seen.headers), "code": str(seen.body)}}
    return (Step(reply=Reply(status=500, headers={"content-type": "application/json", "x-echo": "MARKER"}, json=told)),)


def _in_band(seen):
    told = {"error": {"message": f"{seen.headers} {seen.body}", "type": "MARKER type", "code": "MARKER code"}}
    return (Step(reply=Reply(headers=JSON, json=told)),)


def _misconfigured(seen):
    return (Step(reply=Reply(status=401, headers=JSON, text=f"bad key {seen.headers['authorization']}")),)


async def test_no_secret_is_shown_by_any_error_path(serve: Serve, up: SettableUpstream, tmp_path: Path) -> None:
    create_key(tmp_path / "keys.yaml", ApiKey(id="one", sha256=digest(API_KEY), tenant="shop"))
    steady = {"consecutive": 10_000, "min_calls": 100_000}
    process = await serve(
        chat_policy(deadline="300ms", ladder=["heavy", "light", "stale"], default_answer=None),
        tensor_policy(deadline="300ms", ladder=["heavy", "stale"], default_answer=None),
        env={
            "REDIS": f"redis://user:{REDIS_PASSWORD}@127.0.0.1:{free_port()}/0",
            "TOKEN": ADMIN_TOKEN,
            "GATEWAY_HINTS": "1",
        },
        redis={"url_env": "REDIS"},
        admin={"token_env": "TOKEN"},
        log={"level": "debug"},
        backends={name: {"breaker": steady} for name in ("heavy", "light", "scorer")},
    )
    client = await process.ready()
    try:
        answers = await _provoke(process, client, up)
        shown = await _admin_pages(client, answers)
    finally:
        await client.aclose()
    process.signal()
    assert await process.ended() == 0
    assert len(answers) > 80
    for got in answers:
        _is_clean(got.body.decode(errors="replace"), "an answer's body")
        _is_clean(str(dict(got.headers)), "an answer's headers")
    for page, text in shown.items():
        _is_clean(text, page)
    _is_clean(process.output, "the log")
    assert process.events("request_failed")


def _is_clean(text: str, where: str) -> None:
    for secret in SECRETS:
        assert secret not in text, f"{where} shows {secret}: {text[:2000]}"


async def _provoke(process: GatewayProcess, client: Client, up: SettableUpstream) -> list[Got]:
    answers: list[Got] = []
    key = {"Authorization": f"Bearer {API_KEY}"}
    number = 0
    for fault in (*FAULTS, _repeats_everything, _in_band, _misconfigured):
        for stream in (False, True):
            number += 1
            up.play(heavy=fault, light=fault, scorer=fault if not isinstance(fault, str) else _tensor_fault(fault))
            answers += await asyncio.gather(
                client.chat(f"{PROMPT} {number}", stream=stream, user="MARKER-user", headers=key),
                client.infer(headers={**key, "x-secret": "MARKER-header"}, id="MARKER-id"),
            )
    # The client's own mistakes, with secrets in every place.
    for headers in (
        {"Authorization": "Bearer MARKER-unknown-key"},
        {"Authorization": "MARKER"},
        {"x-request-timeout-ms": "MARKER"},
    ):
        answers.append(await client.chat(PROMPT, headers=headers))
    broken = json.dumps(question(PROMPT)).encode()[:-3]
    wrong = tensors([1.0])
    wrong["inputs"][0].update(data=["MARKER-value"], datatype="FP32")
    for path, body in (
        ("/v1/chat/completions", broken),
        ("/v1/chat/completions", json.dumps({**question(PROMPT), "temperature": "MARKER-temperature"}).encode()),
        (
            "/v1/chat/completions",
            json.dumps({"model": "auto", "messages": [{"role": "user", "content": {"MARKER": 1}}]}).encode(),
        ),
        ("/v1/chat/completions", b'{"model": "auto", "messages": "MARKER-\xff"}'),
        ("/v1/embeddings", json.dumps({"model": "embed", "input": {"text": "MARKER"}}).encode()),
        ("/v2/models/recommend/infer", json.dumps(wrong).encode()),
        ("/v2/models/recommend/infer", b'{"inputs": "MARKER"}'),
    ):
        answers.append(await client.send("POST", path, body, key))
    for request in (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer MARKER" + b"M" * 20_000 + b"\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: MARKER\r\nBad Header MARKER\r\n\r\n",
        b"MARKER /v1/models HTTP/1.1 MARKER\r\n\r\n",
    ):
        answers.append(Got(0, {}, await raw(client.url, request)))
    # A client that leaves in the middle.
    up.play(heavy="never")
    _, writer = await open_raw(
        client.url, "/v1/chat/completions", question(PROMPT), f"Authorization: Bearer {API_KEY}\r\n"
    )
    writer.close()
    return answers


def _tensor_fault(fault: str) -> str:
    return {"never": "never", "error-first": "error-first", "html": "malformed", "empty": "empty"}.get(fault, "error")


async def _admin_pages(client: Client, answers: list[Got]) -> dict[str, str]:
    token = {"Authorization": f"Bearer {ADMIN_TOKEN}"}
    ids = [f"/debug/requests/{got.said('request-id')}" for got in answers if got.said("request-id")]
    shown = {}
    for path in ("/metrics", "/policies", "/backends", "/models", "/cache", "/debug/requests", "/", *ids):
        got = await client.admin(path, token)
        assert got.status == 200, path
        shown[path] = got.body.decode()
    refused = await client.admin("/metrics", {"Authorization": "Bearer MARKER-wrong"})
    shown["a refusal"] = refused.body.decode()
    shown["/readyz"] = (await client.get("/readyz")).body.decode()
    return shown


async def test_a_gateway_that_cannot_start_shows_no_secret(serve: Serve) -> None:
    process = await serve(
        redis={"url_env": "REDIS"}, backends={"heavy": {"base_url": "nonsense"}},
        env={"REDIS": f"redis://user:{REDIS_PASSWORD}@", "TEST_CREDENTIAL": "MARKER\nnewline"},
    )  # fmt: skip
    assert await process.ended() == 2
    _is_clean(process.output, "the output")
    assert "gateway.yaml:" in process.output
