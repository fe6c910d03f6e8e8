"""Reading YAML: what is understood, what is refused, and that nothing makes it hang, execute or lose its place."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.core.errors import ConfigError
from policies.language.problems import Problems
from policies.language.yaml_reader import MAX_ALIASES, lookup, plain, position, read_bytes, read_yaml


def read(text: str | bytes):
    problems = Problems("f.yaml")
    root = read_yaml(text.encode() if isinstance(text, str) else text, problems)
    return (None if root is None else plain(root)), problems.lines()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a: yes\nb: off\nc: true", {"a": "yes", "b": "off", "c": True}),
        ("a: 12:30\nb: 2026-01-01\nc: 010", {"a": "12:30", "b": "2026-01-01", "c": 10}),
        ("a: .nan\nb: .inf\nc: 1e3", {"a": ".nan", "b": ".inf", "c": 1000.0}),
        ("a: '1'\nb: \"true\"\nc: ~\nd:", {"a": "1", "b": "true", "c": None, "d": None}),
        ("a: -4\nb: 0.5\nc: 1.5m\nd: 30%", {"a": -4, "b": 0.5, "c": "1.5m", "d": "30%"}),
        ("a: " + "9" * 5000, {"a": "9" * 5000}),
        ("- a\n- {b: [1, 2]}", ["a", {"b": [1, 2]}]),
        ("on: 发票", {"on": "发票"}),
        ("\ufeffa: 1\r\nb: |\r\n  x\r\n  y\r\n", {"a": 1, "b": "x\ny\n"}),
        ("a: &x [1]\nb: *x", {"a": [1], "b": [1]}),
        ("a:\t1", {"a": 1}),
        ("--- \na: 1\n...\n", {"a": 1}),
    ],
)
def test_reads_yaml_1_2_without_surprises(text, value):
    assert read(text) == (value, [])


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a: 1\nb:\n  a: 2\n  c: 3\n  a: 4", "f.yaml:5:3: the key `a` stands here twice (first on line 3); remove one"),
        ("a: !!python/object/apply:os.system [ls]", "f.yaml:1:4: tags such as"),
        ("a: !x 1", "f.yaml:1:4: tags such as !x are not used here"),
        ("a: &x [*x]", "f.yaml:1:8: `*x` stands inside its own anchor"),
        ("a: *nope", "f.yaml:1:4: the anchor `&nope` does not exist"),
        ("a: {b: 1}\nc:\n  <<: {d: 1}", "f.yaml:3:3: `<<` merges are not supported"),
        ("a: 1\n---\nb: 2", "f.yaml:2:1: a second document begins here"),
        ("a:\n\tb: 1", "f.yaml:2:1: a tab is used for indentation; YAML wants spaces"),
        ("a:\n  b: 1\n \tc: 1", "f.yaml:3:2: a tab is used for indentation"),
        ("a: [1, 2", "f.yaml:1:9: not valid YAML"),
        ("", "f.yaml:1:1: the file is empty"),
        ("# nothing\n", "f.yaml:1:1: the file is empty"),
        ("a: 1\nb: x\x07", "f.yaml:2:5: the character U+0007 is not allowed"),
        (b"a: 1\nb: \xff", "f.yaml:2:4: this is not UTF-8; save the file as UTF-8"),
        ("a: 1".encode("utf-16"), "f.yaml:1:1: this is not UTF-8 (it looks like UTF-16)"),
        ("发: 1\n票: \x00", "f.yaml:2:4: the character U+0000"),
        ("? [a]\n: 1", "f.yaml:1:3: a key must be a word or a text"),
        ("[" * 40 + "]" * 40, "f.yaml:1:33: nested deeper than 32 levels"),
    ],
)
def test_refuses_with_the_place_and_the_reason(text, line):
    value, lines = read(text)
    assert len(lines) == 1
    assert lines[0].startswith(line), lines
    # A duplicate or a merge is reported, and reading goes on to find more.
    assert value is None or "twice" in line or "merges" in line


def test_all_duplicates_are_reported_and_the_first_value_holds():
    value, lines = read("a: 1\na: 2\nb: 1\nb: 2\nb: 3")
    assert value == {"a": 1, "b": 1}
    assert [line.split(":")[1] for line in lines] == ["2", "4", "5"]


@pytest.mark.parametrize(
    "bomb",
    [
        "a: &a [x, x, x, x, x, x, x, x, x]\n"
        + "".join(f"{b}: &{b} [{', '.join(['*' + a] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)),
        "x: &x 1\ny: [" + ", ".join(["*x"] * (MAX_ALIASES + 1)) + "]",
        "[" * 100_000,
        "{a: " * 100_000,
        "- " * 100_000,
        "a: [" + "1," * 30_000 + "]",
        "&a " * 10_000,
        "? " * 50_000,
        "- - - - - - - - - - &a [*a]",
    ],
)
def test_bombs_are_refused_at_once(bomb):
    began = time.perf_counter()
    value, lines = read(bomb)
    assert value is None
    assert len(lines) == 1
    assert time.perf_counter() - began < 1.0


def test_aliased_depth_counts():
    deep = "a: &a " + "[" * 20 + "1" + "]" * 20 + "\nb: " + "[" * 20 + "*a" + "]" * 20
    _, lines = read(deep)
    assert "nested deeper" in lines[0]


def test_positions_follow_paths():
    root = read_yaml(b"a:\n  - b: 1\n    c: [x, y]\n", Problems("f"))
    assert root is not None
    assert position(root, ("a", 0, "c", 1)) == (3, 12)
    assert position(root, ("a", 0, "missing", 7)) == (2, 5)
    assert lookup(root, ("a", 3)) is None


@given(st.binary(max_size=400))
def test_any_bytes_are_read_or_refused(data):
    value, lines = read(data)
    assert value is None or not lines or "twice" in lines[0] or "merges" in lines[0]
    for line in lines:
        _, row, column, _ = line.split(":", 3)
        assert int(row) >= 1 and int(column) >= 1


@given(st.text(alphabet="ab:-[]{}#&*!|>'\"%@ \t\n发\r,?~", max_size=120))
def test_any_near_yaml_is_read_or_refused(text):
    read(text)


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(10**17), 10**17)
        | st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=20),
        lambda inner: (
            st.lists(inner, max_size=4) | st.dictionaries(st.text("abc", min_size=1, max_size=4), inner, max_size=4)
        ),
        max_leaves=20,
    )
)
def test_json_is_read_as_json(value):
    import json

    got, lines = read(json.dumps(value, ensure_ascii=False))
    assert lines == []
    assert got == value


def test_files_that_are_none(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "big").write_bytes(b"a" * 2_000_000)
    for path, reason in [
        (tmp_path / "pipe", "not a regular file"),
        (tmp_path, "Is a directory"),
        (tmp_path / "none", "cannot be read"),
        (tmp_path / "big", "larger than 1024 KiB"),
        (Path("/dev/zero"), "not a regular file"),
    ]:
        with pytest.raises(ConfigError, match=reason):
            read_bytes(path)
