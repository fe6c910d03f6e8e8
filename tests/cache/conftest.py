"""Fixtures of the cache's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from policies.core.clock import FakeClock
from tests.support.redis_server import RedisServer


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
async def redis_server() -> AsyncIterator[RedisServer]:
    """A fresh, empty server of one's own."""
    server = RedisServer()
    await server.start()
    yield server
    server.close()
