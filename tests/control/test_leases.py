"""Leases are warned of once before they end, and can be extended."""

from __future__ import annotations

from typing import Any

import pytest
from tests.control.control_plane import ControlPlane
from tests.tenants import ref

from slicewise.control import leases
from slicewise.control.commands import Extend, SetTenant
from slicewise.control.snapshot import restore_snapshot, snapshot_of
from slicewise.control.state import State
from slicewise.journal.entries import AllocationRecord, Ended, QuotaRecord, Seconds
from slicewise.journal.lease_entries import LeaseEnding, LeaseExtended

WARNING = 300.0


@pytest.fixture
def control() -> ControlPlane:
    control = ControlPlane(lease_warning=WARNING)
    control.tenant()
    control.node()
    return control


def extend(control: ControlPlane, identity: str, lease: Seconds, tenant: Any = None) -> Any:
    """Extend a lease; return the status and the body."""
    return control.ask(Extend(identity, lease, tenant))


def restarted(control: ControlPlane) -> ControlPlane:
    """A control plane with the restored state, at the same time."""
    snapshot = restore_snapshot(snapshot_of(control.state), control.fresh())
    other = ControlPlane(state=snapshot, first_id=100, lease_warning=control.lease_warning)
    other.now = control.now
    return other


def entries(control: ControlPlane, seconds: Seconds) -> list[Any]:
    """Let time pass, and return the entries that this caused."""
    return [row.entry for row in control.wait(seconds)]


# Warnings


def test_a_lease_is_warned_of_once_and_then_ends(control: ControlPlane) -> None:
    _, made = control.create("1g.10gb", lease=3600.0)
    ends = control.now + 3600
    assert control.state.next_lease == ends - WARNING
    assert entries(control, 3299.9) == []
    acme = control.state.tenants_by_name["acme"].ref
    assert entries(control, 0.1) == [LeaseEnding(made["id"], acme, ends)]
    assert control.rows[-1].actor == "clock"
    assert control.state.next_lease == ends
    assert entries(control, 299) == []
    (ended,) = entries(control, 1)
    assert isinstance(ended, Ended)
    assert control.state.next_lease is None


@pytest.mark.parametrize(("lease", "warned"), [(599.9, False), (600.0, True)])
def test_only_a_lease_twice_as_long_as_the_warning_is_warned_of(
    control: ControlPlane, lease: Seconds, warned: bool
) -> None:
    control.create("1g.10gb", lease=lease)
    kinds = [type(entry) for entry in entries(control, lease - 1)]
    assert kinds == [LeaseEnding] * warned
    assert [type(entry) for entry in entries(control, 1)] == [Ended]


def test_without_a_warning_leases_only_end() -> None:
    control = ControlPlane(lease_warning=0)
    control.tenant()
    control.node()
    control.create("1g.10gb", lease=3600.0)
    assert entries(control, 3599) == []
    assert [type(entry) for entry in entries(control, 1)] == [Ended]


def test_a_lease_that_is_over_is_not_warned_of(control: ControlPlane) -> None:
    """After a long stop of the service, for example."""
    control.create("1g.10gb", lease=3600.0)
    assert [type(entry) for entry in entries(control, 10_000)] == [Ended]


def test_warnings_and_ends_share_a_batch(control: ControlPlane) -> None:
    for lease in (3600.0, 3600.0, 3300.0, 50.0):
        control.create("1g.10gb", lease=lease)
    assert [type(entry) for entry in entries(control, 50)] == [Ended]
    kinds = [type(entry) for entry in entries(control, 3250)]
    assert sorted(kind.__name__ for kind in kinds) == ["Ended", "LeaseEnding", "LeaseEnding"]


def test_a_queued_request_is_warned_of_after_it_was_placed(control: ControlPlane) -> None:
    _, whole = control.create("7g.80gb")
    control.create("1g.10gb", wait=5000.0, lease=1000.0)
    assert entries(control, 2000) == []
    control.release(whole["id"])
    assert entries(control, 699) == []
    assert [type(entry) for entry in entries(control, 1)] == [LeaseEnding]


@pytest.mark.parametrize("pause", [3299.0, 3300.0, 3400.0])
def test_a_restart_neither_repeats_nor_loses_a_warning(
    control: ControlPlane, pause: Seconds
) -> None:
    control.create("1g.10gb", lease=3600.0)
    told = entries(control, pause)
    again = restarted(control)
    assert again.state.next_lease == control.state.next_lease
    told += entries(again, 3599 - pause)
    assert [type(entry) for entry in told] == [LeaseEnding]
    assert [type(entry) for entry in entries(again, 1)] == [Ended]


# Extensions


def test_an_extended_lease_ends_later(control: ControlPlane) -> None:
    _, made = control.create("1g.10gb", lease=1000.0)
    control.wait(100)
    status, view = extend(control, made["id"], 2000.0)
    ends = control.now + 2000
    acme = control.state.tenants_by_name["acme"].ref
    assert control.rows[-1].entry == LeaseExtended(made["id"], acme, 2000.0, ends)
    assert (status, view["lease_seconds"]) == (200, 2000)
    assert view["ends_at"] > made["ends_at"]
    assert view["placed_at"] == made["placed_at"]
    assert control.state.allocations[made["id"]].ends == ends
    kinds = [type(entry) for entry in entries(control, 1999)]
    assert kinds == [LeaseEnding]
    assert [type(entry) for entry in entries(control, 1)] == [Ended]


def test_an_extended_lease_is_warned_of_again(control: ControlPlane) -> None:
    _, made = control.create("1g.10gb", lease=1000.0)
    assert [type(entry) for entry in entries(control, 700)] == [LeaseEnding]
    extend(control, made["id"], 1000.0)
    again = restarted(control)
    for one in (control, again):
        assert entries(one, 699) == []
        assert [type(entry) for entry in entries(one, 1)] == [LeaseEnding]
    # Extended by less than twice the warning, it is not.
    extend(control, made["id"], 599.0)
    assert entries(control, 598) == []
    assert [type(entry) for entry in entries(control, 1)] == [Ended]


def test_a_lease_never_gets_shorter(control: ControlPlane) -> None:
    _, made = control.create("1g.10gb", lease=1000.0)
    written = len(control.rows)
    for lease in (1.0, 1000.0):
        status, view = extend(control, made["id"], lease)
        assert (status, view["ends_at"], view["lease_seconds"]) == (200, made["ends_at"], 1000)
    assert len(control.rows) == written


def test_what_cannot_be_extended(control: ControlPlane) -> None:
    _, forever = control.create("1g.10gb")
    _, queued = control.create("7g.80gb", wait=100, lease=100.0)
    _, ended = control.create("1g.10gb", lease=100.0)
    control.release(ended["id"])
    for identity, expected, reason, told in (
        (forever["id"], 409, "no lease", "has no lease to extend: it lasts until its release"),
        (queued["id"], 409, "queued", "is queued: its lease begins when it is placed"),
        (ended["id"], 404, None, "no allocation"),
        ("unknown", 404, None, "no allocation 'unknown'"),
    ):
        status, body = extend(control, identity, 1000.0)
        assert (status, body.get("reason")) == (expected, reason)
        assert told in body["detail"]


def test_a_tenant_extends_only_its_own_allocations(control: ControlPlane) -> None:
    _, made = control.create("1g.10gb", lease=100.0)
    assert extend(control, made["id"], 200.0, ref("other"))[0] == 404
    acme = control.state.tenants_by_name["acme"].ref
    assert extend(control, made["id"], 200.0, acme)[0] == 200


def test_the_longest_lease_counts_from_the_extension(control: ControlPlane) -> None:
    control.ask(SetTenant("acme", QuotaRecord(max_lease_seconds=1000), new=False))
    _, made = control.create("1g.10gb")
    control.wait(600)
    status, body = extend(control, made["id"], 1000.5)
    told = "a lease of tenant 'acme' lasts at most 1000 seconds, not 1000.5"
    assert (status, body["reason"], body["detail"]) == (409, "quota", told)
    assert extend(control, made["id"], 1000.0)[0] == 200
    assert control.state.allocations[made["id"]].ends == control.now + 1000


def test_a_lease_is_not_extended_past_a_promised_opening(
    control: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, made = control.create("1g.10gb", lease=1000.0)
    begun = control.now
    openings = {"next": begun + 1500}

    def opening(state: State, allocation: AllocationRecord) -> Seconds:
        assert state is control.state
        assert allocation.id == made["id"]
        return openings["next"]

    monkeypatch.setattr(leases, "promised_opening", opening)
    status, body = extend(control, made["id"], 1500.5)
    assert (status, body["reason"]) == (409, "promised")
    assert body["detail"] == (
        f"the room of allocation {made['id']!r} is promised to a waiting request: its lease may "
        "last until 1970-01-01T00:41:40.000Z, not until 1970-01-01T00:41:40.500Z"
    )
    assert extend(control, made["id"], 1500.0)[0] == 200
    openings["next"] = begun + 10  # an opening before the end does not shorten the lease
    assert extend(control, made["id"], 1400.0)[0] == 200
    status, body = extend(control, made["id"], 1600.0)
    assert (status, "until 1970-01-01T00:41:40.000Z, not" in body["detail"]) == (409, True)
    assert control.state.allocations[made["id"]].ends == begun + 1500


def test_times_that_no_longer_hold_are_dropped(control: ControlPlane) -> None:
    replica = State("default")  # it has no warnings of its own
    _, made = control.create("1g.10gb", lease=3600.0)
    for _ in range(250):
        control.wait(1)
        assert extend(control, made["id"], 3600.0)[0] == 200
    for row in control.rows:
        replica.apply(row)
    for state in (control.state, replica):
        assert len(state.placements.lease_times) < 150
    assert control.state.next_lease == control.now + 3300
    assert replica.next_lease == control.now + 3600
