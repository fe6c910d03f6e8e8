from __future__ import annotations

import codecs
import itertools

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from backends.onnx.chat_prompt import ChatPrompt
from backends.onnx.detokenize import StreamText, TokenBytes, byte_alphabet

BYTES = TokenBytes([bytes([value]) for value in range(256)])
letters = st.text("ab<>é漢🎉", max_size=24)
stops = st.lists(st.text("ab<>é漢", min_size=1, max_size=4), max_size=3)


def shown(text: bytes, cuts: list[int], stop: list[str] = ()) -> tuple[list[str], StreamText]:
    """What is shown after each token, when `text` comes in tokens cut at `cuts`."""
    edges = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    tokens = [text[a:b] for a, b in itertools.pairwise(edges)]
    stream = StreamText(TokenBytes(tokens), stop)
    pieces = [stream.push(token) for token in range(len(tokens))]
    return [*pieces, stream.finish()], stream


@given(st.text(max_size=40), st.lists(st.integers(0, 200), max_size=12))
def test_any_cut_gives_back_the_text_in_whole_characters(text, cuts):
    assume("\ufffd" not in text)
    pieces, _ = shown(text.encode(), cuts)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@given(st.binary(max_size=40), st.lists(st.integers(0, 200), max_size=12))
def test_bytes_that_are_no_text_become_the_same_marks_however_they_come(raw, cuts):
    pieces, _ = shown(raw, cuts)
    whole = codecs.getincrementaldecoder("utf-8")("replace").decode(raw)  # without the unfinished end
    assert "".join(pieces) == whole
    assert raw.decode("utf-8", "replace").startswith(whole)


def test_an_unfinished_character_at_the_end_is_not_shown():
    pieces, _ = shown("ab🎉".encode()[:-1], [1, 2, 3, 4])
    assert "".join(pieces) == "ab"


def stopped_by_letters(text: str, stop: list[str]) -> tuple[str, bool]:
    """The definition: the text ends where a stop string is first complete, before the longest that ends there."""
    for end in range(1, len(text) + 1):
        complete = [s for s in stop if text[:end].endswith(s)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


@given(letters, st.lists(st.integers(0, 100), max_size=12), stops)
def test_stop_strings_cut_the_text_at_the_same_place_however_it_comes(text, cuts, stop):
    pieces, stream = shown(text.encode(), cuts, stop)
    assert ("".join(pieces), stream.stopped) == stopped_by_letters(text, stop)


@given(letters, st.lists(st.integers(0, 100), max_size=12), stops)
def test_text_is_held_back_only_while_it_may_become_a_stop_string(text, cuts, stop):
    encoded = text.encode()
    pieces, stream = shown(encoded, cuts, stop)
    assume(not stream.stopped)
    held = pieces[-1]
    assert held == "" or any(s.startswith(held) and s != held for s in stop)


def test_nothing_is_shown_after_a_stop_string():
    stream = StreamText(BYTES, ["END"])
    text = [stream.push(token) for token in b"abEN"] + [stream.push(token) for token in b"Dcd"]
    assert "".join(text) + stream.finish() == "ab"
    assert stream.stopped


def test_a_disproved_stop_string_is_shown_at_once():
    stream = StreamText(BYTES, ["END"])
    assert [stream.push(token) for token in b"aENx"] == ["a", "", "", "ENx"]


def test_decodes_as_the_tokenizer_itself_does(tiny_chat):
    tokenizer = ChatPrompt(tiny_chat).tokenizer
    vocabulary = TokenBytes.of(tokenizer)
    source = np.random.default_rng(3)
    for _ in range(50):
        ids = source.integers(0, tokenizer.get_vocab_size(), size=30).tolist()
        assert vocabulary.decode(ids) == tokenizer.decode(ids, skip_special_tokens=True)


def test_the_byte_alphabet_is_complete():
    assert sorted(byte_alphabet().values()) == list(range(256))


def test_refuses_a_vocabulary_that_is_not_byte_level():
    tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(ValueError, match="must be ByteLevel"):
        TokenBytes.of(tokenizer)
    tokenizer = Tokenizer(models.WordLevel({"漢": 0}, unk_token="漢"))
    tokenizer.decoder = decoders.ByteLevel()
    with pytest.raises(ValueError, match="byte-level alphabet"):
        TokenBytes.of(tokenizer)
