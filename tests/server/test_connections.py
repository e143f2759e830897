"""Which connection is aborted when there are too many."""

from __future__ import annotations

import resource

import pytest

from slicewise.server.limits import SPARE_FILES, Connections, raise_file_limit


class FakeConnection:
    """A connection that removes itself when it is aborted."""

    def __init__(self, connections: Connections, address: str, idle: bool = True) -> None:
        self.connections, self.address, self.idle, self.open = connections, address, idle, True
        connections.add(self, address)

    def abort(self) -> None:
        self.open = False
        self.connections.remove(self, self.address)


def test_the_client_with_the_most_connections_loses_its_oldest_idle_one() -> None:
    connections = Connections(4)
    a = [FakeConnection(connections, "10.0.0.1", idle=number > 0) for number in range(3)]
    b = FakeConnection(connections, "10.0.0.2")
    assert connections.open == 4
    c = FakeConnection(connections, "10.0.0.3")
    assert [one.open for one in a] == [True, False, True]
    assert (b.open, c.open, connections.open, connections.aborted) == (True, True, 4, 1)


def test_the_newest_connection_is_aborted_if_none_is_idle() -> None:
    connections = Connections(2)
    a = [FakeConnection(connections, "10.0.0.1", idle=False) for _ in range(3)]
    assert [one.open for one in a] == [True, True, False]


def test_a_64_bit_prefix_of_ipv6_is_one_client() -> None:
    connections = Connections(3)
    a = [FakeConnection(connections, f"2001:db8::{number}") for number in range(1, 3)]
    b = FakeConnection(connections, "2001:db8:0:1::1")
    c = FakeConnection(connections, "2001:db8:0:2::1")
    assert [one.open for one in (*a, b, c)] == [False, True, True, True]


def test_the_limit_of_open_files_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [200, 1000]
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", lambda _, both: limits.__setitem__(0, both[0]))
    assert raise_file_limit(50) == 50
    assert limits == [200, 1000]
    assert raise_file_limit(500) == 500
    assert limits == [500 + SPARE_FILES, 1000]
    assert raise_file_limit(5000) == 1000 - SPARE_FILES
    limits[:] = [200, resource.RLIM_INFINITY]
    assert raise_file_limit(5000) == 5000
    limits[:] = [resource.RLIM_INFINITY, resource.RLIM_INFINITY]
    assert raise_file_limit(5000) == 5000
