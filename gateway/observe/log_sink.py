"""Where log lines go, so that nothing that becomes of them can hurt a request.

A full disk, a reader that has gone and a reader that does not read cost lines, never time: lines wait in a bounded queue and
a thread of its own writes them. What is lost is counted, and told in one line as soon as lines can be written again.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TextIO

from gateway.observe.metric_store import Family, Sample

MOST_LINES = 10_000
MOST_BYTES = 8 * 1024 * 1024
#: How long the end of a process may wait for lines to be written.
CLOSE_S = 1.0


class LogSink:
    """A file for whole lines: each `write` is one line with its end.

    Each line is one write(2), so that lines of several processes on one pipe do not mix, as long as a line has at most
    PIPE_BUF bytes (4096 on Linux). Pieces of a longer one may stand between lines of other processes.

    A stream without a file descriptor lives in this process, can neither block nor fill, and is written to directly.

    told
        The line that tells how many were lost.
    """

    def __init__(
        self,
        stream: TextIO | None,
        told: Callable[[int], str],
        *,
        most_lines: int = MOST_LINES,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        self._stream = stream
        self._told = told
        self._most_lines = most_lines
        self._most_bytes = most_bytes
        # A copy: should the stream be closed, its number may become some other file's.
        self._fd = _copy_of(stream)
        self._queue: SimpleQueue[bytes | None] = SimpleQueue()
        # Nothing that the garbage collector looks at is made while this is held: what it frees may want to log.
        self._lock = threading.Lock()
        self._closed = False
        #: The time limit of `close` was over and the thread was not done.
        self._stuck = False
        #: Lines that found no room, and those that could not be written; each is counted by one side only.
        self._refused = 0
        self._failed = 0
        self._told_of = 0
        self._bytes_in = 0
        self._bytes_out = 0
        #: A line was written in part: what comes next begins on a new one.
        self._torn = False
        self._thread: threading.Thread | None = None
        if self._fd is not None:
            self._thread = threading.Thread(target=self._run, args=(self._fd,), name="log-sink", daemon=True)
            self._thread.start()

    @property
    def lost(self) -> int:
        """Lines that were not written and never will be."""
        return self._refused + self._failed

    def families(self) -> list[Family]:
        """For `Metrics.source`."""
        return [
            Family(
                "gateway_log_lines_lost",
                "Log lines that could not be written.",
                "counter",
                (),
                "sum",
                [Sample((), [float(self.lost)])],
            )
        ]

    def write(self, text: str) -> int:
        """Never blocks, never raises."""
        line = text.encode("utf-8", "backslashreplace")
        with self._lock:
            if self._thread is None or self._closed:
                self._write_through(text, line)
            elif (
                self._queue.qsize() >= self._most_lines
                or self._bytes_in - self._bytes_out + len(line) > self._most_bytes
            ):
                self._refused += 1
            else:
                self._bytes_in += len(line)
                self._queue.put(line)
        return len(text)

    def flush(self) -> None:
        """Lines are on their way already. Waiting for them is what this file is there to avoid: see `close`."""

    def close(self, limit_s: float = CLOSE_S) -> None:
        """Wait until what is here is written, for at most `limit_s`. Lines that come later are written directly, or lost
        where that would block."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._queue.put(None)
        if self._thread is not None:
            self._thread.join(limit_s)
            self._stuck = self._thread.is_alive()
            if self._stuck:
                # The one that is being written, and those behind it, less the end mark.
                self._refused += self._queue.qsize()

    def _write_through(self, text: str, line: bytes) -> None:
        """Without the thread: at the end of the process, or into a stream that is no file."""
        try:
            if self._fd is not None:
                if self._stuck or not _takes_more(self._fd):
                    raise BlockingIOError
                os.write(self._fd, line)
            elif self._stream is not None:
                self._stream.write(text)
                self._stream.flush()
        except (OSError, ValueError):
            self._refused += 1

    def _run(self, fd: int) -> None:
        while (line := self._queue.get()) is not None:
            self._bytes_out += len(line)
            if not self._put(fd, line):
                self._failed += 1
            elif self._queue.empty():
                self._tell(fd)
        self._tell(fd)

    def _tell(self, fd: int) -> None:
        lost = self.lost
        if lost > self._told_of and self._put(fd, self._told(lost - self._told_of).encode("utf-8", "backslashreplace")):
            self._told_of = lost

    def _put(self, fd: int, line: bytes) -> bool:
        """Write one line; False when that is not possible."""
        rest = b"\n" + line if self._torn else line
        try:
            while rest:
                try:
                    rest = rest[os.write(fd, rest) :]
                except BlockingIOError:
                    # Somebody who shares the pipe has made it non-blocking.
                    poll = select.poll()
                    poll.register(fd, select.POLLOUT)
                    poll.poll()
        except OSError:
            self._torn = self._torn or len(rest) < len(line)
            return False
        self._torn = False
        return True


def _copy_of(stream: TextIO | None) -> int | None:
    try:
        return None if stream is None else os.dup(stream.fileno())
    except (OSError, ValueError, AttributeError):
        return None


def _takes_more(fd: int) -> bool:
    """May a line be written now without waiting?"""
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    return bool(poll.poll(0))
