"""Server-sent events, read from bytes that arrive in any pieces (WHATWG HTML, section 9.2.6, `data` fields only)."""

from __future__ import annotations

from policies.core.errors import MalformedAnswer

MAX_EVENT_BYTES = 2 << 20


class SseReader:
    """`feed` bytes, get the `data` of every event that is complete. Lines end in LF or CR LF; comments and the fields
    `event`, `id` and `retry` are skipped; the lines of a multi-line event are joined by LF.

    Raises MalformedAnswer when one event grows past `limit_bytes`: memory stays bounded whatever a backend sends.
    """

    __slots__ = ("_buffer", "_data", "_data_bytes", "_limit", "_scanned")

    def __init__(self, limit_bytes: int = MAX_EVENT_BYTES) -> None:
        self._limit = limit_bytes
        self._buffer = bytearray()
        self._scanned = 0  # bytes of the buffer known to hold no LF: each byte is searched once
        self._data: list[bytes] = []
        self._data_bytes = 0

    def feed(self, piece: bytes) -> list[bytes]:
        if not self._buffer and not self._data and piece[:6] == b"data: " and piece[-2:] == b"\n\n":
            # The common case, whole events in one piece: no copying into the buffer.
            if b"\r" not in piece and piece.count(b"\n") == 2:
                self._check(len(piece))
                return [piece[6:-2]]
            lines = piece.split(b"\n")
            lines.pop()
        else:
            buffer = self._buffer
            buffer += piece
            end = buffer.rfind(b"\n", self._scanned)
            if end < 0:
                self._scanned = len(buffer)
                self._check(len(buffer) + self._data_bytes)
                return []
            lines = bytes(buffer[:end]).split(b"\n")
            del buffer[: end + 1]
            self._scanned = len(buffer)
        events: list[bytes] = []
        for line in lines:
            self._line(line, events)
        self._check(len(self._buffer) + self._data_bytes)
        return events

    def flush(self) -> list[bytes]:
        """At the end of the input: an event whose last blank line is missing still counts."""
        events: list[bytes] = []
        if self._buffer:
            self._line(bytes(self._buffer), events)
            self._buffer.clear()
            self._scanned = 0
        self._line(b"", events)
        return events

    def _line(self, line: bytes, events: list[bytes]) -> None:
        if line[-1:] == b"\r":
            line = line[:-1]
        if not line:
            if self._data:
                events.append(self._data[0] if len(self._data) == 1 else b"\n".join(self._data))
                self._data = []
                self._data_bytes = 0
            return
        if line[:3] == b"\xef\xbb\xbf":
            line = line[3:]
        if line[:5] == b"data:":
            value = line[6:] if line[5:6] == b" " else line[5:]
            self._data.append(value)
            self._data_bytes += len(value)
            self._check(self._data_bytes)

    def _check(self, size: int) -> None:
        if size > self._limit:
            raise MalformedAnswer(f"one event of the stream is larger than {self._limit} bytes")
