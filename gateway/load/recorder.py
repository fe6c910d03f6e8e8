"""Counts and histograms of a run, in bounded memory whatever its length.

Latency and first token are counted from the *intended* send time: a request that should have been sent while the server
stalled carries the wait it would have had (no coordinated omission).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from hdrh.histogram import HdrHistogram

from gateway.load.outcome import ANSWERED, COUNTED, Outcome

_LOWEST_US, _HIGHEST_US = 1, 3_600_000_000
#: Values of long histograms keep 3 digits; those of one time window 2 (11 KB each).
_DIGITS, _WINDOW_DIGITS = 3, 2
#: A run has at most about this many time windows; longer runs get wider ones.
MAX_WINDOWS = 600
#: Distinct names of errors that are counted apart.
_MAX_ERRORS = 50


class Histogram:
    """Durations in seconds, 1 us to 1 h."""

    __slots__ = ("_hdr",)

    def __init__(self, digits: int = _DIGITS) -> None:
        self._hdr = HdrHistogram(_LOWEST_US, _HIGHEST_US, digits, word_size=4)

    def record(self, seconds: float) -> None:
        value = int(seconds * 1e6)
        self._hdr.record_value(min(max(value, _LOWEST_US), _HIGHEST_US))

    def add(self, other: Histogram) -> None:
        self._hdr.add(other._hdr)

    @property
    def count(self) -> int:
        return int(self._hdr.get_total_count())

    def percentile_s(self, percent: float) -> float:
        return float(self._hdr.get_value_at_percentile(percent)) / 1e6

    def max_s(self) -> float:
        return float(self._hdr.get_max_value()) / 1e6

    def mean_s(self) -> float:
        return float(self._hdr.get_mean_value()) / 1e6


def merged(histograms: Iterable[Histogram], digits: int = _DIGITS) -> Histogram:
    """One histogram of all; `digits` must not be more than theirs."""
    total = Histogram(digits)
    for histogram in histograms:
        total.add(histogram)
    return total


@dataclass(frozen=True, slots=True)
class Record:
    """One request that ended. `at_s`: intended send time from the start of the run; `label`: its traffic class."""

    at_s: float
    label: str
    rung: str
    outcome: Outcome
    latency_s: float
    first_s: float | None = None
    #: Content chunks and seconds from the first to the end, for the speed of a stream.
    chunks: int = 0
    streaming_s: float = 0.0
    status: int = 0
    error: str = ""


@dataclass(slots=True)
class Cell:
    """Everything with the same class, rung and outcome."""

    latency: Histogram = field(default_factory=Histogram)
    first: Histogram | None = None
    count: int = 0


@dataclass(slots=True)
class Window:
    """A stretch of intended send time, of one class: outcomes, and latency of what was answered."""

    outcomes: Counter[Outcome] = field(default_factory=Counter)
    latency: Histogram | None = None


class Recorder:
    """Takes every request of a run. `duration_s` is the run's intended length."""

    def __init__(self, duration_s: float) -> None:
        self.window_s = float(max(1, -(-int(duration_s) // MAX_WINDOWS)))
        self.cells: dict[tuple[str, str, Outcome], Cell] = {}
        self.windows: list[dict[str, Window]] = []
        self.outcomes: Counter[Outcome] = Counter()
        self.statuses: Counter[int] = Counter()
        self.errors: Counter[str] = Counter()
        self.send_lag = Histogram()
        self.sent = 0
        self.late = 0
        self.in_flight = 0
        self.max_in_flight = 0
        self.chunks = 0
        self.streaming_s = 0.0

    def issued(self, lag_s: float, late_after_s: float) -> None:
        """A request is going out, `lag_s` after its intended moment."""
        self.sent += 1
        self.in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        self.send_lag.record(lag_s)
        if lag_s > late_after_s:
            self.late += 1

    def ended(self, record: Record) -> None:
        """A request that was issued is over."""
        self.in_flight -= 1
        self._count(record)
        cell = self.cells.get((record.label, record.rung, record.outcome))
        if cell is None:
            cell = self.cells[record.label, record.rung, record.outcome] = Cell()
        cell.count += 1
        cell.latency.record(record.latency_s)
        if record.first_s is not None:
            if cell.first is None:
                cell.first = Histogram()
            cell.first.record(record.first_s)
        if record.chunks > 1 and record.streaming_s > 0 and record.outcome in ANSWERED:
            self.chunks += record.chunks - 1
            self.streaming_s += record.streaming_s
        if record.status:
            self.statuses[record.status] += 1
        if record.error:
            known = record.error in self.errors or len(self.errors) < _MAX_ERRORS
            self.errors[record.error if known else "other"] += 1

    def dropped(self, at_s: float, label: str) -> None:
        """A request that was never issued: no slot for it."""
        self._count(Record(at_s, label, "none", Outcome.DROPPED, 0.0))

    def own_limit(self, at_s: float, label: str, reason: str) -> None:
        """A request that was issued but could not leave this machine."""
        self.in_flight -= 1
        self.errors[reason if len(self.errors) < _MAX_ERRORS else "other"] += 1
        self.dropped(at_s, label)

    def _count(self, record: Record) -> None:
        self.outcomes[record.outcome] += 1
        index = min(int(record.at_s / self.window_s), MAX_WINDOWS)
        while len(self.windows) <= index:
            self.windows.append({})
        window = self.windows[index].get(record.label)
        if window is None:
            window = self.windows[index][record.label] = Window()
        window.outcomes[record.outcome] += 1
        if record.outcome in ANSWERED:
            if window.latency is None:
                window.latency = Histogram(_WINDOW_DIGITS)
            window.latency.record(record.latency_s)

    def select(self, wanted: Callable[[str, str, Outcome], bool]) -> Iterator[Cell]:
        """The cells whose (class, rung, outcome) are wanted."""
        return (cell for key, cell in self.cells.items() if wanted(*key))

    def between(self, start_s: float, end_s: float, label: str | None = None) -> Window:
        """What was due in [start_s, end_s), to whole windows: how a burst compares with the time before it."""
        chosen = self.windows[int(start_s / self.window_s) : int(-(-end_s // self.window_s))]
        total = Window(latency=Histogram(_WINDOW_DIGITS))
        assert total.latency is not None
        for window in (w for by_label in chosen for name, w in by_label.items() if label in (None, name)):
            total.outcomes.update(window.outcomes)
            if window.latency is not None:
                total.latency.add(window.latency)
        return total


def share_of(outcomes: Counter[Outcome], *wanted: Outcome) -> float:
    """The share that `wanted` have among the counted outcomes; 0 when nothing was counted."""
    counted = sum(outcomes[outcome] for outcome in COUNTED)
    return sum(outcomes[outcome] for outcome in wanted) / counted if counted else 0.0
