"""A BERT encoder's sizes and weights as `config.json` and `model.safetensors` hold them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backends.onnx.manifest import ModelSourceError

FloatArray = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class BertSizes:
    """The numbers that fix the graph. `positions` is the longest text in tokens, `epsilon` that of the layer norms."""

    layers: int
    width: int
    heads: int
    feed_forward: int
    vocabulary: int
    positions: int
    epsilon: float


class BertWeights:
    """Weights by the names of Hugging Face's `BertModel`, without a prefix. Linear weights are [outputs, inputs]."""

    def __init__(self, sizes: BertSizes, arrays: dict[str, FloatArray]) -> None:
        self.sizes = sizes
        prefix = "" if "embeddings.word_embeddings.weight" in arrays else "bert."
        self._arrays = {name.removeprefix(prefix): array for name, array in arrays.items()}

    def __call__(self, name: str) -> FloatArray:
        """The weight in float32. Raises ModelSourceError when the file lacks it."""
        array = self._arrays.get(name)
        if array is None:
            raise ModelSourceError(f"the weights have no {name!r}: this is not a BERT encoder")
        return np.asarray(array, np.float32)

    def layer(self, index: int, name: str) -> FloatArray:
        return self(f"encoder.layer.{index}.{name}")


def read_weights(folder: Path) -> BertWeights:
    """Raises ModelSourceError when files are missing or the architecture is another one."""
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_bytes())
        activation = config.get("hidden_act", "gelu")
        sizes = BertSizes(
            layers=config["num_hidden_layers"],
            width=config["hidden_size"],
            heads=config["num_attention_heads"],
            feed_forward=config["intermediate_size"],
            vocabulary=config["vocab_size"],
            positions=config["max_position_embeddings"],
            epsilon=config["layer_norm_eps"],
        )
    except (OSError, ValueError, KeyError) as error:
        raise ModelSourceError(f"{folder / 'config.json'} is not a BERT configuration: {error!r}") from error
    if activation != "gelu" or config.get("position_embedding_type", "absolute") != "absolute":
        raise ModelSourceError(f"{folder}: only BERT with gelu and absolute positions is supported, not {activation!r}")
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        return BertWeights(sizes, load_file(folder / "model.safetensors"))
    except (OSError, SafetensorError) as error:
        raise ModelSourceError(f"{folder / 'model.safetensors'} cannot be read: {error}") from error
