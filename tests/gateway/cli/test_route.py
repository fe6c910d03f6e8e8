"""`gateway route train | eval` as typed."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from gateway.cli.route import app
from policies.core.errors import ConfigError
from routing.heads import LexicalHead, read_head

EASY, HARD = ["garden", "summer", "friend"], ["lemma", "tensor", "spectral"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(0)
    rows = []
    for number in range(80):
        hard = number % 2 == 0
        prompt = " ".join(rng.choice(HARD if hard else EASY, 8))
        rows.append(
            {"prompt": prompt, "weak": not hard, "strong": bool(rng.random() < 0.9), "source": f"s{number % 3}"}
        )
    file = tmp_path_factory.mktemp("data") / "pairs.jsonl"
    file.write_bytes(b"\n".join(msgspec.json.encode(row) for row in rows))
    return file


def test_train_then_eval(data: Path, tmp_path: Path) -> None:
    ran = CliRunner().invoke(
        app, ["train", "--data", str(data), "--out", str(tmp_path), "--folds", "2", "--everyday", "-", "--json"]
    )
    assert ran.exit_code == 0, ran.output
    told = msgspec.json.decode(ran.stdout)
    assert set(told["apgr"]) == {"s0", "s1", "s2"}
    assert set(told["sources"]["s0"]["scores"]) == {"complexity", "random", "length", "oracle"}
    head = read_head(Path(told["written"]["complexity"]))
    assert isinstance(head, LexicalHead)
    assert head.header.about["rows"] == 80

    other = tmp_path / "other.jsonl"
    other.write_bytes(data.read_bytes() + b"\n")
    ran = CliRunner().invoke(app, ["eval", "--data", str(other), "--head", str(tmp_path / "complexity.head"), "--json"])
    told = msgspec.json.decode(ran.stdout)
    assert head.fingerprint.hex() in told["how"]
    assert min(told["apgr"].values()) > 0.6


def test_a_head_is_not_scored_on_what_it_was_trained_on(data: Path, tmp_path: Path) -> None:
    CliRunner().invoke(app, ["train", "--data", str(data), "--out", str(tmp_path), "--folds", "2"])
    ran = CliRunner().invoke(app, ["eval", "--data", str(data), "--head", str(tmp_path / "complexity.head")])
    assert ran.exit_code == 0, ran.output
    assert "5-fold" in ran.stdout
    assert "trained on this file" in ran.stderr


def test_a_bad_file_is_one_clear_error(tmp_path: Path) -> None:
    ran = CliRunner().invoke(app, ["eval", "--data", str(tmp_path / "none.jsonl")])
    assert isinstance(ran.exception, ConfigError)
    assert "none.jsonl: cannot be read" in str(ran.exception)
