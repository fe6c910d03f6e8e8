"""A few connections to one Redis, and one rule that makes them safe: a connection goes back only after exactly as many
replies as commands were read from it. Whatever happens in between (time limit, cancellation, a reply of the wrong form)
closes it, so no caller can ever read another caller's reply.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from redis.asyncio.connection import ConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ReadOnlyError, ResponseError

Command = tuple[bytes | str | int, ...]

#: Closing is the only step of redis-py that this bounds here; calls have their own limit.
_CLOSE_LIMIT_S = 1.0


class RedisWire:
    """`call` sends commands as one pipeline and returns their replies. Connections are made when first needed."""

    def __init__(self, url: str, max_connections: int) -> None:
        # redis-py reads the URL (credentials, TLS, database, socket path) and makes connections; keeping them is ours.
        self._factory = ConnectionPool.from_url(
            url,
            protocol=2,
            driver_info=None,
            socket_timeout=None,
            socket_connect_timeout=_CLOSE_LIMIT_S,
            retry=Retry(NoBackoff(), 0),
        )
        self._room = asyncio.Semaphore(max_connections)
        self._idle: list[Any] = []
        self._busy: set[Any] = set()

    async def call(self, commands: Sequence[Command], limit_s: float) -> list[Any]:
        """One reply a command, in order; an error reply is returned as a ResponseError, not raised.

        Raises TimeoutError after `limit_s` (waiting for a connection included), redis.RedisError or OSError when the
        connection fails. Commands may be sent twice, so they must be harmless to repeat.
        """
        async with asyncio.timeout(limit_s), self._room:
            while self._idle:
                try:
                    return await self._exchange(self._idle.pop(), commands)
                except (RedisConnectionError, OSError):
                    # Closed by the server while it lay idle: so, most likely, were the others. Take a new one.
                    await self._close(self._idle)
            return await self._exchange(self._factory.make_connection(), commands)

    async def _exchange(self, connection: Any, commands: Sequence[Command]) -> list[Any]:
        self._busy.add(connection)
        clean = False
        try:
            await connection.connect()
            await connection.send_packed_command(connection.pack_commands(commands))
            replies = [await _reply(connection) for _ in commands]
            # After a failover this server may stay a replica: look up again where the name leads.
            clean = not any(isinstance(reply, ReadOnlyError) for reply in replies)
            return replies
        finally:
            self._busy.discard(connection)
            if clean:
                self._idle.append(connection)
            else:
                await connection.disconnect(nowait=True)

    async def _close(self, connections: list[Any]) -> None:
        while connections:
            await connections.pop().disconnect(nowait=True)

    async def aclose(self) -> None:
        """Close idle connections; those in use close when their calls end or are cancelled."""
        await self._close(self._idle)

    def __repr__(self) -> str:
        return f"RedisWire({len(self._busy)} in use, {len(self._idle)} idle)"


async def _reply(connection: Any) -> Any:
    try:
        return await connection.read_response()
    except ResponseError as error:
        return error
