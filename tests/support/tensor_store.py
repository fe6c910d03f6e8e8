"""A `TensorCache` in a dict that writes down what it is asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


class TensorDict:
    def __init__(self) -> None:
        self.kept: dict[bytes, dict[str, NDArray[Any]]] = {}
        self.asked: list[list[bytes]] = []

    async def get_many(self, keys: Sequence[bytes]) -> list[dict[str, NDArray[Any]] | None]:
        assert all(len(key) == 16 for key in keys)
        self.asked.append(list(keys))
        return [self.kept.get(key) for key in keys]

    async def put(self, key: bytes, tensors: dict[str, NDArray[Any]]) -> None:
        self.kept[key] = {name: np.array(array) for name, array in tensors.items()}
