"""Events come out the same however their bytes were cut."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.sse import MAX_EVENT_BYTES, SseReader
from policies.core.errors import MalformedAnswer

datas = st.lists(
    st.text(alphabet=st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), min_size=1), max_size=6
)


def cut(stream: bytes, places: list[int]) -> list[bytes]:
    edges = sorted({0, len(stream), *(place % (len(stream) + 1) for place in places)})
    return [stream[a:b] for a, b in itertools.pairwise(edges)]


def read(pieces: list[bytes]) -> list[bytes]:
    reader = SseReader()
    return [event for piece in pieces for event in reader.feed(piece)] + reader.flush()


@given(datas, st.sampled_from(["\n", "\r\n"]), st.lists(st.integers(0, 10_000), max_size=30))
def test_any_cut_gives_the_same_events(texts: list[str], line_end: str, places: list[int]) -> None:
    stream = "".join(f": ping{line_end}event: x{line_end}data: {text}{line_end}{line_end}" for text in texts).encode()
    assert read(cut(stream, places)) == [text.encode() for text in texts]


@given(datas, st.lists(st.integers(0, 10_000), max_size=30))
def test_the_lines_of_one_event_are_joined(texts: list[str], places: list[int]) -> None:
    stream = ("".join(f"data:{' ' if text[0] == ' ' else ''}{text}\n" for text in texts) + "\n").encode()
    assert read(cut(stream, places)) == (["\n".join(texts).encode()] if texts else [])


def test_whole_events_in_one_piece() -> None:
    assert SseReader().feed(b"data: a\n\ndata: b\n\n") == [b"a", b"b"]
    assert SseReader().feed(b"data: a\n\n") == [b"a"]
    assert SseReader().feed(b"data: a\r\n\r\n") == [b"a"]


def test_an_event_without_its_last_blank_line_counts_at_the_end() -> None:
    assert read([b"\xef\xbb\xbfdata: a\n\nda", b"ta: b"]) == [b"a", b"b"]


def test_a_line_of_one_mebibyte_passes() -> None:
    text = b"x" * (1 << 20)
    assert read(cut(b"data: " + text + b"\n\n", list(range(0, 1 << 20, 65_536)))) == [text]


@pytest.mark.parametrize("piece", [b"x" * 65_536, b"data: " + b"x" * 65_536 + b"\n", b": " + b"c" * 65_536])
def test_an_event_without_end_is_refused_before_it_fills_memory(piece: bytes) -> None:
    reader = SseReader()
    with pytest.raises(MalformedAnswer, match="larger than"):
        for _ in range(MAX_EVENT_BYTES // 65_536 + 1):
            reader.feed(piece)
