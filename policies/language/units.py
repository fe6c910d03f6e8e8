"""Values with a unit, as people write them in a file: durations, shares, sizes, moments, URLs.

Each reader takes the text and returns the value, or raises UnitError with what to write instead. A number without its
unit is refused: nobody should have to guess whether 30 is seconds or milliseconds.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from policies.language.problems import shown

_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0}
_BYTES = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_MEANT_BYTES = {"b": "B", "k": "KiB", "m": "MiB", "g": "GiB"}
_NUMBER = re.compile(r"(\d{1,15}(?:\.\d{1,9})?)\s*([^\d\s.]*)", re.ASCII)

MAX_DURATION_S = 366 * 86_400.0
MAX_SIZE_BYTES = 1 << 40


class UnitError(ValueError):
    """What is wrong with a value, and the spelling that was probably meant."""

    def __init__(self, message: str, meant: str | None = None) -> None:
        super().__init__(f"{message}; did you mean {meant}?" if meant else message)


def duration(text: str) -> float:
    """`300ms`, `10s`, `1.5m`, `1h`, `7d` -> seconds."""
    match = _NUMBER.fullmatch(text)
    if match is None:
        raise UnitError(
            f"`{shown(text)}` is not a duration; write one number and a unit, such as 300ms, 10s, 1.5m or 1h"
        )
    number, unit = match.groups()
    if unit == "":
        raise UnitError(f"`{number}` has no unit", f"{number}s")
    if unit not in _SECONDS:
        meant = _meant_second(unit)
        raise UnitError(
            f"`{shown(unit)}` is not a unit of time (ms, s, m, h, d)", f"{number}{meant}" if meant else None
        )
    seconds = float(number) * _SECONDS[unit]
    if seconds > MAX_DURATION_S:
        raise UnitError(f"`{text}` is longer than a year")
    return seconds


def _meant_second(unit: str) -> str | None:
    lowered = unit.lower()
    if lowered in _SECONDS:
        return lowered
    spoken = {"sec": "s", "mil": "ms", "mse": "ms", "min": "m", "hou": "h", "hr": "h", "hrs": "h", "day": "d"}
    return spoken.get(lowered[:3])


def share(text: str) -> float:
    """`30%` -> 0.3; between 0% and 100%."""
    match = _NUMBER.fullmatch(text)
    if match is None:
        raise UnitError(f"`{shown(text)}` is not a share; write it in percent, such as 30%")
    number, unit = match.groups()
    if unit == "":
        value = float(number)
        raise UnitError(f"`{number}` has no unit", f"{value * 100:g}%" if 0 < value < 1 else f"{number}%")
    if unit != "%":
        raise UnitError(f"`{shown(unit)}` is not percent", f"{number}%")
    if float(number) > 100:
        raise UnitError(f"`{text}` is more than 100%")
    return float(number) / 100


def size(text: str) -> int:
    """`512B`, `64KiB`, `4MiB`, `1GiB` -> bytes."""
    match = _NUMBER.fullmatch(text)
    if match is None:
        raise UnitError(f"`{shown(text)}` is not a size; write one number and a unit, such as 64KiB or 4MiB")
    number, unit = match.groups()
    if unit == "":
        raise UnitError(f"`{number}` has no unit (B, KiB, MiB, GiB)", f"{number}B")
    if unit not in _BYTES:
        meant = _MEANT_BYTES.get(unit[:1].lower())
        raise UnitError(
            f"`{shown(unit)}` is not a unit of size (B, KiB, MiB, GiB)", f"{number}{meant}" if meant else None
        )
    value = float(number) * _BYTES[unit]
    if value > MAX_SIZE_BYTES:
        raise UnitError(f"`{text}` is more than 1024GiB")
    return int(value)


def moment(text: str) -> float:
    """`2026-12-31` (its first second, UTC) or `2026-12-31T18:00:00+08:00` -> seconds since 1970-01-01 UTC."""
    try:
        at = dt.datetime.fromisoformat(text)
    except (ValueError, OverflowError):
        raise UnitError(f"`{shown(text)}` is not a date; write 2026-12-31 or 2026-12-31T18:00:00Z") from None
    if at.tzinfo is None:
        if len(text) > 10:
            raise UnitError(f"`{shown(text)}` has no time zone", f"{shown(text)}Z")
        at = at.replace(tzinfo=dt.UTC)
    return at.timestamp() if at.year > 1 else 0.0


def url(text: str) -> str:
    """An http or https address without credentials, its trailing slash removed."""
    try:
        parts = urlsplit(text)
        host, _ = parts.hostname, parts.port
    except ValueError:
        raise UnitError("this is not a URL; write http://HOST:PORT/PATH") from None
    if "@" in parts.netloc:
        raise UnitError(
            "a URL must not carry credentials; put them in an environment variable and name it in `credential_env`"
        )
    if parts.scheme not in ("http", "https") or not host:
        meant = f"http://{text}" if "://" not in text and re.fullmatch(r"[\w.-]+(:\d+)?(/\S*)?", text) else None
        raise UnitError(f"`{shown(text)}` is not an http or https URL", meant)
    if parts.query or parts.fragment or any(c.isspace() for c in text):
        raise UnitError("a URL here has no query, fragment or spaces")
    return text.rstrip("/")


#: The `unit` of a field's `Meta(extra=...)` -> (its reader, the word for it in messages).
UNITS: dict[str, tuple[Callable[[str], Any], str]] = {
    "duration": (duration, "a duration such as 300ms, 10s or 1h"),
    "share": (share, "a share such as 30%"),
    "size": (size, "a size such as 64KiB or 4MiB"),
    "moment": (moment, "a date such as 2026-12-31 or 2026-12-31T18:00:00Z"),
    "url": (url, "a URL such as http://127.0.0.1:9100/v1"),
}
