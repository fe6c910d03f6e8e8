"""Waiting for something that another party does: polled, with a deadline, never by sleeping for a fixed time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any


async def until(condition: Callable[[], Any], within_s: float = 2.0, every_s: float = 0.002) -> Any:
    """The first true value of `condition()`. Fails after `within_s`."""
    deadline = asyncio.get_running_loop().time() + within_s
    while not (value := condition()):
        if asyncio.get_running_loop().time() > deadline:
            raise AssertionError(f"it did not come true within {within_s:g} s")
        await asyncio.sleep(every_s)
    return value


async def eventually(ask: Callable[[], Awaitable[Any]], within_s: float = 2.0, every_s: float = 0.01) -> Any:
    """The first true value of `await ask()`. Fails after `within_s`."""
    deadline = asyncio.get_running_loop().time() + within_s
    while not (value := await ask()):
        if asyncio.get_running_loop().time() > deadline:
            raise AssertionError(f"it did not come true within {within_s:g} s")
        await asyncio.sleep(every_s)
    return value
