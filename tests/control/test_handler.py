"""The decisions of the command handler, case by case."""

from __future__ import annotations

from typing import Any

import pytest
from tests.control.control_plane import A30, A100, ControlPlane

from slicewise.control.actors import internal
from slicewise.control.commands import (
    AddNode,
    CarryOut,
    Cordon,
    Create,
    CreateAll,
    CreateOn,
    Drain,
    Extend,
    IssueToken,
    MoveInstance,
    Release,
    RemoveNode,
    RemoveTenant,
    RevokeToken,
    SetClock,
    SetTenant,
    Terms,
    Uncordon,
)
from slicewise.control.handler import CommandHandler
from slicewise.control.snapshot import restore_snapshot, snapshot_of
from slicewise.control.state import State, request_of
from slicewise.core.cluster import Cluster
from slicewise.core.geometry import Profile
from slicewise.core.request import Request
from slicewise.core.states import GpuState
from slicewise.engine.reservation_rules import ReservationRules
from slicewise.engine.scheduler import Scheduler
from slicewise.journal.entries import (
    LATEST,
    Cause,
    ClockSet,
    Ended,
    NodePhase,
    QuotaRecord,
    Rejected,
    Reserved,
    Role,
    Served,
    Want,
)
from slicewise.policies.base import Policy, Preference, ScanPolicy, Spot, TablePolicy


@pytest.fixture
def control() -> ControlPlane:
    """One tenant, one node with one A100."""
    control = ControlPlane()
    control.tenant()
    control.node()
    return control


def test_a_request_is_placed(control: ControlPlane) -> None:
    status, body = control.create("3g.40gb", labels={"job": "x"})
    assert status == 201
    assert (body["state"], body["tenant"], body["node"], body["gpu"]) == (
        "placed",
        "acme",
        "n0",
        0,
    )
    assert (body["model"], body["profile"], body["size"]) == ("A100-80GB", "3g.40gb", 4)
    assert body["labels"] == {"job": "x"}
    assert body["instances"][0]["start"] == body["start"]


def test_a_full_cluster_rejects_for_capacity(control: ControlPlane) -> None:
    assert control.create("7g.80gb")[0] == 201
    status, body = control.create("1g.10gb")
    assert status == 409
    assert body["reason"] == "capacity"
    assert isinstance(control.rows[-1].entry, Rejected)


def test_blocked_windows_reject_for_fragmentation(control: ControlPlane) -> None:
    for _ in range(2):
        assert control.create("3g.40gb")[0] == 201
    held = control.create("1g.10gb")
    assert held[0] == 409  # both halves are taken
    control = ControlPlane(policy="worst-fit")
    control.tenant()
    control.node()
    starts = {}
    for _ in range(7):
        _, body = control.create("1g.10gb")
        starts[body["start"]] = body["id"]
    for start in (0, 2, 4, 6):
        control.release(starts[start])
    status, body = control.create("2g.20gb")
    assert status == 409
    assert body["reason"] == "fragmented"


def test_an_unknown_profile_is_refused_with_similar_names(control: ControlPlane) -> None:
    status, body = control.create("3g.41gb")
    assert status == 400
    assert "3g.40gb" in body["detail"]
    assert control.rows[-1].entry.__class__.__name__ == "NodeAdded"  # nothing was written


def test_similar_names_are_those_of_the_requested_models(control: ControlPlane) -> None:
    wants = Terms(Want(profile="2g.20gb", models=("A30-24GB",)))
    status, body = control.ask(Create("acme", wants))
    assert status == 400
    assert "did you mean 2g.12gb" in body["detail"]


def test_a_known_profile_without_a_node_is_rejected_for_capacity() -> None:
    control = ControlPlane()
    control.tenant()
    status, body = control.create("3g.40gb")
    assert (status, body["reason"]) == (409, "capacity")


def test_a_need_that_no_model_offers_is_refused(control: ControlPlane) -> None:
    status, body = control.ask(Create("acme", Terms(Want(compute=7, memory_gb=9000.0))))
    assert status == 400
    assert "9000" in body["detail"]
    assert control.ask(Create("acme", Terms(Want(compute=2, memory_gb=15.0))))[0] == 201


def test_several_instances_are_all_or_none(control: ControlPlane) -> None:
    status, body = control.create("3g.40gb", count=2)
    assert status == 201
    assert sorted(i["start"] for i in body["instances"]) == [0, 4]
    assert control.release(body["id"])[0] == 200
    status, body = control.create("3g.40gb", count=3)
    assert status == 409
    assert control.state.cluster.instance_count == 0


def test_a_batch_is_all_or_none(control: ControlPlane) -> None:
    three, four = Terms(Want(profile="3g.40gb")), Terms(Want(profile="4g.40gb"))
    status, body = control.ask(CreateAll("acme", (three, four)))
    assert status == 201
    assert len(body["allocations"]) == 2
    for allocation in body["allocations"]:
        control.release(allocation["id"])
    status, body = control.ask(CreateAll("acme", (four, three, four)))
    assert (status, body["index"]) == (409, 2)
    assert control.state.cluster.instance_count == 0
    status, body = control.ask(CreateAll("acme", (four, Terms(Want(profile="9g.9gb")))))
    assert (status, body["index"]) == (400, 1)
    assert control.state.cluster.instance_count == 0


def test_a_batch_takes_room_that_no_queued_request_can_use(control: ControlPlane) -> None:
    one = Terms(Want(profile="1g.10gb"))
    control.create("4g.40gb")
    assert control.create("7g.80gb", wait=100)[0] == 202
    assert control.ask(CreateAll("acme", (one, one)))[0] == 201
    too_much = (one, Terms(Want(profile="7g.80gb")))
    status, body = control.ask(CreateAll("acme", too_much))
    assert (status, body["index"]) == (409, 1)
    assert control.state.cluster.instance_count == 3


def test_a_request_that_can_never_fit_does_not_block_the_queue() -> None:
    control = ControlPlane()
    control.tenant()
    control.tenant("other")
    control.node()
    assert control.create("7g.80gb", count=2, wait=1000)[0] == 202
    for _ in range(5):
        assert control.create("1g.10gb", tenant="other")[0] == 201
    control.node("n1")
    _, held = control.create("1g.10gb", tenant="other", wait=100)
    assert held["state"] == "placed"
    control.node("n2")  # now it can fit, once n0 is empty or another node joins
    control.node("n3")
    assert not len(control.state.waiting)


def test_releasing_twice_is_not_found(control: ControlPlane) -> None:
    _, body = control.create("1g.10gb")
    status, gone = control.release(body["id"])
    assert (status, gone["state"], gone["cause"]) == (200, "released", "released")
    assert control.release(body["id"])[0] == 404


def test_a_tenant_cannot_release_allocations_of_another(control: ControlPlane) -> None:
    control.tenant("other")
    _, body = control.create("1g.10gb")
    assert control.ask(Release(body["id"], control.state.tenants_by_name["other"].ref))[0] == 404
    assert control.ask(Release(body["id"], control.state.tenants_by_name["acme"].ref))[0] == 200


@pytest.mark.parametrize(
    ("quota", "word"),
    [
        ({"memory_slices": 3}, "memory"),
        ({"compute_slices": 2}, "compute"),
        ({"instances": 0}, "in"),
    ],
)
def test_quotas_are_enforced(quota: dict[str, Any], word: str) -> None:
    control = ControlPlane()
    control.tenant(**quota)
    control.node()
    status, body = control.create("3g.40gb")
    assert (status, body["reason"]) == (409, "quota")
    assert word in body["detail"]
    assert control.state.cluster.instance_count == 0


def test_a_quota_counts_the_profile_that_serves_a_need() -> None:
    """The smallest suitable profile is within the quota, the one that the policy takes is not."""
    control = ControlPlane()
    control.tenant(memory_slices=4)
    control.node("n0", 1, A30)
    wants = Terms(Want(compute=1, memory_gb=6.0))
    assert [control.ask(Create("acme", wants))[0] for _ in range(4)] == [201] * 4
    assert control.ask(Create("acme", wants))[1]["reason"] == "quota"


def test_a_batch_counts_as_a_whole_against_the_quota() -> None:
    control = ControlPlane()
    control.tenant(instances=2)
    control.node()
    one = Terms(Want(profile="1g.10gb"))
    status, body = control.ask(CreateAll("acme", (one, one, one)))
    assert (status, body["reason"], body["index"]) == (409, "quota", 2)


def test_one_pass_of_the_queue_stays_within_the_quota() -> None:
    control = ControlPlane()
    control.tenant(instances=2)
    control.tenant("blocker")
    control.node()
    _, whole = control.create("7g.80gb", tenant="blocker")
    ids = [control.create("1g.10gb", wait=100)[1]["id"] for _ in range(4)]
    control.release(whole["id"])
    assert [control.state.allocations[i].state for i in ids] == [
        "placed",
        "placed",
        "queued",
        "queued",
    ]
    assert control.state.tenants_by_name["acme"].usage.instances == 2
    control.release(ids[0])
    assert control.state.allocations[ids[2]].state == "placed"


def test_a_request_may_have_any_priority(control: ControlPlane) -> None:
    control.ask(SetTenant("acme", QuotaRecord(max_priority=5), new=False))
    assert control.create("1g.10gb", priority=6)[1]["priority"] == 6


def test_the_terms_of_a_request_are_recorded(control: ControlPlane) -> None:
    _, placed = control.create("7g.80gb", preemptible=True, expected_seconds=90.0)
    _, queued = control.create("1g.10gb", wait=100, lease=30.0)
    assert (placed["preemptible"], placed["expected_seconds"]) == (True, 90)
    assert "lease_seconds" not in placed
    assert queued["lease_seconds"] == 30
    assert not {"preemptible", "expected_seconds"} & set(queued)
    record = control.state.allocations[placed["id"]]
    assert (record.preemptible, record.expected_seconds, record.lease) == (True, 90, None)
    assert control.wait(91) == [], "the expectation ends nothing"


@pytest.mark.parametrize(
    ("default", "longest", "asked", "granted"),
    [
        (None, None, None, None),
        (None, None, 1e6, 1e6),
        (60.0, None, None, 60.0),
        (60.0, None, 1e6, 1e6),
        (60.0, 90.0, None, 60.0),
        (60.0, 90.0, 90.0, 90.0),
        (None, 90.0, None, 90.0),
        (None, 90.0, 10.0, 10.0),
    ],
)
def test_a_tenant_has_a_default_lease(
    control: ControlPlane,
    default: float | None,
    longest: float | None,
    asked: float | None,
    granted: float | None,
) -> None:
    quota = QuotaRecord(default_lease_seconds=default, max_lease_seconds=longest)
    assert control.ask(SetTenant("acme", quota, new=False))[0] == 200
    terms = Terms(Want(profile="1g.10gb"), lease=asked)
    _, alone = control.ask(Create("acme", terms))
    _, (several) = control.ask(CreateAll("acme", (terms, terms)))
    for view in (alone, *several["allocations"]):
        assert control.state.allocations[view["id"]].lease == granted
        assert (view["ends_at"] is None) == (granted is None)


def test_a_lease_longer_than_the_tenants_maximum_is_refused(control: ControlPlane) -> None:
    control.ask(SetTenant("acme", QuotaRecord(max_lease_seconds=90), new=False))
    good, bad = (Terms(Want(profile="1g.10gb"), lease=lease) for lease in (90, 90.5))
    told = "a lease of tenant 'acme' lasts at most 90 seconds, not 90.5"
    for command, index in (
        (Create("acme", bad), None),
        (CreateAll("acme", (good, bad)), 1),
    ):
        status, body = control.ask(command)
        assert (status, body["reason"], body["detail"]) == (409, "quota", told)
        assert body.get("index") == index
    assert not control.state.allocations


def test_a_default_lease_does_not_end_allocations_made_for_a_pod(control: ControlPlane) -> None:
    control.ask(SetTenant("acme", QuotaRecord(default_lease_seconds=60), new=False))
    terms = Terms(Want(profile="1g.10gb"), labels={"pod": "p1"})
    status, body = control.ask(CreateOn("acme", "n0", (terms,), "pod"))
    assert (status, body["allocations"][0]["ends_at"]) == (201, None)


@pytest.mark.parametrize(
    ("quota", "field"),
    [
        (QuotaRecord(memory_slices=7, guarantee=8), "quota.guarantee"),
        (
            QuotaRecord(default_lease_seconds=61, max_lease_seconds=60),
            "quota.default_lease_seconds",
        ),
    ],
)
def test_contradictory_terms_of_a_tenant_are_refused(
    control: ControlPlane, quota: QuotaRecord, field: str
) -> None:
    for new, name in ((False, "acme"), (True, "beta")):
        status, body = control.ask(SetTenant(name, quota, new=new))
        assert (status, body["field"]) == (400, field)
    assert control.state.tenants_by_name["acme"].quota == QuotaRecord()
    fine = QuotaRecord(memory_slices=7, guarantee=7, default_lease_seconds=60, max_lease_seconds=60)
    assert control.ask(SetTenant("beta", fine, new=True))[0] == 201


def test_a_queued_request_is_served_when_room_appears(control: ControlPlane) -> None:
    _, whole = control.create("7g.80gb")
    status, waits = control.create("3g.40gb", wait=60)
    assert (status, waits["state"], waits["waiting"]["position"]) == (202, "queued", 1)
    assert waits["waiting"]["reason"] == "capacity"
    control.release(whole["id"])
    assert isinstance(control.rows[-1].entry, Served)
    assert control.state.allocations[waits["id"]].state == "placed"


def test_a_rejected_request_does_not_delay_the_queue() -> None:
    control = ControlPlane()
    control.tenant()
    control.node(gpus=2)
    _, first = control.create("7g.80gb")
    control.create("7g.80gb")
    _, waits = control.create("7g.80gb", wait=60)
    # In one batch: slices become free, and a request of higher priority needs more than that.
    control.handler.decide(Release(first["id"]), internal("tester"), control.now)
    urgent = Terms(Want(profile="7g.80gb"), count=2, priority=5)
    assert (
        control.handler.decide(Create("acme", urgent), internal("tester"), control.now).status
        == 409
    )
    control.handler.serve_queue(control.now)
    assert control.state.allocations[waits["id"]].state == "placed"


def test_leases_of_released_allocations_are_dropped(control: ControlPlane) -> None:
    replica = control.fresh()  # a replica never takes leases
    for _ in range(250):
        _, body = control.create("1g.10gb", lease=3600.0)
        control.release(body["id"])
    _, last = control.create("1g.10gb", lease=60.0)
    for row in control.rows:
        replica.apply(row)
    assert len(replica.placements.lease_times) < 150
    control.wait(60)
    assert last["id"] not in control.state.allocations


def test_a_queued_request_times_out(control: ControlPlane) -> None:
    control.create("7g.80gb")
    _, waits = control.create("3g.40gb", wait=60)
    assert control.wait(59.9) == []
    (row,) = control.wait(0.1)
    assert isinstance(row.entry, Ended)
    assert (row.entry.allocation.id, row.entry.allocation.cause) == (waits["id"], Cause.TIMEOUT)
    assert row.entry.allocation.state == "cancelled"
    assert not len(control.state.waiting)


def test_a_queued_request_can_be_cancelled(control: ControlPlane) -> None:
    control.create("7g.80gb")
    _, waits = control.create("3g.40gb", wait=60)
    status, gone = control.release(waits["id"])
    assert (status, gone["state"]) == (200, "cancelled")
    assert not len(control.state.waiting)


def test_a_lease_ends(control: ControlPlane) -> None:
    _, body = control.create("7g.80gb", lease=30)
    _, early = control.create("7g.80gb", wait=100, lease=10)
    assert body["ends_at"] is not None
    assert early["ends_at"] is None  # its lease begins when it is placed
    rows = control.wait(30)
    assert [row.entry.__class__.__name__ for row in rows] == ["Ended", "Served"]
    assert control.state.next_lease == control.now + 10
    control.release(early["id"])
    assert control.state.next_lease is None


def test_a_flood_of_one_tenant_keeps_no_window_from_another(control: ControlPlane) -> None:
    control.tenant("other")
    control.create("4g.40gb")
    for _ in range(40):
        assert control.create("7g.80gb", wait=100)[0] == 202
    assert control.create("1g.10gb", tenant="other")[0] == 201
    assert control.create("1g.10gb", tenant="other", wait=100)[0] == 201


def test_the_tenant_with_the_lower_share_is_served_first(control: ControlPlane) -> None:
    control.tenant("other")
    control.create("3g.40gb")
    _, blocker = control.create("3g.40gb", tenant="other")
    _, mine = control.create("3g.40gb", wait=100)
    _, others = control.create("3g.40gb", tenant="other", wait=100)
    control.release(blocker["id"])
    states = [control.state.allocations[one["id"]].state for one in (mine, others)]
    assert states == ["queued", "placed"]


def test_a_priority_counts_among_tenants_up_to_what_the_operator_allows() -> None:
    for allowed, expected in ((0, ["placed", "queued"]), (1, ["queued", "placed"])):
        control = ControlPlane()
        control.tenant()
        control.tenant("other", max_priority=allowed)
        control.node()
        _, blocker = control.create("7g.80gb")
        _, mine = control.create("7g.80gb", wait=100)
        _, others = control.create("7g.80gb", tenant="other", wait=100, priority=9)
        control.release(blocker["id"])
        states = [control.state.allocations[one["id"]].state for one in (mine, others)]
        assert states == expected


def test_a_window_is_reserved_for_a_request_that_waited_and_was_overtaken() -> None:
    control = ControlPlane(rules=ReservationRules(after=60))
    control.tenant()
    control.tenant("other")
    control.node()
    _, blocking = control.create("3g.40gb", tenant="other", lease=100)
    _, waits = control.create("7g.80gb", wait=1000)
    control.now += 1
    assert control.create("1g.10gb", tenant="other", lease=30)[0] == 201, "it overtakes"
    rows = control.wait(60)
    (reserved,) = [row.entry for row in rows if isinstance(row.entry, Reserved)]
    (window,) = reserved.windows
    left = 100 - 61
    assert (window.node, window.gpu, window.opens) == ("n0", 0, control.now + left)
    assert control.ask(Extend(blocking["id"], lease=left + 1))[1]["reason"] == "promised"
    # It binds requests that may end too late, and no others.
    for lease in (None, left + 1):
        status, body = control.create("1g.10gb", tenant="other", lease=lease)
        assert (status, body["reason"]) == (409, "reserved")
    assert control.create("1g.10gb", tenant="other", lease=left)[0] == 201
    control.wait(left)
    assert control.state.allocations[waits["id"]].state == "placed"
    assert not len(control.state.reservations)


def test_the_lifecycle_of_a_node(control: ControlPlane) -> None:
    status, body = control.ask(AddNode("n0", A100, 8))
    assert (status, body["reason"]) == (409, "exists")
    _, held = control.create("1g.10gb")
    status, body = control.ask(RemoveNode("n0"))
    assert (status, body["reason"]) == (409, "busy")
    assert control.ask(Cordon("n0"))[1]["state"] == "cordoned"
    assert control.create("1g.10gb")[1]["reason"] == "capacity"
    rows = len(control.rows)
    assert control.ask(Cordon("n0"))[0] == 200
    assert len(control.rows) == rows  # nothing changed, nothing written
    assert control.ask(Uncordon("n0"))[1]["state"] == "ready"
    assert control.create("1g.10gb")[0] == 201
    assert control.ask(Drain("n0"))[1]["state"] == "draining"
    control.release(held["id"])
    assert _phase(control) is NodePhase.DRAINING
    control.release(next(iter(control.state.allocations)))
    assert _phase(control) is NodePhase.DRAINED
    assert control.ask(RemoveNode("n0"))[0] == 200
    for command in (Cordon("n0"), Uncordon("n0"), Drain("n0"), RemoveNode("n0")):
        assert control.ask(command)[0] == 404


def test_an_empty_node_is_drained_at_once(control: ControlPlane) -> None:
    assert control.ask(Drain("n0"))[1]["state"] == "drained"


def test_draining_with_evict_ends_allocations(control: ControlPlane) -> None:
    control.node("n1")
    _, on_both = control.create("7g.80gb", count=2)
    status, body = control.ask(Drain("n0", evict=True))
    assert (status, body["state"]) == (200, "drained")
    assert on_both["id"] not in control.state.allocations
    assert control.state.cluster.instance_count == 0


def test_a_model_has_one_geometry(control: ControlPlane) -> None:
    import msgspec

    other = msgspec.structs.replace(A100, compute=6, profiles=A100.profiles[:1])
    status, body = control.ask(AddNode("n1", other, 1))
    assert (status, body["reason"]) == (409, "geometry")


def test_a_new_node_serves_the_queue() -> None:
    control = ControlPlane()
    control.tenant()
    _, waits = control.create("3g.40gb", wait=100)
    control.node()
    assert control.state.allocations[waits["id"]].parts[0].node == "n0"


def test_the_lifecycle_of_a_tenant(control: ControlPlane) -> None:
    assert control.ask(SetTenant("acme", QuotaRecord(), new=True))[1]["reason"] == "exists"
    assert control.ask(SetTenant("unknown", QuotaRecord(), new=False))[0] == 404
    _, held = control.create("1g.10gb")
    assert control.ask(RemoveTenant("acme"))[1]["reason"] == "busy"
    control.release(held["id"])
    _, token = control.ask(IssueToken("d" * 64, Role.TENANT, "acme"))
    assert control.ask(RemoveTenant("acme"))[0] == 200
    assert token["id"] not in control.state.tokens
    assert control.create("1g.10gb")[0] == 404


def test_the_lifecycle_of_a_token(control: ControlPlane) -> None:
    assert control.ask(IssueToken("d" * 64, Role.TENANT, "unknown"))[0] == 404
    _, token = control.ask(IssueToken("d" * 64, Role.ADMIN, note="mine", expires_in=60))
    assert token["expires_at"] == "1970-01-01T00:17:40.000Z"
    assert control.state.tokens_by_digest["d" * 64].role is Role.ADMIN
    assert control.ask(IssueToken("d" * 64, Role.TENANT))[1]["reason"] == "exists"
    assert control.ask(RevokeToken(token["id"]))[0] == 200
    assert control.ask(RevokeToken(token["id"]))[0] == 404
    assert not control.state.tokens_by_digest


def _phase(control: ControlPlane, node: str = "n0") -> NodePhase:
    return control.state.nodes[node].phase


def _move(identity: str, at: tuple[str, int, int], to: tuple[str, int, int]) -> MoveInstance:
    return MoveInstance(identity, 0, *at, *to)


def test_moves_are_all_or_none(control: ControlPlane) -> None:
    control.node("n1")
    _, body = control.create("3g.40gb")
    here = ("n0", 0, body["start"])
    good = _move(body["id"], here, ("n1", 0, 4))
    status, moved = control.ask(CarryOut((good, _move(body["id"], ("n1", 0, 4), ("n1", 0, 0)))))
    assert (status, moved["moves"]) == (200, 2)
    part = control.state.allocations[body["id"]].parts[0]
    assert (part.node, part.start) == ("n1", 0)
    assert control.state.nodes["n0"].instances == 0
    for bad in (
        _move(body["id"], here, ("n1", 0, 4)),  # no longer exists
        _move(body["id"], ("n1", 0, 0), ("n1", 0, 1)),  # no such start
        _move(body["id"], ("n1", 0, 0), ("n1", 7, 0)),  # no such GPU
        _move(body["id"], ("n1", 0, 0), ("n9", 0, 0)),  # no such node
        _move("a999", ("n1", 0, 0), ("n0", 0, 0)),  # no such allocation
    ):
        first = _move(body["id"], ("n1", 0, 0), ("n0", 0, 0))
        back = _move(body["id"], ("n0", 0, 0), ("n1", 0, 0))
        rows = len(control.rows)
        status, refused = control.ask(CarryOut((first, back, bad)))
        assert status in (404, 409), refused
        assert len(control.rows) == rows
        assert control.state.allocations[body["id"]].parts[0] == part
    control.node("other", 1, A30)
    elsewhere = _move(body["id"], ("n1", 0, 0), ("other", 0, 0))
    assert "A30-24GB" in control.ask(CarryOut((elsewhere,)))[1]["detail"]
    control.ask(Cordon("n0"))
    status, refused = control.ask(CarryOut((_move(body["id"], ("n1", 0, 0), ("n0", 0, 0)),)))
    assert "cordoned" in refused["detail"]


def test_a_move_can_finish_a_drain(control: ControlPlane) -> None:
    control.node("n1")
    _, body = control.create("3g.40gb")
    control.ask(Drain("n0"))
    control.ask(CarryOut((_move(body["id"], ("n0", 0, body["start"]), ("n1", 0, 0)),)))
    assert control.state.nodes["n0"].phase is NodePhase.DRAINED


def test_equivalent_needs_are_one_kind_of_request(control: ControlPlane) -> None:
    control.node("n1", 1, A30)
    state = control.state
    kinds = {
        state.canonical(request_of(Want(compute=compute, memory_gb=tenths / 10)))
        for compute in range(8)
        for tenths in range(801)
    }
    assert len(kinds) < 60
    for compute in range(9):
        for memory_gb in (0.0, 5.9, 6.0, 6.1, 15.0, 24.0, 39.5, 40.0, 79.0, 80.0, 81.0):
            request = request_of(Want(compute=compute, memory_gb=memory_gb))
            alike = state.canonical(request)
            for geometry in state.geometries.values():
                assert [p.name for _, p in request.candidates(geometry)] == [
                    p.name for _, p in alike.candidates(geometry)
                ]


class Fragile(ScanPolicy):
    """Takes the first free place, or raises for one profile once ``after`` instances are placed."""

    name = "fragile"
    summary = "For tests."

    def __init__(self) -> None:
        self.fails_on = ""
        self.after = 0

    def choose(self, cluster: Cluster, request: Request) -> Spot | None:
        """The first place."""
        if request.want == self.fails_on and cluster.instance_count >= self.after:
            raise ZeroDivisionError
        for gpu in range(cluster.gpus):
            state = cluster.state(gpu)
            for _, profile in request.candidates(state.geometry):
                for start in state.feasible_starts(profile):
                    placement = state.geometry.placement(profile.name, start)
                    assert placement is not None
                    return Spot(gpu, placement)
        return None


class Stubborn(TablePolicy):
    """Always starts at the first slice, occupied or not."""

    name = "stubborn"
    summary = "For tests."

    def prefer(self, gpu: GpuState, profile: Profile) -> Preference | None:
        """Always the same."""
        return Preference((), 0)


def _with_policy(policy: Policy) -> tuple[ControlPlane, list[Exception]]:
    """Return a control plane with two tenants and one GPU, and the exceptions of its policy."""
    control = ControlPlane()
    raised: list[Exception] = []
    state = control.state
    state.scheduler = Scheduler(state.cluster, policy)
    control.handler = CommandHandler(
        state, lambda letter: f"{letter}{len(control.rows)}", on_policy_error=raised.append
    )
    control.tenant("acme")
    control.tenant("beta")
    control.node()
    return control, raised


def test_a_policy_that_raises_changes_nothing() -> None:
    policy = Fragile()
    control, raised = _with_policy(policy)
    policy.fails_on, policy.after = "1g.10gb", 1
    before = snapshot_of(control.state)
    for command in (
        Create("acme", Terms(Want(profile="1g.10gb"), count=2)),
        CreateAll("acme", (Terms(Want(profile="2g.20gb")), Terms(Want(profile="1g.10gb")))),
    ):
        status, body = control.ask(command)
        assert status == 500
        assert body["detail"].startswith("policy 'fragile' failed on this request, and nothing")
        assert snapshot_of(control.state) == before
        assert control.state.cluster.instance_count == 0
    assert [type(error) for error in raised] == [ZeroDivisionError] * 2


def test_a_policy_that_raises_in_the_queue_blocks_only_that_request() -> None:
    policy = Fragile()
    control, raised = _with_policy(policy)
    _, whole = control.create("7g.80gb")
    _, first = control.create("1g.10gb", wait=100)
    _, second = control.create("2g.20gb", tenant="beta", wait=100)
    policy.fails_on = "1g.10gb"
    control.release(whole["id"])
    assert control.state.tickets.keys() == {first["id"]}
    assert control.state.allocations[second["id"]].parts
    assert len(raised) == 1
    assert control.create("1g.10gb", tenant="beta")[0] == 500  # while another request waits
    assert len(control.state.waiting) == 1
    policy.fails_on = ""
    control.release(second["id"])
    assert not control.state.tickets
    assert snapshot_of(control.state) == snapshot_of(_replayed(control))


def test_an_illegal_choice_on_a_node_changes_nothing() -> None:
    control, raised = _with_policy(Stubborn())
    one = Terms(Want(profile="1g.10gb"), labels={"pod": "p"})
    before = snapshot_of(control.state)
    assert control.ask(CreateOn("acme", "n0", (one, one), "pod"))[0] == 500
    assert len(raised) == 1
    assert control.state.cluster.instance_count == 0
    assert snapshot_of(control.state) == before
    assert control.ask(CreateOn("acme", "n0", (one,), "pod"))[0] == 201


def _replayed(control: ControlPlane) -> State:
    state = control.fresh()
    for row in control.rows:
        state.apply(row)
    return state


# The clock


def test_an_accepted_clock_step_takes_effect_with_its_entry() -> None:
    control = ControlPlane()
    control.now = 1_700_000_000.0
    control.tenant()
    control.node()
    begun = control.now
    control.create("1g.10gb", lease=3600)
    assert control.ask(SetClock(7200.0, 7200.0))[0] == 200
    assert isinstance(control.rows[-1].entry, ClockSet)
    assert control.rows[-1].at == begun
    (ended,) = control.wait(0)
    assert isinstance(ended.entry, Ended)
    assert ended.entry.allocation.cause is Cause.LEASE
    assert ended.at == begun + 7200
    control.create("1g.10gb", lease=3600)
    assert control.ask(SetClock(-86400.0, -86401.0))[0] == 200
    control.tenant("other")
    assert control.rows[-1].at == begun + 7200 - 86400
    assert control.wait(3600) == []
    assert [type(row.entry) for row in control.wait(86400)] == [Ended]
    assert snapshot_of(
        restore_snapshot(snapshot_of(control.state), control.fresh())
    ) == snapshot_of(control.state)


@pytest.mark.parametrize(
    ("by", "seen", "why"),
    [
        (0.0, 0.0, "there is no step"),
        (1.9, 1.9, "there is no step"),
        (86400.0, 7200.0, "check the clock again"),
        (LATEST, LATEST, "outside the years 2000 to 2100"),
        (-LATEST, -LATEST, "outside the years 2000 to 2100"),
    ],
)
def test_an_implausible_clock_step_is_refused(by: float, seen: float, why: str) -> None:
    control = ControlPlane()
    control.now = 1_700_000_000.0
    status, body = control.ask(SetClock(by, seen))
    assert status == 409
    assert why in body["detail"]
    assert control.rows == []


def test_service_time_never_goes_back() -> None:
    control = ControlPlane()
    control.tenant()
    at = control.rows[-1].at
    control.now -= 10
    control.tenant("other")
    assert control.rows[-1].at == at
