"""Messages between the processes of one gateway: four bytes of length, then msgpack, over one stream connection.

    frame    uint32 big-endian n | n bytes of msgpack
    message  any value that msgpack can carry; what it means is the business of whoever opens the connection

Both ends are processes of the same build on the same machine, started by the same supervisor, so there is no version and no
negotiation. A frame that is too large or cannot be read ends the connection: its end is lost, there is nothing to resume at.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import msgspec

#: Two 4 MiB bodies as tensors, their answer, and room to spare.
MOST_BYTES = 64 << 20
_HEAD = 4
#: What a message is written into at first; it grows by itself.
_FIRST_ROOM = 256
#: Read in one go; longer frames are read into their own buffer.
_READ_BYTES = 256 << 10


class FrameConnection(asyncio.BufferedProtocol):
    """One end of a connection.

    receive
        Called with each message, in order, on the event loop. What it raises ends the connection.
    made
        Called once when the connection is there, before anything is received.
    lost
        Called once when the connection is over, with the reason (None = the other end closed it).
    """

    def __init__(
        self,
        receive: Callable[[Any], None],
        lost: Callable[[Exception | None], None],
        most_bytes: int = MOST_BYTES,
        made: Callable[[], None] = lambda: None,
    ) -> None:
        self._receive = receive
        self._lost = lost
        self._made = made
        self._most_bytes = most_bytes
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder()
        #: What is read into: the small buffer again and again, or one that is as long as the large frame on its way.
        self._small = self._view = memoryview(bytearray(_READ_BYTES))
        self._filled = 0
        self._room: asyncio.Event = asyncio.Event()
        self._room.set()
        self._over = False
        self.transport: asyncio.Transport | None = None

    @property
    def open(self) -> bool:
        return self.transport is not None and not self._over and not self.transport.is_closing()

    @property
    def behind(self) -> bool:
        """Does the other end take what is sent more slowly than it is sent? Then what can wait should."""
        return not self._room.is_set()

    @property
    def waiting_bytes(self) -> int:
        """Bytes that have been sent and that the system has not taken yet."""
        return self.transport.get_write_buffer_size() if self.transport is not None else 0

    def send(self, message: Any) -> bool:
        """Send one message; False when the connection is over. Never waits: see `behind` and `room`."""
        if self.transport is None or not self.open:
            return False
        frame = bytearray(_FIRST_ROOM)
        self._encoder.encode_into(message, frame, _HEAD)
        size = len(frame) - _HEAD
        if size > self._most_bytes:
            raise ValueError(f"a message of {size} bytes; at most {self._most_bytes} are sent")
        frame[:_HEAD] = size.to_bytes(_HEAD, "big")
        self.transport.write(frame)
        return True

    async def room(self) -> None:
        """Return when the other end has taken most of what was sent, or the connection is over."""
        await self._room.wait()

    def close(self) -> None:
        """Send what is waiting, then close."""
        if self.transport is not None:
            self.transport.close()

    def abort(self) -> None:
        """Close at once; what is waiting is not sent."""
        if self.transport is not None:
            self.transport.abort()

    # ------------------------------------------------------------------------------------------- asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclasses of asyncio's.
        self.transport = cast("asyncio.Transport", transport)
        self._made()

    def get_buffer(self, _sizehint: int) -> memoryview:
        return self._view[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        """Hand on every frame that is whole; what is left of the last one waits at the beginning of a buffer."""
        view, filled, start = self._view, self._filled + nbytes, 0
        while filled - start >= _HEAD:
            size = int.from_bytes(view[start : start + _HEAD], "big")
            if size > self._most_bytes:
                self._end(ValueError(f"a frame of {size} bytes; at most {self._most_bytes} are read"))
                return
            end = start + _HEAD + size
            if end > filled:
                if end - start > len(view):
                    # A large frame gets a buffer of its own, so that nothing of it is moved again.
                    self._view = memoryview(bytearray(end - start))
                break
            try:
                self._receive(self._decoder.decode(view[start + _HEAD : end]))
            except Exception as error:
                self._end(error)
                return
            if self._over:
                return
            start = end
        self._filled = filled - start
        if view is not self._small and self._view is view and not self._filled:
            self._view = self._small
        elif self._filled and (start or self._view is not view):
            self._view[: self._filled] = bytes(view[start:filled])

    def pause_writing(self) -> None:
        self._room.clear()

    def resume_writing(self) -> None:
        self._room.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._finish(exc)
        # This object is in cycles, as a rule: its buffers must not have to wait for the collector.
        self._small = self._view = memoryview(b"")

    def _end(self, error: Exception) -> None:
        self.abort()
        self._finish(error)

    def _finish(self, reason: Exception | None) -> None:
        if not self._over:
            self._over = True
            self._room.set()
            self._lost(reason)
