"""Sockets that one process binds and others accept from."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from gateway.control.sockets import Group, bind_sockets, close_groups, descriptors, inherited, spec_of
from gateway.listening import CannotListen

HOST = "127.0.0.1"


@pytest.fixture
def opened() -> Iterator[list[Group]]:
    groups: list[Group] = []
    yield groups
    close_groups(groups)


def test_all_groups_share_one_free_port_and_get_connections(opened: list[Group]) -> None:
    opened += bind_sockets(HOST, 0, 3)
    ports = {sock.getsockname()[1] for group in opened for sock in group}
    assert len(opened) == 3
    assert len(ports) == 1
    assert 0 not in ports
    port = ports.pop()
    clients = [socket.create_connection((HOST, port)) for _ in range(60)]
    # Which one is the kernel's choice, by a hash of the addresses: 60 clients and an empty third never happen.
    accepted = [_accepted(group[0]) for group in opened]
    assert sum(accepted) == 60
    assert all(accepted)
    for client in clients:
        client.close()


def _accepted(sock: socket.socket) -> int:
    count = 0
    while True:
        try:
            sock.accept()[0].close()
        except BlockingIOError:
            return count
        count += 1


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("first", [1, 2])
def test_a_port_that_somebody_has_is_refused(opened: list[Group], first: int, count: int) -> None:
    """Also one that both sides would share without a word."""
    opened += bind_sockets(HOST, 0, first)
    port = opened[0][0].getsockname()[1]
    with pytest.raises(CannotListen, match=rf"cannot listen on 127.0.0.1:{port}: Address already in use"):
        bind_sockets(HOST, port, count)


def test_every_address_of_a_name_is_listened_at(opened: list[Group]) -> None:
    named = {info[4][0] for info in socket.getaddrinfo("localhost", 0, type=socket.SOCK_STREAM)}
    opened += bind_sockets("localhost", 0, 2)
    for group in opened:
        # ::1 may be in the hosts file of a machine without IPv6.
        assert {HOST} <= {sock.getsockname()[0] for sock in group} <= named
    assert len({sock.getsockname()[1] for group in opened for sock in group}) == 1


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
def test_both_families_have_the_same_port(opened: list[Group]) -> None:
    opened += bind_sockets("", 0, 1)
    assert len({sock.getsockname()[1] for sock in opened[0]}) == 1
    assert len({sock.family for sock in opened[0]}) == len(opened[0])


@pytest.mark.parametrize("host", ["203.0.113.7", "no.such.host.invalid"])
def test_an_address_that_is_not_ours_is_named(host: str) -> None:
    with pytest.raises(CannotListen, match=f"cannot listen on {host}:0: "):
        bind_sockets(host, 0, 1)


_CHILD = """
import select
import sys
from gateway.control.sockets import inherited
groups = inherited(sys.argv[1])
for number, group in enumerate(groups):
    # Not made blocking: that flag belongs to all copies of a socket.
    select.select(group, [], [])
    client, _ = group[0].accept()
    client.sendall(b"child %d" % number)
    client.close()
"""


def test_a_child_process_accepts_from_what_it_is_handed(opened: list[Group]) -> None:
    opened += [*bind_sockets(HOST, 0, 1), *bind_sockets(HOST, 0, 1)]
    child = subprocess.Popen([sys.executable, "-c", _CHILD, spec_of(opened)], pass_fds=descriptors(opened))
    try:
        for number, group in enumerate(opened):
            with socket.create_connection(group[0].getsockname(), timeout=10.0) as client:
                assert client.recv(100) == b"child %d" % number
        assert child.wait(10.0) == 0
    finally:
        child.kill()
        child.wait()
    # What the child has closed is its own copy.
    with socket.create_connection(opened[0][0].getsockname(), timeout=1.0):
        assert _accepted(opened[0][0]) == 1


def test_what_is_no_listening_socket_is_refused_and_stays_open() -> None:
    fresh, (reading, writing) = socket.socket(), os.pipe()
    try:
        for spec in ("", "x", "7;", "1234567", str(reading), str(fresh.fileno())):
            with pytest.raises(CannotListen, match="must be file descriptors of listening sockets"):
                inherited(spec)
        os.fstat(reading)
        os.fstat(fresh.fileno())
    finally:
        fresh.close()
        os.close(reading)
        os.close(writing)
