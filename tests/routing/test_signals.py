"""Every registered signal keeps the contract; then what each one finds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.language.schema import SignalSpec
from routing.heads import Heads
from routing.reading import Score
from routing.registry import SIGNALS
from routing.signals.base import SpecError
from routing.signals.keywords import Keywords
from routing.signals.length import Length, estimate_tokens
from routing.signals.structure import MARKS, Structure
from tests.support.classify import DIMENSIONS, chat, vector, write_embedding, write_lexical

SPECS = {
    "complexity": SignalSpec(kind="complexity"),
    "embedding_head": SignalSpec(kind="embedding_head", head="meaning"),
    "keywords": SignalSpec(kind="keywords", any=("refund", "发票", "a")),
    "length": SignalSpec(kind="length", tokens=100),
    "structure": SignalSpec(kind="structure"),
}
ODD = [
    "",
    " \n\t ",
    "hello",
    "我需要开发票",
    "😀🇨🇳👨‍👩‍👧",
    "\ud800 lone",
    "\x00\x01",
    "a\u0301" * 50,
    "ﷺ" * 100,
    "a" * 1_000_000,
    "长" * 200_000,
    "|" * 5_000 + "\n" * 5_000,
    "{" * 3_000 + '"' * 3_000,
    "- " * 3_000,
    "((((" * 3_000 + "def f(",
    None,
    [{"type": "text"}],
    [{"type": "text", "text": None}],
]


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Heads:
    folder: Path = tmp_path_factory.mktemp("heads")
    write_lexical(folder)
    write_embedding(folder, np.ones(DIMENSIONS, np.float32))
    return Heads([folder])


def score_of(kind: str, heads: Heads, content: object) -> Score:
    signal = SIGNALS[kind].compile(SPECS[kind], heads)
    if signal.needs_embedding:
        return signal.read_vector(vector(str(content)[:50].encode("utf-8", "replace").decode()))
    return signal.read(chat(content))


def test_the_suite_knows_every_signal() -> None:
    assert set(SPECS) == set(SIGNALS)


@pytest.mark.parametrize("content", ODD, ids=range(len(ODD)))
@pytest.mark.parametrize("kind", SIGNALS)
def test_any_text_gives_a_bounded_repeatable_score(kind: str, content: object, heads: Heads) -> None:
    score = score_of(kind, heads, content)
    assert 0.0 <= score.value <= 1.0
    assert score.text
    assert score == score_of(kind, heads, content)


@pytest.mark.parametrize("kind", SIGNALS)
@settings(max_examples=60, deadline=None)
@given(text=st.text())
def test_random_text_never_raises(kind: str, text: str, heads: Heads) -> None:
    assert 0.0 <= score_of(kind, heads, text).value <= 1.0


@pytest.mark.parametrize("kind", SIGNALS)
def test_the_reason_holds_nothing_of_the_prompt(kind: str, heads: Heads) -> None:
    assert "zanzibar" not in score_of(kind, heads, "my secret is zanzibar").text


@pytest.mark.parametrize(
    ("spec", "key"),
    [
        (SignalSpec(kind="keywords"), "any"),
        (SignalSpec(kind="keywords", any=("ok", " ")), "any"),
        (SignalSpec(kind="length"), "tokens"),
        (SignalSpec(kind="structure", marks=("codes",)), "marks"),
        (SignalSpec(kind="complexity", head="complexty"), "head"),
        (SignalSpec(kind="complexity", head="meaning"), "head"),
        (SignalSpec(kind="embedding_head"), "head"),
        (SignalSpec(kind="embedding_head", head="nothing"), "head"),
    ],
)
def test_a_bad_spec_names_its_key(spec: SignalSpec, key: str, heads: Heads) -> None:
    with pytest.raises(SpecError) as raised:
        SIGNALS[spec.kind].compile(spec, heads)
    assert raised.value.key == key
    assert key in SIGNALS[spec.kind].reads


@pytest.mark.parametrize(
    ("word", "text", "found"),
    [
        ("发票", "我需要开发票", True),
        ("发票", "发  票", False),
        ("py", "happy", False),
        ("py", "a .py file", True),
        ("py", "py", True),
        ("python", "用python写函数", True),
        ("python", "PYTHON3", False),
        ("Python", "ｐｙｔｈｏｎ 是什么", True),
        ("c++", "is c++11 hard?", True),
        ("step by step", "explain it Step\n  by step", True),
        ("step by step", "misstep by step", False),
        ("café", "a Café.", True),
        ("caf", "café", False),
        ("hi", "which this " * 40 + "hi", True),
        ("hi", "which this " * 40, False),
        ("straße", "STRASSE", True),
        ("snake_case", "my_snake_case", False),
        ("退款", "我要退款，谢谢", True),
        ("ok", "ไทยokไทย", True),
    ],
)
def test_keywords(word: str, text: str, found: bool) -> None:
    score = Keywords((word,)).read(chat(text))
    assert score.value == float(found)


def test_keywords_name_the_word() -> None:
    assert Keywords(("refund", "Invoice")).read(chat("an INVOICE please")).text == "keyword: invoice"


def test_length_counts_tokens_in_both_languages() -> None:
    english = estimate_tokens(400, 400)
    chinese = estimate_tokens(100, 300)
    assert english == pytest.approx(100)
    assert chinese == pytest.approx(80)
    length = Length(200)
    assert length.read(chat("x" * 400)).value == pytest.approx(0.5)
    assert length.read(chat("字" * 125)).value == pytest.approx(0.5)
    assert length.read(chat("x" * 10_000)).value == 1.0


def test_length_sees_what_was_cut_off() -> None:
    assert Length(10**6).read(chat("word " * 400_000)).value == pytest.approx(0.5, rel=0.01)


@pytest.mark.parametrize(
    ("text", "mark"),
    [
        ("```\nprint(1)\n```", "code"),
        ("def total(items):\n    return sum(items)", "code"),
        ("import numpy as np", "code"),
        ("SELECT name FROM users WHERE id = 4", "code"),
        ("int a = 1;\nfor (;;) {\n a += 2;\n}\n", "code"),
        ("what is \\frac{1}{2}", "maths"),
        ("solve 3x + 5 = 20", "maths"),
        ("求 ∫ x dx", "maths"),
        ("12 * 13", "maths"),
        ("|a|b|\n|-|-|\n|1|2|", "table"),
        ("- one\n- two", "list"),
        ("1. 苹果\n2. 香蕉", "list"),
        ('{"name": "x", "n": 3}', "json"),
    ],
)
def test_structure_finds(text: str, mark: str) -> None:
    assert Structure((mark,)).read(chat(text)).value == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "What are your opening hours?",
        "Can I come at 9 (or 10)? I'd like a table for two.",
        "我想订一张去上海的火车票，谢谢！",
        "Please tell me about classes for beginners - and prices.",
        "I like this and/or that.",
        "Let me import my photos from my phone",
    ],
)
def test_prose_has_no_structure(text: str) -> None:
    score = Structure(tuple(MARKS)).read(chat(text))
    assert score.value == 0.0, score.text


def test_structure_sees_tools_and_json_mode() -> None:
    assert Structure(("tools",)).read(chat("x", tools=[{}])).text == "found: tools"
    assert Structure(("json",)).read(chat("x", response_format={"type": "json_object"})).value == 1.0


def test_an_embedding_head_wants_its_own_dimensions(heads: Heads) -> None:
    signal = SIGNALS["embedding_head"].compile(SPECS["embedding_head"], heads)
    assert signal.read_vector(np.ones(3, np.float32)).neutral
