"""Which rows make the next run of a model, and which calls are refused: synchronous functions of what waits and of `now`.

Order of the calls that wait: class, then earliest deadline. A call of more rows than a run holds is one class lower, so that a
bulk does not stand before single texts. The first call leads a run; rows of others join, in that order, as long as

- they are of like length: sorted by length, a row begins another group where padding the rows before it to its length would
  cost more than a run does;
- the run stays within `BatchLimits.rows` and is expected to stay within `run_s`, or `vip_run_s` while VIPs come: one who arrives
  meanwhile waits for at most one such run;
- the run ends, predicted at its p99, before the earliest deadline in it. A single row always runs.

A VIP's run holds VIPs only. Aging: when `passes` runs have gone past the call that has waited longest, and that is longer than
`aging_s`, it leads the next one.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

from backends.api import Priority
from backends.onnx.latency import LatencyModel, Safety

#: Rows that are looked at for a run, in runs: more waiting rows make grouping better and choosing slower.
_LOOKED_AT = 4
#: Until a run that is told to stop has stopped (its largest nodes take a few milliseconds).
_STOPPING_S = 0.005
#: How fast the measured cost of a row beyond its tokens follows.
_FOLLOW = 0.05


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """How much one model takes on.

    `run_s`: longest run, as expected; `vip_run_s`: the same within `vip_seen_s` after a VIP came. Short runs cost throughput
    (their start), long ones a VIP's wait. `vip_share`: the part of the waiting room that only VIPs may fill.
    """

    rows: int = 32
    run_s: float = 0.1
    vip_run_s: float = 0.02
    vip_seen_s: float = 10.0
    waiting_rows: int = 4_096
    waiting_bytes: int = 64 << 20
    vip_share: float = 0.125
    aging_s: float = 1.0
    passes: int = 8

    def __post_init__(self) -> None:
        if min(self.rows, self.waiting_rows, self.run_s, self.vip_run_s, self.passes) <= 0:
            raise ValueError("rows, waiting_rows, run_s, vip_run_s and passes of a batcher must be above 0")


class Call:
    """What the waiting room knows of a call: `lengths` of its rows, and which of them wait (shortest first)."""

    __slots__ = ("arrived", "done", "due", "key", "lengths", "pending", "priority", "size_bytes", "squares", "tokens")

    def __init__(self, lengths: Sequence[int], priority: Priority, arrived: float, due: float, size_bytes: int) -> None:
        self.lengths = lengths
        self.priority = priority
        self.arrived = arrived
        #: The moment of its deadline when it arrived. The order is not changed when a deadline moves later.
        self.due = due
        self.size_bytes = size_bytes
        self.pending: list[int] = [0] if len(lengths) == 1 else sorted(range(len(lengths)), key=lengths.__getitem__)
        #: Sums of the lengths, and of their squares, of what waits; kept by the room.
        self.tokens = self.squares = 0
        #: Answered, failed or left: nothing of it is to be run any more.
        self.done = False
        self.key: tuple[int, float, int] = (int(priority), due, 0)


class Row(NamedTuple):
    """One row of a call."""

    call: Call
    at: int

    @property
    def length(self) -> int:
        return self.call.lengths[self.at]


class Refusal(NamedTuple):
    """Why a call is not admitted, and after how many seconds that may be different."""

    reason: str
    retry_after_s: float


#: A row that may join a run: (length, place in the order of service, call, number of the row). Plain, since many are made.
_Offered = tuple[int, int, Call, int]


class WaitingRoom:
    """The rows that wait for a run."""

    def __init__(self, limits: BatchLimits, model: LatencyModel, safety: Safety) -> None:
        self.limits = limits
        self.model = model
        self.safety = safety
        self.rows = 0
        self.size_bytes = 0
        self._order: list[tuple[tuple[int, float, int], Call]] = []
        self._arrivals: deque[Call] = deque()
        #: Groups of rows whose run failed; a bad one among them is looked for.
        self._suspects: deque[list[Row]] = deque()
        #: By class: [rows, tokens, squares of lengths] that wait.
        self._work: tuple[list[int], ...] = tuple([0, 0, 0] for _ in Priority)
        self._seen = 0
        self._vip_seen = -math.inf
        self._passed = 0
        #: Seconds of a run that are not its rows' own tokens (start, padding), for each of its rows.
        self._row_s = model.c0

    def __len__(self) -> int:
        """Calls with rows that wait."""
        return len(self._order)

    # -------------------------------------------------------------------------------------------------- admission

    def refusal(self, call: Call, now: float, rest_s: float = 0.0, instances: int = 1) -> Refusal | None:
        """Is there no room for the call, or would it be answered too late? None = admit it.

        `rest_s`: seconds until an instance is free; `instances`: how many runs go on at a time.
        """
        if full := self._full(call):
            # About when half of what waits is done.
            return Refusal(full, max(0.1, 0.5 * self._seconds(*map(sum, zip(*self._work, strict=True))) / instances))
        finish = rest_s + self._own_s(call, instances)
        allowed = self.safety.factor * (call.due - now)
        cls = self._class(call)
        above = sum(self._seconds(*self._work[other]) for other in range(cls))
        # Half of one run's spread: many runs vary less than one, but what slows one often slows the next.
        varied = (1 + self.model.spread) / (2 * instances)
        if finish + varied * (above + self._seconds(*self._work[cls])) <= allowed:
            return None  # even behind all of its class
        finish += varied * (above + self._seconds(*self._earlier(cls, call.due)))
        if finish <= allowed:
            return None
        return Refusal(
            f"the answer is expected in {finish:.3g} s and {allowed:.3g} s are allowed", max(0.1, finish - allowed)
        )

    def _full(self, call: Call) -> str:
        """A call that is larger than the room is admitted when nobody else waits."""
        if not self.rows:
            return ""
        limits = self.limits
        share = 1.0 if call.priority is Priority.VIP else 1.0 - limits.vip_share
        if self.rows + len(call.lengths) > math.ceil(limits.waiting_rows * share):
            return f"{self.rows} rows wait already"
        if self.size_bytes + call.size_bytes > limits.waiting_bytes * share:
            return f"{self.size_bytes} bytes wait already"
        return ""

    def _class(self, call: Call) -> int:
        """A bulk is one class lower."""
        return min(call.priority + (len(call.lengths) > self.limits.rows), Priority.BATCH)

    def _own_s(self, call: Call, instances: int) -> float:
        """The call's own runs: at their p99 when one will do, else as an average."""
        lengths, model = call.lengths, self.model
        if len(lengths) == 1:
            return model.p99(1, lengths[0])
        own = self._seconds(len(lengths), sum(lengths), sum(length * length for length in lengths))
        return max(own / instances, model.p99(1, max(lengths, default=0)))

    def _seconds(self, rows: int, tokens: int, squares: int) -> float:
        return self.model.c1 * tokens + self.model.c2 * squares + self._row_s * rows

    def _earlier(self, cls: int, due: float) -> tuple[int, int, int]:
        """[rows, tokens, squares] of a class that are due until `due`."""
        rows = tokens = squares = 0
        for key, call in self._order[bisect_left(self._order, cls, key=lambda kept: kept[0][0]) :]:
            if key[0] != cls or key[1] > due:
                break
            rows += len(call.pending)
            tokens += call.tokens
            squares += call.squares
        return rows, tokens, squares

    # ---------------------------------------------------------------------------------------------------- contents

    def add(self, call: Call) -> None:
        self._seen += 1
        cls = self._class(call)
        if cls == Priority.VIP:
            self._vip_seen = call.arrived
        call.key = (cls, call.due, self._seen)
        insort(self._order, (call.key, call))  # keys are unique, so calls are never compared
        self._arrivals.append(call)
        self.size_bytes += call.size_bytes
        self._count(call, call.pending, 1)

    def remove(self, call: Call) -> None:
        """Whatever of the call still waits."""
        if call.pending:
            self._count(call, call.pending, -1)
            call.pending = []
            self._take_off(call)

    def put_back(self, rows: Sequence[Row]) -> None:
        """Rows of a run that was stopped, into their old places."""
        for call in {id(row.call): row.call for row in rows}.values():
            back = [row.at for row in rows if row.call is call]
            if not call.pending:
                insort(self._order, (call.key, call))
                self._arrivals.appendleft(call)
                self.size_bytes += call.size_bytes
            call.pending = sorted([*call.pending, *back], key=call.lengths.__getitem__)
            self._count(call, back, 1)

    def suspect(self, rows: Sequence[Row]) -> None:
        """A run of more than one row has failed: each half is run again, by itself and before anything else."""
        half = (len(rows) + 1) // 2
        self._suspects.extendleft([list(rows[half:]), list(rows[:half])])

    def observe(self, rows: Sequence[Row], seconds: float) -> None:
        """A run of these rows took so long."""
        model, lengths = self.model, [row.length for row in rows]
        own = sum(length * (model.c1 + model.c2 * length) for length in lengths)
        self._row_s += _FOLLOW * (max((seconds - own) / len(lengths), 0.0) - self._row_s)
        model.observe(len(lengths), max(lengths), seconds)

    def _count(self, call: Call, indices: Sequence[int], sign: int) -> None:
        lengths = call.lengths
        tokens = squares = 0
        for index in indices:
            length = lengths[index]
            tokens += length
            squares += length * length
        work = self._work[call.key[0]]
        self.rows += sign * len(indices)
        work[0] += sign * len(indices)
        work[1] += sign * tokens
        work[2] += sign * squares
        call.tokens += sign * tokens
        call.squares += sign * squares

    def _take_off(self, call: Call) -> None:
        """Nothing of the call waits any more."""
        del self._order[bisect_left(self._order, call.key, key=itemgetter(0))]
        self.size_bytes -= call.size_bytes
        while self._arrivals and not self._arrivals[0].pending:
            self._arrivals.popleft()

    # ---------------------------------------------------------------------------------------------------- choosing

    def take(self, now: float) -> list[Row]:
        """The rows of the next run, taken out; empty when nothing waits."""
        while self._suspects:
            if living := [row for row in self._suspects.popleft() if not row.call.done]:
                return living
        if not self._order:
            return []
        oldest = self._arrivals[0]
        aged = now - oldest.arrived > self.limits.aging_s
        leader = oldest if aged and self._passed >= self.limits.passes else self._order[0][1]
        rows = [Row(leader, leader.pending[0])] if self.rows == 1 else self._fill(leader, now)
        self._passed = self._passed + 1 if aged and all(row.call is not oldest for row in rows) else 0
        self._take_out(rows)
        return rows

    def _fill(self, leader: Call, now: float) -> list[Row]:
        """The leader's first row and whoever may join it."""
        limits, model, factor = self.limits, self.model, self.safety.factor
        run_s = limits.vip_run_s if now - self._vip_seen <= limits.vip_seen_s else limits.run_s
        rows: list[Row] = []
        longest, earliest = 0, math.inf
        for length, _, call, at in sorted(self._group(leader), key=itemgetter(1)):
            longer = max(longest, length)
            due = call.due
            # What cannot be in time anyway holds nobody else up.
            sooner = due if due < earliest and model.expected(1, length) <= due - now else earliest
            seconds = model.expected(len(rows) + 1, longer)
            if rows and (seconds > run_s or model.spread * seconds > factor * (sooner - now)):
                break
            rows.append(Row(call, at))
            if len(rows) == limits.rows:
                break
            longest, earliest = longer, sooner
        return rows

    def _group(self, leader: Call) -> list[_Offered]:
        """The rows looked at whose length is like that of the leader's first row, which has place 0."""
        model, most = self.model, self.limits.rows
        group: list[_Offered] = []
        longest, found = 0, False
        for one in sorted(self._looked_at(leader), key=itemgetter(0)):
            length = one[0]
            if length > longest:
                if group and model.padding(min(len(group), most), longest, length) > model.c0:
                    if found:
                        break
                    group = []
                longest = length
            group.append(one)
            found = found or one[1] == 0
        return group

    def _looked_at(self, leader: Call) -> list[_Offered]:
        """The leader's rows, then those of the others in order; of one call no more than a run holds."""
        rows = self.limits.rows
        only_vips = leader.key[0] == Priority.VIP
        offered: list[_Offered] = [
            (leader.lengths[at], place, leader, at) for place, at in enumerate(leader.pending[:rows])
        ]
        for key, call in self._order[: rows * _LOOKED_AT]:
            if (only_vips and key[0] != Priority.VIP) or len(offered) >= rows * _LOOKED_AT:
                break
            if call is not leader:
                for at in call.pending[:rows]:
                    offered.append((call.lengths[at], len(offered), call, at))
        return offered

    def _take_out(self, rows: Sequence[Row]) -> None:
        by_call: dict[int, tuple[Call, list[int]]] = {}
        for call, index in rows:
            by_call.setdefault(id(call), (call, []))[1].append(index)
        for call, taken in by_call.values():
            self._count(call, taken, -1)
            if len(taken) == len(call.pending):
                call.pending = []
                self._take_off(call)
            else:
                # Only the first rows of a call are looked at.
                gone, looked_at = set(taken), self.limits.rows
                call.pending[:looked_at] = [index for index in call.pending[:looked_at] if index not in gone]


def worth_stopping(rest_s: float, survivors_s: float) -> bool:
    """Is it clearly quicker to stop a run and run what is left of it (0 = nothing is) than to let it end?"""
    return survivors_s <= 0 or rest_s > 2 * survivors_s + _STOPPING_S
