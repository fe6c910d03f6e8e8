"""Checks a tree of nodes against a Struct and reports every mistake at once.

    check(node, Policy, problems) -> Policy

The result is always there, so that later checks can run too: what could not be read holds its type's empty value, and
`problems.touches(path)` says so. Structs say what they want by type and by `Meta(extra=...)`:

    {"unit": "duration"}   a value with a unit (policies.language.units)
    {"later": True}        a key that exists, but not in this version
    {"resolved": True}     filled in after reading; not a key of the file
    {"secret": True}       what stands there may be a secret by mistake: no message shows it
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable
from pathlib import Path as FilePath
from typing import Any, TypeVar, cast

import msgspec
from msgspec import inspect as ins

from policies.language.problems import Path, Problems, nearest, path_text, shown, suggestion
from policies.language.units import UNITS, UnitError
from policies.language.yaml_reader import Items, Mapping, Node, Scalar, plain

T = TypeVar("T", bound=msgspec.Struct)

#: A bound in msgspec's description -> its words, and the comparison that breaks it.
_LIMITS: tuple[tuple[str, str, Callable[[float, float], bool]], ...] = (
    ("gt", "more than", operator.le),
    ("ge", "at least", operator.lt),
    ("lt", "less than", operator.ge),
    ("le", "at most", operator.gt),
)
_BOOLISH = {"yes": "true", "on": "true", "y": "true", "no": "false", "off": "false", "n": "false"}


def check(node: Node, struct: type[T], problems: Problems) -> T:
    """`node` as a `struct`; what is wrong is added to `problems`."""
    return cast(T, _Checker(problems).walk(node, type_of(struct), ()))


@functools.cache
def type_of(struct: type[msgspec.Struct]) -> ins.Type:
    """msgspec's description of a Struct, worked out once."""
    return ins.type_info(struct)


def extra_of(kind: ins.Type) -> dict[str, Any]:
    """The `Meta(extra=...)` of a field, through `X | None` as well."""
    if isinstance(kind, ins.Metadata):
        return kind.extra or {}
    if isinstance(kind, ins.UnionType):
        return next((extra_of(part) for part in kind.types if not isinstance(part, ins.NoneType)), {})
    return {}


class _Checker:
    def __init__(self, problems: Problems) -> None:
        self._problems = problems

    def walk(self, node: Node, kind: ins.Type, path: Path) -> Any:
        if isinstance(kind, ins.Metadata):
            extra = kind.extra or {}
            if extra.get("secret") and isinstance(node, Scalar):
                return self._hidden(node, kind.type, path)
            unit = extra.get("unit")
            return self._unit(node, unit, kind.type, path) if unit else self.walk(node, kind.type, path)
        if isinstance(kind, ins.StructType):
            return self._struct(node, kind, path)
        if isinstance(kind, ins.UnionType):
            return self._union(node, kind, path)
        if isinstance(kind, (ins.CollectionType, ins.VarTupleType)):
            return self._items(node, kind, path)
        if isinstance(kind, ins.DictType):
            return self._dict(node, kind, path)
        if isinstance(kind, ins.AnyType):
            return plain(node)
        return self._scalar(node, kind, path)

    # -------------------------------------------------------------------------------------------------- collections

    def _struct(self, node: Node, kind: ins.StructType, path: Path) -> Any:
        entries: dict[str, Node] = {}
        if isinstance(node, Mapping):
            entries = node.entries
            meant = self._keys(node, kind, path)
        else:
            meant = {field.encode_name for field in kind.fields}
            self._wrong(node, "keys and values", path)
        values: dict[str, Any] = {}
        for field in kind.fields:
            extra = extra_of(field.type)
            child = entries.get(field.encode_name)
            if extra.get("later") or extra.get("resolved"):
                continue
            if child is not None:
                values[field.name] = self.walk(child, field.type, (*path, field.encode_name))
            elif field.required:
                values[field.name] = _empty(field.type)
                if field.encode_name not in meant:
                    where = f" in {path_text(path)}" if path else ""
                    message = f"the key `{field.encode_name}` is missing{where}"
                    self._problems.add(node.at, message, (*path, field.encode_name))
        return kind.cls(**values)

    def _keys(self, node: Mapping, kind: ins.StructType, path: Path) -> set[str]:
        """Report keys that cannot stand here. Returns the names that unknown keys probably meant."""
        fields = {field.encode_name: extra_of(field.type) for field in kind.fields}
        usable = [name for name, extra in fields.items() if not extra.get("later") and not extra.get("resolved")]
        meant: set[str] = set()
        for key in node.entries:
            extra = fields.get(key)
            if extra is not None and extra.get("later"):
                message = f"`{key}` is not available in this version; remove it"
            elif extra is None or extra.get("resolved"):
                free = [name for name in usable if name not in node.entries]
                close = nearest(key, free) or nearest(key, usable)
                if close:
                    meant.add(close)
                where = f" in {path_text(path)}" if path else ""
                message = f"unknown key `{shown(key)}`{where}{suggestion(key, free or usable, 'known keys')}"
            else:
                continue
            self._problems.add(node.keys[key], message, (*path, key))
        return meant

    def _items(self, node: Node, kind: ins.CollectionType | ins.VarTupleType, path: Path) -> Any:
        made: list[Any] = []
        if not isinstance(node, Items):
            said = (
                f"; did you mean [{shown(node.text)}]?" if isinstance(node, Scalar) and node.value is not None else ""
            )
            self._wrong(node, "a list", path, said)
        else:
            made = [self.walk(item, kind.item_type, (*path, index)) for index, item in enumerate(node.items)]
            self._length(node, len(made), kind, path)
        if isinstance(kind, ins.FrozenSetType):
            return frozenset(made)
        return set(made) if isinstance(kind, ins.SetType) else made if isinstance(kind, ins.ListType) else tuple(made)

    def _dict(self, node: Node, kind: ins.DictType, path: Path) -> dict[str, Any]:
        if not isinstance(node, Mapping):
            self._wrong(node, "names and values", path)
            return {}
        made: dict[str, Any] = {}
        for key, child in node.entries.items():
            unfit = _unfit_text(key, kind.key_type)
            if unfit:
                self._problems.add(node.keys[key], f"the name `{shown(key)}` {unfit}", (*path, key))
            made[key] = self.walk(child, kind.value_type, (*path, key))
        self._length(node, len(made), kind, path)
        return made

    def _length(self, node: Node, length: int, kind: Any, path: Path) -> None:
        if kind.min_length is not None and length < kind.min_length:
            least = "must not be empty" if kind.min_length == 1 else f"needs at least {kind.min_length} entries"
            self._problems.add(node.at, f"{path_text(path)} {least}", path)
        if kind.max_length is not None and length > kind.max_length:
            self._problems.add(node.at, f"{path_text(path)} has more than {kind.max_length} entries", path)

    def _union(self, node: Node, kind: ins.UnionType, path: Path) -> Any:
        """`X | None`: an empty value is None. The files know no other union."""
        parts = [part for part in kind.types if not isinstance(part, ins.NoneType)]
        assert len(parts) == 1, f"{path_text(path)}: only `X | None` can be checked"
        if isinstance(node, Scalar) and node.value is None:
            return None
        return self.walk(node, parts[0], path)

    # ------------------------------------------------------------------------------------------------------ scalars

    def _scalar(self, node: Node, kind: ins.Type, path: Path) -> Any:
        if isinstance(kind, ins.LiteralType):
            return self._choice(node, [str(value) for value in kind.values], path)
        if isinstance(kind, ins.EnumType):
            choice = self._choice(node, [str(member.value) for member in kind.cls], path)
            return kind.cls(choice) if choice else None
        value = node.value if isinstance(node, Scalar) else None
        if isinstance(kind, (ins.StrType, ins.CustomType)):
            return self._text(node, kind, path)
        if isinstance(kind, ins.BoolType):
            if isinstance(value, bool):
                return value
            said = _BOOLISH.get(value.lower()) if isinstance(value, str) else None
            self._wrong(node, "true or false", path, f"; did you mean `{said}`?" if said else "")
            return False
        if isinstance(kind, (ins.IntType, ins.FloatType)):
            whole = isinstance(kind, ins.IntType)
            if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
                self._wrong(node, "a whole number" if whole else "a number", path, _number_meant(value, whole))
                return _empty(kind)
            return self._in_range(node, value if whole else float(value), kind, path)
        raise AssertionError(f"{path_text(path)}: no check for {kind}")

    def _choice(self, node: Node, choices: list[str], path: Path) -> str:
        if not isinstance(node, Scalar) or node.value is None:
            self._wrong(node, f"one of {', '.join(choices)}", path)
            return ""
        if node.text in choices:
            return node.text
        message = f"`{shown(node.text)}` is no value of {path_text(path)}{suggestion(node.text, choices, 'one of')}"
        self._problems.add(node.at, message, path)
        return ""

    def _text(self, node: Node, kind: ins.StrType | ins.CustomType, path: Path) -> Any:
        if isinstance(kind, ins.CustomType) and isinstance(node, Scalar) and not isinstance(node.value, str):
            # The text may be meant as a secret, so it is not shown.
            self._problems.add(node.at, f"{path_text(path)} must be text; write it in quotes", path)
            return _empty(kind)
        if not isinstance(node, Scalar) or not isinstance(node.value, str):
            said = f'; did you mean "{shown(node.text)}"?' if isinstance(node, Scalar) and node.text else ""
            self._wrong(node, "text", path, said)
            return _empty(kind)
        if isinstance(kind, ins.CustomType):  # a path, a secret: made from its text
            if not node.text:
                self._problems.add(node.at, f"{path_text(path)} must not be empty", path)
            return _maker(kind)(node.text)
        unfit = _unfit_text(node.text, kind)
        if unfit:
            self._problems.add(node.at, f"{path_text(path)} {unfit}", path)
        return node.text

    def _hidden(self, node: Scalar, kind: ins.Type, path: Path) -> Any:
        """Like `walk` for a value that no message may show."""
        if isinstance(kind, ins.StrType) and isinstance(node.value, str):
            unfit = _unfit_text(node.text, kind, show=False)
            if unfit:
                self._problems.add(node.at, f"{path_text(path)} {unfit}", path)
            return node.text
        wanted = "text" if isinstance(kind, ins.StrType) else "keys and values or a list of them"
        self._problems.add(node.at, f"{path_text(path)} must be {wanted}; what stands there is not shown", path)
        return _empty(kind)

    def _unit(self, node: Node, unit: str, kind: ins.Type, path: Path) -> Any:
        reader, noun = UNITS[unit]
        if not isinstance(node, Scalar) or node.value is None or isinstance(node.value, bool):
            self._wrong(node, noun, path)
            return _empty(kind)
        try:
            value = reader(node.text)
        except UnitError as error:
            self._problems.add(node.at, f"{path_text(path)}: {error}", path)
            return _empty(kind)
        return self._in_range(node, value, kind, path)

    def _in_range(self, node: Node, value: Any, kind: Any, path: Path) -> Any:
        for name, words, broken in _LIMITS:
            limit = getattr(kind, name, None)
            if limit is not None and broken(value, limit):
                self._problems.add(node.at, f"{path_text(path)} must be {words} {limit:g}", path)
        return value

    def _wrong(self, node: Node, wanted: str, path: Path, said: str = "") -> None:
        if isinstance(node, Scalar):
            found = "nothing" if node.value is None else f"`{shown(node.text)}`" if node.text else "an empty text"
        else:
            found = "a list" if isinstance(node, Items) else "keys and values"
        self._problems.add(node.at, f"{path_text(path)} must be {wanted}, not {found}{said}", path)


def _maker(kind: ins.CustomType) -> Callable[[str], Any]:
    return cast(Callable[[str], Any], kind.cls)


def _number_meant(value: Any, whole: bool) -> str:
    if isinstance(value, float) and whole and value.is_integer():
        return f"; did you mean {value:.0f}?"
    if isinstance(value, str) and re.fullmatch(r"[-+]?\d{1,15}(\.\d{1,9})?", value):
        return f"; did you mean {value} without quotes?"
    return ""


def _unfit_text(text: str, kind: ins.Type, *, show: bool = True) -> str:
    """Why a text does not fit its type; empty when it does. `show`: may the text stand in a message?"""
    if not isinstance(kind, ins.StrType):
        return _unfit_text(text, kind.type, show=show) if isinstance(kind, ins.Metadata) else ""
    if kind.min_length is not None and len(text) < kind.min_length:
        return "must not be empty" if kind.min_length == 1 else f"must be at least {kind.min_length} characters long"
    if kind.max_length is not None and len(text) > kind.max_length:
        return f"must be at most {kind.max_length} characters long"
    if kind.pattern is not None and not re.fullmatch(kind.pattern.strip("^$"), text):
        found = f": `{shown(text)}`" if show else ""
        return f"has characters that are not allowed here{found} (wanted: {kind.pattern.strip('^$')})"
    return ""


def _empty(kind: ins.Type) -> Any:
    """The value that stands in for one that could not be read."""
    if isinstance(kind, ins.Metadata):
        return _empty(kind.type)
    if isinstance(kind, ins.StructType):
        return kind.cls(**{field.name: _empty(field.type) for field in kind.fields if field.required})
    if isinstance(kind, ins.CustomType):
        return _maker(kind)("." if kind.cls is FilePath else "")
    simple: dict[type[ins.Type], Any] = {ins.StrType: "", ins.LiteralType: "", ins.IntType: 0, ins.FloatType: 0.0}
    simple |= {
        ins.BoolType: False,
        ins.VarTupleType: (),
        ins.ListType: [],
        ins.DictType: {},
        ins.FrozenSetType: frozenset(),
    }
    return simple.get(type(kind))
