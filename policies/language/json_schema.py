"""The JSON Schema of a policy file, for editors: completion, hover text and red underlines while typing."""

from __future__ import annotations

import inspect
import re
from typing import Any

import msgspec

from policies.language import schema
from policies.language.schema import Policy, Section

SCHEMA_ID = "policy.schema.json"

_UNITS: dict[str, dict[str, Any]] = {
    "duration": {"type": "string", "pattern": r"^\d+(\.\d+)?(us|ms|s|m|h|d)$", "examples": ["300ms", "10s", "1h"]},
    "share": {"type": "string", "pattern": r"^\d+(\.\d+)?%$", "examples": ["30%"]},
    "size": {"type": "string", "pattern": r"^\d+(\.\d+)?(B|KiB|MiB|GiB)$", "examples": ["64MiB"]},
}


def policy_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of a policy file. Keys that are not available yet are left out, so editors flag them."""
    (_,), components = msgspec.json.schema_components([Policy], ref_template="#/$defs/{name}")
    shaped = {name: _shape(part) for name, part in components.items()}
    for section in _sections():
        part = shaped.get(section.__name__)
        if part is not None:
            _describe(part, section)
    top = shaped.pop(Policy.__name__)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": SCHEMA_ID,
        **top,
        "title": "Gateway policy",
        "$defs": shaped,
    }


def _sections() -> list[type[Section]]:
    return [part for part in vars(schema).values() if isinstance(part, type) and issubclass(part, Section)]


def _shape(part: Any) -> Any:
    """msgspec's schema describes values as read; turn it into what people write."""
    if isinstance(part, (list, tuple)):
        return [_shape(item) for item in part]
    if not isinstance(part, dict):
        return part
    if "x-unit" in part:
        # The default is a number of seconds or bytes; in the file it is a text, so leave it to the description.
        return dict(_UNITS[part["x-unit"]])
    shaped = {key: _shape(value) for key, value in part.items()}
    if isinstance(part.get("properties"), dict):
        usable = {key: value for key, value in part["properties"].items() if not value.get("x-later")}
        shaped["properties"] = {key: _shape(value) for key, value in usable.items()}
    if isinstance(shaped.get("default"), dict) or shaped.get("default", 0) is None:
        del shaped["default"]
    return shaped


def _describe(part: dict[str, Any], section: type[Section]) -> None:
    """Put the `#:` comments of the schema's source beside the keys, where the source is at hand."""
    try:
        source = inspect.getsource(section)
    except (OSError, TypeError):
        return
    defaults = {f.name: f for f in msgspec.structs.fields(section)}
    for comment, name in re.findall(r"((?:^ +#:? .*\n)+) +(\w+): ", source, re.MULTILINE):
        field = defaults.get(name)
        target = part["properties"].get(field.encode_name) if field else None
        if target is not None:
            lines = re.findall(r"#: (.*)", comment)
            target["description"] = " ".join(lines)
