"""A decoder of SmolLM2's architecture with random weights and a byte vocabulary, as a GGUF file; builds in a moment."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from backends.onnx.detokenize import byte_alphabet

WIDTH, LAYERS, HEADS, KV_HEADS, FEED_FORWARD, CONTEXT = 64, 2, 4, 2, 96, 1024
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>"]
MERGES = ["t h", "th e", "Ġ the", "i n", "e r", "Ġ a"]
TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_tiny_llama(folder: Path, seed: int = 0, *, damaged: bool = False) -> Path:
    """`model.gguf` in `folder`, as `pull` would leave it. `damaged`: one weight is not a number."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens = [*CONTROL, *byte_alphabet(), *(merge.replace(" ", "") for merge in MERGES)]
    writer = gguf.GGUFWriter(folder / "model.gguf", "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(CONTROL) + [1] * (len(tokens) - len(CONTROL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    weights = _weights(len(tokens), seed)
    if damaged:
        weights["blk.1.ffn_up.weight"][3, 5] = np.nan
    for name, array in weights.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder


def _weights(vocabulary: int, seed: int) -> dict[str, np.ndarray]:
    source = np.random.default_rng(seed)

    def linear(outputs: int, inputs: int) -> np.ndarray:
        return (source.normal(size=(outputs, inputs)) / np.sqrt(inputs)).astype(np.float32)

    def gain() -> np.ndarray:
        return (1 + 0.1 * source.normal(size=WIDTH)).astype(np.float32)

    kv_width = WIDTH // HEADS * KV_HEADS
    # A small embedding under large layers, so that the next token is not simply the last one (the head is the embedding).
    embedding = (source.normal(size=(vocabulary, WIDTH)) * 0.4).astype(np.float32)
    embedding[: len(CONTROL)] *= 0.1  # control tokens stay improbable, so that answers run on
    weights = {"token_embd.weight": embedding, "output_norm.weight": gain()}
    for layer in range(LAYERS):
        parts = {
            "attn_norm": gain(),
            "attn_q": linear(WIDTH, WIDTH),
            "attn_k": linear(kv_width, WIDTH),
            "attn_v": linear(kv_width, WIDTH),
            "attn_output": linear(WIDTH, WIDTH),
            "ffn_norm": gain(),
            "ffn_gate": 2 * linear(FEED_FORWARD, WIDTH),
            "ffn_up": 2 * linear(FEED_FORWARD, WIDTH),
            "ffn_down": 2 * linear(WIDTH, FEED_FORWARD),
        }
        weights.update({f"blk.{layer}.{part}.weight": array for part, array in parts.items()})
    return weights
