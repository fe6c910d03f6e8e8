"""The files that ship: good, quick to read, described by a schema; and whatever becomes of them, only ConfigError."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.core.errors import ConfigError
from policies.language.json_schema import policy_schema
from policies.language.loader import load_policies, parse_policy
from policies.language.problems import Problems
from policies.language.yaml_reader import plain, read_yaml

FOLDER = Path(__file__).parents[3] / "policies"
FILES = sorted(FOLDER.glob("*.yaml"))
TEXTS = {path.name: path.read_text("utf-8") for path in FILES}
README = (FOLDER / "README.md").read_text("utf-8")
_POSITION = re.compile(r".+?:[1-9]\d*:[1-9]\d*: \S.*")


def tree(text: str):
    root = read_yaml(text.encode(), Problems("f"))
    assert root is not None
    return plain(root)


def test_they_are_good_and_quickly_read():
    began = time.perf_counter()
    policies = load_policies(FOLDER)
    assert time.perf_counter() - began < 0.05 * 4  # noisy machines; alone it takes 2 ms
    assert sorted(policies.by_name) == ["chatbot", "recommendation"]
    for alias in ("auto", "chat", "support-bot"):
        assert policies.resolve(alias, "chat", "local").policy == "chatbot"
    assert policies.resolve("recommend", "tensor", "local").policy == "recommendation"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_they_name_the_schema_and_pass_it(path):
    line = path.read_text("utf-8").splitlines()[0]
    assert line == "# yaml-language-server: $schema=language/policy.schema.json"
    jsonschema_rs.validate(policy_schema(), tree(path.read_text("utf-8")))


def test_the_schema_file_is_up_to_date():
    """If this fails: gateway policy schema --out policies/language/policy.schema.json"""
    assert json.loads((FOLDER / "language/policy.schema.json").read_text("utf-8")) == policy_schema()


def test_the_schema_refuses_what_the_gateway_refuses():
    good = tree(TEXTS["chatbot.yaml"])
    for change in (
        {"hedge": {}},
        {"deadline": 30},
        {"deadline": "30 sec"},
        {"verson": 1},
        {"ladder": ["heavy", "lite"]},
    ):
        assert not jsonschema_rs.is_valid(policy_schema(), {**good, **change}), change
    assert jsonschema_rs.is_valid(policy_schema(), {**good, "deadline": "1.5m"})


def test_every_key_is_described_for_editors():
    schema = policy_schema()
    for part in (schema, *schema["$defs"].values()):
        for key, described in part["properties"].items():
            assert described.get("description"), key


def test_the_readme_names_every_key_and_its_examples_work():
    schema = policy_schema()
    for key in schema["properties"]:
        assert f"`{key}" in README, key
    for key in schema["$defs"]["Cache"]["properties"]:
        assert f"`cache.{key}" in README, key
    examples = [block for block in re.findall(r"```yaml\n(.*?)```", README, re.DOTALL) if "policy:" in block]
    assert len(examples) == 2
    for text in examples:
        parse_policy(Path("README.yaml"), text.encode())


@settings(max_examples=300)
@given(st.data())
def test_a_mutated_file_is_good_or_refused_with_positions(data):
    """Lines lost, doubled, swapped, indented; characters changed; cut anywhere: ConfigError with places, or a policy."""
    text = data.draw(st.sampled_from(sorted(TEXTS.values())))
    lines = text.splitlines(keepends=True)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(lines) - 1))
        kind = data.draw(st.sampled_from(["drop", "double", "swap", "indent", "char", "cut", "value"]))
        line = lines[at]
        if kind == "drop":
            lines[at] = ""
        elif kind == "double":
            lines[at] = line + line
        elif kind == "swap":
            other = data.draw(st.integers(0, len(lines) - 1))
            lines[at], lines[other] = lines[other], lines[at]
        elif kind == "indent":
            lines[at] = data.draw(st.sampled_from(["  ", " ", "\t", "    - "])) + line
        elif kind == "char" and line:
            where = data.draw(st.integers(0, len(line) - 1))
            lines[at] = line[:where] + data.draw(st.text(max_size=2)) + line[where + 1 :]
        elif kind == "cut":
            where = data.draw(st.integers(0, len(line)))
            lines[at:] = [line[:where], *([""] * (len(lines) - at - 1))]
        else:
            value = data.draw(
                st.sampled_from(["[]", "{}", "-1", "'x'", "null", "true", "9s", "*a", "&a 1", "1e99", "|"])
            )
            lines[at] = line.split(":")[0] + ": " + value + "\n"
    try:
        data_bytes = "".join(lines).encode("utf-8", "surrogatepass")
        parse_policy(Path("m.yaml"), data_bytes)
    except ConfigError as error:
        assert error.problems
        for line in error.problems:
            assert _POSITION.fullmatch(line), line
