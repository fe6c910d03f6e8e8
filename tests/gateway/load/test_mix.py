"""What is sent."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.load.arrivals import Arrival
from gateway.load.mix import (
    CHAT_PATH,
    Caller,
    ChatMix,
    ChatOptions,
    EmbeddingsMix,
    FileMix,
    TensorMix,
    TensorOptions,
    Zipf,
    pick_caller,
)
from gateway.load.prompts import heavy_pool, light_pool, rough_tokens, sized

NOW = Arrival(0.0)


def shots(mix, count=2000):
    return [mix.shot(NOW) for _ in range(count)]


def prompt_of(shot):
    return json.loads(shot.body)["messages"][-1]["content"]


def test_popularity_follows_zipf():
    zipf = Zipf(50, 1.0, random.Random(1))
    counts = Counter(zipf.draw() for _ in range(50_000))
    assert counts[0] / counts[1] == pytest.approx(2.0, rel=0.1)
    assert counts[0] / counts[9] == pytest.approx(10.0, rel=0.2)
    assert max(counts) < 50


@given(st.integers(1, 500), st.integers())
def test_pools_are_distinct_seeded_and_bilingual(count, seed):
    for pool in (light_pool, heavy_pool):
        prompts = pool(count, random.Random(seed))
        assert len(set(prompts)) == count
        assert prompts == pool(count, random.Random(seed))
    assert count < 50 or any(ord(c) > 0x2E80 for c in "".join(light_pool(count, random.Random(seed))))


def test_heavy_prompts_are_longer_than_light_ones():
    light, heavy = light_pool(200, random.Random(1)), heavy_pool(200, random.Random(1))
    assert max(map(rough_tokens, light)) < 40 < min(map(rough_tokens, heavy))


@given(st.integers(0, 5000))
def test_a_prompt_is_drawn_out_to_about_its_length(tokens):
    assert tokens <= rough_tokens(sized("Explain this.", tokens)) <= tokens * 1.03 + 40


def test_shares_of_a_chat_mix_are_kept():
    options = ChatOptions(heavy_share=0.25, stream_share=0.5, unique_share=0.1)
    sent = shots(ChatMix(options, random.Random(2)))
    bodies = [json.loads(shot.body) for shot in sent]
    assert sum(body.get("stream", False) for body in bodies) / len(bodies) == pytest.approx(0.5, abs=0.05)
    assert sum(rough_tokens(prompt_of(shot)) > 40 for shot in sent) / len(sent) == pytest.approx(0.25, abs=0.05)
    assert sum(" #" in prompt_of(shot) for shot in sent) / len(sent) == pytest.approx(0.1, abs=0.03)
    assert all(shot.stream == body.get("stream", False) for shot, body in zip(sent, bodies, strict=True))


def test_unique_prompts_are_all_different():
    sent = shots(ChatMix(ChatOptions(unique_share=1.0), random.Random(2)), 500)
    assert len({prompt_of(shot) for shot in sent}) == 500


def test_the_same_seed_sends_the_same_bodies():
    one, two = (shots(ChatMix(ChatOptions(unique_share=0.2), random.Random(9)), 200) for _ in range(2))
    assert one == two


def test_token_counts_of_a_trace_shape_the_request():
    shot = ChatMix(ChatOptions(), random.Random(1)).shot(Arrival(0.0, prompt_tokens=900, answer_tokens=0))
    assert 900 <= rough_tokens(prompt_of(shot)) < 960
    assert json.loads(shot.body)["max_tokens"] == 1


def test_a_tensor_request_is_an_oip_infer_of_texts():
    shot = TensorMix(TensorOptions(candidates=5), random.Random(1)).shot(NOW)
    inputs = json.loads(shot.body)["inputs"]
    assert shot.path == "/v2/models/recommend/infer"
    assert [(i["name"], i["datatype"], i["shape"], len(i["data"])) for i in inputs] == [
        ("user_history", "BYTES", [4], 4),
        ("candidates", "BYTES", [5], 5),
    ]


def test_embeddings_carry_one_text():
    shot = EmbeddingsMix("auto", 10, 1.0, random.Random(1)).shot(NOW)
    assert isinstance(json.loads(shot.body)["input"], str)


def test_a_file_may_hold_bodies_paths_and_traffic_lines(tmp_path):
    path = tmp_path / "bodies.jsonl"
    lines = [
        {"model": "m", "stream": True},
        {"path": "/v2/models/m/infer", "body": {"inputs": []}},
        {"v": 1, "type": "request", "surface": "embeddings", "body": {"input": "x"}},
        {"v": 1, "type": "request", "surface": "chat", "body": None, "redacted": True},
        {"v": 1, "type": "feedback", "request_id": "r"},
    ]
    path.write_text("\n\n".join(map(json.dumps, lines)))
    mix = FileMix(path)
    sent = [mix.shot(NOW) for _ in range(4)]
    assert [(shot.path, shot.stream) for shot in sent[:3]] == [
        (CHAT_PATH, True),
        ("/v2/models/m/infer", False),
        ("/v1/embeddings", False),
    ]
    assert sent[3] == sent[0]


@pytest.mark.parametrize("text", ["{oops", "[1]", '{"path":"no-slash","body":{}}', '{"body":3}', ""])
def test_a_bad_file_is_refused_with_its_name(tmp_path, text):
    path = tmp_path / "bodies.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"bodies\.jsonl"):
        FileMix(path)


@pytest.mark.parametrize("options", [{"heavy_share": 1.5}, {"stream_share": -0.1}, {"prompts": 0}])
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ValueError, match=r"must be|at least"):
        ChatMix(ChatOptions(**options), random.Random(1))


def test_classes_are_drawn_by_their_shares():
    pick = pick_caller([Caller("vip", 1), Caller("normal", 3), Caller("none", 0)], random.Random(1))
    counts = Counter(pick().label for _ in range(4000))
    assert counts["vip"] / 4000 == pytest.approx(0.25, abs=0.03) and counts["none"] == 0


@pytest.mark.parametrize("callers", [[], [Caller("a", 0)], [Caller("a", -1), Caller("b", 2)]])
def test_class_shares_must_make_sense(callers):
    with pytest.raises(ValueError, match="shares"):
        pick_caller(callers, random.Random(1))
