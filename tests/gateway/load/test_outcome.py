"""What becomes of a request in the report."""

from __future__ import annotations

import pytest

from gateway.load.outcome import Outcome, Seen, classify, error_code, is_quota, rung_of
from gateway.load.sse import StreamReader
from tests.support.load_target import CUT_STREAM, ERROR_STREAM, STREAM


@pytest.mark.parametrize(
    ("seen", "outcome"),
    [
        (Seen(200, "heavy"), Outcome.FULL),
        (Seen(200, "canned"), Outcome.FULL),
        (Seen(200, "none"), Outcome.FULL),
        (Seen(200, "light", degraded=True), Outcome.DEGRADED),
        (Seen(200, "stale"), Outcome.DEGRADED),
        (Seen(200, "default"), Outcome.DEGRADED),
        (Seen(200, "heavy", complete=False, committed=True), Outcome.CUT),
        (Seen(200, "heavy", complete=False), Outcome.FAILED),
        (Seen(0, error="ClientConnectorError"), Outcome.FAILED),
        (Seen(302), Outcome.FAILED),
        (Seen(408), Outcome.FAILED),
        (Seen(500), Outcome.FAILED),
        (Seen(503), Outcome.FAILED),
        (Seen(429), Outcome.FAILED),
        (Seen(429, quota=True), Outcome.CLIENT_ERROR),
        (Seen(400), Outcome.CLIENT_ERROR),
        (Seen(401), Outcome.CLIENT_ERROR),
        (Seen(404), Outcome.CLIENT_ERROR),
    ],
)
def test_each_sight_has_its_outcome(seen, outcome):
    assert classify(seen) is outcome


@pytest.mark.parametrize(
    ("headers", "rung"),
    [({}, "none"), ({"x-gateway-rung": "hit-l1"}, "hit-l1"), ({"x-gateway-rung": "x" * 99}, "other")],
)
def test_rungs_are_a_closed_set(headers, rung):
    assert rung_of(headers) == rung


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b'{"error":{"code":"limit_reached","message":"m"}}', "limit_reached"),
        (b'{"error":"an oip error"}', ""),
        (b'{"error":{"code":7}}', ""),
        (b"[1]", ""),
        (b"\xff\xfe", ""),
        (b"<html>", ""),
        (b"", ""),
    ],
)
def test_error_codes_are_read_from_any_body(body, code):
    assert error_code(body) == code


def test_a_quota_is_told_from_a_shed_request():
    assert is_quota({}, "quota_exceeded") and is_quota({"X-RateLimit-Remaining-Requests": "0"}, "")
    assert not is_quota({"retry-after": "1"}, "limit_reached")


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_a_stream_is_understood_in_pieces_of_any_size(size):
    reader, data = StreamReader(), b"".join(STREAM)
    contents = [reader.feed(data[at : at + size]) for at in range(0, len(data), size)]
    assert any(contents) and reader.chunks == 3
    assert reader.complete and reader.committed and reader.why_incomplete() == ""


def test_the_first_content_is_not_the_role():
    reader = StreamReader()
    assert not reader.feed(STREAM[0])
    assert reader.feed(STREAM[1])


@pytest.mark.parametrize(
    ("pieces", "committed", "why"),
    [
        (CUT_STREAM, True, "stream_not_finished"),
        (STREAM[:1], False, "stream_without_content"),
        (STREAM[:-1], True, "stream_without_done"),
        (ERROR_STREAM, True, "error_event"),
        ((b"data: nonsense\n\n",), False, "event_not_understood"),
        ((b'data: {"choices":[{"delta":{"tool_calls":[{"index":0}]}}]}\n\n',), True, "stream_not_finished"),
    ],
)
def test_what_is_wrong_with_a_stream_is_named(pieces, committed, why):
    reader = StreamReader()
    for piece in pieces:
        reader.feed(piece)
    assert (reader.committed, reader.complete, reader.why_incomplete()) == (committed, False, why)
