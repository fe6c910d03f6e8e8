"""Request bodies are read strictly, and numbers come out in one form."""

import pytest

from backends.json_codec import MAX_DEPTH, decode_object
from policies.core.errors import InvalidRequest


def test_numbers_are_normalised_once() -> None:
    body = decode_object(b'{"a": 1.0, "b": 1e0, "c": -0.0, "d": 0.5, "e": 123456789012345678901234567890, "f": true}')
    assert body == {"a": 1, "b": 1, "c": 0, "d": 0.5, "e": 123456789012345678901234567890, "f": True}
    assert [type(body[name]) for name in "abcdef"] == [int, int, int, float, int, bool]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "empty"),
        (b"  \n", "empty"),
        (b"[1]", "must be a JSON object"),
        (b'"text"', "must be a JSON object"),
        (b'{"a": NaN}', "byte 6"),
        (b'{"a": Infinity}', "byte 6"),
        (b'{"a": 1e999}', "too large"),
        (b'{"a": -1e999}', "too large"),
        (b'{"a": 1', "byte 7"),
        (b'{"a": 1}}', "trailing"),
        (b"{'a': 1}", "byte 1"),
        (b'{"a": "\xff"}', "UTF-8"),
        (b'{"a": "\\ud800"}', "not valid JSON"),
        (b'{"a": "\x01"}', "byte 7"),
        (b"\xef\xbb\xbf{}", "byte 0"),
        (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested deeper"),
        (b'{"a":' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}", "nested deeper"),
        (b'{"a":' * (MAX_DEPTH + 1) + b"1" + b"}" * (MAX_DEPTH + 1), "nested deeper"),
    ],
)
def test_what_is_not_one_json_object_is_refused_and_said_where(data: bytes, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as caught:
        decode_object(data)
    assert caught.value.code == "invalid_json"


def test_depth_counts_levels_not_brackets() -> None:
    wide = b'{"a":[' + b",".join([b"{}"] * 1000) + b"]}"
    assert len(decode_object(wide)["a"]) == 1000
    deep = b'{"a":' + b"[" * (MAX_DEPTH - 1) + b"]" * (MAX_DEPTH - 1) + b"}"
    assert decode_object(deep)
