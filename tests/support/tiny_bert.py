"""A BERT encoder of MiniLM's architecture with random weights, small enough to build in every test."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.processors import BertProcessing

WIDTH, LAYERS, HEADS, FEED_FORWARD, POSITIONS = 64, 2, 4, 128, 512
WORDS = [
    "a",
    "the",
    "tent",
    "boots",
    "rain",
    "coffee",
    "tea",
    "bread",
    "knife",
    "lamp",
    "book",
    "train",
    "song",
    "game",
    "dog",
    "cat",
    "run",
    "swim",
    "warm",
    "cold",
]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]


def write_tiny_bert(folder: Path, seed: int = 0) -> Path:
    """config.json, model.safetensors and tokenizer.json, as `pull` would leave them."""
    folder.mkdir(parents=True, exist_ok=True)
    pieces = [chr(c) for c in range(ord("a"), ord("z") + 1)]
    vocabulary = {
        token: i for i, token in enumerate(dict.fromkeys([*SPECIAL, *WORDS, *pieces, *("##" + p for p in pieces)]))
    }
    _write_tokenizer(folder / "tokenizer.json", vocabulary)
    config = {
        "num_hidden_layers": LAYERS,
        "hidden_size": WIDTH,
        "num_attention_heads": HEADS,
        "intermediate_size": FEED_FORWARD,
        "vocab_size": len(vocabulary),
        "max_position_embeddings": POSITIONS,
        "layer_norm_eps": 1e-12,
        "hidden_act": "gelu",
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_weights(len(vocabulary), seed), folder / "model.safetensors")
    return folder


def _write_tokenizer(path: Path, vocabulary: dict[str, int]) -> None:
    tokenizer = Tokenizer(WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = BertNormalizer()
    tokenizer.pre_tokenizer = BertPreTokenizer()
    tokenizer.post_processor = BertProcessing(("[SEP]", vocabulary["[SEP]"]), ("[CLS]", vocabulary["[CLS]"]))
    # Files in the wild cut and pad silently; ours does too, so that a reader who forgets to switch it off is found out.
    tokenizer.enable_truncation(16)
    tokenizer.enable_padding(length=16)
    tokenizer.save(str(path))


def _weights(vocabulary: int, seed: int) -> dict[str, np.ndarray]:
    source = np.random.default_rng(seed)

    def normal(*shape: int, scale: float = 0.1) -> np.ndarray:
        return (source.normal(size=shape) * scale).astype(np.float32)

    weights = {
        "embeddings.word_embeddings.weight": normal(vocabulary, WIDTH, scale=1.0),
        "embeddings.position_embeddings.weight": normal(POSITIONS, WIDTH),
        "embeddings.token_type_embeddings.weight": normal(2, WIDTH),
        "embeddings.LayerNorm.weight": 1 + normal(WIDTH),
        "embeddings.LayerNorm.bias": normal(WIDTH),
    }
    linears = {
        "attention.self.query": (WIDTH, WIDTH),
        "attention.self.key": (WIDTH, WIDTH),
        "attention.self.value": (WIDTH, WIDTH),
        "attention.output.dense": (WIDTH, WIDTH),
        "intermediate.dense": (FEED_FORWARD, WIDTH),
        "output.dense": (WIDTH, FEED_FORWARD),
    }
    for layer in range(LAYERS):
        prefix = f"encoder.layer.{layer}."
        for name, shape in linears.items():
            weights[f"{prefix}{name}.weight"] = normal(*shape)
            weights[f"{prefix}{name}.bias"] = normal(shape[0])
        for name in ("attention.output.LayerNorm", "output.LayerNorm"):
            weights[f"{prefix}{name}.weight"] = 1 + normal(WIDTH)
            weights[f"{prefix}{name}.bias"] = normal(WIDTH)
    return weights
