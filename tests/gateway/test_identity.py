"""Who asks: keys, tenants and classes; and that a change of the file is a change of what is allowed."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.api import Priority
from gateway.edge.identity import LOCAL, Identities
from gateway.keys import ApiKey, create_key, digest, load_keys, new_key, parse_keys, revoke_key
from policies.core.clock import FakeClock
from policies.core.errors import ConfigError, NotPermitted, Unauthenticated
from tests.support.file_keys import FileKeys

KEY = "gw-known"


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(wall=1_700_000_000.0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "keys.yaml"
    create_key(path, ApiKey(id="k1", sha256=digest(KEY), tenant="shop", priority="vip", policies=("chatbot",)))
    return path


def refused(identities: Identities, authorization: str | None, loopback: bool = False) -> str:
    with pytest.raises(Unauthenticated) as caught:
        identities.identify(authorization, loopback)
    return str(caught.value)


def test_a_known_key_is_its_entry(path, clock):
    identities = FileKeys(path, clock)
    for _ in range(2):  # looked up, then remembered
        identity = identities.identify(f"Bearer {KEY}", loopback=False)
        assert (identity.key_id, identity.tenant, identity.priority) == ("k1", "shop", Priority.VIP)
        assert identity.policies == {"chatbot"}
    assert identities.identify(f"bearer  {KEY} ", loopback=True).tenant == "shop"
    identity.require_policy("chatbot")
    with pytest.raises(NotPermitted, match="'k1' may not use the policy 'other'"):
        identity.require_policy("other")


def test_no_key(path, clock):
    identities = FileKeys(path, clock)
    assert identities.identify(None, loopback=True) is LOCAL
    assert (LOCAL.tenant, LOCAL.priority, LOCAL.policies) == ("local", Priority.NORMAL, None)
    assert "an API key is needed" in refused(identities, None)
    strict = FileKeys(path, clock, anonymous=False)
    assert "an API key is needed" in refused(strict, None, loopback=True)


def test_without_a_keys_file_any_key_from_this_machine_will_do(tmp_path, clock):
    for identities in (Identities(clock), FileKeys(tmp_path / "keys.yaml", clock)):
        assert identities.identify("Bearer anything", loopback=True) is LOCAL
        refused(identities, "Bearer anything")


def test_with_a_keys_file_an_unknown_key_is_refused_even_here(path, clock):
    identities = FileKeys(path, clock)
    for authorization in ("Bearer nope", f"Bearer {KEY}x", f"Basic {KEY}", KEY, "Bearer", "", f"Bearer {digest(KEY)}"):
        said = refused(identities, authorization, loopback=True)
        assert "nope" not in said and KEY not in said


@given(st.text(max_size=60))
def test_no_other_text_is_a_key(tmp_path_factory, text):
    clock = FakeClock()
    path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    path.write_text(f'keys: [{{id: a, sha256: "{digest(KEY)}", tenant: t}}]\n')
    identities = FileKeys(path, clock)
    if text != KEY:
        refused(identities, f"Bearer {text}")


def test_a_key_expires_at_its_moment(tmp_path, clock):
    path = tmp_path / "keys.yaml"
    create_key(path, ApiKey(id="k", sha256=digest(KEY), tenant="t", expires=clock.wall() + 10))
    identities = FileKeys(path, clock)
    identities.identify(f"Bearer {KEY}", loopback=False)
    clock.advance(9.9)
    identities.identify(f"Bearer {KEY}", loopback=False)
    clock.advance(0.2)
    assert "expired" in refused(identities, f"Bearer {KEY}")


def test_a_revoked_key_is_refused_at_the_next_reload(path, clock):
    identities = FileKeys(path, clock)
    identities.identify(f"Bearer {KEY}", loopback=True)
    assert revoke_key(path, "k1")
    assert identities.reload()
    assert "revoked" in refused(identities, f"Bearer {KEY}", loopback=True)
    assert not identities.reload()  # nothing new
    assert len(identities) == 0


def test_a_new_key_works_at_the_next_reload(tmp_path, clock):
    path = tmp_path / "keys.yaml"
    identities = FileKeys(path, clock)
    create_key(path, ApiKey(id="k", sha256=digest(KEY), tenant="t", priority="batch"))
    assert identities.reload()
    assert identities.identify(f"Bearer {KEY}", loopback=False).priority is Priority.BATCH


@pytest.mark.parametrize("text", ["keys: [", "keys: 3", "", "keys:\n  - id: k1\n", "kys: []"])
def test_a_broken_file_keeps_the_last_good_keys_and_says_so(path, clock, text):
    identities = FileKeys(path, clock)
    good = path.read_text()
    path.write_text(text)
    assert not identities.reload()
    assert identities.problem.startswith(f"{path}:")
    assert identities.identify(f"Bearer {KEY}", loopback=False).key_id == "k1"
    path.write_text(good)
    assert not identities.reload()
    assert identities.problem == ""


def test_a_file_that_vanished_keeps_its_keys_and_says_so(path, clock):
    identities = FileKeys(path, clock)
    path.unlink()
    assert not identities.reload()
    assert "has gone" in identities.problem
    assert identities.identify(f"Bearer {KEY}", loopback=False).key_id == "k1"
    refused(identities, "Bearer other", loopback=True)


def test_a_start_with_a_broken_file_is_refused(path, clock):
    path.write_text("keys: [{id: a, sha256: short, tenant: t, clas: vip}]")
    with pytest.raises(ConfigError) as caught:
        FileKeys(path, clock)
    assert [line.removeprefix(f"{path}:") for line in caught.value.problems] == [
        "1:24: `keys[0].sha256` has characters that are not allowed here (wanted: [0-9a-f]{64})",
        "1:42: unknown key `clas` in `keys[0]`; did you mean `class`?",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "keys: [{id: a, sha256: %s, tenant: t}]",
        "keys: [{id: a, sha256: [%s], tenant: t}]",
        "keys: [{id: a, sha256: {%s: 1}, tenant: t}]",
        "keys: [%s]",
        "keys: %s",
        "keys: {%s: {id: a}}",
        "keys: [{%s: {id: a}}]",
        "%s",
        "%s: {tenant: a}",
    ],
)
def test_a_key_in_the_wrong_place_is_not_repeated(path, clock, text):
    secret = new_key()
    path.write_text(text % secret)
    with pytest.raises(ConfigError) as caught:
        FileKeys(path, clock)
    assert secret.partition("-")[2][:6] not in str(caught.value)


def test_faults_by_key_are_not_available(path, clock):
    path.write_text(f"keys: [{{id: a, sha256: {digest(KEY)}, tenant: t, chaos: true}}]")
    with pytest.raises(ConfigError, match="`chaos` is not available in this version"):
        FileKeys(path, clock)


def test_ids_and_digests_are_unique(tmp_path):
    one = f'{{id: a, sha256: "{digest("1")}", tenant: t}}'
    two = f'{{id: b, sha256: "{digest("1")}", tenant: t}}'
    three = f'{{id: a, sha256: "{digest("3")}", tenant: t}}'
    with pytest.raises(ConfigError) as caught:
        parse_keys(f"keys:\n - {one}\n - {two}\n - {three}\n".encode(), tmp_path / "k")
    assert len(caught.value.problems) == 2
    assert ":3:20: this digest is that of a key above" in caught.value.problems[0]
    assert ":4:9: the id `a` is taken by a key above" in caught.value.problems[1]


def test_what_is_written_is_what_is_read(tmp_path):
    path = tmp_path / "deep" / "keys.yaml"
    keys = [
        ApiKey(id="null", sha256=digest("1"), tenant="1e5"),
        ApiKey(
            id="b",
            sha256="1" * 64,
            tenant="true",
            priority="vip",
            policies=("p", "q"),
            expires=1_800_000_000.0,
        ),
        ApiKey(id="c", sha256=digest("3"), tenant="t", policies=()),
    ]
    for key in keys:
        create_key(path, key)
    assert list(load_keys(path)) == keys
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(ConfigError, match="there is a key `b` already"):
        create_key(path, keys[1])
    assert revoke_key(path, "b") and not revoke_key(path, "b")
    assert [key.id for key in load_keys(path)] == ["null", "c"]


def test_keys_are_long_and_different():
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(key.startswith("gw-") and len(key) == 46 for key in keys)


def test_what_is_remembered_is_bounded(path, clock):
    identities = FileKeys(path, clock)
    for spaces in range(900):
        identities.identify("Bearer" + " " * (spaces + 1) + KEY, loopback=False)
    for other in range(10_000):
        refused(identities, f"Bearer {other}")
    assert len(identities._presented) <= 4_096
