"""Where log lines go: pipes that nobody reads, full disks, readers that have gone."""

import fcntl
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import TextIO

import pytest

from gateway.observe.log_sink import LogSink


def _told(lost: int) -> str:
    return f"{lost} lost\n"


class _Pipe:
    def __init__(self) -> None:
        self.reading, writing = os.pipe()
        self.stream: TextIO = os.fdopen(writing, "w")
        # Room for exactly one page: it is quickly full.
        fcntl.fcntl(self.reading, fcntl.F_SETPIPE_SZ, 4096)

    def fill(self) -> None:
        os.write(self.stream.fileno(), b"." * 4095 + b"\n")

    def read(self) -> bytes:
        """What is there, or the next that comes."""
        return os.read(self.reading, 65536)

    def stop_reading(self) -> None:
        os.close(self.reading)
        self.reading = -1

    def close(self) -> None:
        self.stream.close()
        if self.reading >= 0:
            self.stop_reading()


@pytest.fixture
def pipe() -> Iterator[_Pipe]:
    pipe = _Pipe()
    yield pipe
    pipe.close()


def _soon(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 2.0
    while not condition():
        assert time.monotonic() < deadline
        os.sched_yield()


def test_lines_come_out_whole_and_in_order(pipe: _Pipe) -> None:
    sink = LogSink(pipe.stream, _told)
    for number in range(20):
        sink.write(f"line {number}\n")
    sink.close()
    assert pipe.read().decode().split("\n") == [*(f"line {number}" for number in range(20)), ""]
    assert sink.lost == 0


def test_a_pipe_that_nobody_reads_costs_lines_and_no_time(pipe: _Pipe) -> None:
    pipe.fill()
    sink = LogSink(pipe.stream, _told, most_lines=10)
    sink.write("stuck\n")
    _soon(lambda: sink._queue.qsize() == 0)
    began = time.monotonic()
    for number in range(1_000):
        sink.write(f"line {number}\n")
    assert time.monotonic() - began < 0.5
    assert sink.lost == 990
    assert [family.samples[0].value for family in sink.families()] == [[990.0]]
    # Somebody reads again.
    got = b""
    while b"lost" not in got:
        got += pipe.read()
    assert got.decode().split("\n")[1:] == ["stuck", *(f"line {number}" for number in range(10)), "990 lost", ""]
    sink.write("after\n")
    assert pipe.read() == b"after\n"
    sink.close()
    assert sink.lost == 990


def test_bytes_are_bounded_too(pipe: _Pipe) -> None:
    pipe.fill()
    sink = LogSink(pipe.stream, _told, most_bytes=1_000)
    sink.write("stuck\n")
    _soon(lambda: sink._queue.qsize() == 0)
    for _ in range(10):
        sink.write("x" * 299 + "\n")
    assert sink.lost == 7
    sink.close(limit_s=0.05)


def test_the_end_does_not_wait_longer_than_its_limit(pipe: _Pipe) -> None:
    pipe.fill()
    sink = LogSink(pipe.stream, _told)
    for _ in range(5):
        sink.write("stuck\n")
    began = time.monotonic()
    sink.close(limit_s=0.1)
    assert 0.09 < time.monotonic() - began < 1.0
    assert sink.lost == 5
    sink.write("later\n")
    sink.close()
    assert sink.lost == 6


def test_lines_after_the_end_are_written_where_that_does_not_block(pipe: _Pipe) -> None:
    sink = LogSink(pipe.stream, _told)
    sink.write("before\n")
    sink.close()
    assert pipe.read() == b"before\n"
    sink.write("after\n")
    assert pipe.read() == b"after\n"
    pipe.fill()
    sink.write("no room\n")
    assert sink.lost == 1


def test_a_full_disk_loses_lines_and_nothing_else() -> None:
    with open("/dev/full", "w") as full:
        sink = LogSink(full, _told)
        for _ in range(100):
            sink.write("line\n")
        _soon(lambda: sink.lost == 100)
        sink.close()
        sink.write("later\n")
        assert sink.lost == 101


def test_a_reader_that_has_gone_loses_lines_and_nothing_else(pipe: _Pipe) -> None:
    sink = LogSink(pipe.stream, _told)
    pipe.stop_reading()
    sink.write("line\n")
    _soon(lambda: sink.lost == 1)
    sink.close()


def test_a_line_that_was_written_in_part_does_not_spoil_the_next(pipe: _Pipe) -> None:
    """A line longer than the pipe has room for, whose reader leaves in mid-line; another one comes."""
    path = f"/proc/self/fd/{pipe.stream.fileno()}"
    sink = LogSink(pipe.stream, _told)
    sink.write("y" * 10_000 + "\n")
    assert pipe.read().startswith(b"y")
    pipe.stop_reading()
    _soon(lambda: sink.lost == 1)
    # Opening a pipe's end by its name makes a new reader, as with a named pipe.
    pipe.reading = os.open(path, os.O_RDONLY)
    sink.write("whole\n")
    got = b""
    while not got.endswith(b"lost\n"):
        got += pipe.read()
    assert got.lstrip(b"y") == b"\nwhole\n1 lost\n"
    sink.close()


def test_a_pipe_that_somebody_made_non_blocking(pipe: _Pipe) -> None:
    os.set_blocking(pipe.stream.fileno(), False)
    pipe.fill()
    sink = LogSink(pipe.stream, _told)
    sink.write("line\n")
    pipe.read()
    assert pipe.read() == b"line\n"
    sink.close()
    assert sink.lost == 0


def test_a_stream_of_this_process_is_written_to_at_once() -> None:
    stream = io.StringIO()
    sink = LogSink(stream, _told)
    sink.write("line\n")
    assert stream.getvalue() == "line\n"
    stream.close()
    sink.write("line\n")
    assert sink.lost == 1
    assert LogSink(None, _told).write("nowhere\n") == 8


def test_what_cannot_be_encoded_is_written_in_escapes(pipe: _Pipe) -> None:
    sink = LogSink(pipe.stream, _told)
    sink.write("half \ud83d\n")
    sink.close()
    assert pipe.read() == b"half \\ud83d\n"


_PROGRAM = """
import structlog
from gateway.observe import logs
sink = logs.configure(worker="worker-3")
log = structlog.get_logger("x")
for number in range(500):
    log.info("event", number=number)
log.info("of another", worker="worker-9")
"""


def test_the_end_of_a_process_writes_what_it_has_logged() -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, timeout=20, check=True)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line.get("number") for line in lines] == [*range(500), None]
    assert [line["worker"] for line in lines] == ["worker-3"] * 500 + ["worker-9"]
    assert done.stderr == b""


def test_the_line_that_tells_of_lost_lines_looks_like_all_others() -> None:
    program = _PROGRAM + "\nimport sys\nsys.stdout = None\nprint(sink._told(7), end='', file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=20, check=True)
    line = json.loads(done.stderr)
    assert set(line) == {"event", "level", "lost", "timestamp", "worker"}
    assert (line["event"], line["level"], line["lost"]) == ("log_lines_lost", "warning", 7)
