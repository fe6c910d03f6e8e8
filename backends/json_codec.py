"""JSON of request bodies: one strict decoder, so that what a backend is sent is what the cache key was made from."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from policies.core.errors import InvalidRequest

#: Deeper bodies are refused: nothing real needs it, and every later walk of the body may recurse without care.
MAX_DEPTH = 64

_EXACT = 1 << 53  # up to here every integral float is one integer
_POSITION = re.compile(r"\s*\((byte \d+)\)$")


def _number(literal: str) -> int | float:
    """Called for literals with a point or an exponent only: 1.0 and 1e0 become 1, what overflows is refused."""
    value = float(literal)
    if value - value != 0.0:
        raise ValueError("the number is too large")
    return int(value) if value.is_integer() and -_EXACT <= value <= _EXACT else value


_decode = msgspec.json.Decoder(dict[str, Any], float_hook=_number).decode


def decode_object(data: bytes) -> dict[str, Any]:
    """The JSON object in `data`, with numbers normalised (1.0 is 1, -0.0 is 0). Of a repeated key the last one counts.

    Raises InvalidRequest, with the position, for anything that is not one JSON object in UTF-8: bad syntax, NaN, Infinity,
    numbers beyond a double, nesting deeper than MAX_DEPTH.
    """
    try:
        body = _decode(data)
    except msgspec.DecodeError as error:
        raise InvalidRequest(_explain(str(error), data), code="invalid_json") from None
    except RecursionError:
        raise _too_deep() from None
    # Fewer brackets than levels allowed: cannot be too deep. This spares nearly every body the walk.
    if data.count(b"{") + data.count(b"[") > MAX_DEPTH and _depth(body) > MAX_DEPTH:
        raise _too_deep()
    return body


def _explain(reason: str, data: bytes) -> str:
    if not data.strip():
        return "The request body is empty: send one JSON object."
    if reason.startswith("Expected `object`"):
        return f"The request body must be a JSON object. {reason}."
    found = _POSITION.search(reason)
    where = f"at {found[1]}" if found else f"at byte {len(data)}" if "truncated" in reason else "somewhere in the body"
    if " - at `" in reason:
        reason, _, path = reason.partition(" - at ")
        where = f"at {path}"
    reason = _POSITION.sub("", reason).removeprefix("JSON is malformed: ")
    return f"The request body is not valid JSON {where}: {reason}."


def _too_deep() -> InvalidRequest:
    return InvalidRequest(f"The request body is nested deeper than {MAX_DEPTH} levels.", code="invalid_json")


def _depth(body: object) -> int:
    """Levels of nesting, level by level (no recursion)."""
    depth, level = 0, [body]
    while level:
        depth += 1
        inner: list[object] = []
        for item in level:
            members = item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
            inner.extend(member for member in members if isinstance(member, dict | list))
        level = inner
    return depth
