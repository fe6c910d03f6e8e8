"""What the admin API says of a model that is to be loaded anew: by whoever runs models, there or not."""

from __future__ import annotations

from typing import Any

from aiohttp.test_utils import TestClient, TestServer

from gateway.control.admin import AdminAccess, AdminActions, admin_app
from gateway.control.hub import ANSWER_S, Ack

ABSENT = Ack("worker-2", error="it is not there (starting)", reached=False, asked=False)


class Hub:
    """Acknowledges what a test says."""

    def __init__(self, *acks: Ack) -> None:
        self._acks = list(acks)
        self.limits: list[float] = []

    async def command(self, name: str, payload: dict[str, Any], limit_s: float = ANSWER_S) -> list[Ack]:
        self.limits.append(limit_s)
        return self._acks


class Crew:
    def __init__(self, hub: Hub) -> None:
        self.hub = hub


async def reload(hub: Hub) -> tuple[int, dict[str, Any]]:
    async def nothing() -> Any:
        return None

    app = admin_app(Crew(hub), AdminAccess(), AdminActions(nothing, nothing), list)
    async with TestClient(TestServer(app)) as client:
        answer = await client.post("/models/light/reload", json={})
        return answer.status, await answer.json()


async def test_a_large_model_has_time_to_be_loaded():
    hub = Hub(Ack("model-host", {"models": []}), ABSENT)
    assert await reload(hub) == (200, {"model-host": {"models": []}})
    assert hub.limits[0] > 60.0


async def test_a_host_that_does_not_answer_is_named():
    silent = Ack("model-host", error="it has not been heard of for 2.0 s; it will act when it is back", reached=False)
    assert await reload(Hub(silent, ABSENT)) == (422, {"model-host": {"error": silent.error}})


async def test_a_host_that_is_not_there_is_not_denied():
    status, told = await reload(Hub(ABSENT))
    assert status == 404
    assert "or it is down (GET /workers)" in told["error"]
