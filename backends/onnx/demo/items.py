"""Reads the sample catalogue (`catalogue.json`)."""

from __future__ import annotations

from importlib import resources

import msgspec


class Item(msgspec.Struct, frozen=True):
    """One thing of the sample catalogue. `id` is unique."""

    id: str
    title: str
    description: str
    category: str

    @property
    def text(self) -> str:
        """What the recommender reads of the item."""
        return f"{self.title}. {self.description}"


def sample_items() -> list[Item]:
    """The whole catalogue, in a fixed order."""
    data = resources.files(__package__).joinpath("catalogue.json").read_bytes()
    return msgspec.json.decode(data, type=list[Item])
