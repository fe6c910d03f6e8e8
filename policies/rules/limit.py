"""How many calls may be at a backend at once.

Arithmetic (`FixedLimit`) is apart from permits (`ConcurrencyLimiter`). There is no queue here: a call that finds no room is
refused at once with LimitReached. Each permit is closed by exactly one of success (its time is a sample), ignored (its
time says nothing: a client fault, a cancelled call, an open breaker) and dropped (the backend was too slow or refused).
"""

# ruff: noqa: SLF001  a permit is the other half of its limiter
from __future__ import annotations

from typing import Protocol

from policies.core.errors import LimitReached
from policies.language.schema import Section


class LimitOptions(Section, frozen=True, kw_only=True):
    max_concurrent: int = 256


class Limit(Protocol):
    """Decides a number of concurrent calls from samples."""

    @property
    def current(self) -> int: ...

    def on_sample(self, seconds: float, in_use: int, *, dropped: bool) -> None: ...


class FixedLimit:
    """A limit that learns nothing."""

    __slots__ = ("current",)

    def __init__(self, options: LimitOptions) -> None:
        if options.max_concurrent < 1:
            raise ValueError("max_concurrent must be at least 1: a backend that may serve nothing is left out instead")
        self.current = options.max_concurrent

    def on_sample(self, seconds: float, in_use: int, *, dropped: bool) -> None:
        """A fixed limit ignores samples."""


class ConcurrencyLimiter:
    """Permits under a limit."""

    __slots__ = ("_in_use", "_limit")

    def __init__(self, limit: Limit) -> None:
        self._limit = limit
        self._in_use = 0

    @property
    def in_use(self) -> int:
        return self._in_use

    @property
    def limit(self) -> int:
        """How many there may be now."""
        return self._limit.current

    def acquire(self) -> LimitPermit:
        """A permit for one call. Raises LimitReached."""
        if self._in_use >= self._limit.current:
            raise LimitReached(f"{self._in_use} calls are at this backend already", retry_after_s=1.0)
        self._in_use += 1
        return LimitPermit(self)

    def _release(self) -> None:
        self._in_use -= 1

    def __repr__(self) -> str:
        return f"ConcurrencyLimiter({self._in_use}/{self._limit.current} in use)"


class LimitPermit:
    """Room for one call; closed by exactly one of success, ignored and dropped."""

    __slots__ = ("_limiter",)

    def __init__(self, limiter: ConcurrencyLimiter) -> None:
        self._limiter: ConcurrencyLimiter | None = limiter

    def success(self, seconds: float) -> None:
        """`seconds`: to the first token of a stream, else the run time."""
        limiter = self._close()
        limiter._limit.on_sample(seconds, limiter._in_use, dropped=False)
        limiter._in_use -= 1

    def ignored(self) -> None:
        self._close()._release()

    def dropped(self, seconds: float) -> None:
        limiter = self._close()
        limiter._limit.on_sample(seconds, limiter._in_use, dropped=True)
        limiter._in_use -= 1

    def _close(self) -> ConcurrencyLimiter:
        limiter = self._limiter
        if limiter is None:
            raise RuntimeError("this permit was closed already: every call closes its permit exactly once")
        self._limiter = None
        return limiter
