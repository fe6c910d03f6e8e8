"""`gateway keys` and `gateway policy`, as a person or a script meets them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gateway.cli.keys import app as keys_app
from gateway.cli.policy import app as policy_app
from policies.core.clock import FakeClock
from policies.core.errors import Unauthenticated
from policies.language.json_schema import policy_schema
from tests.support.file_keys import FileKeys

ROOT = Path(__file__).parents[2]
GATEWAY = ["--config", str(ROOT / "gateway.yaml")]


def keys(*args: object):
    return CliRunner().invoke(keys_app, [str(arg) for arg in args])


def policy(*args: object):
    return CliRunner().invoke(policy_app, [str(arg) for arg in args])


def test_a_key_from_making_to_revoking(tmp_path):
    path, clock = tmp_path / "keys.yaml", FakeClock()
    made = keys("create", "shop-web", "--tenant", "shop", "--class", "vip", "--policy", "chatbot", "--file", path)
    assert made.exit_code == 0
    key = made.stdout.strip()
    assert "\n" not in key  # a script takes stdout as it is
    assert "shown this once" in made.stderr
    assert key not in path.read_text()
    identities = FileKeys(path, clock)
    assert identities.identify(f"Bearer {key}", loopback=False).tenant == "shop"

    listed = json.loads(keys("list", "--json", "-f", path).stdout)
    assert listed["keys"] == [
        {"id": "shop-web", "tenant": "shop", "class": "vip", "policies": ["chatbot"], "expires": None}
    ]
    table = keys("list", "-f", path)
    assert "shop-web" in table.stdout and key not in table.stdout

    assert keys("revoke", "shop-web", "-f", path).exit_code == 0
    identities.reload()
    with pytest.raises(Unauthenticated):
        identities.identify(f"Bearer {key}", loopback=False)


def test_the_file_comes_from_the_configuration(tmp_path):
    config = tmp_path / "g.yaml"
    config.write_text("keys_file: k.yaml\nbackends: {light: {kind: scripted, role: light}}\n")
    made = keys("create", "a", "--tenant", "t", "--expires", "2030-01-01", "--config", config, "--json")
    assert json.loads(made.stdout)["file"] == str(tmp_path / "k.yaml")
    assert json.loads(made.stdout)["expires"] == "2030-01-01T00:00:00Z"
    assert "There are no keys" in keys("list", "-f", tmp_path / "none.yaml").stdout


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["create", "a b", "--tenant", "t"], "the key id 'a b' may have letters"),
        (["create", "a", "--tenant", "t", "--class", "gold"], "the class 'gold' is none of vip, normal, batch"),
        (["create", "a", "--tenant", "t", "--expires", "soon"], "--expires: `soon` is not a date"),
        (["create", "a", "--tenant", "t", "--expires", "5x"], "--expires: `x` is not a unit of time"),
        (["create", "taken", "--tenant", "t"], "there is a key `taken` already"),
        (["create", "a", "--tenant", "t", "--chaos"], "`--chaos` is not available in this version"),
        (["revoke", "none"], "there is no key 'none'"),
    ],
)
def test_mistakes_exit_with_2(tmp_path, args, said):
    path = tmp_path / "keys.yaml"
    assert keys("create", "taken", "--tenant", "t", "-f", path).exit_code == 0
    before = path.read_bytes()
    result = keys(*args, "-f", path)
    assert result.exit_code == 2
    assert said in result.stderr
    assert path.read_bytes() == before


def test_a_broken_keys_file_is_left_alone(tmp_path):
    path = tmp_path / "keys.yaml"
    path.write_text("keys: [\n")
    for args in (["list"], ["create", "a", "--tenant", "t"], ["revoke", "a"]):
        result = keys(*args, "-f", path)
        assert result.exit_code == 2 and f"{path}:" in result.stderr
    assert path.read_text() == "keys: [\n"


# ------------------------------------------------------------------------------------------------------------- policy


def test_check_accepts_the_shipped_policies():
    result = policy("check", *GATEWAY)
    assert result.exit_code == 0, result.stderr
    assert "chatbot@1" in result.stdout and "recommendation@1" in result.stdout


def test_check_reports_every_mistake_and_exits_with_2(tmp_path):
    bad = tmp_path / "bad.yaml"
    bad.write_text(
        "policy: bad\nverson: 1\nmatch: {aliases: [auto]}\ndeadline: 30\n"
        "classify: {signals: {w: {kind: keyword, any: [x]}}}\n"
        "routes:\n  - {name: a, when: {signal: w, at_least: 1}, to: hevy}\n"
    )
    result = policy("check", bad, *GATEWAY)
    assert result.exit_code == 2
    places = [line.split(": ")[0].removeprefix(f"{bad}:") for line in result.stderr.splitlines()]
    assert places == ["2:1", "4:11", "5:32", "7:5", "7:51", "5 problems"]
    as_json = policy("check", bad, "--json", *GATEWAY)
    assert as_json.exit_code == 2
    found = json.loads(as_json.stdout)
    assert not found["ok"] and len(found["problems"]) == 5
    assert found["problems"][4]["line"] == 7 and "did you mean `heavy`?" in found["problems"][4]["message"]


def test_check_finds_conflicts_between_files(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.yaml").write_text(
            f"policy: {name}\nversion: 1\nmatch: {{aliases: [auto]}}\nroutes: [{{name: r, to: light}}]\n"
        )
    result = policy("check", tmp_path, *GATEWAY)
    assert result.exit_code == 2
    assert "b.yaml:3:19: `auto` on the chat surface for all tenants belongs to the policy `a`" in result.stderr
    assert policy("check", tmp_path / "b.yaml", *GATEWAY).exit_code == 0


def test_check_without_files_or_with_a_broken_configuration(tmp_path):
    assert policy("check", tmp_path, *GATEWAY).exit_code == 2
    assert policy("check", tmp_path / "none.yaml", *GATEWAY).exit_code == 2
    broken = tmp_path / "g.yaml"
    broken.write_text("listn: {}\n")
    result = policy("check", "--config", broken)
    assert result.exit_code == 2
    assert f"{broken}:1:1: unknown key `listn`; did you mean `listen`?" in result.stderr


def test_schema(tmp_path):
    assert json.loads(policy("schema").stdout) == policy_schema()
    assert policy("schema", "--out", tmp_path / "s.json").exit_code == 0
    assert json.loads((tmp_path / "s.json").read_text()) == policy_schema()
    assert policy("schema", "--out", tmp_path / "no" / "s.json").exit_code == 2
