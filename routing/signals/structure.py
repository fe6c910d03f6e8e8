"""Is there more than prose: code, maths, a table, a list, JSON, tool use?"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import ClassVar, Self

from policies.language.schema import SignalSpec
from routing.heads import Heads
from routing.reading import Score
from routing.signals.base import SpecError
from routing.view import RequestView

# Each check starts with a search for a fixed string, so that plain prose costs next to nothing.
_CODE_LINE = re.compile(
    r"(?m)^\s*(?:(?:async )?def \w+\(|class \w+[(:{ ]|from [\w.]+ import |import \w+|func \w+\(|fn \w+|#include\b"
    r"|public \w+ \w+|(?:const|let|var) \w+ =|SELECT .+ FROM\b|INSERT INTO\b|Traceback \(most recent)"
)
_CODE_ENDS = (";\n", "{\n", "):\n", "->", "=>", "();", "&&", "||", "==", "!=")
_FORMULA = re.compile(r"[\w)\]][ ]?[=+*/^×÷<>≤≥-][ ]?[\w(\[√]")
_DIGITS_AND_OPERATOR = re.compile(r"\d\s?[+*/^×÷=-]\s?[\d(a-z]")
_LATEX = ("\\frac", "\\sum", "\\int", "\\sqrt", "\\begin{", "$$", "\\(", "\\[")
_MATHS_SIGN = re.compile("[∫∑∏√∞≤≥≠≈∂∇∈∀∃×÷±π²³]")
_LIST_LINE = re.compile(r"(?m)^[ \t]*(?:[-*•·]|\(?\d{1,2}[.)、．]|[(（]\d{1,2}[)）])[ \t]*\S")
_JSON_PAIR = re.compile(r'"[^"\n]{1,80}"\s*:\s*["\d\[{tfn-]')


def _code(view: RequestView) -> bool:
    text = view.text
    if "```" in text:
        return True
    if "\n" in text and sum(text.count(end) for end in _CODE_ENDS) >= 3:
        return True
    return ("(" in text or "import " in text or " FROM " in text) and _CODE_LINE.search(text) is not None


def _maths(view: RequestView) -> bool:
    text = view.text
    if "\\" in text or "$$" in text:
        for mark in _LATEX:
            if mark in text:
                return True
    if not text.isascii() and _MATHS_SIGN.search(text):
        return True
    if "=" in text and len(_FORMULA.findall(text, 0, 2_000)) >= 2:
        return True
    return ("+" in text or "*" in text or "/" in text or "^" in text or "=" in text) and (
        _DIGITS_AND_OPERATOR.search(text) is not None
    )


def _table(view: RequestView) -> bool:
    text = view.text
    if "\n" not in text:
        return False
    if "|" in text:
        return sum(1 for line in text.splitlines() if line.count("|") >= 2) >= 2
    return text.count("\t") >= 4


def _list(view: RequestView) -> bool:
    text = view.text
    return "\n" in text and len(_LIST_LINE.findall(text)) >= 2


def _json(view: RequestView) -> bool:
    if view.wants_json:
        return True
    text = view.text
    return "{" in text and '"' in text and _JSON_PAIR.search(text) is not None


def _tools(view: RequestView) -> bool:
    return view.has_tools or view.has_tool_messages


MARKS: dict[str, Callable[[RequestView], bool]] = {
    "code": _code,
    "maths": _maths,
    "table": _table,
    "list": _list,
    "json": _json,
    "tools": _tools,
}

_PROSE = Score(0.0, "plain prose")


class Structure:
    """1 when any of `marks` (all of them when none is named) is there, else 0."""

    reads: ClassVar[frozenset[str]] = frozenset({"marks"})
    needs_embedding: ClassVar[bool] = False
    __slots__ = ("_checks",)

    def __init__(self, marks: tuple[str, ...]) -> None:
        self._checks = tuple((mark, MARKS[mark]) for mark in marks)

    @classmethod
    def compile(cls, spec: SignalSpec, heads: Heads) -> Self:  # noqa: ARG003
        for mark in spec.marks:
            if mark not in MARKS:
                raise SpecError("marks", f"{mark!r} is not a mark; the marks are {', '.join(MARKS)}")
        return cls(spec.marks or tuple(MARKS))

    def read(self, view: RequestView) -> Score:
        found = tuple([mark for mark, check in self._checks if check(view)])
        return Score(1.0, "found", found) if found else _PROSE
