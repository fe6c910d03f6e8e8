from gateway.observe.quiet import MOST_KINDS, Quiet
from policies.core.clock import FakeClock


def test_a_kind_is_let_through_once_in_a_while_with_a_count() -> None:
    clock = FakeClock()
    quiet = Quiet(clock, 10.0)
    assert quiet.admit("junk") == {}
    assert [quiet.admit("junk") for _ in range(500)] == [None] * 500
    clock.advance(9.9)
    assert quiet.admit("junk") is None
    clock.advance(0.2)
    assert quiet.admit("junk") == {"suppressed": 501}
    assert quiet.admit("junk") is None
    clock.advance(20.0)
    assert quiet.admit("junk") == {"suppressed": 1}
    clock.advance(10.0)
    assert quiet.admit("junk") == {}


def test_kinds_do_not_hide_each_other() -> None:
    quiet = Quiet(FakeClock())
    assert quiet.admit(("failed", "support")) == {}
    assert quiet.admit(("failed", "scoring")) == {}
    assert quiet.admit(("failed", "support")) is None


def test_ever_new_kinds_take_no_more_than_a_bounded_memory() -> None:
    quiet = Quiet(FakeClock())
    for number in range(3 * MOST_KINDS):
        quiet.admit(number)
    assert len(quiet._kinds) <= MOST_KINDS
