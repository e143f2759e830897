"""Which connection is closed when there are too many."""

from __future__ import annotations

import resource

import pytest

from slicewise.service.connections import SPARE_FILES, Connections, room_for


class Line:
    """A connection."""

    def __init__(self, crowd: Connections, address: str, idle: bool = True) -> None:
        self.crowd, self.address, self.idle, self.open = crowd, address, idle, True
        crowd.enter(self, address)

    def cut(self) -> None:
        self.open = False
        self.crowd.leave(self, self.address)


def test_the_client_with_the_most_loses_its_oldest_idle_connection() -> None:
    crowd = Connections(4)
    a = [Line(crowd, "10.0.0.1", idle=number > 0) for number in range(3)]
    b = Line(crowd, "10.0.0.2")
    assert crowd.open == 4
    c = Line(crowd, "10.0.0.3")
    assert [one.open for one in a] == [True, False, True]
    assert (b.open, c.open, crowd.open, crowd.cut) == (True, True, 4, 1)


def test_where_all_are_busy_the_newest_goes() -> None:
    crowd = Connections(2)
    a = [Line(crowd, "10.0.0.1", idle=False) for _ in range(3)]
    assert [one.open for one in a] == [True, True, False]


def test_a_client_is_all_of_a_network_that_one_host_can_have() -> None:
    crowd = Connections(3)
    a = [Line(crowd, f"2001:db8::{number}") for number in range(1, 3)]
    b = Line(crowd, "2001:db8:0:1::1")
    c = Line(crowd, "2001:db8:0:2::1")
    assert [one.open for one in (*a, b, c)] == [False, True, True, True]


def test_there_are_no_more_than_files_can_be_open(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [200, 1000]
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", lambda _, both: limits.__setitem__(0, both[0]))
    assert room_for(50) == 50
    assert limits == [200, 1000]
    assert room_for(500) == 500
    assert limits == [500 + SPARE_FILES, 1000]
    assert room_for(5000) == 1000 - SPARE_FILES
    limits[:] = [200, resource.RLIM_INFINITY]
    assert room_for(5000) == 5000
    limits[:] = [resource.RLIM_INFINITY, resource.RLIM_INFINITY]
    assert room_for(5000) == 5000
