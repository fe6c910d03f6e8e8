"""`gateway serve`: when a stand-in is started, what is said of refused addresses, and what a crash may show."""

from __future__ import annotations

import socket
from importlib import import_module
from pathlib import Path

import pytest

from gateway.cli.main import GROUPS
from gateway.cli.serve import no_stand_in
from gateway.config import load_config
from gateway.listening import CannotListen, listening_on

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


@pytest.mark.parametrize("verb", GROUPS)
def test_a_crash_shows_no_local_variables(verb: str) -> None:
    """They hold the environment, and so every secret."""
    module, _, name = GROUPS[verb].partition(":")
    assert getattr(import_module(module), name).pretty_exceptions_show_locals is False
