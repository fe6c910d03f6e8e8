"""A listener that cannot have its address, told apart from everything else that an operating system may refuse."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


def address(host: str, port: int) -> str:
    """As it stands in a URL."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class CannotListen(Exception):
    """The message names the address and the cause."""


@contextmanager
def listening_on(host: str, port: int) -> Iterator[None]:
    """Round the start of one listener: turns its OSError into CannotListen."""
    try:
        yield
    except OSError as error:
        raise CannotListen(f"cannot listen on {address(host, port)}: {error.strerror or error}") from error
