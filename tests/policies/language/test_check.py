"""Walking a tree against a Struct: every mistake at once, with its place and a suggestion."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta

from policies.language.check import check
from policies.language.problems import Problems
from policies.language.schema import Duration, Later, Limit, Section, Share, Size
from policies.language.units import UnitError, duration, moment, share, size, url
from policies.language.yaml_reader import read_yaml


class Colour(StrEnum):
    RED = "red"
    GREEN = "green"


class Inner(Section, frozen=True, kw_only=True):
    wait_s: Duration = 1.0
    part: Share = 0.5
    room: Size = 0
    fast: bool = False


class Outer(Section, frozen=True, kw_only=True):
    name: Annotated[str, Meta(pattern="^[a-z]+$", min_length=1)]
    count: Annotated[int, Meta(ge=1, le=9)] = 1
    limit: Limit = 1.0
    mode: Literal["one", "two"] = "one"
    colour: Colour | None = None
    colours: frozenset[Colour] = frozenset()
    inner: Inner = Inner()
    items: tuple[Inner, ...] = ()
    table: dict[str, int] = msgspec.field(default_factory=dict)
    place: Path | None = None
    hedge: Later = None
    secret: Annotated[str | None, Meta(extra={"resolved": True})] = None
    token: Annotated[str, Meta(pattern="^[a-z]+$", extra={"secret": True})] | None = None


def walk(text: str) -> tuple[Outer, list[str]]:
    problems = Problems("f")
    root = read_yaml(text.encode(), problems)
    assert root is not None
    return check(root, Outer, problems), problems.lines()


def test_values_arrive_in_their_units():
    value, lines = walk(
        "name: abc\nlimit: 300ms\nmode: two\ncolour: green\ncolours: [red, red]\nplace: ~/x\n"
        "inner: {wait: 1.5m, part: 30%, room: 64MiB, fast: true}\nitems: [{}, {wait: 1h}]\ntable: {a: 1}\n"
    )
    assert lines == []
    assert value == Outer(
        name="abc",
        limit=0.3,
        mode="two",
        colour=Colour.GREEN,
        colours=frozenset({Colour.RED}),
        place=Path("~/x"),
        inner=Inner(wait_s=90.0, part=0.3, room=64 << 20, fast=True),
        items=(Inner(), Inner(wait_s=3600.0)),
        table={"a": 1},
    )


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("nam: abc", "f:1:1: unknown key `nam`; did you mean `name`?"),
        (
            "name: abc\nzzz: 1",
            "f:2:1: unknown key `zzz`; known keys: colour, colours, count, inner, items, limit, mode, place, table, token",
        ),
        ("name: abc\nsecret: x", "f:2:1: unknown key `secret`"),
        ("name: abc\nhedge: {after: 1s}", "f:2:1: `hedge` is not available in this version; remove it"),
        ("count: 2", "f:1:1: the key `name` is missing"),
        ("name: 12", 'f:1:7: `name` must be text, not `12`; did you mean "12"?'),
        ("name: [a]", "f:1:7: `name` must be text, not a list"),
        ("name:", "f:1:6: `name` must be text, not nothing"),
        ("name: ''", "f:1:7: `name` must not be empty"),
        ("name: A b", "f:1:7: `name` has characters that are not allowed here: `A b` (wanted: [a-z]+)"),
        ('name: "a\\n"', "f:1:7: `name` has characters"),
        ("name: abc\ncount: '3'", "f:2:8: `count` must be a whole number, not `3`; did you mean 3 without quotes?"),
        ("name: abc\ncount: 2.0", "f:2:8: `count` must be a whole number, not `2.0`; did you mean 2?"),
        ("name: abc\ncount: true", "f:2:8: `count` must be a whole number, not `true`"),
        ("name: abc\ncount: 10", "f:2:8: `count` must be at most 9"),
        ("name: abc\nlimit: 30", "f:2:8: `limit`: `30` has no unit; did you mean 30s?"),
        ("name: abc\nlimit: 0s", "f:2:8: `limit` must be more than 0"),
        ("name: abc\nlimit: 10min", "did you mean 10m?"),
        ("name: abc\nlimit: soon", "is not a duration; write one number and a unit, such as 300ms, 10s, 1.5m or 1h"),
        ("name: abc\nlimit: [1s]", "f:2:8: `limit` must be a duration such as 300ms, 10s or 1h, not a list"),
        ("name: abc\nmode: tow", "f:2:7: `tow` is no value of `mode`; did you mean `two`?"),
        ("name: abc\ncolour: gren", "f:2:9: `gren` is no value of `colour`; did you mean `green`?"),
        (
            "name: abc\ninner: {fast: yes}",
            "f:2:15: `inner.fast` must be true or false, not `yes`; did you mean `true`?",
        ),
        ("name: abc\ninner: {part: 0.3}", "`0.3` has no unit; did you mean 30%?"),
        ("name: abc\ninner: {room: 64MB}", "did you mean 64MiB?"),
        ("name: abc\ninner: {wait_s: 3s}", "unknown key `wait_s` in `inner`; did you mean `wait`?"),
        ("name: abc\ninner:", "f:2:7: `inner` must be keys and values, not nothing"),
        ("name: abc\nitems: {}", "f:2:8: `items` must be a list, not keys and values"),
        ("name: abc\nitems: [{fast: 1}]", "f:2:16: `items[0].fast` must be true or false, not `1`"),
        ("name: abc\ncolours: red", "f:2:10: `colours` must be a list, not `red`; did you mean [red]?"),
        ("name: abc\ntable: {x: y}", "f:2:12: `table.x` must be a whole number, not `y`"),
        ("- name: abc", "f:1:1: the file must be keys and values, not a list"),
        ("abc", "f:1:1: the file must be keys and values, not `abc`"),
    ],
)
def test_one_mistake_one_line(text, line):
    _, lines = walk(text)
    assert len(lines) == 1, lines
    assert line in lines[0]


@pytest.mark.parametrize("value", ["HUNTER2", "[HUNTER2]", "{HUNTER2: 1}", "'HUN TER2'", "1234567"])
def test_what_may_be_a_secret_is_not_shown(value):
    _, lines = walk(f"name: abc\ntoken: {value}")
    assert len(lines) == 1 and lines[0].startswith("f:2:8: `token` ")
    assert "HUN" not in lines[0] and "1234567" not in lines[0]


def test_all_mistakes_are_reported_in_the_order_of_the_file():
    _, lines = walk("mode: x\ncount: 0\ninner: {wait: 5, fst: true}\nitems: [3]\nhedge: 1\n")
    assert [line.split(": ")[0] for line in lines] == ["f:1:1", "f:1:7", "f:2:8", "f:3:15", "f:3:18", "f:4:9", "f:5:1"]


def test_what_could_not_be_read_is_marked():
    problems = Problems("f")
    root = read_yaml(b"name: abc\nitems: [{fast: 1}, {}]", problems)
    assert root is not None
    check(root, Outer, problems)
    assert problems.touches(("items", 0)) and problems.touches(("items",)) and problems.touches(())
    assert not problems.touches(("items", 1)) and not problems.touches(("name",))


@given(st.recursive(st.text("ab1%s:", max_size=4) | st.integers() | st.none() | st.booleans(),
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
                        st.sampled_from([f.encode_name for f in msgspec.structs.fields(Outer)] + ["wait", "x"]), inner, max_size=4),
                    max_leaves=12))  # fmt: skip
def test_any_tree_gives_a_value_and_its_problems(tree):
    import json

    problems = Problems("f")
    root = read_yaml(json.dumps(tree).encode(), problems)
    if root is None:
        return
    value = check(root, Outer, problems)
    assert isinstance(value, Outer)
    if not problems:
        # What was accepted is what msgspec itself accepts for the type.
        assert msgspec.convert(msgspec.to_builtins(value), Outer) == value


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("300ms", 0.3), ("10s", 10), ("1.5m", 90), ("1h", 3600), ("7d", 604_800), ("0s", 0), ("5 s", 5)],
)
def test_durations(text, seconds):
    assert duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text", ["", "s", "-1s", "1e3s", "1h30m", "1..5s", "٣s", "400d", "1 s s", "9" * 400 + "s", "inf", "0x1s"]
)
def test_no_durations(text):
    with pytest.raises(UnitError):
        duration(text)


def test_other_units():
    assert share("30%") == 0.3 and share("100%") == 1.0
    assert size("4MiB") == 4 << 20 and size("0.5KiB") == 512
    assert moment("2026-12-31") == 1_798_675_200.0
    assert moment("2026-12-31T08:00:00+08:00") == moment("2026-12-31T00:00:00Z")
    assert url("http://h:1/v1/") == "http://h:1/v1"
    for reader, text in [
        (share, "101%"), (share, "-1%"), (size, "2000GiB"), (moment, "tomorrow"), (moment, "2026-12-31T00:00:00"),
        (url, "ftp://x"), (url, "http://"), (url, "http://u:p@h/"), (url, "http://h/?q=1"), (url, "http://h:99999/"),
    ]:  # fmt: skip
        with pytest.raises(UnitError):
            reader(text)


def test_a_url_with_credentials_is_refused_without_showing_them():
    with pytest.raises(UnitError) as caught:
        url("http://me:hunter2@h/")
    assert "hunter2" not in str(caught.value)
