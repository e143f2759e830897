"""Rivals: which claims may conflict with an allocation of ours, and for how long."""

from __future__ import annotations

import msgspec
from tests.kubernetes.objects import claim, device_class

from slicewise.kubernetes.api import DeviceClass
from slicewise.kubernetes.claim_states import ClaimState
from slicewise.kubernetes.conflicts import EXPECTED_SECONDS, LONGEST, Conflicts, may_want

STOCK = {"name": "r", "exactly": {"deviceClassName": "mig.nvidia.com"}}


def begin(conflicts: Conflicts) -> None:
    """An allocation of ours is tentative."""
    record = conflicts.records.update(claim("a", seats=[("n1", "d")]))
    conflicts.records.move(record, ClaimState.TENTATIVE)


def test_a_claim_waits_for_the_rivals_known_when_its_write_was_seen() -> None:
    conflicts = Conflicts(settle=5.0)
    assert not conflicts.expected(0, "n1")
    conflicts.update(claim("s", STOCK), True, 1.0)
    assert conflicts.expected(1.0, "n1")
    begin(conflicts)
    assert conflicts.settled(100.0) == []  # our write has not been seen yet
    conflicts.seen("uid-a")
    assert conflicts.next_time is None
    conflicts.update(claim("late", STOCK), True, 2.0)  # created after our write, which it has seen
    assert conflicts.settled(2.0) == []
    conflicts.update(claim("s", STOCK, seats=[("n1", "d")]), True, 3.0)
    assert conflicts.settled(3.0) == ["uid-a"]


def test_a_rival_without_devices_gets_a_limited_time() -> None:
    conflicts = Conflicts(settle=5.0)
    conflicts.update(claim("s", STOCK), True, 0.0)
    begin(conflicts)
    conflicts.seen("uid-a")
    conflicts.seen("uid-a")
    assert conflicts.settled(1000.0) == []  # the scheduler may not have seen it
    conflicts.reserved("uid-a", 10.0)
    conflicts.reserved("uid-a", 12.0)
    assert conflicts.next_time == 15.0
    assert conflicts.settled(14.9) == []
    assert conflicts.settled(15.0) == ["uid-a"]


def test_a_rival_with_a_nominated_pod_gets_more_time() -> None:
    conflicts = Conflicts(settle=5.0)
    conflicts.update(claim("s", STOCK), True, 0.0)
    begin(conflicts)
    conflicts.seen("uid-a")
    conflicts.reserved("uid-a", 0.0)
    conflicts.nominated.add("uid-s")
    assert conflicts.settled(5.0 + LONGEST - 1) == []
    assert conflicts.next_time == 5.0 + LONGEST
    conflicts.nominated.clear()
    conflicts.begun.add("uid-s")
    assert conflicts.settled(50.0) == []
    assert conflicts.settled(5.0 + LONGEST) == ["uid-a"]
    conflicts.update(claim("s", STOCK, seats=[("n1", "d")]), True, 51.0)
    assert conflicts.settled(51.0) == ["uid-a"]


def test_a_deleted_rival_is_dropped_and_more_are_expected_for_a_while() -> None:
    conflicts = Conflicts(settle=5.0)
    conflicts.update(claim("s", STOCK), True, 0.0)
    assert conflicts.expected(0.0, "n1")
    begin(conflicts)
    conflicts.seen("uid-a")
    conflicts.drop("uid-s")
    assert conflicts.settled(0.0) == ["uid-a"]
    assert conflicts.expected(EXPECTED_SECONDS - 1, "n1")
    assert not conflicts.expected(EXPECTED_SECONDS + 1, "n1")
    gone = claim("t", STOCK, deletionTimestamp="2026-01-01T00:00:00Z")
    conflicts.update(gone, True, EXPECTED_SECONDS + 2)
    assert not conflicts.rivals


def test_only_claims_that_may_run_on_the_same_node_compete() -> None:
    conflicts = Conflicts(5.0, may_run=lambda claim, node: node == "n2")
    conflicts.update(claim("s", STOCK), True, 0.0)
    assert not conflicts.expected(0.0, "n1")
    assert conflicts.expected(0.0, "n2")
    begin(conflicts)  # on n1
    conflicts.seen("uid-a")
    assert conflicts.settled(0.0) == ["uid-a"]
    conflicts.update(claim("s", STOCK, seats=[("n3", "d")], node="n3"), True, 1.0)
    lately = EXPECTED_SECONDS
    assert [conflicts.expected(lately, node) for node in ("n1", "n2", "n3")] == [False, False, True]
    assert not conflicts.expected(lately + 1.0, "n3")


def test_without_rivals_an_allocation_is_confirmed_at_once() -> None:
    conflicts = Conflicts(5.0, "always")
    assert conflicts.expected(0.0, "n1")
    begin(conflicts)
    conflicts.seen("uid-a")
    assert conflicts.settled(0.0) == ["uid-a"]
    never = Conflicts(5.0, "never")
    never.update(claim("s", STOCK), True, 0.0)
    assert not never.expected(0.0, "n1")


def test_which_claims_may_get_our_devices() -> None:
    stock = device_class("mig.nvidia.com", sealed=False)
    classes: dict[str, DeviceClass] = {"mig.nvidia.com": stock, "any": DeviceClass(stock.metadata)}
    ours = {"gpu.nvidia.com"}
    assert may_want(claim("c", STOCK), classes, ours)
    assert not may_want(claim("c", STOCK), classes, {"nic.example.com"})
    assert may_want(claim("c", {"name": "r", "exactly": {"deviceClassName": "any"}}), classes, ours)
    assert may_want(claim("c", {"name": "r", "firstAvailable": [{}]}), classes, ours)
    for expression in (
        'device.driver == "nic.example.com" || device.driver == x',
        '!(device.driver == "nic.example.com")',
        'x ? device.driver == "nic.example.com" : true',
    ):
        spec = {"selectors": [{"cel": {"expression": expression}}]}
        body = {"metadata": {"name": "unclear"}, "spec": spec}
        unclear = {"unclear": msgspec.convert(body, DeviceClass)}
        made = claim("c", {"name": "r", "exactly": {"deviceClassName": "unclear"}})
        assert may_want(made, unclear, ours), expression
    unknown = {"name": "r", "exactly": {"deviceClassName": "unheard-of"}}
    assert not may_want(claim("c", unknown), classes, ours)
