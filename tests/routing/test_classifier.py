"""Reading signals: the cheap ones at once, the embedding only when asked, and no failure ever an error."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from backends.api import EmbeddingsRequest, TensorRequest
from policies.core.clock import FakeClock, SystemClock
from policies.core.deadline import Deadline
from policies.core.errors import ConfigError, DeadlineExceeded, LimitReached, ModelFailed
from policies.language.schema import Route, SignalSpec
from routing.classifier import Classifier
from routing.heads import Heads
from routing.reading import UNREAD
from routing.router import Router
from routing.train import PROBE
from routing.view import RequestView
from tests.support.classify import DIMENSIONS, FakeEmbedder, backends, chat, policy, vector, when, write_embedding

WORDS = SignalSpec(kind="keywords", any=("prove", "证明"))
MEANING = SignalSpec(kind="embedding_head", head="meaning")
ROUTES = (
    Route(name="words", when=when("words"), to="heavy"),
    Route(name="meaning", when=when("meaning"), to="heavy"),
    Route(name="rest", to="light"),
)


@pytest.fixture
def heads(tmp_path: Path) -> Heads:
    """The head `meaning` likes what is like "the hard one"."""
    write_embedding(tmp_path, 2 * vector("the hard one"))
    return Heads([tmp_path])


def deadline() -> Deadline:
    return Deadline.after(30, SystemClock())


def classifier(heads: Heads, embedder: FakeEmbedder | None, routes: tuple[Route, ...] = ROUTES) -> Classifier:
    return Classifier(policy({"words": WORDS, "meaning": MEANING}, routes), heads, embedder)


async def test_cheap_signals_are_read_at_once_and_the_embedding_later(heads: Heads) -> None:
    embedder = FakeEmbedder()
    made = classifier(heads, embedder)
    view = chat("the hard one")
    reading = made.read(view)
    assert made.needs_embedding
    assert reading.scores["words"].value == 0.0
    assert reading.scores["meaning"] is UNREAD
    assert embedder.seen == []
    await made.read_embedding(view, reading, deadline())
    assert reading.scores["meaning"].value > 0.9
    assert reading.vector == pytest.approx(vector("the hard one"))
    assert embedder.seen == [PROBE, "the hard one"]
    await made.read_embedding(view, reading, deadline())
    other = chat("something else")
    await made.read_embedding(other, made.read(other), deadline())
    assert embedder.seen == [PROBE, "the hard one", "something else"]


def test_an_embedding_signal_that_no_rule_mentions_is_not_needed(heads: Heads) -> None:
    made = classifier(heads, FakeEmbedder(), (ROUTES[0], ROUTES[2]))
    assert not made.needs_embedding
    assert "no rule needed it" in made.read(chat("x")).scores["meaning"].text


def test_a_rule_that_holds_already_needs_no_embedding(heads: Heads) -> None:
    made = classifier(heads, FakeEmbedder())
    router = Router(policy({"words": WORDS, "meaning": MEANING}, ROUTES), backends())
    assert router.settled(made.read(chat("prove it")))
    assert not router.settled(made.read(chat("say it")))


@pytest.mark.parametrize(
    ("embedder", "text", "reason"),
    [
        (None, "hello", "embedder_missing"),
        (FakeEmbedder(), "你好，请问几点开门", "embedder_vocabulary"),
        (FakeEmbedder(), "", "no text"),
        (FakeEmbedder(DeadlineExceeded()), "hello", "embedder_late"),
        (FakeEmbedder(LimitReached()), "hello", "embedder_failed: limit_reached"),
        (FakeEmbedder(ModelFailed()), "hello", "embedder_failed: model_failed"),
        (FakeEmbedder(ZeroDivisionError()), "hello", "embedder_failed: ZeroDivisionError"),
        (FakeEmbedder(sign=-1.0), "hello", "embedder_mismatch"),
    ],
)
async def test_without_an_embedding_the_signal_is_neutral_and_says_why(
    embedder: FakeEmbedder | None, text: str, reason: str, heads: Heads
) -> None:
    made = classifier(heads, embedder)
    view = chat(text)
    reading = made.read(view)
    await made.read_embedding(view, reading, deadline())
    score = reading.scores["meaning"]
    assert score.neutral
    assert reason in score.text


async def test_a_late_embedder_costs_at_most_what_is_left(heads: Heads) -> None:
    made = classifier(heads, FakeEmbedder(hang=True))
    view = chat("hello")
    reading = made.read(view)
    await made.read_embedding(view, reading, Deadline.after(0.01, SystemClock()))
    assert reading.scores["meaning"].text == "embedder_late"
    gone = made.read(view)
    clock = FakeClock()
    await made.read_embedding(view, gone, Deadline(clock.now() - 1, clock))
    assert gone.scores["meaning"].text == "embedder_late"


async def test_cancelling_classification_cancels_it(heads: Heads) -> None:
    made = classifier(heads, FakeEmbedder(hang=True))
    view = chat("hello")
    task = asyncio.create_task(made.read_embedding(view, made.read(view), deadline()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_embedder_of_other_dimensions_is_a_mismatch(tmp_path: Path) -> None:
    write_embedding(tmp_path, vector("x"))
    embedder = FakeEmbedder()
    embedder.dimensions = DIMENSIONS + 1
    made = classifier(Heads([tmp_path]), embedder)
    view = chat("x")
    reading = made.read(view)
    await made.read_embedding(view, reading, deadline())
    assert reading.scores["meaning"].text == "embedder_mismatch"


async def test_an_embedder_that_was_loaded_anew_is_looked_at_anew(heads: Heads) -> None:
    embedder = FakeEmbedder()
    made = classifier(heads, embedder)
    for fingerprint, sign, fits in (
        ("fake", 1.0, True),
        ("fake", -1.0, True),
        ("other", -1.0, False),
        ("fake", 1.0, True),
    ):
        embedder.fingerprint, embedder._sign = fingerprint, sign
        view = chat("hello")
        reading = made.read(view)
        await made.read_embedding(view, reading, deadline())
        assert (reading.scores["meaning"].text != "embedder_mismatch") is fits


def test_only_chat_is_classified(heads: Heads) -> None:
    made = classifier(heads, None)
    for request in (EmbeddingsRequest({}, ["prove it"]), TensorRequest("m", [])):
        reading = made.read(RequestView(request))
        assert all(score.neutral for score in reading.scores.values())
        assert set(reading.values().values()) == {None}


def test_a_signal_that_fails_is_neutral(heads: Heads) -> None:
    class Broken(RequestView):
        @property
        def folded(self) -> str:
            raise RecursionError

    reading = classifier(heads, None).read(Broken(chat("x").request))
    assert reading.scores["words"].neutral
    assert reading.scores["words"].text == "signal failed: RecursionError"


def test_every_bad_signal_is_named(heads: Heads) -> None:
    bad = {"a": SignalSpec(kind="keyword", any=("x",)), "b": SignalSpec(kind="length"), "words": WORDS}
    with pytest.raises(ConfigError) as raised:
        Classifier(policy(bad), heads)
    first, second = raised.value.problems
    assert "classify.signals.a.kind" in first
    assert "did you mean 'keywords'" in first
    assert "classify.signals.b.tokens" in second


def test_a_truncated_text_is_marked(heads: Heads) -> None:
    assert classifier(heads, None).read(chat("word " * 10_000)).truncated
    assert "words=0.00" in repr(classifier(heads, None).read(chat("word")))


def test_vectors_are_unit_length() -> None:
    assert np.linalg.norm(vector("anything")) == pytest.approx(1.0)
