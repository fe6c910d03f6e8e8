"""`gateway serve`: when a stand-in is started, what is said of refused addresses, and what a crash may show."""

from __future__ import annotations

import socket
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from gateway.cli.main import GROUPS
from gateway.cli.serve import no_stand_in, reader
from gateway.config import load_config
from gateway.listening import CannotListen, address, listening_on
from policies.core.errors import ConfigError

HERE = "{kind: openai, base_url: 'http://127.0.0.1:9100/v1', model: m}"


@pytest.mark.parametrize(
    ("heavy", "env", "reason"),
    [
        (f"heavy: {HERE}", {}, ""),
        (f"other: {HERE}", {}, "there is no backend `heavy`"),
        ("heavy: {kind: scripted}", {}, "the backend `heavy` is of kind scripted"),
        ("heavy: {kind: oip, base_url: 'http://127.0.0.1:9100/v1', model: m}", {}, "is of kind oip"),
        ("heavy: {kind: openai, base_url: 'https://api.example.com/v1', model: m}", {}, "is at https://api.example.com/v1"),
        ("heavy: {kind: openai, base_url: 'http://127.0.0.1:1/v1', model: m}", {}, "is at http://127.0.0.1:1/v1"),
        (f"heavy: {HERE}", {"HEAVY_BASE_URL": "http://127.0.0.1:9100/v1"}, "HEAVY_BASE_URL is set"),
    ],
)  # fmt: skip
def test_a_stand_in_only_where_heavy_expects_it(tmp_path: Path, heavy: str, env: dict[str, str], reason: str) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text(f"backends: {{{heavy}}}\n")
    told = no_stand_in(load_config(path, {"HOME": str(tmp_path)}), env)
    assert reason in told and bool(told) is bool(reason)


def test_an_address_that_cannot_be_had_is_named() -> None:
    with socket.socket() as taken, socket.socket() as second:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(CannotListen, match=f"cannot listen on 127.0.0.1:{port}: "), listening_on("127.0.0.1", port):
            second.bind(("127.0.0.1", port))


def test_an_address_can_be_put_into_a_url() -> None:
    assert address("127.0.0.1", 80) == "127.0.0.1:80"
    assert address("localhost", 80) == "localhost:80"
    assert urlsplit(f"http://{address('::1', 80)}/x").hostname == "::1"


@pytest.mark.parametrize("verb", GROUPS)
def test_a_crash_shows_no_local_variables(verb: str) -> None:
    """They hold the environment, and so every secret."""
    module, _, name = GROUPS[verb].partition(":")
    assert getattr(import_module(module), name).pretty_exceptions_show_locals is False


@pytest.mark.parametrize("closed", ["0", "1", "2", "0 1 2"])
def test_no_socket_gets_the_number_of_a_closed_standard_stream(tmp_path: Path, closed: str) -> None:
    told = tmp_path / "told"
    program = """
import os, socket, subprocess, sys
for fd in sys.argv[2].split():
    os.close(int(fd))
from gateway.cli.main import open_standard_streams
sys.stdout = sys.stderr = None
open_standard_streams()
print("to nobody", sys.stdout.isatty(), sys.stderr.isatty())
with socket.socket() as sock:
    # Nor does one of a process that is started by this one.
    inner = "import socket, sys; print(socket.socket().fileno(), file=open(sys.argv[1], 'a'))"
    subprocess.run([sys.executable, "-W", "ignore", "-c", inner, sys.argv[1]], check=True)
    print(sock.fileno(), file=open(sys.argv[1], "a"))
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", program, str(told), closed], check=True)
    assert all(int(fd) > 2 for fd in told.read_text().split()), told.read_text()


def test_a_configuration_that_has_gone_is_a_mistake_and_no_wish_for_the_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "gateway.yaml"
    path.write_text(f"backends: {{other: {HERE}}}\n")
    read = reader(None, None, None)
    assert list(read().backends) == ["other"]
    path.unlink()
    with pytest.raises(ConfigError, match=r"gateway\.yaml"):
        read()
