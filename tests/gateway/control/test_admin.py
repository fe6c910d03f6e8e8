"""The admin API before workers that do not answer: they are named, and nobody takes their silence for a no."""

from __future__ import annotations

import pytest
from aiohttp.test_utils import TestClient, TestServer

from gateway.control.admin import AdminAccess, AdminActions, admin_app
from gateway.control.hub import Ack


class AnsweringHub:
    """Of a hub, the answers to queries."""

    def __init__(self) -> None:
        self.acks: list[Ack] = []

    async def query(self, _name, _payload) -> list[Ack]:
        return self.acks


class AnsweringCrew:
    def __init__(self) -> None:
        self.hub = AnsweringHub()


@pytest.fixture
def crew():
    return AnsweringCrew()


@pytest.fixture
async def client(crew):
    actions = AdminActions(dict, list)
    async with TestClient(TestServer(admin_app(crew, AdminAccess(None, None), actions, list))) as client:
        yield client


SILENT = Ack("worker-1", error="no answer within 5 s", reached=False)


async def test_a_request_that_a_silent_worker_may_have_served_is_not_called_unknown(crew, client):
    crew.hub.acks = [SILENT, Ack("worker-2")]
    got = await client.get("/debug/requests/abc")
    assert got.status == 503
    told = (await got.json())["error"]
    assert "'abc'" in told
    assert "worker-1: no answer within 5 s" in told
    crew.hub.acks = [Ack("worker-1"), Ack("worker-2")]
    got = await client.get("/debug/requests/abc")
    assert got.status == 404
    crew.hub.acks = [SILENT, Ack("worker-2", {"request_id": "abc"})]
    got = await client.get("/debug/requests/abc")
    assert (got.status, await got.json()) == (200, {"worker": "worker-2", "request_id": "abc"})


async def test_a_list_of_requests_says_whose_are_missing(crew, client):
    crew.hub.acks = [SILENT, Ack("worker-2", [[2.0, "b"], [1.0, "a"]])]
    got = await client.get("/debug/requests")
    assert await got.json() == {"requests": ["b", "a"], "no_answer_of": {"worker-1": "no answer within 5 s"}}
