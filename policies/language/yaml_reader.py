"""YAML text -> a tree of nodes that know where they stand.

A careful subset of YAML 1.2 (core schema): `yes`, `no`, `on`, `12:30` and `2026-01-01` are text, not surprises. Built from
parser events, so nothing is ever constructed from a tag and every bound holds while reading:

    refused   a key twice · tags (`!!python`, `!x`) · several documents · `<<` merges · an alias inside its own anchor ·
              bytes that are not UTF-8, control characters · files over 1 MiB, deeper than 32, larger than 20,000 nodes
              (aliases counted as often as they are used), more than 50 aliases
    accepted  a byte-order mark, Windows line ends, tabs that are not indentation
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

import yaml

from policies.core.errors import ConfigError
from policies.language.problems import START, Path, Position, Problems, shown

MAX_FILE_BYTES = 1 << 20
MAX_DEPTH = 32
MAX_NODES = 20_000
MAX_ALIASES = 50

_Loader: type[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_CONTROL = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_INTEGER = re.compile(r"[-+]?[0-9]{1,18}", re.ASCII)
_FLOAT = re.compile(r"[-+]?(?:[0-9]{1,18}\.[0-9]{0,18}|\.[0-9]{1,18}|[0-9]{1,18})(?:[eE][-+]?[0-9]{1,2})?", re.ASCII)
_WORDS: dict[str, bool | None] = {
    "": None, "~": None, "null": None, "Null": None, "NULL": None,
    "true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False,
}  # fmt: skip


@dataclass(slots=True)
class Scalar:
    """`value` is what the text means where any type may stand; `text` is the text itself."""

    at: Position
    text: str
    value: str | int | float | bool | None
    size: int = 1
    depth: int = 1


@dataclass(slots=True)
class Items:
    at: Position
    items: list[Node] = field(default_factory=list)
    size: int = 1
    depth: int = 1


@dataclass(slots=True)
class Mapping:
    at: Position
    entries: dict[str, Node] = field(default_factory=dict)
    keys: dict[str, Position] = field(default_factory=dict)
    size: int = 1
    depth: int = 1


Node = Scalar | Items | Mapping


def plain(node: Node) -> Any:
    """The tree as dicts, lists and scalars."""
    if isinstance(node, Scalar):
        return node.value
    if isinstance(node, Items):
        return [plain(item) for item in node.items]
    return {key: plain(value) for key, value in node.entries.items()}


def lookup(root: Node, path: Path) -> Node | None:
    """The node at `path`, if the file has one."""
    node: Node | None = root
    for part in path:
        if isinstance(node, Mapping) and isinstance(part, str):
            node = node.entries.get(part)
        elif isinstance(node, Items) and isinstance(part, int) and part < len(node.items):
            node = node.items[part]
        else:
            return None
    return node


def position(root: Node, path: Path) -> Position:
    """Where the value at `path` begins; for a part that the file does not have, where its nearest parent does."""
    for depth in range(len(path), -1, -1):
        node = lookup(root, path[:depth])
        if node is not None:
            return node.at
    return root.at


def key_position(root: Node, path: Path) -> Position:
    """Where the key of `path` stands (list items: the item)."""
    parent = lookup(root, path[:-1]) if path else None
    if isinstance(parent, Mapping) and path[-1] in parent.keys:
        return parent.keys[str(path[-1])]
    return position(root, path)


def read_bytes(path: FilePath, limit_bytes: int = MAX_FILE_BYTES) -> bytes:
    """The file's bytes. Raises ConfigError when it is missing, no regular file, not readable or too large."""
    try:
        # Non-blocking, so that opening a pipe of that name cannot hang.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(handle, "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ConfigError([f"{path}:1:1: this is not a regular file"])
            data = file.read(limit_bytes + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not a usable file name"
        raise ConfigError([f"{path}:1:1: cannot be read: {reason}"]) from None
    if len(data) > limit_bytes:
        raise ConfigError([f"{path}:1:1: larger than {limit_bytes >> 10} KiB; a configuration file is not"])
    return data


def read_yaml(data: bytes, problems: Problems) -> Node | None:
    """The tree of the one document in `data`; None, with the reason in `problems`, when there is none to go on with."""
    text = _decode(data, problems)
    if text is None:
        return None
    try:
        root = _Builder(problems).build(text)
    except _Stopped as stop:
        problems.add(stop.at, stop.message)
        return None
    except yaml.YAMLError as error:
        problems.add(*_syntax(error, text))
        return None
    if root is None:
        problems.add(START, "the file is empty")
    return root


def _decode(data: bytes, problems: Problems) -> str | None:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        before = data[: error.start].decode("utf-8")
        hint = " (it looks like UTF-16)" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else ""
        problems.add(_end_of(before), f"this is not UTF-8{hint}; save the file as UTF-8")
        return None
    text = text.removeprefix("\ufeff")
    control = _CONTROL.search(text)
    if control is not None:
        code = ord(control.group())
        problems.add(_end_of(text[: control.start()]), f"the character U+{code:04X} is not allowed here; remove it")
        return None
    return text


def _end_of(text: str) -> Position:
    lines = re.split("\r\n|[\r\n]", text)
    return Position(len(lines), len(lines[-1]) + 1)


def _syntax(error: yaml.YAMLError, text: str) -> tuple[Position, str]:
    """A parser error in words that help."""
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    at = START if mark is None else Position(mark.line + 1, mark.column + 1)
    lines = text.splitlines()
    # Either the line itself or the one before it (where the parser only notices later) is indented by a tab.
    for number in (at.line, at.line - 1):
        line = lines[number - 1] if 0 < number <= len(lines) else ""
        indent = line[: len(line) - len(line.lstrip())]
        if "\t" in indent:
            return Position(number, indent.index("\t") + 1), "a tab is used for indentation; YAML wants spaces"
    said = str(getattr(error, "problem", None) or "cannot be read")
    context, begun = getattr(error, "context", None), getattr(error, "context_mark", None)
    if context:
        said = f"{context}, {said}"
    where = f" (begun on line {begun.line + 1})" if context and begun is not None else ""
    return min(at, _end_of(text)), f"not valid YAML: {shown(said, 160)}{where}"


class _Stopped(Exception):
    """Reading cannot go on."""

    def __init__(self, event: Any, message: str) -> None:
        super().__init__(message)
        self.at = _at(event)
        self.message = message


def _at(event: Any) -> Position:
    return Position(event.start_mark.line + 1, event.start_mark.column + 1)


@dataclass(slots=True)
class _Open:
    """A collection being read. `key` is the key whose value comes next; `skip` drops the value of a refused key."""

    node: Items | Mapping
    anchor: str | None
    key: str | None = None
    skip: bool = False


class _Builder:
    """Builds the tree from the parser's events, with a stack instead of recursion."""

    def __init__(self, problems: Problems) -> None:
        self._problems = problems
        self._stack: list[_Open] = []
        self._anchors: dict[str, Node | None] = {}
        self._aliases = 0
        self._root: Node | None = None

    def build(self, text: str) -> Node | None:
        documents = 0
        for event in yaml.parse(text, Loader=_Loader):
            if isinstance(event, yaml.ScalarEvent):
                self._scalar(event)
            elif isinstance(event, yaml.CollectionStartEvent):
                self._open(event)
            elif isinstance(event, yaml.CollectionEndEvent):
                self._close(event)
            elif isinstance(event, yaml.AliasEvent):
                self._alias(event)
            elif isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    raise _Stopped(
                        event, "a second document begins here; write one document a file (remove this `---`)"
                    )
        return self._root

    def _scalar(self, event: Any) -> None:
        if event.tag is not None:
            raise _Stopped(event, f"tags such as {shown(str(event.tag))} are not used here; remove it")
        top = self._stack[-1] if self._stack else None
        if top is not None and isinstance(top.node, Mapping) and top.key is None:
            self._key(top, top.node, event)
            return
        value: Any = _resolve(event.value) if event.implicit[0] else event.value
        node = Scalar(_at(event), event.value, value)
        if event.anchor:
            self._anchors[event.anchor] = node
        self._place(node, event)

    def _key(self, top: _Open, mapping: Mapping, event: Any) -> None:
        key, at = event.value, _at(event)
        top.key, top.skip = key, False
        if key in mapping.keys:
            first = mapping.keys[key].line
            self._problems.add(at, f"the key `{shown(key)}` stands here twice (first on line {first}); remove one")
            top.skip = True
        elif key == "<<" and event.implicit[0]:
            self._problems.add(at, "`<<` merges are not supported; write the keys out")
            top.skip = True
        else:
            mapping.keys[key] = at

    def _open(self, event: Any) -> None:
        if event.tag is not None:
            raise _Stopped(event, f"tags such as {shown(str(event.tag))} are not used here; remove it")
        top = self._stack[-1] if self._stack else None
        if top is not None and isinstance(top.node, Mapping) and top.key is None:
            raise _Stopped(event, "a key must be a word or a text")
        if len(self._stack) >= MAX_DEPTH:
            raise _Stopped(event, f"nested deeper than {MAX_DEPTH} levels")
        node: Items | Mapping = Mapping(_at(event)) if isinstance(event, yaml.MappingStartEvent) else Items(_at(event))
        if event.anchor:
            self._anchors[event.anchor] = None
        self._stack.append(_Open(node, event.anchor))

    def _close(self, event: Any) -> None:
        closed = self._stack.pop()
        if closed.anchor:
            self._anchors[closed.anchor] = closed.node
        self._place(closed.node, event)

    def _alias(self, event: Any) -> None:
        name = event.anchor
        top = self._stack[-1] if self._stack else None
        if top is not None and isinstance(top.node, Mapping) and top.key is None:
            raise _Stopped(event, "a key must be a word or a text")
        if name not in self._anchors:
            raise _Stopped(event, f"the anchor `&{shown(name)}` does not exist")
        node = self._anchors[name]
        if node is None:
            raise _Stopped(event, f"`*{shown(name)}` stands inside its own anchor")
        self._aliases += 1
        if self._aliases > MAX_ALIASES:
            raise _Stopped(event, f"more than {MAX_ALIASES} aliases")
        self._place(node, event)

    def _place(self, node: Node, event: Any) -> None:
        """Put a finished node into the collection that is open."""
        if not self._stack:
            self._root = node
            return
        top = self._stack[-1]
        parent = top.node
        parent.size += node.size
        parent.depth = max(parent.depth, node.depth + 1)
        if parent.size > MAX_NODES or len(self._stack) + node.depth > MAX_DEPTH + 1:
            raise _Stopped(
                event, f"larger than {MAX_NODES} values or nested deeper than {MAX_DEPTH} levels, aliases included"
            )
        if isinstance(parent, Items):
            parent.items.append(node)
        else:
            assert top.key is not None
            if not top.skip:
                parent.entries[top.key] = node
            top.key = None


def _resolve(text: str) -> str | int | float | bool | None:
    """What an unquoted text means (YAML 1.2 core, decimal numbers only)."""
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    return text
