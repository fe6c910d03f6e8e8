"""The hash of training and serving: the quick way equals the plain one."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from routing import ngrams

MIXED = st.text(st.one_of(st.sampled_from("ab Z09_-.\n卡到了吗éЖ😀ñ"), st.characters(exclude_categories=("Cs",))))


def reference(text: str, bits: int) -> tuple[list[int], int]:
    """Word by word, byte by byte, straight from the definition."""
    words: list[bytes] = []
    current = b""
    for character in text:
        raw = character.encode()
        folded = b"0" if character in "0123456789" else raw.lower() if len(raw) == 1 else raw
        if len(raw) >= 3:
            words += [current, folded]
            current = b""
        elif len(raw) == 2 or folded.isalnum() or folded == b"_":
            current += folded
        else:
            words.append(current)
            current = b""
    words = [word for word in [*words, current] if word]
    hashes = [sum(byte * 256**position for position, byte in enumerate(word)) % ngrams.PRIME for word in words]
    found = [h * ngrams.C1 % 2**64 >> 64 - bits for h in hashes]
    for before, after in itertools.pairwise(hashes):
        found.append((after * ngrams.C1 + before * ngrams.C2) * ngrams.C1 % 2**64 >> 64 - bits)
    return found, len(words)


@given(MIXED, st.sampled_from([10, 16, 18]))
@example("card 卡到了吗 ok?", 16)
@example("😀😀a😀", 16)
@example("", 16)
def test_all_ways_agree(text: str, bits: int) -> None:
    folded = ngrams.fold(text.encode())
    expected, words = reference(text, bits)
    many, count = ngrams.indices(folded, bits)
    looped, counted = ngrams.indices_loop(folded, bits)
    assert (many.tolist(), count) == (expected, words)
    assert (sorted(looped), counted) == (sorted(expected), words)


def test_case_and_digits_do_not_matter_but_letters_do() -> None:
    def found(text: str) -> list[int]:
        return ngrams.indices(ngrams.fold(text.encode()), 16)[0].tolist()

    assert found("Call 12 People") == found("call 98 people")
    assert found("call") != found("calm")


@pytest.mark.parametrize("text", ["长" * 20_000, "é" * 20_000, "😀" * 9_000, "a" * 50_000])
def test_very_long_text_is_cut_at_a_character(text: str) -> None:
    folded = ngrams.fold(text.encode())
    assert len(folded) <= ngrams.MAX_BYTES
    assert ngrams.indices(folded, 16)[1] == ngrams.indices_loop(folded, 16)[1]
