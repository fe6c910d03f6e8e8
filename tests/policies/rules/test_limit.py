"""Room for calls: refused at once when full, given back exactly once."""

import pytest

from policies.core.errors import LimitReached
from policies.rules.limit import ConcurrencyLimiter, FixedLimit, LimitOptions


class Samples:
    """A limit that notes what it is told."""

    current = 3

    def __init__(self) -> None:
        self.seen: list[tuple[float, int, bool]] = []

    def on_sample(self, seconds: float, in_use: int, *, dropped: bool) -> None:
        self.seen.append((seconds, in_use, dropped))


def test_a_full_limiter_refuses_at_once_with_retry_after() -> None:
    limiter = ConcurrencyLimiter(FixedLimit(LimitOptions(max_concurrent=2)))
    permits = [limiter.acquire(), limiter.acquire()]
    with pytest.raises(LimitReached) as caught:
        limiter.acquire()
    assert caught.value.retry_after_s == 1.0
    assert repr(limiter) == "ConcurrencyLimiter(2/2 in use)"
    permits[0].ignored()
    limiter.acquire().success(0.1)
    assert limiter.in_use == 1


def test_only_calls_that_say_something_are_samples() -> None:
    limit = Samples()
    limiter = ConcurrencyLimiter(limit)
    a, b, c = limiter.acquire(), limiter.acquire(), limiter.acquire()
    a.success(0.5)
    b.ignored()
    c.dropped(2.0)
    assert limit.seen == [(0.5, 3, False), (2.0, 1, True)]
    assert limiter.in_use == 0


@pytest.mark.parametrize("second", ["success", "ignored", "dropped"])
def test_a_permit_closes_once(second: str) -> None:
    limiter = ConcurrencyLimiter(FixedLimit(LimitOptions()))
    permit = limiter.acquire()
    permit.ignored()
    with pytest.raises(RuntimeError, match="exactly once"):
        getattr(permit, second)(*([] if second == "ignored" else [0.1]))
    assert limiter.in_use == 0


def test_a_limit_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        FixedLimit(LimitOptions(max_concurrent=0))
