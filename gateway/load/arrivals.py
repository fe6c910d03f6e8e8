"""When requests are sent: pure generators of intended send times, in seconds from the start of a run.

A process of unit rate (one arrival a second on average) is warped through a profile of the rate over time. So every
process takes every profile: a step with Gamma arrivals is the Gamma process read through a step profile.
"""

from __future__ import annotations

import csv
import itertools
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

#: A trace longer than this is refused rather than read into memory.
MAX_TRACE_ROWS = 1_000_000


@dataclass(frozen=True, slots=True)
class Arrival:
    """One intended send. Token counts come from a recorded trace and shape the prompt; None = the mix decides."""

    at_s: float
    prompt_tokens: int | None = None
    answer_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Segment:
    """From `start_s` until the next segment starts, `rate` requests a second."""

    start_s: float
    rate: float


@dataclass(frozen=True, slots=True)
class Profile:
    """The rate over time, piecewise constant. The first segment starts at 0, the last one never ends."""

    segments: tuple[Segment, ...]

    def __post_init__(self) -> None:
        starts = [segment.start_s for segment in self.segments]
        if not starts or starts[0] != 0 or any(b <= a for a, b in itertools.pairwise(starts)):
            raise ValueError("a rate profile needs segments in rising order, the first one at 0 s")
        if any(segment.rate < 0 for segment in self.segments) or self.segments[-1].rate <= 0:
            raise ValueError("rates must not be negative, and the last segment's rate must be above 0")

    def rate_at(self, at_s: float) -> float:
        return next(segment.rate for segment in reversed(self.segments) if segment.start_s <= at_s)

    def warp(self, units: Iterable[float]) -> Iterator[float]:
        """Times of a unit-rate process, mapped through the inverse of the profile's cumulative rate."""
        index, done = 0, 0.0  # `done`: expected arrivals before segment `index`
        segments = self.segments
        for unit in units:
            while index + 1 < len(segments):
                segment = segments[index]
                after = done + segment.rate * (segments[index + 1].start_s - segment.start_s)
                if unit < after:
                    break
                index, done = index + 1, after
            yield segments[index].start_s + (unit - done) / segments[index].rate


def steady(rate: float) -> Profile:
    """The same rate for ever."""
    return Profile((Segment(0.0, rate),))


def step(rate: float, factor: float, start_s: float, duration_s: float) -> Profile:
    """`rate`, but `factor` times as much from `start_s` for `duration_s`."""
    burst = (Segment(start_s, rate * factor), Segment(start_s + duration_s, rate))
    return Profile(burst if start_s == 0 else (Segment(0.0, rate), *burst))


def constant() -> Iterator[float]:
    """0, 1, 2 ...: evenly spaced."""
    return (float(n) for n in itertools.count())


def poisson(rng: random.Random) -> Iterator[float]:
    """Independent arrivals: exponential gaps of mean 1."""
    return itertools.accumulate(rng.expovariate(1.0) for _ in itertools.repeat(None))


def gamma(rng: random.Random, cv: float) -> Iterator[float]:
    """Gamma gaps of mean 1 and coefficient of variation `cv`: 1 is Poisson, 4 is very bursty.

    Shape 1 / cv^2 and scale cv^2 (mean = shape * scale, cv = 1 / sqrt(shape)).
    """
    if not cv > 0:
        raise ValueError(f"the coefficient of variation must be above 0, not {cv}")
    shape = 1.0 / (cv * cv)
    return itertools.accumulate(rng.gammavariate(shape, 1.0 / shape) for _ in itertools.repeat(None))


def replay(trace: list[Arrival], rate: float | None = None) -> Iterator[Arrival]:
    """The trace over and over, from 0 s. With `rate`, time is stretched so that the mean is `rate` a second."""
    if not trace:
        raise ValueError("the trace holds no arrival")
    first, rows = trace[0].at_s, len(trace)
    span = trace[-1].at_s - first
    # One mean gap between the last arrival and the first of the next round.
    period = span * rows / (rows - 1) if span > 1e-9 else float(rows)
    scale = 1.0 if rate is None else rows / period / rate
    for turn in itertools.count():
        for arrival in trace:
            at_s = (turn * period + arrival.at_s - first) * scale
            yield Arrival(at_s, arrival.prompt_tokens, arrival.answer_tokens)


def bounded(arrivals: Iterable[Arrival], duration_s: float, max_requests: int) -> Iterator[Arrival]:
    """Only what is due before `duration_s`, and at most `max_requests`."""
    return itertools.takewhile(lambda arrival: arrival.at_s < duration_s, itertools.islice(arrivals, max_requests))


def plain(times: Iterable[float]) -> Iterator[Arrival]:
    return map(Arrival, times)


def read_trace(path: Path) -> list[Arrival]:
    """Arrivals of a CSV file with a header, sorted by time.

    Time is the column TIMESTAMP (ISO date and time) or seconds; ContextTokens / prompt_tokens and GeneratedTokens /
    answer_tokens are optional. Raises ValueError with file and line.
    """
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        columns = {name.strip().lower(): name for name in reader.fieldnames or ()}
        when = columns.get("timestamp") or columns.get("seconds")
        if when is None:
            raise ValueError(f"{path}:1: the trace needs a column TIMESTAMP or seconds; it has {sorted(columns)}")
        context = columns.get("contexttokens") or columns.get("prompt_tokens")
        answer = columns.get("generatedtokens") or columns.get("answer_tokens")
        trace: list[Arrival] = []
        for line, row in enumerate(itertools.islice(reader, MAX_TRACE_ROWS + 1), start=2):
            if len(trace) == MAX_TRACE_ROWS:
                raise ValueError(f"{path}: more than {MAX_TRACE_ROWS} arrivals; cut the trace")
            try:
                trace.append(Arrival(_seconds(row[when]), _count(row, context), _count(row, answer)))
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError(f"{path}:{line}: cannot read this arrival: {error}") from error
    if not trace:
        raise ValueError(f"{path}: the trace holds no arrival")
    return sorted(trace, key=lambda arrival: arrival.at_s)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        stamp = datetime.fromisoformat(text.strip())
        # A naive stamp counts as UTC: only differences matter, and no local clock change may bend them.
        seconds = (stamp - datetime(1970, 1, 1, tzinfo=stamp.tzinfo)).total_seconds()
    if not 0 <= seconds < 1e12:
        raise ValueError(f"{text!r} is no moment in time")
    return seconds


def _count(row: dict[str, str], column: str | None) -> int | None:
    if column is None or not row[column]:
        return None
    count = int(row[column])
    if count < 0:
        raise ValueError(f"{column} is negative")
    return count
