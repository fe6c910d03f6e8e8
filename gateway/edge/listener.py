"""A listening HTTP server round an edge, with an end that drops no request."""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import Callable, Collection, Sequence
from typing import Any, cast

import structlog
from aiohttp import web

from gateway.control.sockets import BACKLOG
from gateway.edge.connection import Connection
from gateway.edge.http_server import EdgeLimits, HttpEdge
from gateway.listening import CannotListen
from gateway.observe.quiet import Quiet

_log = structlog.get_logger("gateway.edge")
#: The listener's own sockets among those that it accepts from; the others have their owners' names.
_OWN = ""


class _Server(web.Server):
    """aiohttp's server with our connection. `on_lost` is called when a connection is gone."""

    def __init__(
        self, handler: Any, limits: EdgeLimits, quiet: Quiet, on_lost: Callable[[], None], **options: Any
    ) -> None:
        super().__init__(handler, **options)
        self._limits = limits
        self._quiet = quiet
        self._on_lost = on_lost

    def __call__(self) -> web.RequestHandler:
        return Connection(self, self._limits, self._quiet, loop=self._loop, **self._kwargs)

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        super().connection_lost(handler, exc)
        task = cast(Connection, handler).task
        if task is not None:
            # aiohttp forgets the connection when this task is done, by a callback that was added before ours.
            task.add_done_callback(lambda _: self._on_lost())
        else:
            self._on_lost()


class _Accepting:
    """A listening socket that the loop accepts from: a copy for the loop, which closes it, and one of our own.

    For uvloop, which the gateway runs on. asyncio's own loop takes a connection in two steps, and forgets one that is
    between them when its server is closed: there a client that came in that moment gets no answer.
    """

    def __init__(self, server: asyncio.Server, copy: socket.socket) -> None:
        self._server = server
        self._copy = copy

    def close(self) -> None:
        """Leave what waits in the queue to whoever else has this socket open."""
        self._server.close()
        self._copy.close()

    def close_empty(self) -> list[socket.socket]:
        """Close, having taken what waits in the queue: nothing may come between finding it empty and closing."""
        taken: list[socket.socket] = []
        self._server.close()
        try:
            while True:
                try:
                    taken.append(self._copy.accept()[0])
                except (ConnectionAbortedError, InterruptedError):
                    continue
        except BlockingIOError:
            self._copy.close()
        except OSError as error:
            self._copy.close()
            _log.warning("accept_queue_not_emptied", reason=str(error))
        return taken


class Listener:
    """Accepts connections and knows what is under way. For an end without a dropped request, in this order:

    the edge drains (`Readiness.draining`)   every answer is the last one on its connection, and says so
    `lame_duck`                              new connections are taken while requests are under way; then no more
    `drain`                                  what is under way ends, what is idle is closed
    `close`                                  cuts what is left
    """

    def __init__(self, edge: HttpEdge, limits: EdgeLimits) -> None:
        self._edge = edge
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._accepting: dict[str, list[_Accepting]] = {}
        self._stopped = False
        self._joining: set[asyncio.Task[Any]] = set()
        self._in_flight = 0
        self._hurried = False
        self._changed = asyncio.Event()
        self._server = _Server(
            self._handle,
            limits,
            Quiet(edge.clock),
            self._changed.set,
            request_factory=self._make_request,
            handler_cancellation=True,  # a client that leaves cancels its request
            access_log=None,
            max_line_size=limits.header_bytes,
            max_field_size=limits.header_bytes,
            max_headers=limits.headers,
            keepalive_timeout=75.0,
        )

    @property
    def in_flight(self) -> int:
        return self._in_flight

    async def start(self, sockets: Sequence[socket.socket]) -> int:
        """Accept from these (bound, listening); returns their port. Raises OSError.

        They stay the caller's. As long as a copy is open anywhere, clients are let into the accept queue: who does not
        mean to hand them on closes them now.
        """
        port: int = sockets[0].getsockname()[1]
        await self._accept(_OWN, sockets)
        return port

    async def adopt(self, name: str, sockets: Sequence[socket.socket]) -> None:
        """Accept from the sockets of the neighbour `name` too; they stay the caller's. A second time is no different.

        Raises CannotListen when this listener takes no new connections any more, and OSError.
        """
        if name not in self._accepting:
            await self._accept(name, sockets)

    def release(self, name: str) -> None:
        """No longer accept from the sockets of `name`; what waits in their queues is left to it."""
        for accepting in self._accepting.pop(name, ()):
            accepting.close()

    async def _accept(self, name: str, sockets: Sequence[socket.socket]) -> None:
        group: list[_Accepting] = []
        self._accepting[name] = group
        try:
            for sock in sockets:
                # The loop closes the copy that it gets.
                server = await self._loop.create_server(self._server, sock=sock.dup(), backlog=BACKLOG)
                group.append(_Accepting(server, sock.dup()))
            if self._stopped:
                raise CannotListen("cannot listen: this worker is on its way out")
        except BaseException:
            self._forget(name, group)
            raise
        if self._accepting.get(name) is not group:
            # Released meanwhile.
            self._forget(name, group)

    def _forget(self, name: str, group: list[_Accepting]) -> None:
        if self._accepting.get(name) is group:
            del self._accepting[name]
        for accepting in group:
            accepting.close()

    def _make_request(
        self, message: Any, payload: Any, protocol: Any, writer: Any, task: asyncio.Task[None]
    ) -> web.BaseRequest:
        return web.BaseRequest(
            message, payload, protocol, writer, task, self._loop, client_max_size=self._limits.body_bytes
        )

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        self._in_flight += 1
        try:
            response = await self._edge(request)
            # A stream has been sent by now.
            if self._edge.ends_connection(request) and not response.prepared:
                response.force_close()
            return response
        finally:
            self._in_flight -= 1
            if self._in_flight == 0:
                self._changed.set()

    async def lame_duck(self, limit_s: float) -> None:
        """Go on taking new connections while requests are under way, for at most `limit_s`, then `stop_listening`.

        For as long, whoever asks `/readyz` is told 503, and who has not asked yet is served.
        """
        await self._until(lambda: self._in_flight == 0, limit_s)
        self.stop_listening()

    def stop_listening(self) -> None:
        """Take what waits in the accept queues, then no new connection any more."""
        self._stopped = True
        accepting, self._accepting = self._accepting, {}
        for one in (one for group in accepting.values() for one in group):
            for sock in one.close_empty():
                sock.setblocking(False)
                task = self._loop.create_task(self._loop.connect_accepted_socket(self._server, sock))
                self._joining.add(task)
                task.add_done_callback(self._joined)

    def _joined(self, task: asyncio.Task[Any]) -> None:
        self._joining.discard(task)
        self._changed.set()
        if not task.cancelled() and task.exception() is not None:
            # The client left before it was its turn, as a rule.
            _log.info("connection_not_taken", reason=str(task.exception()))

    async def drain(self, limit_s: float, idle_s: float) -> int:
        """Wait until every connection is gone, for at most `limit_s`; returns how many requests were under way then.

        An idle connection is closed after `idle_s`, counted from here or from its last answer: its client may be about
        to use it, and would have its request cut off by the closing. One that is used gets its answer and `Connection:
        close`.
        """
        # What the loop has accepted becomes a connection in its next round.
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        closer = _IdleCloser(self._server, self._loop, idle_s)
        try:
            await self._until(lambda: not (self._in_flight or self._joining or self._server.connections), limit_s)
        finally:
            closer.stop()
        return sum(cast(Connection, connection).under_way for connection in self._server.connections)

    async def _until(self, done: Callable[[], bool], limit_s: float) -> None:
        try:
            async with asyncio.timeout(limit_s):
                while not (done() or self._hurried):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            pass

    def hurry(self) -> None:
        """Let lame duck and drain end now; what is under way is cut."""
        self._hurried = True
        self._changed.set()

    async def close(self) -> None:
        """Cut what is left."""
        self._stopped = True
        for name in list(self._accepting):
            self.release(name)
        for task in self._joining:
            task.cancel()
        for connection in cast(list[Connection], self._server.connections):
            # Nobody has to wait for these.
            if connection.idle_since is not None:
                connection.force_close()
        await self._server.shutdown(1.0)


class _IdleCloser:
    """Closes connections that have been idle for `idle_s`, until it is stopped."""

    def __init__(self, server: web.Server, loop: asyncio.AbstractEventLoop, idle_s: float) -> None:
        self._server = server
        self._loop = loop
        self._idle_s = idle_s
        self._began = loop.time()
        self._timer = loop.call_later(idle_s, self._sweep)

    def stop(self) -> None:
        self._timer.cancel()

    def _sweep(self) -> None:
        now = self._loop.time()
        # A connection that is busy now has been idle for long enough after the next round at the earliest.
        next_at = now + self._idle_s
        due: dict[int, Connection] = {}
        for connection in cast(list[Connection], self._server.connections):
            since = connection.idle_since
            if since is None:
                continue
            closes_at = max(since, self._began) + self._idle_s
            if closes_at <= now and connection.transport is not None:
                due[connection.transport.get_extra_info("socket").fileno()] = connection
            else:
                next_at = min(next_at, closes_at)
        for fd in _nothing_to_read(due):
            due[fd].force_close()
        self._timer = self._loop.call_at(max(next_at, now + 0.01), self._sweep)


def _nothing_to_read(fds: Collection[int]) -> list[int]:
    """Those of the sockets whose client has sent nothing that is still to be read."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    readable = {fd for fd, _ in poll.poll(0)}
    return [fd for fd in fds if fd not in readable]
