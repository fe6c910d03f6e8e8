from gateway.error_table import TABLE, row
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
