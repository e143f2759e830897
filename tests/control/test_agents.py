"""How the handler decides agents' commands: sessions, geometry, holds, reboots, reports."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.control.control_plane import A100, ControlPlane

from slicewise import load_geometry
from slicewise.api.agents import HelloBody, ReportBody
from slicewise.control.commands import (
    Accept,
    Adopt,
    CarryOut,
    Cordon,
    Drain,
    Evict,
    Heard,
    Hello,
    Lost,
    MoveInstance,
    RemoveNode,
    RemoveTenant,
    Report,
    Uncordon,
)
from slicewise.control.geometries import distinct, named, record_of, same_layout, too_many_states
from slicewise.control.snapshot import (
    decode_snapshot,
    encode_snapshot,
    restore_snapshot,
    snapshot_of,
)
from slicewise.control.views import desired_view
from slicewise.core.errors import SlicewiseError
from slicewise.core.geometry import Geometry, Profile
from slicewise.journal.agent_entries import Phase
from slicewise.journal.entries import NodePhase, Row, concerns, decode, encode
from slicewise.runtime.commit_loop import load
from slicewise.store.memory import MemoryJournal
from slicewise.store.occupancy import Occupancy

H200 = record_of(load_geometry("H200-141GB"))


class ManagedNode:
    """A control plane with one managed node."""

    def __init__(self, gpus: tuple[str, ...] = ("GPU-0", "GPU-1"), **hello: Any) -> None:
        self.control = ControlPlane()
        self.control.tenant("acme")
        self.gpus = gpus
        self.session = ""
        self.hello(**hello)

    @property
    def state(self) -> Any:
        return self.control.state

    @property
    def node(self) -> Any:
        return self.state.nodes["g"]

    @property
    def node_phase(self) -> str:
        return str(self.node.phase)

    def hello(
        self,
        gpus: tuple[str, ...] | None = None,
        status: int = 200,
        catalog: Any = H200,
        fail: bool = False,
        off: tuple[str, ...] = (),
        reports: bool = True,
        **changes: Any,
    ) -> Any:
        """Begin a session, by default with a first report of an empty node."""
        if gpus is not None:
            self.gpus = gpus
        body = {
            "boot": "b1",
            "agent": "1.0",
            "driver": "580",
            "model": "H200-141GB",
            "geometry": msgspec.to_builtins(H200),
            "gpus": [{"uuid": uuid, "mig": uuid not in off} for uuid in self.gpus],
        } | changes
        command = Hello("g", msgspec.convert(body, HelloBody), catalog, fail)
        got, said = self.control.ask(command)
        assert got == status, said
        self.session = said.get("session", self.session)
        if reports and status == 200:
            self.report(gpus=body["gpus"])
        return said

    def report(
        self,
        *instances: dict[str, Any],
        foreign: tuple[dict[str, Any], ...] = (),
        gpus: list[dict[str, Any]] | None = None,
        status: int = 200,
        session: str | None = None,
    ) -> Any:
        body = {
            "session": session or self.session,
            "gpus": gpus or [{"uuid": uuid, "mig": True} for uuid in self.gpus],
            "instances": instances,
            "foreign": foreign,
        }
        got, said = self.control.ask(Report("g", msgspec.convert(body, ReportBody)))
        assert got == status, said
        return said

    def create(self, profile: str = "1g.18gb", **terms: Any) -> Any:
        status, said = self.control.create(profile, **terms)
        assert status in (201, 202), said
        return said

    def phase(self, one: dict[str, Any], phase: str, index: int = 0, **more: Any) -> None:
        self.report({"allocation": one["id"], "index": index, "phase": phase} | more)

    def active(self, one: dict[str, Any], uuid: str = "MIG-1") -> None:
        self.phase(one, "active", uuid=uuid)

    def desired(self) -> Any:
        return desired_view(self.state, self.node, self.node.agent)

    def holds(self) -> dict[int, dict[str, str]]:
        return dict(self.node.agent.gpu_holds)


def foreign_report(**changes: Any) -> dict[str, Any]:
    return {
        "gpu": "GPU-0",
        "uuid": "MIG-x",
        "profile": "3g.71gb",
        "start": 4,
        "size": 4,
        "why": "foreign",
    } | changes


def test_foreign_instances_on_an_unreadable_gpu_are_kept() -> None:
    managed = ManagedNode()
    managed.report(foreign=(foreign_report(),))
    sick = [{"uuid": uuid, "mig": True, "problem": "it is lost"} for uuid in managed.gpus]
    managed.report(gpus=sick)
    assert list(managed.node.agent.foreign) == ["MIG-x"]
    managed.report()
    assert not managed.node.agent.foreign


# Sessions


def test_a_late_hello_of_the_same_agent_lets_it_begin_again() -> None:
    managed = ManagedNode()
    managed.hello(life="abc")
    mine = managed.session
    managed.hello(life="abc")  # the first, delivered once more
    assert managed.report(session=mine, status=409)["reason"] == "unknown", "it says hello again"
    mine = managed.session
    managed.hello(life="def")
    assert managed.report(session=mine, status=409)["reason"] == "superseded"


def test_a_restored_service_lets_its_agents_begin_again() -> None:
    managed = ManagedNode()
    identity, begun, _ = managed.session.split(".")
    later = f"{identity}.{int(begun) + 60_000}.abc"
    assert managed.report(session=later, status=409)["reason"] == "unknown"
    for odd in ("s", "s.", "s.x.abc", f"{identity}.{begun}.abc", "s.\u00b2.y"):
        assert managed.report(session=odd, status=409)["reason"] == "superseded"


def test_a_new_session_ends_the_one_before() -> None:
    managed = ManagedNode()
    old = managed.session
    managed.hello()
    assert managed.session != old
    said = managed.report(session=old, status=409)
    assert said["reason"] == "superseded"
    assert managed.control.ask(Lost("g", old, 1.0))[0] == 409
    managed.control.ask(RemoveNode("g"))
    assert managed.report(status=409)["reason"] == "unknown"
    managed.control.node("g", 1)
    assert managed.report(status=409)["reason"] == "unknown"


def test_an_agent_takes_over_a_node_that_an_operator_added() -> None:
    control = ControlPlane()
    control.tenant("acme")
    control.node("g", 2, H200)
    _, one = control.create("2g.35gb", count=2)
    managed = ManagedNode.__new__(ManagedNode)
    managed.control, managed.session, managed.gpus = control, "", ("GPU-0", "GPU-1")
    managed.hello(gpus=("GPU-0",), status=409)
    managed.hello(gpus=("GPU-0", "GPU-1"))
    record = control.state.allocations[one["id"]]
    assert [part.phase for part in record.parts] == [Phase.PLACED, Phase.PLACED]
    assert {part.gpu_uuid for part in record.parts} <= {"GPU-0", "GPU-1"}
    assert len(managed.desired().instances) == 2


def test_gpus_are_identified_by_uuid() -> None:
    managed = ManagedNode()
    assert managed.hello(gpus=("GPU-0", "GPU-0"), status=400)["field"] == "gpus"
    one = managed.create()
    at = one["gpu"]
    other = 1 - at
    managed.hello(gpus=("GPU-1", "GPU-0"))  # the order does not matter
    assert managed.node.agent.gpus == ("GPU-0", "GPU-1")
    assert not managed.holds()
    # The one without instances was replaced; the one with instances is missed.
    new = ["GPU-0", "GPU-1"]
    new[other] = "GPU-9"
    managed.hello(gpus=tuple(new))
    assert managed.node.agent.gpus[other] == "GPU-9"
    assert not managed.holds()
    new[at] = "GPU-8"
    managed.hello(gpus=tuple(new))
    assert managed.node.agent.gpus[at] == f"GPU-{at}"
    assert managed.holds() == {at: {"missing": f"GPU-{at} is missing"}}
    # One less is missed, one more is refused.
    managed.hello(gpus=("GPU-9",))
    assert set(managed.holds()) == {at}
    assert managed.hello(gpus=("GPU-9", "GPU-8", "GPU-7"), status=409)["reason"] == "changed"
    # Without instances it becomes what it is.
    managed.control.release(one["id"])
    managed.report({"allocation": one["id"], "index": 0, "phase": "gone"})
    managed.hello(gpus=("GPU-9", "GPU-8", "GPU-7"))
    assert len(managed.node.gpus) == 3
    assert not managed.holds()


def test_a_replaced_node_keeps_its_phase_and_labels() -> None:
    managed = ManagedNode()
    managed.control.ask(Cordon("g"))
    managed.hello(gpus=("GPU-5",))
    assert len(managed.node.gpus) == 1
    assert managed.node.phase is NodePhase.CORDONED


# Geometry


def other_geometry() -> dict[str, Any]:
    changed = msgspec.to_builtins(H200)
    for profile in changed["profiles"]:
        if profile["name"] == "1g.18gb":
            profile["starts"] = [0, 1, 2, 3, 4, 5]
            profile["preferred"] = []
    return dict(changed)


def test_a_node_whose_driver_disagrees_is_held_until_accepted() -> None:
    why = ("1g.18gb: the driver offers starts 0-5, the catalog 0-6",)
    managed = ManagedNode(geometry=other_geometry(), disagreements=why)
    assert managed.node.holds == {"geometry": why[0]}
    model = managed.node.geometry.model
    assert model.startswith("H200-141GB~")
    assert len(model) == len("H200-141GB~") + 6
    status, said = managed.control.create("1g.18gb")
    assert (status, said["reason"]) == (409, "capacity")
    status, said = managed.control.ask(Accept("g"))
    assert (status, said["holds"]) == (200, {})
    assert managed.control.ask(Accept("g"))[0] == 200, "once more changes nothing"
    managed.create()
    managed.hello(geometry=other_geometry(), disagreements=why)
    assert managed.node.holds == {}, "accepted once, it stays accepted"
    assert managed.node.geometry.model == model
    assert managed.hello(status=409)["reason"] == "changed", (
        "another geometry, with instances there"
    )


def test_accept_is_refused_without_a_disagreement() -> None:
    managed = ManagedNode()
    assert managed.control.ask(Accept("g"))[1]["reason"] == "agreed"
    managed.control.node("plain", 1, A100)
    assert managed.control.ask(Accept("plain"))[0] == 409
    assert managed.control.ask(Accept("nowhere"))[0] == 404


def test_the_service_detects_a_disagreement_that_the_agent_missed() -> None:
    """The agent's catalog agrees with the driver, but the service's has another geometry."""
    managed = ManagedNode(geometry=other_geometry())
    assert "another geometry named H200-141GB" in managed.node.holds["geometry"]


def test_an_unknown_model_gets_the_name_that_the_driver_reports() -> None:
    managed = ManagedNode(model="NVIDIA H900 (beta)", catalog=None)
    assert managed.node.geometry.model == "NVIDIA-H900-beta"
    assert named(H200, "???").model == "GPU"


def test_layouts_are_compared_without_order() -> None:
    turned = msgspec.structs.replace(H200, model="x", profiles=H200.profiles[::-1])
    assert same_layout(H200, turned)
    assert distinct(H200).model == distinct(H200).model != distinct(turned).model


def test_models_with_too_many_states_are_detected() -> None:
    assert not too_many_states(load_geometry("H200-141GB"))
    profiles = tuple(Profile(f"{n}g", 1, n, 1, tuple(range(16))) for n in range(1, 8))
    assert too_many_states(Geometry("wild", 16, 112, profiles))


# Instances


def test_slices_are_free_only_when_the_instance_is_gone() -> None:
    managed = ManagedNode(gpus=("GPU-0",))
    whole = managed.create("7g.141gb", lease=100.0)
    managed.active(whole)
    waiting = managed.create("7g.141gb", wait=1000.0)
    assert waiting["state"] == "queued"
    managed.control.ask(Drain("g"))
    managed.control.ask(Uncordon("g"))
    managed.control.wait(101.0)  # the lease is over
    assert managed.state.leaving[whole["id"]].state == "releasing"
    assert waiting["id"] in managed.state.tickets
    for phase in ("creating", "active", "failed"):
        rows = len(managed.control.rows)
        managed.phase(whole, phase, uuid="MIG-1")
        assert len(managed.control.rows) == rows, "it is not wanted any more"
    managed.phase(whole, "quarantined", detail="in use", attempts=10)
    rows = len(managed.control.rows)
    managed.phase(whole, "quarantined", detail="in use", attempts=11)
    assert len(managed.control.rows) == rows, "that it was tried again is no news"
    assert managed.state.phases[Phase.QUARANTINED] == 1
    managed.phase(whole, "gone")
    assert managed.state.allocations[waiting["id"]].state == "placed"
    managed.phase(whole, "gone")
    assert whole["id"] not in managed.state.leaving


def test_a_report_of_gone_frees_only_leaving_instances() -> None:
    managed = ManagedNode()
    one = managed.create()
    managed.active(one)
    for phase in ("gone", "releasing", "quarantined"):
        rows = len(managed.control.rows)
        managed.phase(one, phase)
        assert len(managed.control.rows) == rows
    for stale in ({"allocation": "a-none"}, {"index": 7}):
        managed.report({"allocation": one["id"], "index": 0, "phase": "gone"} | stale)
    assert managed.state.allocations[one["id"]].state == "active"


def test_an_agent_cannot_report_instances_of_another_node() -> None:
    managed = ManagedNode()
    managed.control.node("plain", 1, A100)
    one = managed.create("1g.10gb")
    managed.phase(one, "failed", detail="nonsense")
    assert managed.state.allocations[one["id"]].state == "placed"
    managed.control.release(one["id"])
    assert not managed.state.leaving


def test_a_failed_instance_ends_its_allocation_with_the_reason() -> None:
    managed = ManagedNode()
    one = managed.create("3g.71gb", count=2)
    managed.phase(one, "failed", index=1, detail="the driver said no")
    record = managed.state.leaving[one["id"]]
    assert record.state == "failed"
    assert record.detail.endswith("could not be created: the driver said no")
    assert [item.wanted for item in managed.desired().instances] == ["absent", "absent"]
    assert managed.state.tenants_by_name["acme"].usage.instances == 0
    managed.phase(one, "gone")
    assert managed.state.leaving[one["id"]].parts[0].phase is Phase.GONE
    managed.phase(one, "gone", index=1)
    assert not managed.state.leaving
    assert managed.node.instances == 0
    assert managed.state.ended(record).state == "failed"


def test_the_state_of_an_allocation_on_several_nodes() -> None:
    managed = ManagedNode(gpus=("GPU-0",))
    managed.control.node("plain", 1, H200)
    one = managed.create("7g.141gb", count=2)
    record = managed.state.allocations[one["id"]]
    index = next(n for n, part in enumerate(record.parts) if part.node == "g")
    assert record.state == "placed"
    managed.phase(one, "creating", index=index, attempts=2)
    assert managed.state.allocations[one["id"]].state == "creating"
    managed.phase(one, "creating", index=index, attempts=3)
    assert managed.state.allocations[one["id"]].parts[index].attempts == 3
    managed.phase(one, "active", index=index, uuid="MIG-1")
    assert managed.state.allocations[one["id"]].state == "active"
    managed.control.release(one["id"])
    assert managed.state.nodes["plain"].instances == 0, "no agent has to report it there"
    assert managed.node.instances == 1
    snapshot = snapshot_of(managed.state)
    assert (
        snapshot_of(
            restore_snapshot(decode_snapshot(encode_snapshot(snapshot)), managed.control.fresh())
        )
        == snapshot
    )
    managed.phase(one, "gone", index=index)
    assert managed.state.ended(record).parts[index].phase is Phase.GONE


def test_a_node_is_drained_when_its_last_instance_is_gone() -> None:
    managed = ManagedNode()
    one = managed.create()
    managed.active(one)
    managed.control.ask(Drain("g", evict=True))
    assert managed.node_phase == "draining"
    status, said = managed.control.ask(RemoveNode("g"))
    assert (status, said["reason"]) == (409, "busy")
    assert managed.control.ask(RemoveTenant("acme"))[0] == 200, "it holds nothing"
    managed.phase(one, "gone")
    assert managed.node_phase == "drained"
    managed.report(foreign=(foreign_report(),))
    assert managed.control.ask(RemoveNode("g"))[0] == 200, "what is not ours stays where it is"
    assert managed.state.cluster.instance_count == 0


def test_leaving_instances_stay_with_a_removed_tenant() -> None:
    managed, journal = ManagedNode(), MemoryJournal()
    first = managed.state.tenants_by_name["acme"].ref
    one, two = managed.create(), managed.create()
    managed.control.release(one["id"])
    managed.control.release(two["id"])
    assert managed.control.ask(RemoveTenant("acme"))[0] == 200
    managed.control.tenant("acme")
    second = managed.state.tenants_by_name["acme"].ref
    assert (first.name, second.name) == ("acme", "acme")
    assert first.id != second.id
    managed.phase(one, "gone")
    assert concerns(managed.control.rows[-1].entry) == (first, one["id"])
    three = managed.create()
    managed.control.release(three["id"])
    assert [record.tenant for record in managed.state.leaving.values()] == [first, second]
    snapshot = snapshot_of(managed.state)
    journal.kept_rows = managed.control.rows
    for kept in ([], [snapshot]):
        journal.snapshots = kept
        assert snapshot_of(load(journal, managed.control.fresh())) == snapshot


# Restarts


def test_after_a_reboot_instances_are_created_again() -> None:
    managed = ManagedNode()
    kept, ended = managed.create(), managed.create()
    managed.report(
        {"allocation": kept["id"], "index": 0, "phase": "active", "uuid": "MIG-1"},
        {"allocation": ended["id"], "index": 0, "phase": "active", "uuid": "MIG-2"},
    )
    managed.control.release(ended["id"])
    managed.hello(boot="b2")
    record = managed.state.allocations[kept["id"]]
    assert (record.state, record.parts[0].uuid) == ("placed", "")
    left = managed.state.leaving[ended["id"]].parts[0]
    assert (left.phase, left.uuid) == (Phase.RELEASING, "")
    managed.phase(ended, "gone")
    assert not managed.state.leaving


def test_after_a_reboot_allocations_fail_if_so_configured() -> None:
    managed = ManagedNode()
    one = managed.create(count=2)
    managed.hello(boot="b2", fail=True)
    assert managed.state.leaving[one["id"]].detail == "node g was restarted"
    managed.hello(boot="b2", fail=True)
    assert managed.state.leaving[one["id"]].state == "failed"


def test_a_reboot_frees_leaving_instances_of_a_missing_gpu() -> None:
    managed = ManagedNode()
    one, other = (managed.create("7g.141gb") for _ in range(2))
    managed.control.release(one["id"])
    left = f"GPU-{other['gpu']}"
    managed.hello(gpus=(left,))
    assert managed.node.instances == 2, "the outcome is unknown"
    managed.hello(gpus=(left,), boot="b2")
    assert managed.node.instances == 1, "no instance outlives a restart"


def test_a_reboot_frees_instances_that_fail_on_a_missing_gpu() -> None:
    managed = ManagedNode()
    one, other = (managed.create("7g.141gb") for _ in range(2))
    managed.hello(gpus=(f"GPU-{other['gpu']}",), boot="b2", fail=True)
    assert one["id"] not in managed.state.leaving, "no report would say that it is gone"
    assert managed.state.leaving[other["id"]].state == "failed"
    assert managed.node.instances == 1


@pytest.mark.parametrize(
    "changes", [{"gpus": ("GPU-0", "GPU-1", "GPU-2")}, {"geometry": None}], ids=["gpus", "driver"]
)
def test_a_changed_node_can_be_drained_after_a_reboot(changes: dict[str, Any]) -> None:
    """Its hello is refused while it has instances, so no report could say that they are gone."""
    if "geometry" in changes:
        changes = {"geometry": other_geometry()}
    managed = ManagedNode()
    one = managed.create()
    managed.active(one)
    managed.hello(boot="b2", status=409, **changes)
    managed.control.ask(Drain("g", evict=True))
    managed.hello(status=409, **changes)  # of the same boot: they may be there
    assert managed.node.instances == 1
    managed.hello(boot="b2", **changes)
    assert (managed.node.instances, managed.node_phase) == (0, "drained")
    assert not managed.state.leaving
    assert len(managed.node.gpus) == len(managed.gpus)


# Holds


def test_gpus_are_held_while_they_have_a_problem() -> None:
    managed = ManagedNode(off=("GPU-1",))
    assert managed.holds() == {1: {"mig": "MIG mode is off"}}
    managed.report(gpus=[{"uuid": "GPU-0", "mig": True, "problem": "XID 79"}])
    assert managed.holds() == {
        0: {"problem": "XID 79"},
        1: {"missing": "GPU-1 is missing"},
    }
    waiting = managed.create(wait=100.0)
    assert waiting["state"] == "queued"
    rows = len(managed.control.rows)
    managed.report(gpus=[{"uuid": "GPU-0", "mig": True, "problem": "XID 79"}])
    assert len(managed.control.rows) == rows
    managed.report()
    assert not managed.holds()
    assert managed.state.allocations[waiting["id"]].state == "placed", "the queue was served"


def test_a_lost_agent_holds_its_node_and_frees_nothing() -> None:
    managed = ManagedNode()
    one = managed.create()
    managed.active(one)
    status, said = managed.control.ask(Lost("g", managed.session, 1000.0))
    assert status == 200
    assert said["holds"]["unknown"].startswith("its agent has been unreachable since 1970-01-01")
    rows = len(managed.control.rows)
    managed.control.ask(Lost("g", managed.session, 1000.0))
    assert len(managed.control.rows) == rows
    waiting = managed.create(wait=100.0)
    assert waiting["state"] == "queued"
    assert managed.node.instances == 1
    managed.control.ask(Heard("g"))
    managed.control.ask(Heard("g"))
    assert managed.node.holds == {}
    assert managed.state.allocations[waiting["id"]].state == "placed"
    managed.control.ask(Lost("g", managed.session, 1000.0))
    managed.report()
    assert managed.node.holds == {}, "a report is a sign of life"


def test_a_node_is_held_until_the_first_report() -> None:
    managed = ManagedNode(gpus=("GPU-0",), reports=False)
    why = "its agent has not sent its first report"
    assert managed.node.holds == {"unreported": why}
    status, said = managed.control.create("3g.71gb")
    assert (status, said["reason"]) == (409, "capacity")
    lost = said["detail"]
    waiting = managed.create("3g.71gb", wait=100.0)
    assert waiting["state"] == "queued"
    managed.control.ask(Heard("g"))
    assert managed.node.holds == {"unreported": why}, "to be heard of is not enough"
    managed.report(foreign=(foreign_report(start=0),))
    assert managed.node.holds == {}
    (part,) = managed.state.allocations[waiting["id"]].parts
    assert part.start == 4, "the queue was served, and went around what is there"
    assert managed.node.agent.foreign["MIG-x"].blocks

    # The current status of a node whose agent is silent.
    managed.control.release(waiting["id"])
    managed.report({"allocation": waiting["id"], "index": 0, "phase": "gone"})
    managed.control.ask(Lost("g", managed.session, 1000.0))
    status, said = managed.control.create("3g.71gb")
    assert (status, said["reason"], said["detail"]) == (409, "capacity", lost)


def test_every_session_waits_for_its_own_first_report() -> None:
    managed = ManagedNode(gpus=("GPU-0",))
    old = managed.session
    one = managed.create("1g.18gb")
    managed.active(one)
    managed.hello(reports=False)
    assert set(managed.node.holds) == {"unreported"}
    assert managed.state.allocations[one["id"]].state == "active", "what is there stays"
    assert managed.control.create("3g.71gb")[0] == 409
    managed.report(session=old, status=409)
    assert set(managed.node.holds) == {"unreported"}, "what another session says does not count"
    managed.report(foreign=(foreign_report(start=0),))
    assert managed.node.holds == {}
    rows = len(managed.control.rows)
    managed.report(foreign=(foreign_report(start=0),))
    assert len(managed.control.rows) == rows


def test_holds_are_independent_of_the_wait_for_a_report() -> None:
    why = ("1g.18gb: the driver offers starts 0-5, the catalog 0-6",)
    managed = ManagedNode(geometry=other_geometry(), disagreements=why, reports=False)
    assert set(managed.node.holds) == {"geometry", "unreported"}
    managed.control.ask(Lost("g", managed.session, 1000.0))
    assert set(managed.node.holds) == {"geometry", "unreported", "unknown"}
    assert set(managed.control.ask(Accept("g"))[1]["holds"]) == {"unreported", "unknown"}
    assert managed.control.create("1g.18gb")[0] == 409
    rows = len(managed.control.rows)
    managed.report()
    assert managed.node.holds == {}
    assert len(managed.control.rows) == rows + 1, "both are lifted at once"


def test_a_gpu_that_the_first_report_omits_stays_held() -> None:
    managed = ManagedNode(reports=False)
    managed.report(gpus=[{"uuid": "GPU-0", "mig": True, "problem": "it cannot be read"}])
    assert managed.node.holds == {}
    assert managed.holds() == {
        0: {"problem": "it cannot be read"},
        1: {"missing": "GPU-1 is missing"},
    }
    assert managed.control.create("1g.18gb")[0] == 409


def test_a_follower_never_sees_occupied_slices_as_free() -> None:
    """The last row of a report lifts the hold, after everything else is recorded."""
    managed = ManagedNode(gpus=("GPU-0",), reports=False)
    before = len(managed.control.rows)
    managed.report(foreign=(foreign_report(),))
    kinds = [type(row.entry).__name__ for row in managed.control.rows[before:]]
    assert kinds == ["ForeignSeen", "NodeHeld"]


def test_the_wait_for_a_report_survives_a_restart_of_the_service() -> None:
    managed = ManagedNode(gpus=("GPU-0",), reports=False)
    waiting = managed.create("3g.71gb", wait=100.0)
    snapshot = snapshot_of(managed.state)
    replayed = managed.control.fresh()
    for row in managed.control.rows:
        replayed.apply(msgspec.structs.replace(row, entry=decode(encode(row.entry))))
    restored = restore_snapshot(decode_snapshot(encode_snapshot(snapshot)), managed.control.fresh())
    for state in (replayed, restored):
        assert snapshot_of(state) == snapshot
        managed.control = ControlPlane(state=state, first_id=1000)
        assert set(managed.node.holds) == {"unreported"}
        assert managed.control.create("1g.18gb")[0] == 409
        managed.report(foreign=(foreign_report(start=0),))  # the session continues with any leader
        assert state.allocations[waiting["id"]].parts[0].start == 4


# Foreign instances


def test_a_foreign_instance_blocks_its_slices() -> None:
    managed = ManagedNode(gpus=("GPU-0",))
    managed.report(foreign=(foreign_report(), foreign_report(gpu="GPU-unknown", uuid="MIG-y")))
    assert managed.control.create("7g.141gb")[0] == 409
    one = managed.create("3g.71gb")
    assert one["start"] == 0
    rows = len(managed.control.rows)
    managed.report(foreign=(foreign_report(),))
    assert len(managed.control.rows) == rows
    managed.report(foreign=(foreign_report(why="stray"),))
    assert managed.node.agent.foreign["MIG-x"].why == "stray"
    managed.report()
    assert managed.create("3g.71gb")["start"] == 4


@pytest.mark.parametrize(
    "changes", [{"profile": ""}, {"profile": "9g.999gb"}, {"size": 2}, {"start": 3}]
)
def test_a_foreign_instance_that_cannot_be_blocked_holds_its_gpu(changes: dict[str, Any]) -> None:
    managed = ManagedNode(gpus=("GPU-0",))
    managed.report(foreign=(foreign_report(**changes),))
    assert set(managed.holds()[0]) == {"foreign"}
    assert managed.control.create("1g.18gb")[0] == 409
    assert managed.control.ask(Adopt("g", "MIG-x", "acme"))[1]["reason"] == "unusable"
    managed.report()
    assert not managed.holds()


def test_a_foreign_instance_in_the_place_of_an_allocation() -> None:
    managed = ManagedNode(gpus=("GPU-0",))
    one = managed.create("7g.141gb")
    managed.report(foreign=(foreign_report(),))
    assert not managed.node.agent.foreign["MIG-x"].blocks
    assert set(managed.holds()[0]) == {"foreign"}
    managed.report(
        {"allocation": one["id"], "index": 0, "phase": "failed", "detail": "no room"},
        foreign=(foreign_report(),),
    )
    managed.report(
        {"allocation": one["id"], "index": 0, "phase": "gone"}, foreign=(foreign_report(),)
    )
    assert managed.node.agent.foreign["MIG-x"].blocks, (
        "its slices are blocked as soon as they can be"
    )
    assert not managed.holds()
    assert managed.create("3g.71gb")["start"] == 0


def test_foreign_instances_without_a_uuid_are_identified_by_place() -> None:
    managed = ManagedNode()
    bare = foreign_report(uuid="")
    managed.report(foreign=(bare, foreign_report(uuid="", gpu="GPU-1"), foreign_report(start=0)))
    names = {"gpu0-3g.71gb-4", "gpu1-3g.71gb-4", "MIG-x"}
    assert set(managed.node.agent.foreign) == names
    assert (
        "no compute instance"
        in managed.control.ask(Adopt("g", "gpu0-3g.71gb-4", "acme"))[1]["detail"]
    )
    assert managed.control.ask(Evict("g", "gpu0-3g.71gb-4"))[0] == 202
    (order,) = managed.desired().evict
    assert (order.gpu, order.uuid, order.profile, order.start) == ("GPU-0", "", "3g.71gb", 4)


def test_adopting_creates_an_allocation_in_place() -> None:
    managed = ManagedNode(gpus=("GPU-0",))
    managed.report(foreign=(foreign_report(),))
    managed.control.ask(Cordon("g"))
    status, one = managed.control.ask(Adopt("g", "MIG-x", "acme", {"job": "7"}))
    assert status == 201
    assert (one["state"], one["uuid"], one["labels"]) == ("active", "MIG-x", {"job": "7"})
    assert managed.state.tenants_by_name["acme"].usage.memory_slices == 4
    (wanted,) = managed.desired().instances
    assert (wanted.wanted, wanted.uuid) == ("present", "MIG-x")
    rows = len(managed.control.rows)
    managed.report(foreign=(foreign_report(),))  # sent before the agent knew
    assert len(managed.control.rows) == rows
    assert managed.control.ask(Adopt("g", "MIG-x", "acme"))[0] == 404
    managed.control.release(one["id"])
    managed.report(foreign=(foreign_report(),))
    assert not managed.node.agent.foreign
    managed.phase(one, "gone")
    assert managed.state.cluster.instance_count == 0


def test_an_eviction_stays_when_a_stray_instance_becomes_foreign() -> None:
    """The agent drops its record of an instance before it destroys it."""
    managed = ManagedNode(gpus=("GPU-0",))
    managed.report(foreign=(foreign_report(why="stray"),))
    assert managed.control.ask(Evict("g", "MIG-x"))[0] == 202
    managed.report(foreign=(foreign_report(),))
    assert managed.node.agent.foreign["MIG-x"].why == "foreign"
    assert [order.uuid for order in managed.desired().evict] == ["MIG-x"]
    assert managed.control.create("7g.141gb")[0] == 409, "its slices are blocked as before"
    managed.report()
    assert managed.desired().evict == ()
    assert managed.create("7g.141gb")["start"] == 0


def test_adopting_is_refused() -> None:
    managed = ManagedNode(gpus=("GPU-0",))
    managed.control.tenant("small", instances=0)
    managed.report(foreign=(foreign_report(),))
    for command, status, reason in (
        (Adopt("g", "MIG-x", "unknown"), 404, None),
        (Adopt("g", "MIG-none", "acme"), 404, None),
        (Adopt("nowhere", "MIG-x", "acme"), 404, None),
        (Adopt("g", "MIG-x", "small"), 409, "quota"),
    ):
        got, said = managed.control.ask(command)
        assert (got, said.get("reason")) == (status, reason)
    for _ in range(2):
        assert managed.control.ask(Evict("g", "MIG-x"))[0] == 202
    assert managed.control.ask(Adopt("g", "MIG-x", "acme"))[1]["reason"] == "evicted"
    assert len(managed.desired().evict) == 1
    managed.report()
    assert managed.desired().evict == ()
    managed.control.node("plain", 1, A100)
    assert managed.control.ask(Evict("plain", "MIG-x"))[0] == 404


# Moves


def test_instances_on_a_managed_node_are_not_moved() -> None:
    managed = ManagedNode(gpus=("GPU-0", "GPU-1"))
    managed.control.node("plain", 1, H200)
    one = managed.create("1g.18gb")
    assert one["node"] == "g"
    at = one["node"], one["gpu"], one["start"]
    status, said = managed.control.ask(CarryOut((MoveInstance(one["id"], 0, *at, "plain", 0, 0),)))
    assert (status, said["reason"]) == (409, "stale")
    assert "where instances cannot be moved" in said["detail"]
    managed.control.ask(Cordon("g"))
    other = managed.create("1g.18gb")
    at = other["node"], other["gpu"], other["start"]
    managed.control.ask(Uncordon("g"))
    managed.report(gpus=[{"uuid": "GPU-0", "mig": True}])
    status, said = managed.control.ask(CarryOut((MoveInstance(other["id"], 0, *at, "g", 1, 0),)))
    assert "GPU 1 of 'g' is held" in said["detail"]
    managed.report()
    status, said = managed.control.ask(CarryOut((MoveInstance(other["id"], 0, *at, "g", 1, 0),)))
    assert status == 200, said
    moved = managed.state.allocations[other["id"]].parts[0]
    assert (moved.node, moved.phase, moved.gpu_uuid) == ("g", Phase.PLACED, "GPU-1")


# The journal


def test_entries_that_contradict_the_state_are_refused() -> None:
    managed = ManagedNode()
    one = managed.create()
    managed.active(one)
    managed.control.release(one["id"])
    managed.phase(one, "gone")
    for kind, wrong, match in (
        ("allocated", {"phase": "gone"}, "cannot be gone"),
        ("ended", {"phase": "active"}, "cannot be active"),
        ("node-added", {"gpus": ["GPU-0"]}, "has 2 GPUs, and its agent reports 1"),
    ):
        with pytest.raises(SlicewiseError, match=match):
            _replay(managed.control, kind, wrong)


def _replay(control: ControlPlane, kind: str, wrong: dict[str, Any]) -> None:
    """Apply the journal, with a changed entry after the first entry of that kind."""
    state, behind = control.fresh(), False
    for row in control.rows:
        entry = msgspec.json.decode(encode(row.entry))
        changed = decode(msgspec.json.encode(entry | wrong)) if behind else row.entry
        state.apply(msgspec.structs.replace(row, entry=changed))
        behind = entry["kind"] == kind


COLLISION = [
    b'{"kind":"tenant-set","tenant":{"id":"acme","name":"acme"}}',
    b'{"kind":"model-entered","geometry":' + msgspec.json.encode(H200) + b"}",
    b'{"kind":"node-added","node":"g","model":"H200-141GB","gpus":1,"first":0}',
    b'{"kind":"agent-joined","node":"g","session":"s1.1000.","boot":"b1","driver":"580",'
    b'"version":"1.0","since":1.0,"gpus":["GPU-0"]}',
    b'{"kind":"allocated","allocation":{"id":"a1","tenant":{"id":"acme","name":"acme"},"want":'
    b'{"profile":"3g.71gb"},"requested":1.0,"placed":1.0,"parts":[{"node":"g","gpu":0,'
    b'"model":"H200-141GB","profile":"3g.71gb","start":4,"size":4,"compute":3,'
    b'"memory_gb":71.0,"phase":"placed","gpu_uuid":"GPU-0"}]}}',
]
"""A session without the hold for its first report, and an allocation placed in it."""
COLLISION_FOUND = [
    b'{"kind":"foreign-seen","node":"g","name":"MIG-x","foreign":{"gpu":0,"uuid":"MIG-x",'
    b'"profile":"3g.71gb","start":4,"size":4}}',
    b'{"kind":"gpu-held","node":"g","gpu":0,"reasons":{"foreign":"it is in the way"}}',
]
"""The first report then shows a foreign instance in the same place."""


def test_an_allocation_that_collides_with_a_foreign_instance_fails() -> None:
    for journal in (COLLISION, COLLISION + COLLISION_FOUND):
        managed = ManagedNode.__new__(ManagedNode)
        managed.control, managed.session, managed.gpus = ControlPlane(), "s1.1000.", ("GPU-0",)
        twin = Occupancy()
        for seq, data in enumerate(journal, 1):
            entry = decode(data)
            assert twin.take(entry) == []
            managed.state.apply(Row(seq, 1.0, "t", entry))
        assert managed.node.holds == {}
        snapshot = snapshot_of(managed.state)
        assert (
            snapshot_of(
                restore_snapshot(
                    decode_snapshot(encode_snapshot(snapshot)), managed.control.fresh()
                )
            )
            == snapshot
        )
        # The collision fails the allocation, and the next session is held again.
        failed = {"allocation": "a1", "index": 0, "phase": "failed", "detail": "taken"}
        managed.report(failed, foreign=(foreign_report(),))
        managed.report(
            {"allocation": "a1", "index": 0, "phase": "gone"}, foreign=(foreign_report(),)
        )
        assert managed.node.agent.foreign["MIG-x"].blocks
        assert not managed.holds()
        assert managed.node.holds == {}
        managed.hello(reports=False)
        assert set(managed.node.holds) == {"unreported"}
