"""SmolLM2-Instruct from its GGUF file to a model folder, without torch.

model.onnx           see `llama_graph`; `q8` = every linear layer and the head in 8-bit blocks of 32
tokenizer.json       the file's byte-level BPE
chat_template.jinja  the file's own template
generation.json      stop tokens, default sampling
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from backends.api import Capabilities, Surface
from backends.onnx.build import smollm2_reference
from backends.onnx.build.graph import Precision, save
from backends.onnx.build.llama_graph import write_llama
from backends.onnx.build.llama_weights import LlamaWeights
from backends.onnx.catalogue import CATALOGUE
from backends.onnx.chat_prompt import TEMPLATE_NAME, TOKENIZER_NAME, ChatPrompt
from backends.onnx.chat_request import DEFAULTS_NAME, GenerationDefaults
from backends.onnx.manifest import Check, Manifest, ModelError, Progress, check, no_progress, read_manifest, seal

GRAPH_NAME = "model.onnx"

#: fp32: largest difference of any logit from float64, whose largest is about 30; every most probable token equal.
FP32_LIMIT = 1e-3
#: q8, over the probes' positions: Kullback-Leibler divergence from float64 in nats, and the share of positions whose most
#: probable token differs. On real text 8 bit has a mean of .004 to .007 and 3 to 8 %.
Q8_MEAN_LIMIT = 0.02
Q8_WORST_LIMIT = 0.3
Q8_OTHER_TOKEN_LIMIT = 0.15

#: What the model's authors recommend for chat.
_TEMPERATURE, _TOP_P = 0.2, 0.9

#: A question and the answer that is fed to it, token by token.
_PROBES = (
    ("What is the capital of France?", "The capital of France is Paris, a city of two million people on the Seine."),
    ("How do plants make sugar?", "Plants use light, water and carbon dioxide; the sugar is made in their leaves."),
)


def build(weights_dir: Path, out_dir: Path, variant: str, progress: Progress = no_progress) -> Manifest:
    """Fill `out_dir` and seal it, once the graph agrees with the reference (else ModelError)."""
    weights = LlamaWeights.find(weights_dir)
    save(write_llama(weights, cast(Precision, variant), progress), out_dir / GRAPH_NAME)
    weights.tokenizer().save(str(out_dir / TOKENIZER_NAME))
    (out_dir / TEMPLATE_NAME).write_text(weights.chat_template, encoding="utf-8")
    defaults = GenerationDefaults(stop_tokens=tuple(weights.stop_tokens()), temperature=_TEMPERATURE, top_p=_TOP_P)
    (out_dir / DEFAULTS_NAME).write_bytes(msgspec.json.encode(defaults))
    checks = _compare(out_dir, weights, variant, progress)
    if bad := [check for check in checks if not check.ok]:
        raise ModelError(
            f"the graph of smollm2:{variant} is wrong: {bad[0].name} is {bad[0].difference:.2g}, limit {bad[0].limit:.2g}"
        )
    entry, sizes = CATALOGUE["smollm2"], weights.sizes
    manifest = Manifest(
        name=entry.name,
        kind="chat",
        source=entry.source,
        variant=cast(Any, variant),
        builder=entry.builder,
        processing=entry.processing,
        fingerprint="",
        files=(),
        capabilities=Capabilities(
            surfaces=frozenset({Surface.CHAT}), context_tokens=sizes.context_tokens, languages=frozenset({"en"})
        ),
        architecture={"layers": sizes.layers, "width": sizes.width, "vocabulary": sizes.vocabulary},
        checks=tuple(checks),
    )
    return seal(out_dir, manifest)


def verify(model_dir: Path, weights_dir: Path) -> list[Check]:
    """Compare a built model with the float64 reference again."""
    return _compare(model_dir, LlamaWeights.find(weights_dir), read_manifest(model_dir).variant, no_progress)


def _compare(folder: Path, weights: LlamaWeights, variant: str, progress: Progress) -> list[Check]:
    """Graph against reference at every position of the fixed answers."""
    found, expected = [], []
    for place, (prompt, answer) in enumerate(probe_tokens(folder)):
        progress("compare with the reference", place, len(_PROBES))
        expected.append(smollm2_reference.logits(weights, prompt + answer)[len(prompt) - 1 :])
        found.append(_run(folder, weights.sizes.context_tokens, prompt, answer))
    progress("compare with the reference", len(_PROBES), len(_PROBES))
    return differences(np.concatenate(found), np.concatenate(expected), variant)


def probe_tokens(folder: Path) -> list[tuple[list[int], list[int]]]:
    """(prompt, answer) of each probe, in the folder's own tokens."""
    prompt = ChatPrompt(folder)
    return [
        (prompt.tokens([{"role": "user", "content": question}]), prompt.tokenizer.encode(answer).ids)
        for question, answer in _PROBES
    ]


def differences(found: NDArray[Any], expected: NDArray[Any], variant: str) -> list[Check]:
    """Compare logits [positions, vocabulary] by the variant's own measures."""
    other = float((found.argmax(-1) != expected.argmax(-1)).mean())
    if variant == "fp32":
        return [
            check("largest difference of a logit", float(np.abs(found - expected).max()), FP32_LIMIT),
            check("positions with another most probable token", other, 0.0),
        ]
    wanted, got = _log_softmax(expected), _log_softmax(found)
    divergence = (np.exp(wanted) * (wanted - got)).sum(-1)
    return [
        check("mean divergence in nats", float(divergence.mean()), Q8_MEAN_LIMIT),
        check("worst divergence in nats", float(divergence.max()), Q8_WORST_LIMIT),
        check("positions with another most probable token", other, Q8_OTHER_TOKEN_LIMIT),
    ]


def _log_softmax(logits: NDArray[Any]) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result


def _run(folder: Path, context_tokens: int, prompt: list[int], answer: list[int]) -> NDArray[np.float32]:
    """Logits after the prompt and after each token of the answer, as they are made in use: prefill, then steps."""
    from backends.onnx.decoder import Rooms, decoder_shape
    from backends.onnx.session import create_session

    session = create_session(folder / GRAPH_NAME)
    room = Rooms(session, decoder_shape(session, context_tokens)).take(len(prompt) + len(answer))
    rows = [room.run(prompt, 0).copy()]
    for place, token in enumerate(answer):
        rows.append(room.run([token], len(prompt) + place).copy())
    return np.stack(rows)
