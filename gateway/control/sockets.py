"""Listening sockets, bound by one process and accepted from by several.

Nothing is lost that waits in a socket's accept queue as long as one process keeps the socket open: who binds is not who
accepts. A *group* is what one worker accepts from: one socket for each address of the host.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterable, Sequence
from typing import Any

from gateway.listening import CannotListen, listening_on

Group = list[socket.socket]
#: Family, and what `bind` takes for it.
_Address = tuple[socket.AddressFamily, tuple[Any, ...]]

#: Connections that may wait in one socket's accept queue.
BACKLOG = 1024
#: With port 0 and several addresses: how many ports are tried until one is free at each of them.
_PORT_TRIES = 16


def bind_sockets(host: str, port: int, count: int) -> list[Group]:
    """`count` groups of sockets that listen: non-blocking, inheritable, all on the same port (0 = any free one).

    With several groups the kernel spreads connections over them (SO_REUSEPORT). That option also lets a second gateway
    share the port without a word, so nobody else may hold the port when we begin.

    Raises CannotListen.
    """
    with listening_on(host, port):
        tries = 1 if port else _PORT_TRIES
        while True:
            tries -= 1
            try:
                return _bound(_addresses(host, port), count)
            except OSError as error:
                if error.errno != errno.EADDRINUSE or tries <= 0:
                    raise


def close_groups(groups: Iterable[Group]) -> None:
    """Close every socket here; the other processes' copies stay open."""
    for group in groups:
        for sock in group:
            sock.close()


def spec_of(groups: Sequence[Group]) -> str:
    """The groups' file descriptors as one argument for a child process: "3,4;5,6"."""
    return ";".join(",".join(str(sock.fileno()) for sock in group) for group in groups)


def descriptors(groups: Sequence[Group]) -> tuple[int, ...]:
    """The same for `subprocess`' `pass_fds`: the numbers are the same in the child."""
    return tuple(sock.fileno() for group in groups for sock in group)


def inherited(spec: str) -> list[Group]:
    """The groups that a parent handed down under `spec`. They are not handed down further.

    Raises CannotListen when something in `spec` is not a listening socket of this process.
    """
    groups: list[Group] = []
    try:
        for part in spec.split(";"):
            groups.append([])
            for fd in part.split(","):
                groups[-1].append(_inherited(int(fd)))
    except (ValueError, OSError) as error:
        close_groups(groups)
        raise CannotListen(
            f"cannot listen on the sockets handed down as {spec!r}: {error}; "
            "they must be file descriptors of listening sockets, like 3,4;5,6"
        ) from error
    return groups


def _inherited(fd: int) -> socket.socket:
    sock = socket.socket(fileno=fd)
    if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        # It is something else of this process, which goes on to use it.
        sock.detach()
        raise ValueError(f"file descriptor {fd} is a socket that does not listen")
    sock.setblocking(False)
    sock.set_inheritable(False)
    return sock


def _addresses(host: str, port: int) -> list[_Address]:
    """Family and address of everything that `host` names, in the resolver's order. Raises OSError."""
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return list(dict.fromkeys((family, address) for family, _, _, _, address in found))


def _bound(addresses: list[_Address], count: int) -> list[Group]:
    """Bind all of it or nothing. Raises OSError."""
    groups: list[Group] = [[] for _ in range(count)]
    port = 0
    refused: OSError | None = None
    try:
        for family, address in addresses:
            asked = address if not port else (address[0], port, *address[2:])
            try:
                # A name may stand for an address that this machine does not have (::1 without IPv6).
                probe = _socket(family, asked)
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
                refused = error
                continue
            port = probe.getsockname()[1]
            if count == 1:
                groups[0].append(probe)
                continue
            # Bound without SO_REUSEPORT: nobody else listens here.
            probe.close()
            for group in groups:
                group.append(_socket(family, (address[0], port, *address[2:]), shared=True))
        if refused is not None and not groups[0]:
            raise refused
        for group in groups:
            for sock in group:
                sock.listen(BACKLOG)
    except OSError:
        close_groups(groups)
        raise
    return groups


def _socket(family: socket.AddressFamily, address: tuple[Any, ...], *, shared: bool = False) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.set_inheritable(True)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            # Else `::` would also take the IPv4 port, which has a socket of its own.
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        if shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(address)
    except BaseException:
        sock.close()
        raise
    return sock
