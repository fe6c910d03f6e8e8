"""API keys through the whole gateway: who is let in, whose answers are whose, and how soon a change counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.keys import ApiKey, create_key, digest, revoke_key
from tests.support.gateway import Gateway, Start, chat_policy, tensor_policy
from tests.support.gateway_client import HARD, Got
from tests.support.settable_upstream import SettableUpstream
from tests.support.waiting import eventually

BOTH = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
KEYS = {
    "shop": ApiKey(id="shop-web", sha256=digest("gw-shop"), tenant="shop", priority="vip"),
    "shop-2": ApiKey(id="shop-app", sha256=digest("gw-shop-2"), tenant="shop"),
    "bank": ApiKey(id="bank", sha256=digest("gw-bank"), tenant="bank", priority="batch"),
    "narrow": ApiKey(id="narrow", sha256=digest("gw-narrow"), tenant="narrow", policies=("scoring",)),
    "old": ApiKey(id="old", sha256=digest("gw-old"), tenant="shop", expires=1_600_000_000.0),
}


def key(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer gw-{name}"}


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.yaml"
    for entry in KEYS.values():
        create_key(path, entry)
    return path


@pytest.fixture
async def gateway(start: Start, keys_file: Path) -> Gateway:
    private = chat_policy(policy="bankers", match={"aliases": ["auto"], "tenants": ["bank"], "backends": []}, version=9)
    return await start(chat_policy(), tensor_policy(), private)


@BOTH
async def test_tenants_do_not_see_each_others_answers(gateway: Gateway, up: SettableUpstream, stream: bool) -> None:
    client = gateway.client
    rungs = [
        (await client.chat(HARD, stream=stream, headers=headers)).said("rung")
        for headers in (key("shop"), key("shop"), key("shop-2"), {}, {}, key("bank"))
    ]
    assert rungs == ["heavy", "hit-l1", "hit-l1", "heavy", "hit-l1", "heavy"]
    assert up.calls("heavy") == 3
    scored = [
        (await client.infer(headers=headers)).said("rung") for headers in (key("shop"), key("shop-2"), key("bank"))
    ]
    assert scored == ["heavy", "hit-l1", "heavy"]


async def test_answers_are_shared_where_the_policy_says_all(start: Start, keys_file: Path) -> None:
    gateway = await start(chat_policy(cache={"scope": "all"}))
    rungs = [
        (await gateway.client.chat(HARD, headers=headers)).said("rung") for headers in (key("shop"), key("bank"), {})
    ]
    assert rungs == ["heavy", "hit-l1", "hit-l1"]


async def test_equal_requests_of_two_tenants_are_not_one_flight(gateway: Gateway, up: SettableUpstream) -> None:
    import asyncio

    up.play(heavy="slow-first-token")
    await asyncio.gather(*(gateway.client.chat(HARD, headers=key(name)) for name in ("shop", "shop-2", "bank")))
    assert up.calls("heavy") == 2


async def test_tenant_and_class_come_from_the_key(gateway: Gateway) -> None:
    client = gateway.client
    forged = {"x-gateway-tenant": "bank", "x-gateway-priority": "vip", "x-gateway-class": "vip"}
    for name, tenant, priority in (("shop", "shop", "vip"), ("shop-2", "shop", "normal"), ("bank", "bank", "batch")):
        told = await client.why(await client.chat(HARD, headers={**forged, **key(name)}))
        assert (told["tenant"], told["class"]) == (tenant, priority)
    told = await client.why(await client.chat(HARD, headers=forged))
    assert (told["tenant"], told["class"]) == ("local", "normal")


async def test_the_protocols_priority_may_only_lower_the_class(gateway: Gateway) -> None:
    client = gateway.client
    for name, asked, becomes in (
        ("shop", 0, "vip"),
        ("shop", 2, "batch"),
        ("bank", 0, "batch"),
        ("shop-2", 0, "normal"),
    ):
        told = await client.why(await client.infer(parameters={"priority": asked}, headers=key(name)))
        assert told["class"] == becomes, (name, asked)


async def test_a_policy_for_one_tenant_is_that_tenants(gateway: Gateway) -> None:
    client = gateway.client
    assert (await client.chat(HARD, headers=key("bank"))).said("policy") == "bankers@9"
    assert (await client.chat(HARD, headers=key("shop"))).said("policy") == "support@3"
    assert (await client.chat(HARD)).said("policy") == "support@3"


def _is_refused(got: Got, status: int, code: str, *, oip: bool) -> None:
    assert got.status == status
    if oip:
        assert got.oip_error
    else:
        assert got.error["code"] == code


@pytest.mark.parametrize(
    "authorization",
    ["Bearer gw-unknown", "Bearer gw-old", "Bearer", "Bearer ", "gw-shop", "Basic gw-shop", "Bearer gw-shop extra", "Bearer " + "x" * 5000],
)  # fmt: skip
async def test_a_key_that_is_not_known_is_a_401_everywhere(
    gateway: Gateway, up: SettableUpstream, authorization: str
) -> None:
    client, headers = gateway.client, {"Authorization": authorization}
    for stream in (False, True):
        _is_refused(await client.chat(HARD, stream=stream, headers=headers), 401, "invalid_api_key", oip=False)
    _is_refused(await client.infer(headers=headers), 401, "", oip=True)
    _is_refused(await client.get("/v1/models", headers), 401, "invalid_api_key", oip=False)
    _is_refused(await client.get("/v2/models/recommend", headers), 401, "", oip=True)
    got = await client.send("POST", "/v1/embeddings", {"model": "embed", "input": "x"}, headers)
    _is_refused(got, 401, "invalid_api_key", oip=False)
    assert up.total() == 0
    for path in ("/livez", "/readyz", "/v2/health/live"):
        assert (await client.get(path, headers)).status == 200


async def test_a_policy_that_a_key_may_not_use_is_a_403(gateway: Gateway, up: SettableUpstream) -> None:
    client = gateway.client
    for stream in (False, True):
        got = await client.chat(HARD, stream=stream, headers=key("narrow"))
        assert got.status == 403
        assert got.error["code"] == "not_permitted"
        assert got.error["type"] == "permission_error"
    assert up.total() == 0
    assert (await client.infer(headers=key("narrow"))).status == 200
    names = {model["id"] for model in (await client.get("/v1/models", key("narrow"))).json["data"]}
    assert "auto" not in names


async def test_where_no_anonymous_use_is_allowed_everybody_needs_a_key(start: Start, keys_file: Path) -> None:
    gateway = await start(listen={"anonymous_loopback": False})
    got = await gateway.client.chat(HARD)
    assert got.status == 401
    assert got.error["type"] == "authentication_error"
    assert (await gateway.client.chat(HARD, headers=key("shop"))).status == 200


async def test_any_key_is_as_good_as_none_without_a_keys_file(start: Start) -> None:
    """Clients that insist on a key work out of the box on the same machine."""
    gateway = await start()
    assert (await gateway.client.chat(HARD, headers=key("whatever"))).status == 200


async def test_keys_made_and_revoked_count_within_two_seconds(gateway: Gateway, keys_file: Path) -> None:
    client = gateway.client

    async def status(name: str) -> int:
        return (await client.chat(HARD, headers=key(name))).status

    assert (await status("shop"), await status("fresh")) == (200, 401)
    create_key(keys_file, ApiKey(id="fresh", sha256=digest("gw-fresh"), tenant="fresh"))

    async def let_in() -> bool:
        return await status("fresh") == 200

    await eventually(let_in, within_s=2.0)
    assert revoke_key(keys_file, "shop-web")

    async def shut_out() -> bool:
        return await status("shop") == 401

    await eventually(shut_out, within_s=2.0)
    assert (await status("shop-2"), await status("fresh")) == (200, 200)


async def test_a_broken_keys_file_keeps_the_keys_in_force(gateway: Gateway, keys_file: Path) -> None:
    good = keys_file.read_text()
    keys_file.write_text("keys: [{id: broken\n")
    create = ApiKey(id="late", sha256=digest("gw-late"), tenant="late")
    for _ in range(20):
        assert (await gateway.client.chat(HARD, headers=key("shop"))).status == 200
    keys_file.write_text(good)
    create_key(keys_file, create)

    async def let_in() -> bool:
        return (await gateway.client.chat(HARD, headers=key("late"))).status == 200

    await eventually(let_in, within_s=2.5)


async def test_a_key_expires_while_the_gateway_runs(start: Start, keys_file: Path) -> None:
    import time

    create_key(
        keys_file, ApiKey(id="brief", sha256=digest("gw-brief"), tenant="shop", expires=float(int(time.time()) + 600))
    )
    gateway = await start()
    assert (await gateway.client.chat(HARD, headers=key("brief"))).status == 200
    gateway.clock.advance(700)
    assert (await gateway.client.chat(HARD, headers=key("brief"))).status == 401


async def test_metadata_of_a_model_that_the_key_may_not_use_is_not_told(start: Start, tmp_path: Path) -> None:
    create_key(tmp_path / "keys.yaml", ApiKey(id="chat", sha256=digest("gw-chat"), tenant="t", policies=("support",)))
    create_key(tmp_path / "keys.yaml", ApiKey(id="both", sha256=digest("gw-both"), tenant="t", policies=("scoring",)))
    client = (await start()).client
    for path in ("", "/ready", "/versions/1"):
        refused = await client.get(f"/v2/models/recommend{path}", key("chat"))
        unknown = await client.get(f"/v2/models/nobody{path}", key("chat"))
        assert refused.status == unknown.status == 404
        assert refused.oip_error == unknown.oip_error.replace("nobody", "recommend")
        assert (await client.get(f"/v2/models/recommend{path}", key("both"))).status == 200
