"""Head files: what is written is read, and what is damaged is refused with its reason."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.core.errors import ConfigError
from routing import ngrams
from routing.heads import Calibration, EmbeddingHead, Header, HeadFileError, Heads, LexicalHead, read_head, write_head
from tests.support.classify import DIMENSIONS, write_embedding, write_lexical


def sealed(body: bytes) -> bytes:
    return body + hashlib.blake2b(body, digest_size=16).digest()


def test_what_is_written_is_read(tmp_path: Path) -> None:
    table = np.linspace(-1, 1, 1 << 10).astype(np.float16)
    header = Header(
        kind="lexical",
        arrays=(),
        calibration=Calibration(scale=2.0, centre=0.3),
        bias=0.25,
        length_weight=0.5,
        short_weight=1.5,
        about={"rows": 3},
    )
    fingerprint = write_head(tmp_path / "a.head", header, {"table": table})
    head = read_head(tmp_path / "a.head")
    assert isinstance(head, LexicalHead)
    assert head.fingerprint == fingerprint
    assert head.header.about == {"rows": 3}
    text = "Two short words 你好"
    found, words = ngrams.indices(ngrams.fold(text.encode()), 10)
    log_words = math.log(1 + words)
    expected = 0.25 + 0.5 * (log_words - 4.0) + 1.5 * (log_words - 2.7)
    expected += table[found].astype(float).sum() / math.sqrt(2 * words - 1)
    assert head.logit(text.encode())[0] == pytest.approx(expected, abs=1e-5)


def test_short_and_long_text_are_scored_alike(tmp_path: Path) -> None:
    """The plain loop and numpy meet at LOOP_BYTES without a step."""
    head = read_head(write_lexical(tmp_path))
    assert isinstance(head, LexicalHead)
    text = b"ab " * (ngrams.LOOP_BYTES // 3)
    below, above = head.logit(text.strip())[0], head.logit(text + b" " * 20)[0]
    assert below == pytest.approx(above, abs=1e-4)
    assert head.logit(b" ... ") == (0.0, 0)


def test_half_precision_keeps_the_order(tmp_path: Path) -> None:
    head = read_head(write_embedding(tmp_path, np.arange(DIMENSIONS, dtype=np.float32)))
    assert isinstance(head, EmbeddingHead)
    assert head.logit(np.eye(DIMENSIONS, dtype=np.float32)[3]) == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda data: b"", "not a head file"),
        (lambda data: b"PK\x03\x04" + data[4:], "not a head file"),
        (lambda data: data[:4] + b"\x09" + data[5:], "version 9"),
        (lambda data: data[:-40], "damaged or cut off"),
        (lambda data: data[:100] + bytes([data[100] ^ 1]) + data[101:], "damaged"),
        (lambda data: sealed(data[:-16] + b"more"), "longer than its header"),
        (lambda data: sealed(data[:-18]), "does not fit"),
        (lambda data: sealed(data[:5] + b"\xff\xff\xff\xff" + data[9:-16]), "header cannot be read"),
        (lambda data: sealed(data[:-16].replace(b'"lexical"', b'"magical"')), "kind 'magical'"),
        (lambda data: sealed(data[:-16].replace(b'"table"', b'"tabel"')), "lacks the array"),
        (lambda data: sealed(data[:-16].replace(b'"float16"', b'"object0"')), "unknown type"),
        (lambda data: sealed(data[:-16].replace(b"[1024]", b"[1023]")), "longer than its header"),
        (lambda data: sealed(data[:-16].replace(b"[1024]", b"[-102]")), "does not fit"),
        (lambda data: sealed(data[:-18] + b"\x00\x7e"), "not finite"),
    ],
)
def test_a_bad_file_is_refused(damage: object, says: str, tmp_path: Path) -> None:
    path = write_lexical(tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(HeadFileError, match=says) as raised:
        read_head(path)
    assert str(path) in str(raised.value)
    assert "gateway route train" in str(raised.value)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_random_bytes_are_refused(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("h")
    good = write_lexical(folder).read_bytes()[:-16]
    at = data.draw(st.integers(4, 200))
    bad = folder / "bad.head"
    bad.write_bytes(sealed(good[:at] + data.draw(st.binary(min_size=1, max_size=30)) + good[at:]))
    with pytest.raises(HeadFileError):
        read_head(bad)


def test_heads_by_name_and_all_faults_at_once(tmp_path: Path) -> None:
    write_lexical(tmp_path)
    write_embedding(tmp_path, np.ones(DIMENSIONS, np.float32))
    heads = Heads([tmp_path])
    assert set(heads.names()) == {"complexity", "meaning"}
    assert "did you mean 'complexity'" in heads.why_not("complexty", "lexical")
    assert "is of kind embedding" in heads.why_not("meaning", "lexical")
    (tmp_path / "b.head").write_bytes(b"x")
    (tmp_path / "c.head").write_bytes(b"y")
    with pytest.raises(ConfigError) as raised:
        Heads([tmp_path, tmp_path / "gone.head"])
    assert len(raised.value.problems) == 3


def test_the_shipped_heads_tell_everyday_talk_from_hard_work() -> None:
    head = Heads.shipped().get("complexity")
    assert isinstance(head, LexicalHead)

    def score(text: str) -> float:
        return head.calibration.score(head.logit(text.encode())[0])

    for simple in (
        "Hi",
        "Thanks!",
        "When do you close on Friday?",
        "请问地铁站怎么走",
        "谢谢你",
        "Could you pass on my order number?",
    ):
        assert score(simple) < 0.4, simple
    for hard in (
        "请推导这个递推式的复杂度，并严格证明每一步的正确性",
        "设计一个高可用的分布式消息队列，并论证一致性取舍",
    ):
        assert score(hard) > 0.5, hard
