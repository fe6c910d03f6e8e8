"""Bodies that were asked before, byte for byte, and answered from the cache: they need not be parsed and digested again.

Parsing a body and finding its plan and digest are functions of its bytes, the caller and the plans in force. For a question
that many clients send alike they cost more than the look-up itself. Only bodies whose answer came from the cache are kept,
so traffic without repetition pays one failed dictionary look-up.
"""

from __future__ import annotations

from backends.api import Surface
from gateway.edge.codec import Parsed

MOST_BODIES = 2_048
#: Larger bodies are seldom repeated, and would take the room of many.
MOST_BYTES = 8_192


class RepeatedBodies:
    """Parsed requests by body. When full, it starts anew: what is really repeated is back at once."""

    __slots__ = ("_by_surface",)

    def __init__(self) -> None:
        # Tensor requests also depend on headers and path.
        self._by_surface: dict[Surface, dict[bytes, Parsed]] = {Surface.CHAT: {}, Surface.EMBEDDINGS: {}}

    def get(self, surface: Surface, body: bytes) -> Parsed | None:
        bodies = self._by_surface.get(surface)
        return None if bodies is None else bodies.get(body)

    def add(self, surface: Surface, body: bytes, parsed: Parsed) -> None:
        bodies = self._by_surface.get(surface)
        if bodies is None or len(body) > MOST_BYTES:
            return
        if len(bodies) >= MOST_BODIES and body not in bodies:
            bodies.clear()
        bodies[body] = parsed
