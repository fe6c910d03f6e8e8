"""Training and evaluation on small made-up data."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from policies.core.errors import ConfigError
from routing.evaluate import curve, evaluate
from routing.fit import fit_calibration, fit_ridge
from routing.heads import LexicalHead, read_head
from routing.pairs import EVERYDAY, Pairs, read_pairs
from routing.train import TrainOptions, Vectors, train_embedding, train_lexical
from tests.support.classify import vector

OPTIONS = TrainOptions(bits=12, iterations=60)
EASY = ["colour", "apple", "garden", "summer", "kitchen", "friend", "holiday", "cousin"]
HARD = ["theorem", "manifold", "eigenvalue", "tensor", "lemma", "convexity", "spectral", "operator"]


def made_up(count: int = 240) -> Pairs:
    """Prompts of easy words, which both get right, and of hard ones, which the weak model mostly gets wrong."""
    rng = np.random.default_rng(3)
    hard = rng.random(count) < 0.5
    prompts = [" ".join(rng.choice(HARD if row else EASY, 12)) + " please tell" for row in hard]
    weak = np.where(hard, rng.random(count) < 0.1, rng.random(count) < 0.9).astype(float)
    strong = (rng.random(count) < 0.9).astype(float)
    return Pairs(prompts, weak, strong, np.array(["made up"] * count), np.ones(count))


def silent(_: str) -> None:
    pass


def test_training_separates_what_can_be_separated(tmp_path: Path) -> None:
    pairs = made_up()
    trained = train_lexical(pairs, None, OPTIONS, {"rows": len(pairs)}, silent)
    report = evaluate(pairs, {"head": trained.out_of_fold})["made up"]
    assert report.scores["head"].apgr > 0.75
    assert report.scores["head"].apgr > report.scores["random"].apgr + 0.2
    head = read_head(trained.write(tmp_path / "new", "complexity"))
    assert isinstance(head, LexicalHead)

    def score(text: str) -> float:
        return head.calibration.score(head.logit(text.encode())[0])

    assert score(" ".join(EASY)) < 0.5 < score(" ".join(HARD))


def test_training_is_repeatable(tmp_path: Path) -> None:
    pairs = made_up(80)
    first = train_lexical(pairs, None, OPTIONS, {}, silent).write(tmp_path / "a", "x")
    second = train_lexical(pairs, None, OPTIONS, {}, silent).write(tmp_path / "b", "x")
    assert first.read_bytes() == second.read_bytes()


def test_everyday_prompts_move_to_their_side() -> None:
    pairs, everyday = made_up(), read_pairs(EVERYDAY)
    trained = train_lexical(pairs, everyday, OPTIONS, {}, silent)
    own = trained.out_of_fold[len(pairs) :]
    simple, hard = own[everyday.weak == 1], own[everyday.weak == 0]
    assert np.mean(simple[:, None] < hard[None, :]) > 0.9


def test_an_embedding_head_learns_a_direction() -> None:
    pairs = made_up()
    easy, hard = vector("easy"), vector("hard")
    noise = np.random.default_rng(0).normal(size=(len(pairs), len(easy))) * 0.1
    rows = np.array([hard if HARD[0] in text or HARD[1] in text or HARD[2] in text else easy for text in pairs.prompts])
    vectors = Vectors((rows + noise).astype(np.float32), np.zeros((0, len(easy)), np.float32), vector("probe"))
    trained = train_embedding(pairs, None, vectors, TrainOptions(ridge=1.0), {})
    assert evaluate(pairs, {"head": trained.out_of_fold})["made up"].scores["head"].apgr > 0.7


def test_apgr_of_a_known_curve() -> None:
    """Ten prompts, the strong model right on all, the weak on half: the oracle sends the right five first."""
    weak = np.array([0.0] * 5 + [1.0] * 5)
    strong = np.ones(10)
    best = curve(1.0 - weak, weak, strong)
    worst = curve(weak, weak, strong)
    assert best.share[0] == 0.0
    assert best.share[-1] == 1.0
    assert best.accuracy[0] == pytest.approx(0.5)
    assert best.accuracy[-1] == pytest.approx(1.0)
    assert best.apgr > 0.7
    assert worst.apgr < 0.3
    assert best.apgr + worst.apgr == pytest.approx(1.0, abs=0.11)
    assert best.cpt(0.5) == pytest.approx(0.25, abs=0.06)
    assert worst.cpt(0.5) > 0.7


def test_ties_and_chance_give_half() -> None:
    rng = np.random.default_rng(0)
    weak, strong = (rng.random(4_000) < 0.6).astype(float), (rng.random(4_000) < 0.8).astype(float)
    assert curve(np.zeros(4_000), weak, strong).apgr == pytest.approx(0.5, abs=0.05)
    with pytest.raises(ValueError, match="equally accurate"):
        curve(np.zeros(4), np.ones(4), np.ones(4))


def test_a_curve_that_never_gets_there_has_no_cpt() -> None:
    assert curve(np.arange(4.0), np.array([0.0, 1, 0, 1]), np.ones(4)).cpt(1.5) is None


def test_calibration_puts_half_between_the_classes() -> None:
    logits = np.concatenate([np.random.default_rng(1).normal(-1, 1, 900), np.random.default_rng(2).normal(3, 1, 100)])
    needed = np.repeat([0.0, 1.0], [900, 100])
    scale, centre = fit_calibration(logits, needed, np.ones(1000))
    assert centre == pytest.approx(1.0, abs=0.3)
    assert scale > 1.0
    backwards, _ = fit_calibration(-logits, needed, np.ones(1000))
    assert backwards > 0


def test_ridge_finds_the_plane() -> None:
    points = np.random.default_rng(0).normal(size=(500, 4))
    weights, bias = fit_ridge(points, points @ np.array([1.0, -2.0, 0.0, 3.0]) + 0.5, np.ones(500), 1e-6)
    assert weights == pytest.approx([1.0, -2.0, 0.0, 3.0], abs=1e-5)
    assert bias == pytest.approx(0.5, abs=1e-5)


def test_bad_lines_are_named(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text('{"prompt": "x", "weak": true, "strong": true}\nnonsense\n{"prompt": "x", "weak": 3}\n\n')
    with pytest.raises(ConfigError) as raised:
        read_pairs(file)
    assert [problem.split(": ")[0] for problem in raised.value.problems] == [f"{file}:2:1", f"{file}:3:1"]
    file.write_text("\n")
    with pytest.raises(ConfigError, match="no labelled pairs"):
        read_pairs(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_pairs(tmp_path / "none.jsonl")


def test_everyday_prompts_are_well_formed() -> None:
    rows = [msgspec.json.decode(line) for line in EVERYDAY.read_bytes().splitlines()]
    assert len({row["prompt"] for row in rows}) == len(rows) >= 200
    assert {row["subject"] for row in rows} == {"simple", "hard"}
    assert all(row["weak"] is (row["subject"] == "simple") and row["strong"] for row in rows)
