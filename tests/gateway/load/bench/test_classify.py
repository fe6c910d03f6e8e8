from pathlib import Path

from gateway.load.bench.classify import classify_goals
from policies import language
from policies.language.loader import load_policy


def test_both_languages_are_measured_with_the_shipped_policy():
    goals = classify_goals(load_policy(Path(language.__file__).parents[1] / "chatbot.yaml"))
    assert [goal.name for goal in goals] == ["classify_english_us", "classify_chinese_us"]
    assert all(goal.value is not None and goal.value > 0 and not goal.why for goal in goals)
