"""What the desk decides, case by case."""

from __future__ import annotations

from typing import Any

import pytest
from tests.control.office import A30, A100, Office

from slicewise.control.actors import internal
from slicewise.control.commands import (
    AddNode,
    CarryOut,
    Cordon,
    Create,
    CreateAll,
    CreateOn,
    Drain,
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
from slicewise.control.desk import Desk
from slicewise.control.entries import (
    LATEST,
    Cause,
    ClockSet,
    Ended,
    NodePhase,
    QuotaRecord,
    Rejected,
    Role,
    Served,
    Want,
)
from slicewise.control.geometries import geometry_of
from slicewise.control.image import image_of, restore
from slicewise.control.reach import most, within_reach
from slicewise.control.state import State, request_of
from slicewise.core.cluster import Cluster
from slicewise.core.geometry import Profile
from slicewise.core.request import Request
from slicewise.core.states import GpuState
from slicewise.engine.queue import Discipline
from slicewise.engine.scheduler import Scheduler
from slicewise.policies.base import Policy, Preference, ScanPolicy, Spot, TablePolicy


@pytest.fixture
def office() -> Office:
    """One tenant, one node with one A100."""
    office = Office()
    office.tenant()
    office.node()
    return office


def test_a_request_is_placed_and_says_where(office: Office) -> None:
    status, body = office.create("3g.40gb", labels={"job": "x"})
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


def test_full_is_a_matter_of_capacity(office: Office) -> None:
    assert office.create("7g.80gb")[0] == 201
    status, body = office.create("1g.10gb")
    assert status == 409
    assert body["reason"] == "capacity"
    assert isinstance(office.rows[-1].entry, Rejected)


def test_blocked_windows_are_a_matter_of_fragmentation(office: Office) -> None:
    for _ in range(2):
        assert office.create("3g.40gb")[0] == 201
    held = office.create("1g.10gb")
    assert held[0] == 409  # both halves are taken
    office = Office(policy="worst-fit")
    office.tenant()
    office.node()
    starts = {}
    for _ in range(7):
        _, body = office.create("1g.10gb")
        starts[body["start"]] = body["id"]
    for start in (0, 2, 4, 6):
        office.release(starts[start])
    status, body = office.create("2g.20gb")
    assert status == 409
    assert body["reason"] == "fragmented"


def test_a_profile_nobody_knows_is_refused_with_near_names(office: Office) -> None:
    status, body = office.create("3g.41gb")
    assert status == 400
    assert "3g.40gb" in body["detail"]
    assert office.rows[-1].entry.__class__.__name__ == "NodeAdded"  # nothing was written


def test_near_names_are_those_of_the_models_named(office: Office) -> None:
    wants = Terms(Want(profile="2g.20gb", models=("A30-24GB",)))
    status, body = office.ask(Create("acme", wants))
    assert status == 400
    assert "did you mean 2g.12gb" in body["detail"]


def test_a_known_profile_without_a_node_is_a_matter_of_capacity() -> None:
    office = Office()
    office.tenant()
    status, body = office.create("3g.40gb")
    assert (status, body["reason"]) == (409, "capacity")


def test_a_need_nobody_can_serve_is_refused(office: Office) -> None:
    status, body = office.ask(Create("acme", Terms(Want(compute=7, memory_gb=9000.0))))
    assert status == 400
    assert "9000" in body["detail"]
    assert office.ask(Create("acme", Terms(Want(compute=2, memory_gb=15.0))))[0] == 201


def test_several_instances_are_all_or_none(office: Office) -> None:
    status, body = office.create("3g.40gb", count=2)
    assert status == 201
    assert sorted(i["start"] for i in body["instances"]) == [0, 4]
    assert office.release(body["id"])[0] == 200
    status, body = office.create("3g.40gb", count=3)
    assert status == 409
    assert office.state.cluster.instance_count == 0


def test_a_batch_is_all_or_none(office: Office) -> None:
    three, four = Terms(Want(profile="3g.40gb")), Terms(Want(profile="4g.40gb"))
    status, body = office.ask(CreateAll("acme", (three, four)))
    assert status == 201
    assert len(body["allocations"]) == 2
    for allocation in body["allocations"]:
        office.release(allocation["id"])
    status, body = office.ask(CreateAll("acme", (four, three, four)))
    assert (status, body["index"]) == (409, 2)
    assert office.state.cluster.instance_count == 0
    status, body = office.ask(CreateAll("acme", (four, Terms(Want(profile="9g.9gb")))))
    assert (status, body["index"]) == (400, 1)
    assert office.state.cluster.instance_count == 0


def test_a_batch_passes_those_who_wait_as_far_as_backfill_allows() -> None:
    one = Terms(Want(profile="1g.10gb"))
    for backfill, status in ((0, 409), (4, 201)):
        office = Office(discipline=Discipline(backfill=backfill))
        office.tenant()
        office.node()
        office.create("4g.40gb")
        assert office.create("7g.80gb", wait=100)[0] == 202
        answer, body = office.ask(CreateAll("acme", (one, one)))
        assert answer == status
        if status == 409:
            assert "waits" in body["detail"]
    too_much = (one, Terms(Want(profile="7g.80gb")))
    status, body = office.ask(CreateAll("acme", too_much))
    assert (status, body["index"]) == (409, 1)
    assert office.state.cluster.instance_count == 3


def test_what_can_never_fit_holds_nobody_up() -> None:
    office = Office(discipline=Discipline(backfill=4, overtakes=1))
    office.tenant()
    office.tenant("other")
    office.node()
    assert office.create("7g.80gb", count=2, wait=1000)[0] == 202
    for _ in range(5):
        assert office.create("1g.10gb", tenant="other")[0] == 201
    office.node("n1")
    _, held = office.create("1g.10gb", tenant="other", wait=100)
    assert held["state"] == "placed"
    office.node("n2")  # now it can fit, once n0 is empty or another node joins
    office.node("n3")
    assert not len(office.state.waiting)


@pytest.mark.parametrize(
    ("profile", "most_on_one"),
    [("1g.10gb", 7), ("1g.10gb+me", 1), ("1g.20gb", 4), ("2g.20gb", 3), ("3g.40gb", 2),
     ("4g.40gb", 1), ("7g.80gb", 1)],
)  # fmt: skip
def test_how_many_an_empty_gpu_holds(profile: str, most_on_one: int) -> None:
    geometry = geometry_of(A100)
    assert most(geometry, geometry.profile(profile)) == most_on_one
    assert within_reach(Request(profile), 3 * most_on_one, {geometry: 3})
    assert not within_reach(Request(profile), 3 * most_on_one + 1, {geometry: 3})
    assert not within_reach(Request("9g.9gb"), 1, {geometry: 3})


def test_released_twice_is_not_found(office: Office) -> None:
    _, body = office.create("1g.10gb")
    status, gone = office.release(body["id"])
    assert (status, gone["state"], gone["cause"]) == (200, "released", "released")
    assert office.release(body["id"])[0] == 404


def test_a_tenant_cannot_release_what_is_anothers(office: Office) -> None:
    office.tenant("other")
    _, body = office.create("1g.10gb")
    assert office.ask(Release(body["id"], tenant="other"))[0] == 404
    assert office.ask(Release(body["id"], tenant="acme"))[0] == 200


@pytest.mark.parametrize(
    ("quota", "word"),
    [
        ({"memory_slices": 3}, "memory"),
        ({"compute_slices": 2}, "compute"),
        ({"instances": 0}, "in"),
    ],
)
def test_quotas_hold(quota: dict[str, Any], word: str) -> None:
    office = Office()
    office.tenant(**quota)
    office.node()
    status, body = office.create("3g.40gb")
    assert (status, body["reason"]) == (409, "quota")
    assert word in body["detail"]
    assert office.state.cluster.instance_count == 0


def test_a_quota_counts_the_profile_a_need_was_given() -> None:
    """The least that could serve is within, but what the policy takes is not."""
    office = Office()
    office.tenant(memory_slices=4)
    office.node("n0", 1, A30)
    wants = Terms(Want(compute=1, memory_gb=6.0))
    assert [office.ask(Create("acme", wants))[0] for _ in range(4)] == [201] * 4
    assert office.ask(Create("acme", wants))[1]["reason"] == "quota"


def test_a_batch_may_not_pass_the_quota_by_its_parts() -> None:
    office = Office()
    office.tenant(instances=2)
    office.node()
    one = Terms(Want(profile="1g.10gb"))
    status, body = office.ask(CreateAll("acme", (one, one, one)))
    assert (status, body["reason"], body["index"]) == (409, "quota", 2)


def test_one_pass_of_the_queue_stays_within_the_quota() -> None:
    office = Office(discipline=Discipline(backfill=8, overtakes=8))
    office.tenant(instances=2)
    office.tenant("blocker")
    office.node()
    _, whole = office.create("7g.80gb", tenant="blocker")
    ids = [office.create("1g.10gb", wait=100)[1]["id"] for _ in range(4)]
    office.release(whole["id"])
    assert [office.state.allocations[i].state for i in ids] == [
        "placed",
        "placed",
        "queued",
        "queued",
    ]
    assert office.state.tenants["acme"].usage.instances == 2
    office.release(ids[0])
    assert office.state.allocations[ids[2]].state == "placed"


def test_priorities_may_be_capped(office: Office) -> None:
    office.ask(SetTenant("acme", QuotaRecord(max_priority=5), new=False))
    assert office.create("1g.10gb", priority=5)[0] == 201
    status, body = office.create("1g.10gb", priority=6)
    assert (status, body["reason"]) == (409, "quota")


def test_whoever_waits_is_served_when_room_appears(office: Office) -> None:
    _, whole = office.create("7g.80gb")
    status, waits = office.create("3g.40gb", wait=60)
    assert (status, waits["state"], waits["waiting"]["position"]) == (202, "queued", 1)
    assert waits["waiting"]["reason"] == "capacity"
    office.release(whole["id"])
    assert isinstance(office.rows[-1].entry, Served)
    assert office.state.allocations[waits["id"]].state == "placed"


def test_one_that_only_asked_does_not_cost_those_who_wait_their_turn() -> None:
    office = Office(discipline=Discipline(backfill=0))
    office.tenant()
    office.node(gpus=2)
    _, first = office.create("7g.80gb")
    office.create("7g.80gb")
    _, waits = office.create("7g.80gb", wait=60)
    # Together in one batch: room appears, and somebody more urgent asks for more than there is.
    office.desk.decide(Release(first["id"]), internal("tester"), office.now)
    urgent = Terms(Want(profile="7g.80gb"), count=2, priority=5)
    assert office.desk.decide(Create("acme", urgent), internal("tester"), office.now).status == 409
    office.desk.serve_queue(office.now)
    assert office.state.allocations[waits["id"]].state == "placed"


def test_leases_that_ended_early_are_not_kept(office: Office) -> None:
    replica = office.fresh()  # nobody asks it for leases that are over
    for _ in range(250):
        _, body = office.create("1g.10gb", lease=3600.0)
        office.release(body["id"])
    _, last = office.create("1g.10gb", lease=60.0)
    for row in office.rows:
        replica.apply(row)
    assert len(replica._leases) < 150
    office.wait(60)
    assert last["id"] not in office.state.allocations


def test_whoever_waits_too_long_is_told(office: Office) -> None:
    office.create("7g.80gb")
    _, waits = office.create("3g.40gb", wait=60)
    assert office.wait(59.9) == []
    (row,) = office.wait(0.1)
    assert isinstance(row.entry, Ended)
    assert (row.entry.allocation.id, row.entry.allocation.cause) == (waits["id"], Cause.TIMEOUT)
    assert row.entry.allocation.state == "cancelled"
    assert not len(office.state.waiting)


def test_whoever_waits_may_withdraw(office: Office) -> None:
    office.create("7g.80gb")
    _, waits = office.create("3g.40gb", wait=60)
    status, gone = office.release(waits["id"])
    assert (status, gone["state"]) == (200, "cancelled")
    assert not len(office.state.waiting)


def test_a_lease_ends_by_itself(office: Office) -> None:
    _, body = office.create("7g.80gb", lease=30)
    _, early = office.create("7g.80gb", wait=100, lease=10)
    assert body["ends_at"] is not None
    assert early["ends_at"] is None  # its lease begins when it is placed
    rows = office.wait(30)
    assert [row.entry.__class__.__name__ for row in rows] == ["Ended", "Served"]
    assert office.state.next_lease == office.now + 10
    office.release(early["id"])
    assert office.state.next_lease is None


def test_without_backfill_nobody_passes_the_head() -> None:
    office = Office(discipline=Discipline(backfill=0))
    office.tenant()
    office.tenant("other")
    office.node()
    office.create("4g.40gb")
    assert office.create("7g.80gb", wait=100)[0] == 202
    status, body = office.create("1g.10gb", tenant="other")
    assert status == 409
    assert "waits" in body["detail"]
    assert office.create("1g.10gb", tenant="other", wait=100)[0] == 202


def test_with_backfill_others_pass_but_not_for_ever() -> None:
    office = Office(discipline=Discipline(backfill=4, overtakes=2))
    office.tenant()
    office.tenant("other")
    office.node()
    office.create("4g.40gb")
    _, head = office.create("7g.80gb", wait=100)
    assert office.create("1g.10gb", tenant="other")[0] == 201
    assert office.create("1g.10gb")[0] == 201  # not waiting itself, it is in nobody's line
    number = office.state.tickets[head["id"]]
    assert office.state.waiting.overtaken(number) == 2
    assert office.create("1g.10gb", tenant="other")[0] == 409


def test_a_tenants_waiting_requests_keep_their_order(office: Office) -> None:
    office.create("4g.40gb")
    assert office.create("7g.80gb", wait=100)[0] == 202
    assert office.create("1g.10gb", wait=100)[0] == 202  # it may wait, so it stands in line
    assert office.create("1g.10gb")[0] == 201
    office.tenant("other")
    assert office.create("1g.10gb", tenant="other", wait=100)[0] == 201


def test_nodes_come_and_go(office: Office) -> None:
    status, body = office.ask(AddNode("n0", A100, 8))
    assert (status, body["reason"]) == (409, "exists")
    _, held = office.create("1g.10gb")
    status, body = office.ask(RemoveNode("n0"))
    assert (status, body["reason"]) == (409, "busy")
    assert office.ask(Cordon("n0"))[1]["state"] == "cordoned"
    assert office.create("1g.10gb")[1]["reason"] == "capacity"
    rows = len(office.rows)
    assert office.ask(Cordon("n0"))[0] == 200
    assert len(office.rows) == rows  # nothing changed, nothing written
    assert office.ask(Uncordon("n0"))[1]["state"] == "ready"
    assert office.create("1g.10gb")[0] == 201
    assert office.ask(Drain("n0"))[1]["state"] == "draining"
    office.release(held["id"])
    assert _phase(office) is NodePhase.DRAINING
    office.release(next(iter(office.state.allocations)))
    assert _phase(office) is NodePhase.DRAINED
    assert office.ask(RemoveNode("n0"))[0] == 200
    for command in (Cordon("n0"), Uncordon("n0"), Drain("n0"), RemoveNode("n0")):
        assert office.ask(command)[0] == 404


def test_draining_an_empty_node_is_done_at_once(office: Office) -> None:
    assert office.ask(Drain("n0"))[1]["state"] == "drained"


def test_draining_may_evict(office: Office) -> None:
    office.node("n1")
    _, on_both = office.create("7g.80gb", count=2)
    status, body = office.ask(Drain("n0", evict=True))
    assert (status, body["state"]) == (200, "drained")
    assert on_both["id"] not in office.state.allocations
    assert office.state.cluster.instance_count == 0


def test_a_model_has_one_geometry(office: Office) -> None:
    import msgspec

    other = msgspec.structs.replace(A100, compute=6, profiles=A100.profiles[:1])
    status, body = office.ask(AddNode("n1", other, 1))
    assert (status, body["reason"]) == (409, "geometry")


def test_waiting_for_a_node_to_join() -> None:
    office = Office()
    office.tenant()
    _, waits = office.create("3g.40gb", wait=100)
    office.node()
    assert office.state.allocations[waits["id"]].parts[0].node == "n0"


def test_tenants_come_and_go(office: Office) -> None:
    assert office.ask(SetTenant("acme", QuotaRecord(), new=True))[1]["reason"] == "exists"
    assert office.ask(SetTenant("nobody", QuotaRecord(), new=False))[0] == 404
    _, held = office.create("1g.10gb")
    assert office.ask(RemoveTenant("acme"))[1]["reason"] == "busy"
    office.release(held["id"])
    _, token = office.ask(IssueToken("d" * 64, Role.TENANT, "acme"))
    assert office.ask(RemoveTenant("acme"))[0] == 200
    assert token["id"] not in office.state.tokens
    assert office.create("1g.10gb")[0] == 404


def test_tokens_come_and_go(office: Office) -> None:
    assert office.ask(IssueToken("d" * 64, Role.TENANT, "nobody"))[0] == 404
    _, token = office.ask(IssueToken("d" * 64, Role.ADMIN, note="mine", expires_in=60))
    assert token["expires_at"] == "1970-01-01T00:17:40.000Z"
    assert office.state.tokens_by_digest["d" * 64].role is Role.ADMIN
    assert office.ask(IssueToken("d" * 64, Role.TENANT))[1]["reason"] == "exists"
    assert office.ask(RevokeToken(token["id"]))[0] == 200
    assert office.ask(RevokeToken(token["id"]))[0] == 404
    assert not office.state.tokens_by_digest


def _phase(office: Office, node: str = "n0") -> NodePhase:
    return office.state.nodes[node].phase


def _move(identity: str, at: tuple[str, int, int], to: tuple[str, int, int]) -> MoveInstance:
    return MoveInstance(identity, 0, *at, *to)


def test_moves_are_all_or_none(office: Office) -> None:
    office.node("n1")
    _, body = office.create("3g.40gb")
    here = ("n0", 0, body["start"])
    good = _move(body["id"], here, ("n1", 0, 4))
    status, moved = office.ask(CarryOut((good, _move(body["id"], ("n1", 0, 4), ("n1", 0, 0)))))
    assert (status, moved["moves"]) == (200, 2)
    part = office.state.allocations[body["id"]].parts[0]
    assert (part.node, part.start) == ("n1", 0)
    assert office.state.nodes["n0"].instances == 0
    for bad in (
        _move(body["id"], here, ("n1", 0, 4)),  # not there any more
        _move(body["id"], ("n1", 0, 0), ("n1", 0, 1)),  # no such start
        _move(body["id"], ("n1", 0, 0), ("n1", 7, 0)),  # no such GPU
        _move(body["id"], ("n1", 0, 0), ("n9", 0, 0)),  # no such node
        _move("a999", ("n1", 0, 0), ("n0", 0, 0)),  # no such allocation
    ):
        first = _move(body["id"], ("n1", 0, 0), ("n0", 0, 0))
        back = _move(body["id"], ("n0", 0, 0), ("n1", 0, 0))
        rows = len(office.rows)
        status, refused = office.ask(CarryOut((first, back, bad)))
        assert status in (404, 409), refused
        assert len(office.rows) == rows
        assert office.state.allocations[body["id"]].parts[0] == part
    office.node("other", 1, A30)
    elsewhere = _move(body["id"], ("n1", 0, 0), ("other", 0, 0))
    assert "A30-24GB" in office.ask(CarryOut((elsewhere,)))[1]["detail"]
    office.ask(Cordon("n0"))
    status, refused = office.ask(CarryOut((_move(body["id"], ("n1", 0, 0), ("n0", 0, 0)),)))
    assert "cordoned" in refused["detail"]


def test_a_move_may_finish_a_drain(office: Office) -> None:
    office.node("n1")
    _, body = office.create("3g.40gb")
    office.ask(Drain("n0"))
    office.ask(CarryOut((_move(body["id"], ("n0", 0, body["start"]), ("n1", 0, 0)),)))
    assert office.state.nodes["n0"].phase is NodePhase.DRAINED


def test_needs_that_mean_the_same_are_one_kind(office: Office) -> None:
    office.node("n1", 1, A30)
    state = office.state
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
    """Takes the first place there is, or raises, if told to, once so many are placed."""

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
    """Begins at the first slice, whatever is there."""

    name = "stubborn"
    summary = "For tests."

    def prefer(self, gpu: GpuState, profile: Profile) -> Preference | None:
        """Always the same."""
        return Preference((), 0)


def _with_policy(policy: Policy) -> tuple[Office, list[Exception]]:
    """An office with two tenants, one GPU and this policy, and what the policy raised."""
    office = Office()
    raised: list[Exception] = []
    state = office.state
    state.scheduler = Scheduler(state.cluster, policy)
    office.desk = Desk(state, lambda letter: f"{letter}{len(office.rows)}", 9, raised.append)
    office.tenant("acme")
    office.tenant("beta")
    office.node()
    return office, raised


def test_a_policy_that_raises_changes_nothing() -> None:
    policy = Fragile()
    office, raised = _with_policy(policy)
    policy.fails_on, policy.after = "1g.10gb", 1
    before = image_of(office.state)
    for command in (
        Create("acme", Terms(Want(profile="1g.10gb"), count=2)),
        CreateAll("acme", (Terms(Want(profile="2g.20gb")), Terms(Want(profile="1g.10gb")))),
    ):
        status, body = office.ask(command)
        assert status == 500
        assert body["detail"].startswith("policy 'fragile' failed while it decided this; nothing")
        assert image_of(office.state) == before
        assert office.state.cluster.instance_count == 0
    assert [type(error) for error in raised] == [ZeroDivisionError] * 2


def test_a_policy_that_raises_in_the_queue_holds_up_that_request_only() -> None:
    policy = Fragile()
    office, raised = _with_policy(policy)
    _, whole = office.create("7g.80gb")
    _, first = office.create("1g.10gb", wait=100)
    _, second = office.create("2g.20gb", tenant="beta", wait=100)
    policy.fails_on = "1g.10gb"
    office.release(whole["id"])
    assert office.state.tickets.keys() == {first["id"]}
    assert office.state.allocations[second["id"]].parts
    assert len(raised) == 1
    assert office.create("1g.10gb", tenant="beta")[0] == 500  # while somebody waits
    assert len(office.state.waiting) == 1
    policy.fails_on = ""
    office.release(second["id"])
    assert not office.state.tickets
    assert image_of(office.state) == image_of(_replayed(office))


def test_a_policy_that_chooses_badly_on_a_node_changes_nothing() -> None:
    office, raised = _with_policy(Stubborn())
    one = Terms(Want(profile="1g.10gb"), labels={"pod": "p"})
    before = image_of(office.state)
    assert office.ask(CreateOn("acme", "n0", (one, one), "pod"))[0] == 500
    assert len(raised) == 1
    assert office.state.cluster.instance_count == 0
    assert image_of(office.state) == before
    assert office.ask(CreateOn("acme", "n0", (one,), "pod"))[0] == 201


def _replayed(office: Office) -> State:
    state = office.fresh()
    for row in office.rows:
        state.apply(row)
    return state


# The clock


def test_a_step_that_is_accepted_counts_from_its_entry_on() -> None:
    office = Office()
    office.now = 1_700_000_000.0
    office.tenant()
    office.node()
    begun = office.now
    office.create("1g.10gb", lease=3600)
    assert office.ask(SetClock(7200.0, 7200.0))[0] == 200
    assert isinstance(office.rows[-1].entry, ClockSet)
    assert office.rows[-1].at == begun
    (ended,) = office.wait(0)
    assert isinstance(ended.entry, Ended)
    assert ended.entry.allocation.cause is Cause.LEASE
    assert ended.at == begun + 7200
    office.create("1g.10gb", lease=3600)
    assert office.ask(SetClock(-86400.0, -86401.0))[0] == 200
    office.tenant("other")
    assert office.rows[-1].at == begun + 7200 - 86400
    assert office.wait(3600) == []
    assert [type(row.entry) for row in office.wait(86400)] == [Ended]
    assert image_of(restore(image_of(office.state), office.fresh())) == image_of(office.state)


@pytest.mark.parametrize(
    ("by", "seen", "why"),
    [
        (0.0, 0.0, "there is no step"),
        (1.9, 1.9, "there is no step"),
        (86400.0, 7200.0, "look again"),
        (LATEST, LATEST, "no time of this century"),
        (-LATEST, -LATEST, "no time of this century"),
    ],
)
def test_a_step_that_cannot_be_meant_is_refused(by: float, seen: float, why: str) -> None:
    office = Office()
    office.now = 1_700_000_000.0
    status, body = office.ask(SetClock(by, seen))
    assert status == 409
    assert why in body["detail"]
    assert office.rows == []


def test_time_never_goes_back_behind_the_last_entry() -> None:
    office = Office()
    office.tenant()
    at = office.rows[-1].at
    office.now -= 10
    office.tenant("other")
    assert office.rows[-1].at == at
