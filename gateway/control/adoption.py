"""Whose connections the neighbours take: what waits in the accept queue of a worker that is down or silent is served by all
others that are there, until it is back."""

from __future__ import annotations

from gateway.control.hub_server import HubServer, Member


class Adoption:
    """The workers that are not there now, by number. Belongs to one crew."""

    def __init__(self, hub: HubServer) -> None:
        self._hub = hub
        self._down: set[int] = set()

    async def down(self, number: int) -> None:
        self._down.add(number)
        await self._hub.command("listen.adopt", {"number": number})

    async def up(self, number: int) -> None:
        self._down.discard(number)
        await self._hub.command("listen.release", {"number": number})

    async def tell(self, member: Member) -> None:
        """Who comes late has not been told whose connections to take, and may be the only one there is to take them."""
        for number in sorted(self._down):
            if "listen.adopt" in member.commands:
                await member.ask("command", "listen.adopt", {"number": number})
