"""The admin listener: explanations, metrics, who may use it, policies that change under way."""

from __future__ import annotations

import json

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.gateway import Gateway, Start
from tests.support.gateway_client import EASY, HARD, JSON, Client, raw
from tests.support.settable_upstream import SettableUpstream

BOTH = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


# ------------------------------------------------------------------------------------------------------------- why


@BOTH
async def test_why_explains_scores_rule_lookups_and_steps(client: Client, up: SettableUpstream, stream: bool) -> None:
    up.play(heavy="status-500")
    got = await client.chat("prove MARKER-PROMPT", stream=stream, user="MARKER-USER")
    told = await client.why(got)
    assert told["request_id"] == got.said("request-id")
    assert (told["surface"], told["stream"], told["policy"]) == ("chat", stream, "support@3")
    assert (told["route"], told["rung"], told["served_by"]) == ("hard", "light", "light")
    assert (told["outcome"], told["status"], told["degraded"]) == ("degraded", 200, "upstream_status")
    assert told["fingerprint"] == got.said("fingerprint")
    decision = told["decision"]
    assert decision["rule"] == "hard"
    assert decision["signals"]["thinking"]["score"] == 1.0
    assert [(rule["rule"], rule["chosen"]) for rule in decision["rules"]] == [("hard", True), ("easy", False)]
    assert told["lookup"]["outcome"] == "miss"
    assert [(step["rung"], step["backend"], step["outcome"]) for step in told["steps"]] == [
        ("heavy", "heavy", "upstream_status"),
        ("light", "light", "ok"),
    ]
    assert all(step["ms"] >= 0 for step in told["steps"])
    assert told["ms"]["total"] >= told["ms"]["waited"] >= 0
    assert "MARKER" not in json.dumps(told)


async def test_why_of_an_easy_question_shows_the_rule_that_did_not_apply(client: Client) -> None:
    told = await client.why(await client.chat(EASY))
    rules = {rule["rule"]: rule for rule in told["decision"]["rules"]}
    assert (rules["hard"]["matched"], rules["easy"]["matched"], rules["easy"]["chosen"]) == (False, True, True)


async def test_why_of_hits_errors_and_tensors(client: Client, up: SettableUpstream) -> None:
    first = await client.chat(HARD)
    hit = await client.why(await client.chat(HARD))
    assert (hit["rung"], hit["lookup"]["outcome"], hit["steps"]) == ("hit-l1", "hit-l1", [])
    assert hit["lookup"]["request_digest"] == (await client.why(first))["lookup"]["request_digest"]
    refused = await client.why(await client.chat(HARD, model="nobody"))
    assert (refused["status"], refused["outcome"], refused["degraded"]) == (404, "client_error", "model_not_found")
    assert "nobody" not in json.dumps(refused)
    up.play(scorer="error")
    scored = await client.why(await client.infer([42.4242]))
    assert (scored["surface"], scored["rung"]) == ("tensor", "default")
    assert [step["outcome"] for step in scored["steps"]] == ["upstream_status", "skipped", "ok"]
    assert "42.4242" not in json.dumps(scored)


async def test_why_of_an_unknown_request_is_a_404(client: Client) -> None:
    got = await client.admin("/debug/requests/nothing-of-the-kind")
    assert got.status == 404
    assert "error" in got.json


async def test_recent_requests_are_listed_newest_first(client: Client) -> None:
    ids = [(await client.chat(f"{HARD} {number}")).said("request-id") for number in range(3)]
    listed = (await client.admin("/debug/requests")).json["requests"]
    assert listed[:3] == ids[::-1]


# --------------------------------------------------------------------------------------------------------- metrics


def _series(body: bytes) -> dict[str, set[str]]:
    """Metric name -> its label sets."""
    series: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(body.decode()):
        assert family.documentation, family.name
        if family.name == "gateway_loop_lag_seconds":
            continue  # is there once it has been measured for the first time
        for sample in family.samples:
            series.setdefault(sample.name, set()).add(json.dumps(sample.labels, sort_keys=True))
    return series


async def test_metrics_count_what_happened(client: Client, up: SettableUpstream) -> None:
    await client.chat(HARD)
    await client.chat(HARD)
    up.play(heavy="status-500")
    await client.chat(HARD + " 2", stream=True)
    await client.infer()
    got = await client.admin("/metrics")
    assert got.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert _series(got.body)
    one = {"surface": "chat", "policy": "support"}
    assert await client.metric("gateway_requests_total", rung="heavy", outcome="full", **one) == 1
    assert await client.metric("gateway_requests_total", rung="hit-l1", outcome="full", **one) == 1
    assert await client.metric("gateway_requests_total", rung="light", outcome="degraded", **one) == 1
    assert await client.metric("gateway_requests_total", surface="tensor", policy="scoring", rung="heavy") == 1
    assert await client.metric("gateway_cache_lookups_total", outcome="hit-l1", policy="support") == 1
    assert await client.metric("gateway_attempts_total", backend="heavy", outcome="upstream_status") == 1
    assert await client.metric("gateway_routed_total", policy="support", rule="hard") == 2
    assert await client.metric("gateway_request_seconds_count", surface="chat") == 3
    assert await client.metric("gateway_first_token_seconds_count", policy="support") == 1
    assert await client.metric("gateway_tokens_total", backend="heavy", direction="out") == 8


async def test_histograms_are_cumulative_and_consistent(client: Client) -> None:
    for number in range(5):
        await client.chat(f"{HARD} {number}")
    for family in text_string_to_metric_families((await client.admin("/metrics")).body.decode()):
        if family.type != "histogram":
            continue
        buckets: dict[str, list[float]] = {}
        counts: dict[str, float] = {}
        for sample in family.samples:
            labels = json.dumps({k: v for k, v in sample.labels.items() if k != "le"}, sort_keys=True)
            if sample.name.endswith("_bucket"):
                buckets.setdefault(labels, []).append(sample.value)
            elif sample.name.endswith("_count"):
                counts[labels] = sample.value
        for labels, values in buckets.items():
            assert values == sorted(values)
            assert values[-1] == counts[labels]


async def test_a_thousand_junk_names_make_no_series(client: Client, up: SettableUpstream) -> None:
    junk = "junk"
    await client.chat(HARD)
    await client.chat(HARD, model=f"{junk}-warm")
    await client.infer(model=f"{junk}-warm")
    await client.chat(HARD, user="warm", headers={"x-gateway-degrade": "off"})
    before = _series((await client.admin("/metrics")).body)
    for number in range(1000):
        if number % 4 == 0:
            await client.infer(model=f"{junk}-{number}")
        elif number % 4 == 1:
            await client.get(f"/v2/models/{junk}-{number}")
        else:
            await client.chat(HARD, model=f"{junk}-{number}", user=f"{junk}-{number}")
    after = (await client.admin("/metrics")).body
    assert _series(after) == before
    assert junk.encode() not in after
    assert up.calls("heavy") == 1


# ------------------------------------------------------------------------------------------------------------ access


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8081", "127.0.0.1.evil.example", "[::2]", "0.0.0.0", ""]
)
async def test_a_foreign_host_is_refused(gateway: Gateway, host: str) -> None:
    answer = await raw(
        gateway.admin_url, f"GET /metrics HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode()
    )
    assert answer.split(b" ", 2)[1] in (b"403", b"400")
    assert b"gateway_" not in answer


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "LOCALHOST:1", "[::1]", "127.0.0.1:9999"])
async def test_loopback_names_are_let_in(gateway: Gateway, host: str) -> None:
    answer = await raw(
        gateway.admin_url, f"GET /policies HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode()
    )
    assert answer.split(b" ", 2)[1] == b"200"


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "http://127.0.0.1", "null", "http://localhost:1", "file://"]
)
async def test_a_page_of_another_origin_is_refused(client: Client, origin: str) -> None:
    for method, path in (("GET", "/metrics"), ("POST", "/policies/reload")):
        got = await client.send(method, path, {} if method == "POST" else None, {"Origin": origin}, admin=True)
        assert got.status == 403


async def test_our_own_origin_is_let_in(client: Client) -> None:
    got = await client.send("POST", "/policies/reload", {}, {"Origin": client.admin_url}, admin=True)
    assert got.status == 200


@pytest.mark.parametrize(
    "content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"]
)
async def test_a_change_needs_json(client: Client, content_type: str) -> None:
    got = await client.send("POST", "/policies/reload", b"{}", {"Content-Type": content_type}, admin=True)
    assert got.status == 415
    assert (await client.send("POST", "/policies/reload", b"{}", JSON, admin=True)).status == 200


async def test_unknown_admin_paths_and_methods_are_json_errors(client: Client) -> None:
    assert (await client.admin("/nothing")).status == 404
    assert "error" in (await client.admin("/nothing")).json
    assert (await client.send("POST", "/metrics", {}, admin=True)).status == 405
    assert (await client.send("DELETE", "/policies", {}, admin=True)).status == 405
    assert (await client.admin("/v1/models")).status == 404
    assert (await client.send("POST", "/v1/chat/completions", {}, admin=True)).status == 404


async def test_with_tokens_only_their_holders_are_let_in(start: Start) -> None:
    tokens = {"token_env": "OPERATE", "view_token_env": "VIEW"}
    gateway = await start(admin=tokens, env={"OPERATE": "operate-secret", "VIEW": "view-secret"})
    client = gateway.client

    async def status(method: str, path: str, token: str | None) -> int:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        return (await client.send(method, path, {} if method == "POST" else None, headers, admin=True)).status

    for token, view, change in (
        (None, 401, 401),
        ("wrong", 401, 401),
        ("view-secret", 200, 401),
        ("operate-secret", 200, 200),
    ):
        assert await status("GET", "/metrics", token) == view, token
        assert await status("GET", "/policies", token) == view, token
        assert await status("POST", "/policies/reload", token) == change, token


@pytest.mark.parametrize(
    "header",
    ["operate-secret", "Basic operate-secret", "Bearer", "Bearer ", "Bearer op\u00e9rate", "Bearer \U0001f511", "Beareroperate-secret"],
)  # fmt: skip
async def test_a_token_in_any_other_form_is_a_401(start: Start, header: str) -> None:
    gateway = await start(admin={"token_env": "OPERATE"}, env={"OPERATE": "operate-secret"})
    request = b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: %s\r\n\r\n"
    answer = await raw(gateway.admin_url, request % header.encode())
    assert answer.split(b" ", 2)[1] == b"401"


async def test_bytes_that_are_no_text_as_token_are_a_401(start: Start) -> None:
    gateway = await start(admin={"token_env": "OPERATE"}, env={"OPERATE": "operate-secret"})
    request = b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer \xff\xfe\xe9\r\n\r\n"
    assert (await raw(gateway.admin_url, request)).split(b" ", 2)[1] == b"401"


async def test_outside_loopback_nobody_is_let_in_without_the_token(start: Start) -> None:
    gateway = await start(admin={"host": "0.0.0.0", "token_env": "OPERATE"}, env={"OPERATE": "operate-secret"})
    for path in ("/metrics", "/policies", "/debug/requests", "/nothing"):
        assert (await gateway.client.admin(path)).status == 401
    token = {"Authorization": "Bearer operate-secret"}
    assert (await gateway.client.admin("/metrics", token)).status == 200


async def test_what_the_admin_pages_tell(client: Client) -> None:
    await client.chat(HARD)
    policies = (await client.admin("/policies")).json["worker-1"]
    assert {"policy": "support@3", "surface": "chat", "first_choices": ["heavy", "light"]} in policies
    backends = {backend["name"]: backend for backend in (await client.admin("/backends")).json["worker-1"]}
    assert set(backends) == {"heavy", "light", "scorer"}
    assert (backends["heavy"]["role"], backends["heavy"]["ready"], backends["heavy"]["model"]) == (
        "heavy",
        True,
        "heavy-model",
    )
    cache = (await client.admin("/cache")).json["worker-1"]["result"]
    assert (cache["stored"], cache["dirty_reads"]) == (1, 0)
    assert (await client.admin("/models")).json == {"worker-1": []}
    assert "GET /metrics" in (await client.admin("/")).json["admin"]
