"""The model host's end: serves models to the worker processes of the same gateway, over a Unix socket.

    from a worker   [verb, call, ...]
        infer, stream   model, seconds left, request     embed, unknown   seconds left, texts / text
        extend          seconds left                     cancel
        pause, resume   of a stream that its reader does not keep up with
    to a worker     [verb, ...]
        models          [[name, state, reason, info] ...], embedder: all there is, first of all
        model           name, state, reason, info        embedder         None, or [fingerprint, dimensions]
        done            call, value                      error            call, error
        chunk           call, data, kind                 end              call

Each call is a task. A worker that is gone takes its calls with it. What is sent waits while a worker does not read, so a
worker that has stopped costs no more than the answers of the calls that it has under way.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, cast

import structlog

from backends.api import ChatRequest, Chunk, Embedder
from backends.frames import FrameConnection
from backends.link.wire import answer_value, array_value, error_value, info_value, read_request
from backends.slot import Slot
from policies.core.clock import Clock
from policies.core.deadline import Deadline
from policies.core.errors import CannotServe, GatewayError, ModelFailed, ModelNotReady

_log = structlog.get_logger("gateway.link")


class LinkServer:
    """Serves `models` (by backend name) and the embedder that is shared with them. Belongs to one event loop."""

    def __init__(self, models: Mapping[str, Slot], embedder: Embedder | None, clock: Clock) -> None:
        self.models = models
        self.embedder = embedder
        self.clock = clock
        self._server: asyncio.Server | None = None
        self._path: Path | None = None
        self._ends: set[_WorkerEnd] = set()
        self._changed: asyncio.Event = asyncio.Event()
        self._hurry = asyncio.Event()
        self._told_embedder: list[Any] | None = None
        for name, slot in models.items():
            slot.watchers.append(lambda name=name: self._on_change(name))  # type: ignore[misc]

    async def start(self, path: Path) -> None:
        """Listen at `path`, readable and writable by this user only. What is left there is taken away. Raises OSError."""
        listening = _bound(path)
        self._path = path
        try:
            self._server = await asyncio.get_running_loop().create_unix_server(self._accept, sock=listening)
        except BaseException:
            listening.close()
            raise

    @property
    def in_flight(self) -> int:
        """Calls under way."""
        return sum(len(end.calls) for end in self._ends)

    async def drain(self, limit_s: float) -> int:
        """Wait until no worker is connected any more, for `limit_s` at most or until `hurry`: whoever is may still call.
        Returns how many calls are left."""
        limit = asyncio.ensure_future(self.clock.sleep(limit_s))
        hurry = asyncio.ensure_future(self._hurry.wait())
        try:
            while self._ends and not limit.done() and not hurry.done():
                self._changed.clear()
                changed = asyncio.ensure_future(self._changed.wait())
                await asyncio.wait((changed, limit, hurry), return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
        finally:
            limit.cancel()
            hurry.cancel()
        return self.in_flight

    def hurry(self) -> None:
        """End a drain now."""
        self._hurry.set()

    async def aclose(self) -> None:
        """Stop listening; calls under way fail with ModelNotReady."""
        if self._server is not None:
            self._server.close()
        if self._path is not None:
            _unlink(self._path)
        tasks = [task for end in tuple(self._ends) for task in end.end()]
        await asyncio.gather(*tasks, return_exceptions=True)

    # ------------------------------------------------------------------------------------------------ what is there

    def _accept(self) -> FrameConnection:
        return _WorkerEnd(self).connection

    def opened(self, end: _WorkerEnd) -> None:
        self._ends.add(end)
        models = [self._model_value(name) for name in self.models]
        end.connection.send(["models", models, self._embedder_value()])

    def closed(self, end: _WorkerEnd) -> None:
        self._ends.discard(end)
        self._changed.set()

    def ended(self) -> None:
        """One call less."""
        self._changed.set()

    def _on_change(self, name: str) -> None:
        messages: list[list[Any]] = [["model", *self._model_value(name)]]
        # The embedder changes with the models that use it, and with nothing else.
        embedder = self._embedder_value()
        if embedder != self._told_embedder:
            self._told_embedder = embedder
            messages.insert(0, ["embedder", embedder])
        for end in self._ends:
            for message in messages:
                end.connection.send(message)

    def _model_value(self, name: str) -> list[Any]:
        slot = self.models[name]
        return [name, slot.state, slot.reason, info_value(slot.info)]

    def _embedder_value(self) -> list[Any] | None:
        if self.embedder is None:
            return None
        try:
            return [self.embedder.fingerprint, self.embedder.dimensions]
        except ModelNotReady:
            return None


def _unlink(path: Path) -> None:
    path.unlink(missing_ok=True)


def _bound(path: Path) -> socket.socket:
    _unlink(path)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # Bound with the mode it has to have: there is no moment in which somebody else could open it.
    before = os.umask(0o177)
    try:
        listening.bind(str(path))
    except BaseException:
        listening.close()
        raise
    finally:
        os.umask(before)
    return listening


class _Closable(AsyncIterator[Chunk]):
    async def aclose(self) -> None: ...


class _Call:
    """One call of one worker."""

    __slots__ = ("deadline", "flowing", "id", "task")

    def __init__(self, number: int, deadline: Deadline) -> None:
        self.id = number
        self.deadline = deadline
        #: Cleared while the stream's reader asks for no more; made for streams that are paused only.
        self.flowing: asyncio.Event | None = None
        self.task: asyncio.Task[None] | None = None


class _WorkerEnd:
    """One worker's connection and its calls."""

    def __init__(self, server: LinkServer) -> None:
        self._server = server
        self._ending = False
        self.calls: dict[int, _Call] = {}
        self.connection = FrameConnection(self._receive, self._lost, made=lambda: server.opened(self))
        self._verbs: dict[str, Callable[..., None]] = {
            "infer": self._on_infer,
            "stream": self._on_stream,
            "embed": self._on_embed,
            "unknown": self._on_unknown,
            "extend": self._on_extend,
            "cancel": self._on_cancel,
            "pause": self._on_pause,
            "resume": self._on_resume,
        }

    def end(self) -> list[asyncio.Task[None]]:
        """Tell the worker that its calls are over, cancel them, close."""
        self._ending = True
        tasks = []
        for call in self.calls.values():
            self.connection.send(["error", call.id, error_value(ModelNotReady("the model host is ending"))])
            if call.task is not None:
                call.task.cancel()
                tasks.append(call.task)
        self.connection.close()
        return tasks

    def _receive(self, message: list[Any]) -> None:
        self._verbs[message[0]](*message[1:])

    def _lost(self, error: Exception | None) -> None:
        if error is not None:
            _log.warning("link_connection_broken", reason=f"{type(error).__name__}: {error}")
        for call in self.calls.values():
            if call.task is not None:
                call.task.cancel()
        self._server.closed(self)

    # -------------------------------------------------------------------------------------------- the worker's verbs

    def _on_infer(self, number: int, model: str, seconds: float, request: list[Any]) -> None:
        async def infer(call: _Call) -> Any:
            return answer_value(await self._slot(model).infer(read_request(request), call.deadline))

        self._launch(number, seconds, lambda call: self._answer(call, infer))

    def _on_embed(self, number: int, seconds: float, texts: list[str]) -> None:
        async def embed(call: _Call) -> Any:
            return array_value(await self._embedder().embed(texts, call.deadline))

        self._launch(number, seconds, lambda call: self._answer(call, embed))

    def _on_unknown(self, number: int, seconds: float, text: str) -> None:
        async def unknown(call: _Call) -> Any:
            return await self._embedder().unknown_share(text, call.deadline)

        self._launch(number, seconds, lambda call: self._answer(call, unknown))

    def _on_stream(self, number: int, model: str, seconds: float, request: list[Any]) -> None:
        self._launch(number, seconds, lambda call: self._stream(call, model, request))

    def _on_extend(self, number: int, seconds: float) -> None:
        if (call := self.calls.get(number)) is not None:
            call.deadline.extend(self._server.clock.now() + seconds)

    def _on_cancel(self, number: int) -> None:
        if (call := self.calls.get(number)) is not None and call.task is not None:
            call.task.cancel()

    def _on_pause(self, number: int) -> None:
        if (call := self.calls.get(number)) is not None:
            call.flowing = asyncio.Event()

    def _on_resume(self, number: int) -> None:
        if (call := self.calls.get(number)) is not None and call.flowing is not None:
            call.flowing.set()
            call.flowing = None

    def _launch(self, number: int, seconds: float, run: Callable[[_Call], Awaitable[None]]) -> None:
        if self._ending:
            self.connection.send(["error", number, error_value(ModelNotReady("the model host is ending"))])
            return
        call = self.calls[number] = _Call(number, Deadline.after(seconds, self._server.clock))
        call.task = asyncio.create_task(self._run(call, run))
        call.task.add_done_callback(lambda _: self._ended(call))

    def _ended(self, call: _Call) -> None:
        self.calls.pop(call.id, None)
        self._server.ended()

    # ----------------------------------------------------------------------------------------------------- a call

    async def _run(self, call: _Call, run: Callable[[_Call], Awaitable[None]]) -> None:
        try:
            await run(call)
        except asyncio.CancelledError:
            if call.task is not None and not call.task.cancelling():
                # Neither the worker nor the host's end asked for it: somebody waits for an answer.
                await self._fail(call, ModelFailed("the call was cancelled from within"))
            raise
        except Exception as error:
            if not isinstance(error, GatewayError):
                _log.exception("model_raised_what_it_must_not")
            await self._fail(call, error)

    async def _fail(self, call: _Call, error: Exception) -> None:
        try:
            await self._send(["error", call.id, error_value(error)])
        except ModelFailed:
            plain = ModelFailed(f"the model failed with {type(error).__name__}, which cannot be handed on")
            await self._send(["error", call.id, error_value(plain)])

    async def _answer(self, call: _Call, work: Callable[[_Call], Awaitable[Any]]) -> None:
        await self._send(["done", call.id, await work(call)])

    async def _stream(self, call: _Call, model: str, request: list[Any]) -> None:
        chat = read_request(request)
        if not isinstance(chat, ChatRequest):
            raise CannotServe(f"{model}: only chat answers are streamed")
        # Every stream is a generator in fact: it must be closed here and now, not when it is collected.
        chunks = cast("_Closable", self._slot(model).stream(chat, call.deadline))
        try:
            async for chunk in chunks:
                await self._send(["chunk", call.id, chunk.data, chunk.kind.value])
                if call.flowing is not None:
                    await call.flowing.wait()
        finally:
            await chunks.aclose()
        await self._send(["end", call.id])

    async def _send(self, message: list[Any]) -> None:
        if self.connection.behind:
            await self.connection.room()
        try:
            self.connection.send(message)
        except (TypeError, ValueError, OverflowError) as error:
            # Too large, or it holds what no message can carry.
            raise ModelFailed(f"the model's answer cannot be handed on: {error}") from error

    def _slot(self, name: str) -> Slot:
        slot = self._server.models.get(name)
        if slot is None:
            raise ModelNotReady(f"the model host has no model {name!r}")
        return slot

    def _embedder(self) -> Embedder:
        if self._server.embedder is None:
            raise ModelNotReady("the model host has no embedder")
        return self._server.embedder
