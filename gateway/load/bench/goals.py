"""A figure with its target: what a bench is judged by."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from rich.text import Text


class Goal(msgspec.Struct, frozen=True):
    """A figure with its target. `why` says why it does not count; empty = it counts. `value` None = not measured."""

    name: str
    value: float | None
    target: float
    at_least: bool
    why: str = ""

    @property
    def met(self) -> bool:
        if self.value is None:
            return False
        return self.value >= self.target if self.at_least else self.value <= self.target


def exit_code(goals: Sequence[Goal]) -> int:
    """0 all targets met, 1 one was missed, 4 none was missed but one could not be judged."""
    if any(not goal.met and not goal.why for goal in goals):
        return 1
    return 4 if any(goal.why for goal in goals) else 0


def goal_line(goal: Goal) -> Text:
    sign = ">=" if goal.at_least else "<="
    value = "not measured" if goal.value is None else f"{goal.value:g}"
    line = f"{goal.name} {value} (target {sign} {goal.target:g})"
    if goal.why:
        return Text(f"DOES NOT COUNT {line}: {goal.why}", "yellow")
    return Text(f"ok   {line}", "green") if goal.met else Text(f"MISS {line}", "bold red")
