"""Claims of other classes: who may collide with an allocation of ours, and for how long."""

from __future__ import annotations

from tests.k8s_units.objects import claim, device_class

from slicewise.k8s.api import DeviceClass
from slicewise.k8s.rivals import LATELY, LONGEST, Rivals, may_want

STOCK = {"name": "r", "exactly": {"deviceClassName": "mig.nvidia.com"}}


def test_an_allocation_waits_for_the_rivals_that_were_there_when_it_came_back() -> None:
    rivals = Rivals(settle=5.0)
    assert not rivals.expected(0)
    rivals.note(claim("s", STOCK), True, 1.0)
    assert rivals.expected(1.0)
    rivals.begin("uid-a", "team/a")
    assert rivals.settled(100.0) == []  # our write has not come back
    rivals.came_back("uid-a")
    assert rivals.next_time is None
    rivals.note(claim("late", STOCK), True, 2.0)  # younger than our write: it knows of it
    assert rivals.settled(2.0) == []
    rivals.note(claim("s", STOCK, seats=[("n1", "d")]), True, 3.0)
    assert rivals.settled(3.0) == ["uid-a"]


def test_a_rival_that_gets_nothing_is_given_some_time() -> None:
    rivals = Rivals(settle=5.0)
    rivals.note(claim("s", STOCK), True, 0.0)
    rivals.begin("uid-a", "team/a")
    rivals.came_back("uid-a")
    rivals.came_back("uid-a")
    assert rivals.settled(1000.0) == []  # nobody knows whether the scheduler has seen it
    rivals.reserved("uid-a", 10.0)
    rivals.reserved("uid-a", 12.0)
    assert rivals.next_time == 15.0
    assert rivals.settled(14.9) == []
    assert rivals.settled(15.0) == ["uid-a"]


def test_a_rival_whose_pod_has_a_node_is_waited_for() -> None:
    rivals = Rivals(settle=5.0)
    rivals.note(claim("s", STOCK), True, 0.0)
    rivals.begin("uid-a", "team/a")
    rivals.came_back("uid-a")
    rivals.reserved("uid-a", 0.0)
    rivals.nominated.add("uid-s")
    assert rivals.settled(5.0 + LONGEST - 1) == []
    assert rivals.next_time == 5.0 + LONGEST
    rivals.nominated.clear()
    rivals.begun.add("uid-s")
    assert rivals.settled(50.0) == []
    assert rivals.settled(5.0 + LONGEST) == ["uid-a"]
    rivals.note(claim("s", STOCK, seats=[("n1", "d")]), True, 51.0)
    assert rivals.settled(51.0) == ["uid-a"]


def test_a_rival_that_goes_is_none_and_others_are_expected_for_a_while() -> None:
    rivals = Rivals(settle=5.0)
    rivals.note(claim("s", STOCK), True, 0.0)
    rivals.begin("uid-a", "team/a")
    rivals.came_back("uid-a")
    rivals.drop("uid-s")
    assert rivals.settled(0.0) == ["uid-a"]
    assert rivals.expected(LATELY - 1)
    assert not rivals.expected(LATELY + 1)
    gone = claim("t", STOCK, deletionTimestamp="2026-01-01T00:00:00Z")
    rivals.note(gone, True, LATELY + 2)
    assert not rivals.waiting


def test_where_every_allocation_is_confirmed_it_is_at_once_without_rivals() -> None:
    rivals = Rivals(5.0, "always")
    assert rivals.expected(0.0)
    rivals.begin("uid-a", "team/a")
    rivals.came_back("uid-a")
    assert rivals.settled(0.0) == ["uid-a"]
    never = Rivals(5.0, "never")
    never.note(claim("s", STOCK), True, 0.0)
    assert not never.expected(0.0)


def test_who_may_want_our_devices() -> None:
    stock = device_class("mig.nvidia.com", sealed=False)
    classes: dict[str, DeviceClass] = {"mig.nvidia.com": stock, "any": DeviceClass(stock.metadata)}
    ours = {"gpu.nvidia.com"}
    assert may_want(claim("c", STOCK), classes, ours)
    assert not may_want(claim("c", STOCK), classes, {"nic.example.com"})
    assert may_want(claim("c", {"name": "r", "exactly": {"deviceClassName": "any"}}), classes, ours)
    assert may_want(claim("c", {"name": "r", "firstAvailable": [{}]}), classes, ours)
    unknown = {"name": "r", "exactly": {"deviceClassName": "unheard-of"}}
    assert not may_want(claim("c", unknown), classes, ours)
