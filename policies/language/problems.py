"""All that is wrong with a file, collected so that a person sees everything in one go.

A problem is one complete line, `file:line:column: message; did you mean ...?`. Lines and columns count from 1.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import NamedTuple

from policies.core.errors import ConfigError

#: What looks like an API key. It should not stand in these files; should it do so, it is at least not repeated.
_KEY_LIKE = re.compile(r"\b(gw|sk|pk)-[\w-]{8,}")

#: Where a value stands in a file's tree: keys and list indexes from the root.
Path = tuple[str | int, ...]


class Position(NamedTuple):
    line: int
    column: int


START = Position(1, 1)


class Problems:
    """Collects problems of one file, and remembers which parts of its tree they touch.

    Checks that build on a part of the tree first ask `touches(path)`, so that one mistake is not reported twice.
    """

    __slots__ = ("_found", "_touched", "file")

    def __init__(self, file: str) -> None:
        self.file = file
        self._found: list[tuple[Position, str]] = []
        self._touched: set[Path] = set()

    def add(self, at: Position, message: str, path: Path = ()) -> None:
        self._found.append((at, message))
        self._touched.update(path[:depth] for depth in range(len(path) + 1))

    def touches(self, path: Path) -> bool:
        """Is there a problem at `path` or anywhere below it?"""
        return path in self._touched

    def __bool__(self) -> bool:
        return bool(self._found)

    def lines(self) -> list[str]:
        """The problems in the order of the file, each once."""
        ordered = dict.fromkeys(sorted(self._found))
        return [f"{self.file}:{at.line}:{at.column}: {message}" for at, message in ordered]

    def raise_any(self) -> None:
        if self._found:
            raise ConfigError(self.lines())


def path_text(path: Path) -> str:
    """`("routes", 0, "to")` -> `routes[0].to`; the root is "the file"."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return f"`{shown(text, 80)}`" if text else "the file"


def shown(text: str, limit: int = 40) -> str:
    """Text from a file as it may stand in a message: one line, not too long, without what looks like an API key."""
    flat = _KEY_LIKE.sub(r"\1-***", " ".join(text.split()))
    return flat if len(flat) <= limit else flat[: limit - 3] + "..."


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known name that `word` was probably meant to be."""
    names = sorted(known)
    lowered = {name.lower(): name for name in names}
    close = difflib.get_close_matches(word[:100].lower().replace("-", "_"), lowered, n=1, cutoff=0.6)
    close = close or difflib.get_close_matches(word[:100].lower(), lowered, n=1, cutoff=0.6)
    return lowered[close[0]] if close else None


def suggestion(word: str, known: Iterable[str], noun: str) -> str:
    """The end of a message about an unknown name: the likely one, or the few that there are."""
    names = sorted(known)
    close = nearest(word, names)
    if close is not None:
        return f"; did you mean `{close}`?"
    if not names:
        return f"; there are no {noun}"
    return f"; {noun}: {', '.join(names[:20])}"
