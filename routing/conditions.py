"""Conditions of rules, compiled to functions of a reading, in three-valued logic.

A neutral score is no opinion, so a comparison with it is None, neither true nor false (Kleene's strong logic):
`all` is False if any part is False, else None if any is None; `any` is True if any part is True, else None if any is
None; `not` of None is None. A rule applies only when its condition is True.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

from policies.language.schema import Condition
from routing.reading import Score

Test = Callable[[Mapping[str, Score]], bool | None]


class ConditionError(ValueError):
    """A condition cannot be compiled; the message says what to write instead."""


def compile_condition(condition: Condition, signals: Mapping[str, Any]) -> Test:
    """Raises ConditionError for an unknown signal, or for none or more than one form at once."""
    forms = [bool(condition.signal), bool(condition.all), bool(condition.any), condition.not_ is not None]
    if sum(forms) != 1:
        raise ConditionError("write exactly one of signal, all, any and not")
    if condition.all:
        return _all(tuple(compile_condition(part, signals) for part in condition.all))
    if condition.any:
        return _any(tuple(compile_condition(part, signals) for part in condition.any))
    if condition.not_ is not None:
        return _not(compile_condition(condition.not_, signals))
    return _compare(condition, signals)


def _compare(condition: Condition, signals: Mapping[str, Any]) -> Test:
    name, least, below = condition.signal, condition.at_least, condition.below
    if name not in signals:
        close = difflib.get_close_matches(name, signals, 1)
        hint = f"did you mean {close[0]!r}?" if close else f"classify.signals has {', '.join(signals) or 'none'}"
        raise ConditionError(f"there is no signal {name!r}; {hint}")
    low = 0.5 if least is None and below is None else least or 0.0
    high = 2.0 if below is None else below  # scores end at 1

    def at_least(scores: Mapping[str, Score]) -> bool | None:
        score = scores[name]
        return None if score.neutral else score.value >= low

    def between(scores: Mapping[str, Score]) -> bool | None:
        score = scores[name]
        return None if score.neutral else low <= score.value < high

    return at_least if below is None else between


def _all(tests: tuple[Test, ...]) -> Test:
    def every(scores: Mapping[str, Score]) -> bool | None:
        result: bool | None = True
        for test in tests:
            value = test(scores)
            if value is False:
                return False
            if value is None:
                result = None
        return result

    return every


def _any(tests: tuple[Test, ...]) -> Test:
    def some(scores: Mapping[str, Score]) -> bool | None:
        result: bool | None = False
        for test in tests:
            value = test(scores)
            if value:
                return True
            if value is None:
                result = None
        return result

    return some


def _not(test: Test) -> Test:
    def negated(scores: Mapping[str, Score]) -> bool | None:
        value = test(scores)
        return None if value is None else not value

    return negated


def describe(condition: Condition) -> str:
    """The condition as one line: any(hard >= 0.5, all(code >= 0.5, length >= 0.3))."""
    if condition.all:
        return f"all({', '.join(map(describe, condition.all))})"
    if condition.any:
        return f"any({', '.join(map(describe, condition.any))})"
    if condition.not_ is not None:
        return f"not({describe(condition.not_)})"
    name, least, below = condition.signal, condition.at_least, condition.below
    if below is None:
        return f"{name} >= {0.5 if least is None else least:g}"
    return f"{name} < {below:g}" if least is None else f"{least:g} <= {name} < {below:g}"


def explain(condition: Condition, signals: Mapping[str, Any], scores: Mapping[str, Score]) -> dict[str, Any]:
    """The condition as a tree with verdicts and scores; `holds` is true, false or null (no opinion)."""
    tree: dict[str, Any] = {"holds": compile_condition(condition, signals)(scores)}
    if condition.signal:
        score = scores[condition.signal]
        tree |= {"condition": describe(condition), "score": None if score.neutral else round(score.value, 4)}
        tree["reason"] = score.text
    elif condition.not_ is not None:
        tree["not"] = explain(condition.not_, signals, scores)
    else:
        key = "all" if condition.all else "any"
        tree[key] = [explain(part, signals, scores) for part in condition.all or condition.any]
    return tree
