"""One HTTP/1.1 connection to a backend: a request goes out in one write, aiohttp's parser reads the answer.

What bytes mean is the library's business (llhttp and aiohttp's readers: framing, limits of heads, decompression,
backpressure). What is ours is the life of a connection: asked, answered, free again, or closed at once.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from aiohttp import ClientPayloadError
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http import HttpResponseParser, RawResponseMessage
from aiohttp.streams import StreamReader

#: A reader that holds twice this stops the connection until it is read from.
_READ_BYTES = 1 << 18
#: A server may answer before it is asked (it is shedding); more than this is no answer.
_MAX_EARLY_BYTES = 1 << 16
#: From here on two pieces cost less than one copy.
_LARGE_BODY_BYTES = 1 << 16
_SWITCHING = 101


class Unanswered(ConnectionError):
    """The connection ended before the head of an answer was complete. `heard`: some bytes had come."""

    heard = False


class NotHttp(Exception):
    """What came was no head of an HTTP answer. The cause says why."""


class Owner(Protocol):
    """Who keeps the connections."""

    def free(self, connection: Connection) -> None:
        """Its answer has ended; it can serve again."""
        ...

    def lost(self, connection: Connection) -> None: ...


class Response:
    """The head of an answer, and its body as it comes. The connection goes back by itself when the body has ended."""

    __slots__ = ("connection", "content", "headers", "status")

    def __init__(self, message: RawResponseMessage, content: StreamReader, connection: Connection) -> None:
        self.status = message.code
        self.headers = message.headers
        self.content = content
        #: None once the body has ended.
        self.connection: Connection | None = connection

    @property
    def content_type(self) -> str:
        """Without parameters, in lower case; empty when the answer does not say."""
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()

    def close(self) -> None:
        """Close the connection at once, unless the body has ended."""
        if self.connection is not None:
            self.connection.drop()

    def __repr__(self) -> str:
        return f"Response({self.status}, {'ended' if self.connection is None else 'open'})"


class Connection(BaseProtocol):
    """Serves one call at a time. aiohttp's readers pause and resume it."""

    __slots__ = ("_dropped", "_early", "_heard", "_owner", "_response", "_reusable", "_waiter", "idle_since")

    def __init__(self, loop: asyncio.AbstractEventLoop, owner: Owner) -> None:
        super().__init__(loop)
        self._owner = owner
        #: Of the call that is served now, from its request to the end of its answer.
        self._waiter: asyncio.Future[Response | Exception] | None = None
        self._response: Response | None = None
        self._heard = False
        self._reusable = True
        self._dropped = False
        #: What came before the first request; None after it.
        self._early: bytes | None = b""
        self.idle_since = 0.0

    @property
    def usable(self) -> bool:
        transport = self.transport
        return transport is not None and not transport.is_closing()

    async def exchange(self, head: bytes, body: bytes) -> Response:
        """Send a request; the head of its answer, interim ones (1xx) left out. Raises Unanswered or NotHttp."""
        transport = self.transport
        if transport is None or transport.is_closing():
            raise Unanswered
        self._parser = HttpResponseParser(
            self, self._loop, _READ_BYTES, payload_exception=ClientPayloadError, read_until_eof=True
        )
        self._heard = False
        waiter = self._waiter = self._loop.create_future()
        early, self._early = self._early, None
        if len(body) < _LARGE_BODY_BYTES:
            transport.write(head + body)
        else:
            transport.writelines((head, body))
        if early:
            self.data_received(early)
        try:
            outcome = await waiter
        except BaseException:
            # If the answer has ended the connection is no longer ours: it may serve somebody else already.
            if self._waiter is waiter:
                self.drop()
            raise
        if isinstance(outcome, Response):
            return outcome
        raise outcome

    def drop(self) -> None:
        """Close at once: what is unsent stays unsent. Whoever still waits is told when the connection is gone."""
        self._dropped = True
        if self.transport is not None:
            self.transport.abort()

    # ------------------------------------------------------------------------------------------- called by the transport

    def data_received(self, data: bytes) -> None:
        """No data: the reader has room again, and the parser goes on with what it holds."""
        if self._waiter is None:
            if data:
                self._unasked(data)
            return
        self._heard = True
        assert self._parser is not None, "there is a parser while a call is served"
        try:
            messages, _, _ = self._parser.feed_data(data)
        except Exception as error:
            self._garbled(error)
            return
        for message, content in messages:
            self._headed(message, content)
        response = self._response
        if response is not None and response.content.is_eof():
            self._ended(response)

    def resume_reading(self, resume_parser: bool = True) -> None:
        """Readers call this with every piece that is taken from them."""
        if self._reading_paused:
            super().resume_reading(resume_parser)

    def connection_lost(self, error: BaseException | None) -> None:
        super().connection_lost(error)
        self._owner.lost(self)
        response = self._response
        if response is not None:
            self._cut(response, error)
        elif self._waiter is not None:
            unanswered = Unanswered(*error.args) if isinstance(error, OSError) else Unanswered()
            unanswered.heard = self._heard
            self._settle(unanswered)

    # ------------------------------------------------------------------------------------------------- one call's answer

    def _headed(self, message: RawResponseMessage, content: StreamReader) -> None:
        status = message.code
        if self._response is not None:
            self._reusable = False  # an answer that nobody asked for
        elif not 100 <= status < 200 or status == _SWITCHING:
            if message.should_close or status == _SWITCHING:
                self._reusable = False
            self._response = Response(message, content, self)
            self._settle(self._response)

    def _ended(self, response: Response) -> None:
        response.connection = None
        self._response = self._waiter = self._parser = None
        transport = self.transport
        # Bytes of the request that are still unsent would be read as the next one.
        if self._reusable and not self._dropped and transport is not None and not transport.get_write_buffer_size():
            self._owner.free(self)
        else:
            self.drop()

    def _garbled(self, error: Exception) -> None:
        self.drop()
        if self._response is None:
            failure = NotHttp()
            failure.__cause__ = error
            self._settle(failure)
        else:
            _fail(self._response.content, error)

    def _cut(self, response: Response, error: BaseException | None) -> None:
        """The connection is gone before the end of a body; for some bodies that is their end."""
        assert self._parser is not None, "there is a parser while a call is served"
        if self._dropped:
            _fail(response.content, error)
            response.connection = None
            return
        try:
            self._parser.feed_eof()
        except Exception as cause:
            _fail(response.content, cause)
        # A reader that is full gets the rest, and the end, when it is read from.
        if response.content.is_eof():
            self._ended(response)

    def _settle(self, outcome: Response | Exception) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            # Never as the future's exception: a call cancelled at this moment would leave it unread.
            waiter.set_result(outcome)

    def _unasked(self, data: bytes) -> None:
        if self._early is not None and len(self._early) + len(data) <= _MAX_EARLY_BYTES:
            self._early += data
        else:
            self.drop()


def _fail(content: StreamReader, cause: BaseException | None) -> None:
    """What a body's reader is told when no more will come. The first failure stands."""
    if content.exception() is None:
        failure = ClientPayloadError("the connection ended before the body did")
        failure.__cause__ = cause
        content.set_exception(failure)
