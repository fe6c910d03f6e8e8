"""From configuration to models: which weights, which folder, which embedder."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from backends.onnx.catalogue import CATALOGUE
from backends.onnx.manifest import ModelError
from backends.onnx.prepare import prepare
from backends.onnx.store import ModelStore
from gateway.cli.models import app
from gateway.config import Config, load_config
from gateway.models import checked_folder, embedder_name, model_sources
from tests.support.tiny_bert import write_tiny_bert

EMBED = "  embed: {kind: onnx_embedder, model: minilm}\n"
RECOMMENDER = "  recommender: {kind: onnx_two_tower, model: two-tower}\n"


def write(folder: Path, models: str, backends: str = EMBED) -> Path:
    path = folder / "gateway.yaml"
    path.write_text(f"models_dir: models\nmodels: {models}\nbackends:\n{backends}")
    return path


def load(folder: Path, models: str, backends: str = EMBED) -> Config:
    return load_config(write(folder, models, backends), {"HOME": str(folder)})


def test_the_configured_weights_are_built_and_must_be_what_is_loaded(tmp_path: Path) -> None:
    weights = write_tiny_bert(tmp_path / "weights")
    path = write(tmp_path, f"{{minilm: {{source: 'file:{weights.relative_to(tmp_path)}'}}, two-tower: {{}}}}")
    pulled = CliRunner().invoke(app, ["pull", "minilm", "--config", str(path)])
    assert pulled.exit_code == 0, pulled.output
    built = CliRunner().invoke(app, ["build", "minilm:q8", "--config", str(path)])
    assert built.exit_code == 0, built.output
    config = load_config(path, {"HOME": str(tmp_path)})
    folder = checked_folder(config, "minilm")
    assert ModelStore(config.models_dir).manifest("minilm", "q8").source == f"file:{weights}"
    # A build without the key says where its weights came from all the same: it is not what was configured then.
    other = load(tmp_path, "{minilm: {source: 'file:elsewhere'}}")
    with pytest.raises(ModelError, match=r"was built from file:.* but the configuration says file:.*elsewhere"):
        checked_folder(other, "minilm")
    assert checked_folder(load(tmp_path, "{minilm: {}}"), "minilm") == folder


def test_a_model_made_from_another_takes_its_variant(tmp_path: Path) -> None:
    text = "{minilm: {}, two-tower: {source: 'model:minilm'}}"
    config = load(tmp_path, text, EMBED + RECOMMENDER)
    assert model_sources(config) == {"two-tower": "model:minilm:q8"}
    weights = write_tiny_bert(tmp_path / "weights")
    sources = {**model_sources(config), "minilm": f"file:{weights}"}
    prepare(ModelStore(config.models_dir), ["two-tower:q8"], sources=sources)
    assert checked_folder(config, "two-tower").name == "two-tower-q8"


def test_the_list_of_models(tmp_path: Path) -> None:
    path = write(tmp_path, "{minilm: {}}")
    prepare(
        ModelStore(tmp_path / "models"),
        ["minilm:q8"],
        sources={"minilm": f"file:{write_tiny_bert(tmp_path / 'weights')}"},
    )
    listed = CliRunner().invoke(app, ["list", "--config", str(path)])
    assert listed.exit_code == 0, listed.output
    assert "minilm:q8" in listed.output


def test_the_embedder_is_the_one_that_backends_need(tmp_path: Path) -> None:
    assert embedder_name(load(tmp_path, "{minilm: {}}")) == "minilm"
    assert embedder_name(load(tmp_path, "{two-tower: {}}", RECOMMENDER)) == CATALOGUE["two-tower"].requires
    chat = "  light: {kind: onnx_chat, model: smollm2}\n"
    assert embedder_name(load(tmp_path, "{smollm2: {}}", chat)) is None
