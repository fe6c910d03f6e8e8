"""`gateway route train | eval`: the heads behind the signals `complexity` and `embedding_head`."""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from gateway.cli.sections import flat
from policies.core.clock import SystemClock
from policies.core.deadline import Deadline
from policies.core.errors import ConfigError
from routing.evaluate import Quality, Report, evaluate
from routing.heads import SHIPPED, Heads, LexicalHead
from routing.pairs import EVERYDAY, Pairs, read_pairs
from routing.train import PROBE, Trained, TrainOptions, Vectors, train_embedding, train_lexical

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from backends.api import Embedder

app = typer.Typer(help="Train and evaluate routing heads.", no_args_is_help=True, pretty_exceptions_show_locals=False)

LEXICAL_NAME = "complexity"
EMBEDDING_NAME = "complexity_minilm"
_MAX_UNKNOWN_SHARE = 0.05
_CHUNK = 64
_CHUNK_LIMIT_S = 120.0

DataOption = Annotated[Path, typer.Option("--data", help="JSONL of labelled pairs: {prompt, weak, strong, source}.")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]


@dataclass(frozen=True, slots=True)
class Training:
    """What to train and where to put it."""

    out: Annotated[Path, typer.Option("--out", help="Folder for the head files.")]
    embedder: Annotated[
        str | None, typer.Option(help="Also train the embedding head, with this model (minilm:q8).")
    ] = None
    everyday: Annotated[Path, typer.Option(help="Everyday prompts that keep small talk simple; `-` = none.")] = EVERYDAY
    folds: Annotated[int, typer.Option(min=2, max=20, help="Folds for calibration and for the figures.")] = 5
    config: Annotated[Path | None, typer.Option("--config", "-c", help="The operator's gateway.yaml.")] = None


@app.command()
@flat
def train(data: DataOption, where: Training, as_json: JsonOption = False) -> None:
    """Train the heads on labelled pairs and write them to --out. Prints their figures on rows they were not trained on."""
    began = SystemClock().now()
    pairs = read_pairs(data)
    everyday = read_pairs(where.everyday) if str(where.everyday) != "-" else None
    options = TrainOptions(folds=where.folds)
    about = {"data": data.name, "digest": pairs.digest, "rows": len(pairs), "folds": where.folds}
    lexical = train_lexical(pairs, everyday, options, about, _say)
    heads: dict[str, Trained] = {LEXICAL_NAME: lexical}
    if where.embedder is not None:
        vectors = asyncio.run(_vectors(where.embedder, where.config, pairs, everyday))
        _say("embedding head")
        heads[EMBEDDING_NAME] = train_embedding(pairs, everyday, vectors, options, about | {"embedder": where.embedder})
    written = {name: str(head.write(where.out, name)) for name, head in heads.items()}
    reports = evaluate(pairs, {name: head.out_of_fold[: len(pairs)] for name, head in heads.items()})
    seconds = SystemClock().now() - began
    _print(
        reports, f"{where.folds}-fold: each row scored by a head that was not trained on it", as_json, written=written
    )
    _say(f"wrote {', '.join(written.values())} in {seconds:.0f} s")


@app.command("eval")
def evaluate_(
    data: DataOption,
    head: Annotated[Path | None, typer.Option(help="A head file of kind lexical [the shipped one].")] = None,
    folds: Annotated[
        int, typer.Option(min=0, max=20, help="Train anew in so many folds; 0 = score with the head as it is.")
    ] = 0,
    as_json: JsonOption = False,
) -> None:
    """APGR, CPT50 and CPT80 by source, beside random, length alone and the oracle.

    On the very file that the head was trained on, figures are made in 5 folds instead, since the head knows the answers.
    """
    pairs = read_pairs(data)
    path = head or SHIPPED / f"{LEXICAL_NAME}.head"
    trained = Heads([path]).get(path.stem)
    if not isinstance(trained, LexicalHead):
        raise ConfigError([f"{path}: `gateway route eval` scores heads of kind lexical; this one is of another kind"])
    if not folds and trained.header.about.get("digest") == pairs.digest:
        folds = 5
        _say("the head was trained on this file; its figures are made in 5 folds")
    if folds:
        options = TrainOptions(folds=folds)
        scores = train_lexical(pairs, read_pairs(EVERYDAY), options, {}, _say).out_of_fold[: len(pairs)]
        how = f"{folds}-fold: each row scored by a head that was not trained on it"
    else:
        scores = np.array([trained.logit(prompt.encode("utf-8", "replace"))[0] for prompt in pairs.prompts])
        how = f"scored with {path.name}, fingerprint {trained.fingerprint.hex()}"
    _print(evaluate(pairs, {LEXICAL_NAME: scores}), how, as_json)


async def _vectors(reference: str, config_file: Path | None, pairs: Pairs, everyday: Pairs | None) -> Vectors:
    from backends.onnx.embedder import MiniLmEmbedder
    from gateway.config import load_config
    from gateway.models import model_folder

    folder = model_folder(load_config(config_file, os.environ), reference)
    embedder = await MiniLmEmbedder.load(folder)
    try:
        own = await _embed(embedder, everyday.prompts) if everyday is not None else np.zeros((0, embedder.dimensions))
        if everyday is not None:
            limit = Deadline.after(_CHUNK_LIMIT_S, SystemClock())
            shares = [await embedder.unknown_share(text, limit) for text in everyday.prompts]
            own[[share > _MAX_UNKNOWN_SHARE for share in shares]] = 0.0
        return Vectors(
            await _embed(embedder, pairs.prompts), own.astype(np.float32), (await _embed(embedder, [PROBE]))[0]
        )
    finally:
        await embedder.aclose()


async def _embed(embedder: Embedder, texts: list[str]) -> NDArray[np.float32]:
    clock = SystemClock()
    vectors = np.zeros((len(texts), embedder.dimensions), np.float32)
    # Like lengths together: a batch is padded to its longest text.
    order = sorted(range(len(texts)), key=lambda row: len(texts[row]))
    for start in range(0, len(order), _CHUNK):
        rows = order[start : start + _CHUNK]
        if start % (_CHUNK * 16) == 0:
            _say(f"embedding {start} of {len(texts)}")
        vectors[rows] = await embedder.embed([texts[row] for row in rows], Deadline.after(_CHUNK_LIMIT_S, clock))
    return vectors


def _say(stage: str) -> None:
    print(f"route: {stage}", file=sys.stderr, flush=True)


def _print(reports: dict[str, Report], how: str, as_json: bool, written: dict[str, str] | None = None) -> None:
    if as_json:
        scores = next(iter(reports.values())).scores if reports else {}
        told: dict[str, Any] = {"how": how, "sources": msgspec.to_builtins(reports)}
        name = next(iter(scores), LEXICAL_NAME)
        told["apgr"] = {source: report.scores[name].apgr for source, report in reports.items()}
        if written is not None:
            told["written"] = written
        print(msgspec.json.encode(told).decode())
        return
    console = Console()
    for source, report in reports.items():
        table = Table(
            title=f"{source}: {report.rows} rows, weak {report.weak_accuracy:.1%}, strong {report.strong_accuracy:.1%}"
        )
        table.add_column("score")
        for column in ("APGR", "CPT50", "CPT80"):
            table.add_column(column, justify="right")
        for name, quality in report.scores.items():
            table.add_row(name, f"{quality.apgr:.3f}", *_shares(quality))
        console.print(table)
    console.print(how)


def _shares(quality: Quality) -> tuple[str, str]:
    return tuple("never" if share is None else f"{share:.1%}" for share in (quality.cpt50, quality.cpt80))  # type: ignore[return-value]
