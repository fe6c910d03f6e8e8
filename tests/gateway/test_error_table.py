import pytest

from gateway.error_table import TABLE, is_client_fault, row
from policies.core import errors as e


def all_errors() -> set[type[e.GatewayError]]:
    return {c for c in vars(e).values() if isinstance(c, type) and issubclass(c, e.GatewayError)}


def test_every_error_has_a_row_of_its_own() -> None:
    assert all_errors() == set(TABLE)


def test_no_answer_speaks_for_its_last_cause() -> None:
    error = e.NoAnswer([("heavy", e.UpstreamMisconfigured(401, "heavy"))])
    assert row(error).status == 502
    assert row(e.NoAnswer([])).status == 503


def test_a_client_fault_keeps_the_upstreams_status() -> None:
    assert row(e.ClientFault(422, b"{}", "application/json")).status == 422


def test_retry_after_of_no_answer_is_the_soonest() -> None:
    busy = e.LimitReached("full", retry_after_s=7.0)
    open_ = e.BreakerOpen("open", retry_after_s=3.0)
    assert e.NoAnswer([("heavy", busy), ("light", open_)]).retry_after_s == 3.0


CLIENTS_DOING = [
    e.InvalidRequest("wrong"),
    e.BodyTooLarge("large"),
    e.BodyTimeout("slow"),
    e.Unauthenticated("no key"),
    e.NotCached("not cached"),
    e.ClientFault(422, b"{}", "application/json"),
    e.ContextTooLong(400, b"{}", "application/json"),
    e.CannotServe("no tools"),
    e.NoAnswer([("heavy", e.ConnectFailed()), ("light", e.ContextTooLong(400, b"{}", "application/json"))]),
    e.NoAnswer([("heavy", e.NoAnswer([("light", e.CannotServe("no tools"))]))]),
]
OURS = [
    e.GatewayError(),
    e.DeadlineExceeded(),
    e.LimitReached("full"),
    e.BreakerOpen("open"),
    e.Draining("closing"),
    e.UpstreamStatus(429, "heavy"),
    e.UpstreamMisconfigured(404, "heavy"),
    e.NoAnswer([]),
    e.NoAnswer([("heavy", e.CannotServe("no tools")), ("light", e.ConnectFailed())]),
]


@pytest.mark.parametrize("error", CLIENTS_DOING, ids=repr)
def test_what_the_client_did_does_not_count_against_us(error: e.GatewayError) -> None:
    assert is_client_fault(error)


@pytest.mark.parametrize("error", OURS, ids=repr)
def test_what_we_or_a_backend_did_counts_against_us(error: e.GatewayError) -> None:
    assert not is_client_fault(error)


def test_a_body_that_comes_too_slowly_is_a_408() -> None:
    assert row(e.BodyTimeout("slow")).status == 408
