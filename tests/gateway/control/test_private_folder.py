"""Where a gateway's processes meet."""

from __future__ import annotations

import shutil
import socket
import stat
import tempfile
from pathlib import Path

import pytest

from gateway.control.private_folder import make_private_folder
from gateway.listening import CannotListen


def under(folder: Path, length: int) -> Path:
    """A folder whose path has this many bytes."""
    while length - len(str(folder)) > 201:
        folder /= "x" * 199
    folder /= "x" * (length - len(str(folder)) - 1)
    folder.mkdir(parents=True)
    return folder


def test_what_is_let_through_can_hold_every_socket_and_the_rest_is_said_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    base = Path(tempfile.mkdtemp(dir="/tmp"))
    made, refused = 0, 0
    try:
        for length in range(60, 100):
            temporary = under(base, length)
            monkeypatch.setattr(tempfile, "tempdir", str(temporary))
            try:
                folder = make_private_folder()
            except CannotListen as error:
                assert str(temporary) in str(error)
                assert "TMPDIR" in str(error)
                assert list(temporary.iterdir()) == []
                refused += 1
                continue
            made += 1
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
            for name in ("hub.sock", "models-1.sock", "models-9999.sock"):
                with socket.socket(socket.AF_UNIX) as sock:
                    sock.bind(str(folder / name))
    finally:
        shutil.rmtree(base)
    assert made
    assert refused
