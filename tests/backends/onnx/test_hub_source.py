"""`hf:` sources against a local server that speaks the hub's file protocol. The library reads its settings from the
environment when imported, so it runs in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

DATA = b"weights of a small model"
PULL = """
import sys
from pathlib import Path
from backends.onnx.manifest import ModelSourceError
from backends.onnx.store import ModelStore
try:
    folder = ModelStore(Path(sys.argv[1])).pull(sys.argv[2])
except ModelSourceError as error:
    print("refused:", error)
else:
    print("files:", sorted(path.name for path in folder.iterdir()))
"""


class Hub(BaseHTTPRequestHandler):
    """Knows one file: org/name at revision v1."""

    def do_HEAD(self) -> None:
        known = self.path == "/org/name/resolve/v1/sub/model.bin"
        self.send_response(200 if known else 404)
        if known:
            self.send_header("X-Repo-Commit", "0" * 40)
            self.send_header("ETag", '"abc"')
        else:
            self.send_header("X-Error-Code", "EntryNotFound")
        self.send_header("Content-Length", str(len(DATA)) if known else "0")
        self.end_headers()

    def do_GET(self) -> None:
        self.do_HEAD()
        self.wfile.write(DATA)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def pull(root: Path, source: str, **settings: str) -> str:
    environment = {key: text for key, text in os.environ.items() if not key.startswith("HF_")}
    environment |= {"HF_HOME": str(root / "hf"), "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1", **settings}
    command = [sys.executable, "-c", PULL, str(root / "models"), source]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_file_of_the_hub_is_pulled(tmp_path: Path, hub: str) -> None:
    said = pull(tmp_path, "hf:org/name@v1/sub/model.bin", HF_ENDPOINT=hub)
    assert said == "files: ['model.bin', 'source.json']\n"
    (found,) = (tmp_path / "models" / "sources").glob("*/model.bin")
    assert found.read_bytes() == DATA


def test_a_file_that_the_hub_does_not_have_says_so(tmp_path: Path, hub: str) -> None:
    assert "status 404" in pull(tmp_path, "hf:org/name@v1/other.bin", HF_ENDPOINT=hub)


def test_without_a_network_it_says_what_to_do(tmp_path: Path) -> None:
    said = pull(tmp_path, "hf:org/name@v1/sub/model.bin", HF_HUB_OFFLINE="1")
    assert said.startswith("refused: hf:org/name@v1/sub/model.bin: the hub cannot be reached")
    assert "file:PATH" in said
    assert [p.name for p in (tmp_path / "models").iterdir()] == [".lock"]
