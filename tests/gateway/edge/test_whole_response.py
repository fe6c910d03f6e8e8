from email.utils import parsedate_to_datetime

from gateway.edge.whole_response import DateHeader
from policies.core.clock import FakeClock


def test_the_date_is_http_and_moves_with_the_wall_clock() -> None:
    clock = FakeClock(wall=1_700_000_000.4)
    date = DateHeader(clock)
    first = date.text()
    assert first == "Tue, 14 Nov 2023 22:13:20 GMT"
    assert date.text() is first
    clock.advance(1.0)
    assert parsedate_to_datetime(date.text()).timestamp() == 1_700_000_001
