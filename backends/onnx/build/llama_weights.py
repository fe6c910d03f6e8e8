"""A Llama-family model as its GGUF file holds it: sizes, weights, tokenizer and chat template."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backends.onnx.manifest import ModelError

Weight = NDArray[np.float32]

#: GGUF's `tokenizer.ggml.token_type`: control tokens never stand for text.
_CONTROL = 3
_USER_DEFINED = 4


@dataclass(frozen=True, slots=True)
class LlamaSizes:
    """The numbers that fix the graph. `rotary_base` is theta of the rotary embedding, `epsilon` of the RMS norms."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    feed_forward: int
    vocabulary: int
    context_tokens: int
    epsilon: float
    rotary_base: float

    @property
    def head_width(self) -> int:
        return self.width // self.heads


class LlamaWeights:
    """Reads one GGUF file. Weights are de-quantised one at a time, when asked for; nothing is kept.

    Linear weights are [outputs, inputs]. Query and key rows stand in llama.cpp's order, which pairs neighbouring rows for
    the rotary embedding ("interleaved").
    """

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        self.path = path
        self._reader = GGUFReader(path)
        architecture = self.field("general.architecture")
        if architecture != "llama":
            raise ModelError(f"{path.name}: the architecture must be llama, not {architecture!r}")
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        if "output.weight" in self._tensors:
            raise ModelError(f"{path.name}: a separate output matrix is not supported; the embedding must be tied")
        self.sizes = LlamaSizes(
            layers=self.field("llama.block_count"),
            width=self.field("llama.embedding_length"),
            heads=self.field("llama.attention.head_count"),
            kv_heads=self.field("llama.attention.head_count_kv"),
            feed_forward=self.field("llama.feed_forward_length"),
            vocabulary=int(self._tensors["token_embd.weight"].shape[1]),
            context_tokens=self.field("llama.context_length"),
            epsilon=float(self.field("llama.attention.layer_norm_rms_epsilon")),
            rotary_base=float(self.field("llama.rope.freq_base")),
        )

    @classmethod
    def find(cls, folder: Path) -> LlamaWeights:
        """The one GGUF file at or below `folder`. Raises ModelError when there is not exactly one."""
        found = sorted(folder.rglob("*.gguf"))
        if not found:
            raise ModelError(f"no .gguf file in {folder}")
        if len(found) > 1:
            raise ModelError(f"{folder} must hold one .gguf file, not {', '.join(path.name for path in found)}")
        return cls(found[0])

    def field(self, key: str) -> Any:
        """A metadata value. Raises ModelError when the file lacks it."""
        field = self._reader.get_field(key)
        if field is None:
            raise ModelError(f"{self.path.name}: the field {key} is missing")
        return field.contents()

    def weight(self, name: str) -> Weight:
        """A tensor, de-quantised to float32. Raises ModelError when the file lacks it."""
        from gguf import dequantize

        tensor = self._tensors.get(name)
        if tensor is None:
            raise ModelError(f"{self.path.name}: the tensor {name} is missing")
        return np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)

    def layer(self, index: int, part: str) -> Weight:
        """`part` of a layer: attn_norm attn_q attn_k attn_v attn_output ffn_norm ffn_gate ffn_up ffn_down."""
        return self.weight(f"blk.{index}.{part}.weight")

    @property
    def chat_template(self) -> str:
        template: str = self.field("tokenizer.chat_template")
        return template

    def tokenizer(self) -> Any:
        """The file's byte-level BPE as a `tokenizers.Tokenizer`, with its control tokens as special tokens."""
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

        kind, split = self.field("tokenizer.ggml.model"), self.field("tokenizer.ggml.pre")
        if (kind, split) != ("gpt2", "smollm"):
            raise ModelError(f"{self.path.name}: the tokenizer {kind}/{split} is not known here, only gpt2/smollm")
        tokens: list[str] = self.field("tokenizer.ggml.tokens")
        merges = [tuple(merge.split(" ", 1)) for merge in self.field("tokenizer.ggml.merges")]
        tokenizer = Tokenizer(models.BPE(vocab={text: place for place, text in enumerate(tokens)}, merges=merges))
        # The order matters: each digit alone first, then GPT-2's pattern and byte alphabet.
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        tokenizer.decoder = decoders.ByteLevel()
        kinds = self.field("tokenizer.ggml.token_type")
        tokenizer.add_special_tokens(
            [AddedToken(t, special=True, normalized=False) for t, k in zip(tokens, kinds, strict=True) if k == _CONTROL]
        )
        tokenizer.add_tokens(
            [AddedToken(t, normalized=False) for t, k in zip(tokens, kinds, strict=True) if k == _USER_DEFINED]
        )
        return tokenizer

    def stop_tokens(self) -> list[int]:
        """Tokens that end an answer: end of turn, the start of another turn, end of text."""
        tokens: list[str] = self.field("tokenizer.ggml.tokens")
        stops = {self.field("tokenizer.ggml.eos_token_id"), self.field("tokenizer.ggml.bos_token_id")}
        if "<|endoftext|>" in tokens:
            stops.add(tokens.index("<|endoftext|>"))
        return sorted(stops)
