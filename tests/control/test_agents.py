"""Agents at the desk: sessions, geometry, holds, restarts, and what reports may do."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.control.office import A100, Office

from slicewise import load_geometry
from slicewise.control.agent_wire import HelloBody, ReportBody
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
from slicewise.control.entries import NodePhase, Row, concerns, decode, encode
from slicewise.control.geometries import distinct, named, record_of, same_layout, too_many_states
from slicewise.control.hardware import Phase
from slicewise.control.image import decode as decode_image
from slicewise.control.image import encode as encode_image
from slicewise.control.image import image_of, restore
from slicewise.control.memory import MemoryJournal
from slicewise.control.views import desired_view
from slicewise.control.writer import load
from slicewise.core.errors import SlicewiseError
from slicewise.core.geometry import Geometry, Profile
from slicewise.store.occupancy import Occupancy

H200 = record_of(load_geometry("H200-141GB"))


class Site:
    """A desk, and one node with an agent."""

    def __init__(self, gpus: tuple[str, ...] = ("GPU-0", "GPU-1"), **hello: Any) -> None:
        self.office = Office()
        self.office.tenant("acme")
        self.gpus = gpus
        self.session = ""
        self.hello(**hello)

    @property
    def state(self) -> Any:
        return self.office.state

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
        """Begin a session; unless told otherwise, with a report that nothing is there."""
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
        got, said = self.office.ask(command)
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
        got, said = self.office.ask(Report("g", msgspec.convert(body, ReportBody)))
        assert got == status, said
        return said

    def create(self, profile: str = "1g.18gb", **terms: Any) -> Any:
        status, said = self.office.create(profile, **terms)
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


def stranger(**changes: Any) -> dict[str, Any]:
    return {
        "gpu": "GPU-0",
        "uuid": "MIG-x",
        "profile": "3g.71gb",
        "start": 4,
        "size": 4,
        "why": "foreign",
    } | changes


def test_what_cannot_be_read_may_still_be_there() -> None:
    site = Site()
    site.report(foreign=(stranger(),))
    sick = [{"uuid": uuid, "mig": True, "problem": "it is lost"} for uuid in site.gpus]
    site.report(gpus=sick)
    assert list(site.node.agent.foreign) == ["MIG-x"]
    site.report()
    assert not site.node.agent.foreign


# Sessions


def test_a_late_hello_of_the_same_agent_does_not_end_it() -> None:
    site = Site()
    site.hello(life="abc")
    mine = site.session
    site.hello(life="abc")  # the first, delivered once more
    assert site.report(session=mine, status=409)["reason"] == "unknown", "it says hello again"
    mine = site.session
    site.hello(life="def")
    assert site.report(session=mine, status=409)["reason"] == "superseded"


def test_a_service_restored_from_a_backup_lets_its_agents_begin_anew() -> None:
    site = Site()
    identity, begun, _ = site.session.split(".")
    later = f"{identity}.{int(begun) + 60_000}.abc"
    assert site.report(session=later, status=409)["reason"] == "unknown"
    for odd in ("s", "s.", "s.x.abc", f"{identity}.{begun}.abc", "s.\u00b2.y"):
        assert site.report(session=odd, status=409)["reason"] == "superseded"


def test_a_new_session_ends_the_one_before() -> None:
    site = Site()
    old = site.session
    site.hello()
    assert site.session != old
    said = site.report(session=old, status=409)
    assert said["reason"] == "superseded"
    assert site.office.ask(Lost("g", old, 1.0))[0] == 409
    site.office.ask(RemoveNode("g"))
    assert site.report(status=409)["reason"] == "unknown"
    site.office.node("g", 1)
    assert site.report(status=409)["reason"] == "unknown"


def test_a_node_that_was_registered_by_hand_gets_its_agent_later() -> None:
    office = Office()
    office.tenant("acme")
    office.node("g", 2, H200)
    _, one = office.create("2g.35gb", count=2)
    site = Site.__new__(Site)
    site.office, site.session, site.gpus = office, "", ("GPU-0", "GPU-1")
    site.hello(gpus=("GPU-0",), status=409)
    site.hello(gpus=("GPU-0", "GPU-1"))
    record = office.state.allocations[one["id"]]
    assert [part.phase for part in record.parts] == [Phase.PLACED, Phase.PLACED]
    assert {part.gpu_uuid for part in record.parts} <= {"GPU-0", "GPU-1"}
    assert len(site.desired().instances) == 2


def test_gpus_are_known_by_their_uuids() -> None:
    site = Site()
    assert site.hello(gpus=("GPU-0", "GPU-0"), status=400)["field"] == "gpus"
    one = site.create()
    at = one["gpu"]
    other = 1 - at
    site.hello(gpus=("GPU-1", "GPU-0"))  # in another order: it does not matter
    assert site.node.agent.gpus == ("GPU-0", "GPU-1")
    assert not site.holds()
    # The one without instances was replaced; the one with instances is missed.
    new = ["GPU-0", "GPU-1"]
    new[other] = "GPU-9"
    site.hello(gpus=tuple(new))
    assert site.node.agent.gpus[other] == "GPU-9"
    assert not site.holds()
    new[at] = "GPU-8"
    site.hello(gpus=tuple(new))
    assert site.node.agent.gpus[at] == f"GPU-{at}"
    assert site.holds() == {at: {"missing": f"GPU-{at} is not there"}}
    # One less is missed, one more is refused.
    site.hello(gpus=("GPU-9",))
    assert set(site.holds()) == {at}
    assert site.hello(gpus=("GPU-9", "GPU-8", "GPU-7"), status=409)["reason"] == "changed"
    # Without instances it becomes what it is.
    site.office.release(one["id"])
    site.report({"allocation": one["id"], "index": 0, "phase": "gone"})
    site.hello(gpus=("GPU-9", "GPU-8", "GPU-7"))
    assert len(site.node.gpus) == 3
    assert not site.holds()


def test_a_node_that_becomes_another_keeps_its_phase_and_labels() -> None:
    site = Site()
    site.office.ask(Cordon("g"))
    site.hello(gpus=("GPU-5",))
    assert len(site.node.gpus) == 1
    assert site.node.phase is NodePhase.CORDONED


# Geometry


def other_geometry() -> dict[str, Any]:
    changed = msgspec.to_builtins(H200)
    for profile in changed["profiles"]:
        if profile["name"] == "1g.18gb":
            profile["starts"] = [0, 1, 2, 3, 4, 5]
            profile["preferred"] = []
    return dict(changed)


def test_a_driver_that_disagrees_holds_its_node_until_that_is_accepted() -> None:
    why = ("1g.18gb: the driver offers starts 0-5, the catalog 0-6",)
    site = Site(geometry=other_geometry(), disagreements=why)
    assert site.node.holds == {"geometry": why[0]}
    model = site.node.geometry.model
    assert model.startswith("H200-141GB~")
    assert len(model) == len("H200-141GB~") + 6
    status, said = site.office.create("1g.18gb")
    assert (status, said["reason"]) == (409, "capacity")
    status, said = site.office.ask(Accept("g"))
    assert (status, said["holds"]) == (200, {})
    assert site.office.ask(Accept("g"))[0] == 200, "once more changes nothing"
    site.create()
    site.hello(geometry=other_geometry(), disagreements=why)
    assert site.node.holds == {}, "accepted once, it stays accepted"
    assert site.node.geometry.model == model
    assert site.hello(status=409)["reason"] == "changed", "another geometry, with instances there"


def test_nothing_to_accept_is_refused() -> None:
    site = Site()
    assert site.office.ask(Accept("g"))[1]["reason"] == "agreed"
    site.office.node("plain", 1, A100)
    assert site.office.ask(Accept("plain"))[0] == 409
    assert site.office.ask(Accept("nowhere"))[0] == 404


def test_the_service_may_know_better_than_the_agent() -> None:
    """An agent of another version finds no fault, but the name stands for another geometry here."""
    site = Site(geometry=other_geometry())
    assert "another geometry by the name of H200-141GB" in site.node.holds["geometry"]


def test_a_model_that_nobody_knows_goes_by_the_drivers_name() -> None:
    site = Site(model="NVIDIA H900 (beta)", catalog=None)
    assert site.node.geometry.model == "NVIDIA-H900-beta"
    assert named(H200, "???").model == "GPU"


def test_layouts_are_alike_whatever_their_order() -> None:
    turned = msgspec.structs.replace(H200, model="x", profiles=H200.profiles[::-1])
    assert same_layout(H200, turned)
    assert distinct(H200).model == distinct(H200).model != distinct(turned).model


@pytest.mark.unmeasured
def test_models_with_too_many_states_are_known_before_they_are_tried() -> None:
    assert not too_many_states(load_geometry("H200-141GB"))
    profiles = tuple(Profile(f"{n}g", 1, n, 1, tuple(range(16))) for n in range(1, 8))
    assert too_many_states(Geometry("wild", 16, 112, profiles))


# Instances


def test_an_instance_is_free_when_it_is_gone_and_not_before() -> None:
    site = Site(gpus=("GPU-0",))
    whole = site.create("7g.141gb", lease=100.0)
    site.active(whole)
    waiting = site.create("7g.141gb", wait=1000.0)
    assert waiting["state"] == "queued"
    site.office.ask(Drain("g"))
    site.office.ask(Uncordon("g"))
    site.office.wait(101.0)  # the lease is over
    assert site.state.leaving[whole["id"]].state == "releasing"
    assert waiting["id"] in site.state.tickets
    for phase in ("creating", "active", "failed"):
        rows = len(site.office.rows)
        site.phase(whole, phase, uuid="MIG-1")
        assert len(site.office.rows) == rows, "it is not wanted any more"
    site.phase(whole, "quarantined", detail="in use", attempts=10)
    rows = len(site.office.rows)
    site.phase(whole, "quarantined", detail="in use", attempts=11)
    assert len(site.office.rows) == rows, "that it was tried again is no news"
    assert site.state.phases[Phase.QUARANTINED] == 1
    site.phase(whole, "gone")
    assert site.state.allocations[waiting["id"]].state == "placed"
    site.phase(whole, "gone")
    assert whole["id"] not in site.state.leaving


def test_gone_counts_only_for_what_was_to_go() -> None:
    site = Site()
    one = site.create()
    site.active(one)
    for phase in ("gone", "releasing", "quarantined"):
        rows = len(site.office.rows)
        site.phase(one, phase)
        assert len(site.office.rows) == rows
    for stale in ({"allocation": "a-none"}, {"index": 7}):
        site.report({"allocation": one["id"], "index": 0, "phase": "gone"} | stale)
    assert site.state.allocations[one["id"]].state == "active"


def test_nobody_speaks_for_another_node() -> None:
    site = Site()
    site.office.node("plain", 1, A100)
    one = site.create("1g.10gb")
    site.phase(one, "failed", detail="nonsense")
    assert site.state.allocations[one["id"]].state == "placed"
    site.office.release(one["id"])
    assert not site.state.leaving


def test_what_fails_ends_the_allocation_with_its_reason() -> None:
    site = Site()
    one = site.create("3g.71gb", count=2)
    site.phase(one, "failed", index=1, detail="the driver said no")
    record = site.state.leaving[one["id"]]
    assert record.state == "failed"
    assert record.detail.endswith("could not be made: the driver said no")
    assert [item.wanted for item in site.desired().instances] == ["absent", "absent"]
    assert site.state.tenants["acme"].usage.instances == 0
    site.phase(one, "gone")
    assert site.state.leaving[one["id"]].parts[0].phase is Phase.GONE
    site.phase(one, "gone", index=1)
    assert not site.state.leaving
    assert site.node.instances == 0
    assert site.state.ended(record).state == "failed"


def test_allocations_over_several_nodes_are_as_far_as_all_of_them() -> None:
    site = Site(gpus=("GPU-0",))
    site.office.node("plain", 1, H200)
    one = site.create("7g.141gb", count=2)
    record = site.state.allocations[one["id"]]
    index = next(n for n, part in enumerate(record.parts) if part.node == "g")
    assert record.state == "placed"
    site.phase(one, "creating", index=index, attempts=2)
    assert site.state.allocations[one["id"]].state == "creating"
    site.phase(one, "creating", index=index, attempts=3)
    assert site.state.allocations[one["id"]].parts[index].attempts == 3
    site.phase(one, "active", index=index, uuid="MIG-1")
    assert site.state.allocations[one["id"]].state == "active"
    site.office.release(one["id"])
    assert site.state.nodes["plain"].instances == 0, "nobody has to say so there"
    assert site.node.instances == 1
    image = image_of(site.state)
    assert image_of(restore(decode_image(encode_image(image)), site.office.fresh())) == image
    site.phase(one, "gone", index=index)
    assert site.state.ended(record).parts[index].phase is Phase.GONE


def test_a_node_is_drained_and_removed_when_nothing_is_left() -> None:
    site = Site()
    one = site.create()
    site.active(one)
    site.office.ask(Drain("g", evict=True))
    assert site.node_phase == "draining"
    status, said = site.office.ask(RemoveNode("g"))
    assert (status, said["reason"]) == (409, "busy")
    assert site.office.ask(RemoveTenant("acme"))[0] == 200, "it holds nothing"
    site.phase(one, "gone")
    assert site.node_phase == "drained"
    site.report(foreign=(stranger(),))
    assert site.office.ask(RemoveNode("g"))[0] == 200, "what is not ours stays where it is"
    assert site.state.cluster.instance_count == 0


def test_what_still_leaves_is_not_the_next_tenants() -> None:
    site, journal = Site(), MemoryJournal()
    one, two = site.create(), site.create()
    site.office.release(one["id"])
    site.office.release(two["id"])
    assert site.office.ask(RemoveTenant("acme"))[0] == 200
    site.office.tenant("acme")
    site.phase(one, "gone")
    last = site.office.rows[-1].entry
    assert concerns(last) == ("", one["id"])
    assert {record.tenant for record in site.state.leaving.values()} == {""}
    three = site.create()
    site.office.release(three["id"])
    # By way of an image, and of one by an older version.
    image = image_of(site.state)
    journal.kept_rows = site.office.rows
    old = msgspec.structs.replace(
        image,
        since=None,
        leaving=tuple(msgspec.structs.replace(r, tenant="acme") for r in image.leaving),
    )
    for kept in (None, image, old):
        journal.images = [kept] if kept is not None else []
        assert image_of(load(journal, site.office.fresh())) == image
    assert [record.tenant for record in image.leaving] == ["", "acme"]


# Restarts


def test_after_a_restart_instances_are_made_anew() -> None:
    site = Site()
    kept, ended = site.create(), site.create()
    site.report(
        {"allocation": kept["id"], "index": 0, "phase": "active", "uuid": "MIG-1"},
        {"allocation": ended["id"], "index": 0, "phase": "active", "uuid": "MIG-2"},
    )
    site.office.release(ended["id"])
    site.hello(boot="b2")
    record = site.state.allocations[kept["id"]]
    assert (record.state, record.parts[0].uuid) == ("placed", "")
    left = site.state.leaving[ended["id"]].parts[0]
    assert (left.phase, left.uuid) == (Phase.RELEASING, "")
    site.phase(ended, "gone")
    assert not site.state.leaving


def test_after_a_restart_allocations_may_fail() -> None:
    site = Site()
    one = site.create(count=2)
    site.hello(boot="b2", fail=True)
    assert site.state.leaving[one["id"]].detail == "node g was restarted"
    site.hello(boot="b2", fail=True)
    assert site.state.leaving[one["id"]].state == "failed"


def test_what_was_leaving_on_a_gpu_that_is_gone_after_a_restart_is_gone() -> None:
    site = Site()
    one, other = (site.create("7g.141gb") for _ in range(2))
    site.office.release(one["id"])
    left = f"GPU-{other['gpu']}"
    site.hello(gpus=(left,))
    assert site.node.instances == 2, "nobody knows"
    site.hello(gpus=(left,), boot="b2")
    assert site.node.instances == 1, "no instance outlives a restart"


@pytest.mark.parametrize(
    "changes", [{"gpus": ("GPU-0", "GPU-1", "GPU-2")}, {"geometry": None}], ids=["gpus", "driver"]
)
def test_a_node_that_became_another_can_be_drained_after_a_restart(changes: dict[str, Any]) -> None:
    """Its hello is refused while instances are there, so nobody could say that they are gone."""
    if "geometry" in changes:
        changes = {"geometry": other_geometry()}
    site = Site()
    one = site.create()
    site.active(one)
    site.hello(boot="b2", status=409, **changes)
    site.office.ask(Drain("g", evict=True))
    site.hello(status=409, **changes)  # of the same boot: they may be there
    assert site.node.instances == 1
    site.hello(boot="b2", **changes)
    assert (site.node.instances, site.node_phase) == (0, "drained")
    assert not site.state.leaving
    assert len(site.node.gpus) == len(site.gpus)


# Holds


def test_gpus_are_held_for_what_is_found_and_let_go_of_when_it_is_not() -> None:
    site = Site(off=("GPU-1",))
    assert site.holds() == {1: {"mig": "MIG mode is off"}}
    site.report(gpus=[{"uuid": "GPU-0", "mig": True, "problem": "XID 79"}])
    assert site.holds() == {
        0: {"problem": "XID 79"},
        1: {"missing": "GPU-1 is not there"},
    }
    waiting = site.create(wait=100.0)
    assert waiting["state"] == "queued"
    rows = len(site.office.rows)
    site.report(gpus=[{"uuid": "GPU-0", "mig": True, "problem": "XID 79"}])
    assert len(site.office.rows) == rows
    site.report()
    assert not site.holds()
    assert site.state.allocations[waiting["id"]].state == "placed", "the queue was served"


def test_an_agent_that_is_lost_holds_its_node_and_frees_nothing() -> None:
    site = Site()
    one = site.create()
    site.active(one)
    status, said = site.office.ask(Lost("g", site.session, 1000.0))
    assert status == 200
    assert said["holds"]["unknown"].startswith("its agent has not been heard of since 1970-01-01")
    rows = len(site.office.rows)
    site.office.ask(Lost("g", site.session, 1000.0))
    assert len(site.office.rows) == rows
    waiting = site.create(wait=100.0)
    assert waiting["state"] == "queued"
    assert site.node.instances == 1
    site.office.ask(Heard("g"))
    site.office.ask(Heard("g"))
    assert site.node.holds == {}
    assert site.state.allocations[waiting["id"]].state == "placed"
    site.office.ask(Lost("g", site.session, 1000.0))
    site.report()
    assert site.node.holds == {}, "a report is a sign of life"


def test_nothing_is_placed_on_a_node_before_its_agent_has_said_what_is_there() -> None:
    site = Site(gpus=("GPU-0",), reports=False)
    why = "its agent has not said yet what is there"
    assert site.node.holds == {"unreported": why}
    status, said = site.office.create("3g.71gb")
    assert (status, said["reason"]) == (409, "capacity")
    lost = said["detail"]
    waiting = site.create("3g.71gb", wait=100.0)
    assert waiting["state"] == "queued"
    site.office.ask(Heard("g"))
    assert site.node.holds == {"unreported": why}, "to be heard of is not enough"
    site.report(foreign=(stranger(start=0),))
    assert site.node.holds == {}
    (part,) = site.state.allocations[waiting["id"]].parts
    assert part.start == 4, "the queue was served, and went around what is there"
    assert site.node.agent.foreign["MIG-x"].blocks

    # What is said today of a node whose agent is silent.
    site.office.release(waiting["id"])
    site.report({"allocation": waiting["id"], "index": 0, "phase": "gone"})
    site.office.ask(Lost("g", site.session, 1000.0))
    status, said = site.office.create("3g.71gb")
    assert (status, said["reason"], said["detail"]) == (409, "capacity", lost)


def test_every_session_has_its_own_first_report() -> None:
    site = Site(gpus=("GPU-0",))
    old = site.session
    one = site.create("1g.18gb")
    site.active(one)
    site.hello(reports=False)
    assert set(site.node.holds) == {"unreported"}
    assert site.state.allocations[one["id"]].state == "active", "what is there stays"
    assert site.office.create("3g.71gb")[0] == 409
    site.report(session=old, status=409)
    assert set(site.node.holds) == {"unreported"}, "what another session says does not count"
    site.report(foreign=(stranger(start=0),))
    assert site.node.holds == {}
    rows = len(site.office.rows)
    site.report(foreign=(stranger(start=0),))
    assert len(site.office.rows) == rows


def test_other_holds_neither_lift_nor_outlive_the_wait_for_a_report() -> None:
    why = ("1g.18gb: the driver offers starts 0-5, the catalog 0-6",)
    site = Site(geometry=other_geometry(), disagreements=why, reports=False)
    assert set(site.node.holds) == {"geometry", "unreported"}
    site.office.ask(Lost("g", site.session, 1000.0))
    assert set(site.node.holds) == {"geometry", "unreported", "unknown"}
    assert set(site.office.ask(Accept("g"))[1]["holds"]) == {"unreported", "unknown"}
    assert site.office.create("1g.18gb")[0] == 409
    rows = len(site.office.rows)
    site.report()
    assert site.node.holds == {}
    assert len(site.office.rows) == rows + 1, "both are lifted at once"


def test_what_a_first_report_does_not_tell_of_stays_held() -> None:
    site = Site(reports=False)
    site.report(gpus=[{"uuid": "GPU-0", "mig": True, "problem": "it cannot be read"}])
    assert site.node.holds == {}
    assert site.holds() == {
        0: {"problem": "it cannot be read"},
        1: {"missing": "GPU-1 is not there"},
    }
    assert site.office.create("1g.18gb")[0] == 409


def test_whoever_follows_the_journal_never_sees_free_what_is_not() -> None:
    """The node is let go of in the last row of a report, when all it told is known."""
    site = Site(gpus=("GPU-0",), reports=False)
    before = len(site.office.rows)
    site.report(foreign=(stranger(),))
    kinds = [type(row.entry).__name__ for row in site.office.rows[before:]]
    assert kinds == ["ForeignSeen", "NodeHeld"]


def test_the_wait_for_a_report_outlives_a_restart_of_the_service() -> None:
    site = Site(gpus=("GPU-0",), reports=False)
    waiting = site.create("3g.71gb", wait=100.0)
    image = image_of(site.state)
    replayed = site.office.fresh()
    for row in site.office.rows:
        replayed.apply(msgspec.structs.replace(row, entry=decode(encode(row.entry))))
    restored = restore(decode_image(encode_image(image)), site.office.fresh())
    for state in (replayed, restored):
        assert image_of(state) == image
        site.office = Office(state=state, first_id=1000)
        assert set(site.node.holds) == {"unreported"}
        assert site.office.create("1g.18gb")[0] == 409
        site.report(foreign=(stranger(start=0),))  # the session goes on with whoever leads
        assert state.allocations[waiting["id"]].parts[0].start == 4


# What is nobody's


def test_what_is_nobodys_blocks_its_slices() -> None:
    site = Site(gpus=("GPU-0",))
    site.report(foreign=(stranger(), stranger(gpu="GPU-unknown", uuid="MIG-y")))
    assert site.office.create("7g.141gb")[0] == 409
    one = site.create("3g.71gb")
    assert one["start"] == 0
    rows = len(site.office.rows)
    site.report(foreign=(stranger(),))
    assert len(site.office.rows) == rows
    site.report(foreign=(stranger(why="stray"),))
    assert site.node.agent.foreign["MIG-x"].why == "stray"
    site.report()
    assert site.create("3g.71gb")["start"] == 4


@pytest.mark.parametrize(
    "changes", [{"profile": ""}, {"profile": "9g.999gb"}, {"size": 2}, {"start": 3}]
)
def test_what_cannot_be_blocked_holds_its_gpu(changes: dict[str, Any]) -> None:
    site = Site(gpus=("GPU-0",))
    site.report(foreign=(stranger(**changes),))
    assert set(site.holds()[0]) == {"foreign"}
    assert site.office.create("1g.18gb")[0] == 409
    assert site.office.ask(Adopt("g", "MIG-x", "acme"))[1]["reason"] == "unusable"
    site.report()
    assert not site.holds()


def test_a_stranger_where_an_allocation_is_to_be() -> None:
    site = Site(gpus=("GPU-0",))
    one = site.create("7g.141gb")
    site.report(foreign=(stranger(),))
    assert not site.node.agent.foreign["MIG-x"].blocks
    assert set(site.holds()[0]) == {"foreign"}
    site.report(
        {"allocation": one["id"], "index": 0, "phase": "failed", "detail": "no room"},
        foreign=(stranger(),),
    )
    site.report({"allocation": one["id"], "index": 0, "phase": "gone"}, foreign=(stranger(),))
    assert site.node.agent.foreign["MIG-x"].blocks, "its slices are blocked as soon as they can be"
    assert not site.holds()
    assert site.create("3g.71gb")["start"] == 0


def test_instances_without_a_uuid_are_known_by_their_place() -> None:
    site = Site()
    bare = stranger(uuid="")
    site.report(foreign=(bare, stranger(uuid="", gpu="GPU-1"), stranger(start=0)))
    names = {"gpu0-3g.71gb-4", "gpu1-3g.71gb-4", "MIG-x"}
    assert set(site.node.agent.foreign) == names
    assert (
        "no compute instance" in site.office.ask(Adopt("g", "gpu0-3g.71gb-4", "acme"))[1]["detail"]
    )
    assert site.office.ask(Evict("g", "gpu0-3g.71gb-4"))[0] == 202
    (order,) = site.desired().evict
    assert (order.gpu, order.uuid, order.profile, order.start) == ("GPU-0", "", "3g.71gb", 4)


def test_adopting_makes_an_allocation_where_it_is() -> None:
    site = Site(gpus=("GPU-0",))
    site.report(foreign=(stranger(),))
    site.office.ask(Cordon("g"))
    status, one = site.office.ask(Adopt("g", "MIG-x", "acme", {"job": "7"}))
    assert status == 201
    assert (one["state"], one["uuid"], one["labels"]) == ("active", "MIG-x", {"job": "7"})
    assert site.state.tenants["acme"].usage.memory_slices == 4
    (wanted,) = site.desired().instances
    assert (wanted.wanted, wanted.uuid) == ("present", "MIG-x")
    rows = len(site.office.rows)
    site.report(foreign=(stranger(),))  # sent before the agent knew
    assert len(site.office.rows) == rows
    assert site.office.ask(Adopt("g", "MIG-x", "acme"))[0] == 404
    site.office.release(one["id"])
    site.report(foreign=(stranger(),))
    assert not site.node.agent.foreign
    site.phase(one, "gone")
    assert site.state.cluster.instance_count == 0


def test_an_order_to_destroy_a_stray_outlives_that_the_agent_takes_it_over() -> None:
    """While it is being destroyed it is the agent's own no more: a foreign one, in use, say."""
    site = Site(gpus=("GPU-0",))
    site.report(foreign=(stranger(why="stray"),))
    assert site.office.ask(Evict("g", "MIG-x"))[0] == 202
    site.report(foreign=(stranger(),))
    assert site.node.agent.foreign["MIG-x"].why == "foreign"
    assert [order.uuid for order in site.desired().evict] == ["MIG-x"]
    assert site.office.create("7g.141gb")[0] == 409, "its slices are blocked as before"
    site.report()
    assert site.desired().evict == ()
    assert site.create("7g.141gb")["start"] == 0


def test_adopting_is_refused_for_good_reasons() -> None:
    site = Site(gpus=("GPU-0",))
    site.office.tenant("small", instances=0)
    site.report(foreign=(stranger(),))
    for command, status, reason in (
        (Adopt("g", "MIG-x", "nobody"), 404, None),
        (Adopt("g", "MIG-none", "acme"), 404, None),
        (Adopt("nowhere", "MIG-x", "acme"), 404, None),
        (Adopt("g", "MIG-x", "small"), 409, "quota"),
    ):
        got, said = site.office.ask(command)
        assert (got, said.get("reason")) == (status, reason)
    for _ in range(2):
        assert site.office.ask(Evict("g", "MIG-x"))[0] == 202
    assert site.office.ask(Adopt("g", "MIG-x", "acme"))[1]["reason"] == "evicted"
    assert len(site.desired().evict) == 1
    site.report()
    assert site.desired().evict == ()
    site.office.node("plain", 1, A100)
    assert site.office.ask(Evict("plain", "MIG-x"))[0] == 404


# Moves


def test_what_runs_on_a_managed_node_is_not_moved() -> None:
    site = Site(gpus=("GPU-0", "GPU-1"))
    site.office.node("plain", 1, H200)
    one = site.create("1g.18gb")
    assert one["node"] == "g"
    at = one["node"], one["gpu"], one["start"]
    status, said = site.office.ask(CarryOut((MoveInstance(one["id"], 0, *at, "plain", 0, 0),)))
    assert (status, said["reason"]) == (409, "stale")
    assert "whose agent cannot move what runs" in said["detail"]
    site.office.ask(Cordon("g"))
    other = site.create("1g.18gb")
    at = other["node"], other["gpu"], other["start"]
    site.office.ask(Uncordon("g"))
    site.report(gpus=[{"uuid": "GPU-0", "mig": True}])
    status, said = site.office.ask(CarryOut((MoveInstance(other["id"], 0, *at, "g", 1, 0),)))
    assert "GPU 1 of 'g' is held" in said["detail"]
    site.report()
    status, said = site.office.ask(CarryOut((MoveInstance(other["id"], 0, *at, "g", 1, 0),)))
    assert status == 200, said
    moved = site.state.allocations[other["id"]].parts[0]
    assert (moved.node, moved.phase, moved.gpu_uuid) == ("g", Phase.PLACED, "GPU-1")


# The journal


def test_entries_that_contradict_the_state_are_refused() -> None:
    site = Site()
    one = site.create()
    site.active(one)
    site.office.release(one["id"])
    site.phase(one, "gone")
    for kind, wrong, match in (
        ("allocated", {"phase": "gone"}, "cannot be gone"),
        ("ended", {"phase": "active"}, "cannot be active"),
        ("node-added", {"gpus": ["GPU-0"]}, "has 2 GPUs, and its agent 1"),
    ):
        with pytest.raises(SlicewiseError, match=match):
            _replay(site.office, kind, wrong)


def _replay(office: Office, kind: str, wrong: dict[str, Any]) -> None:
    """Apply the journal, with something else behind the first entry of that kind."""
    state, behind = office.fresh(), False
    for row in office.rows:
        entry = msgspec.json.decode(encode(row.entry))
        changed = decode(msgspec.json.encode(entry | wrong)) if behind else row.entry
        state.apply(msgspec.structs.replace(row, entry=changed))
        behind = entry["kind"] == kind


def test_a_journal_from_before_there_were_agents_is_read_as_it_was() -> None:
    """Rows and an image, byte for byte as an older version wrote them."""
    rows = [
        b'{"kind":"tenant-set","tenant":"acme"}',
        b'{"kind":"model-entered","geometry":' + msgspec.json.encode(A100) + b"}",
        b'{"kind":"node-added","node":"n0","model":"A100-80GB","gpus":1,"first":0}',
        b'{"kind":"allocated","allocation":{"id":"a1","tenant":"acme","want":'
        b'{"profile":"1g.10gb"},"requested":1.0,"placed":1.0,"parts":[{"node":"n0","gpu":0,'
        b'"model":"A100-80GB","profile":"1g.10gb","start":6,"size":1,"compute":1,'
        b'"memory_gb":10.0}]}}',
    ]
    office = Office()
    for seq, data in enumerate(rows, 1):
        entry = decode(data)
        assert encode(entry) == data or b"model-entered" in data, "and is written as it was"
        office.state.apply(Row(seq, 1.0, "t", entry))
    assert office.state.allocations["a1"].state == "placed"
    image = encode_image(image_of(office.state))
    old = msgspec.json.decode(image)
    del old["leaving"]
    for node in old["nodes"]:
        del node["agent"], node["holds"]
    restored = restore(decode_image(msgspec.json.encode(old)), office.fresh())
    assert encode_image(image_of(restored)) == image
    status, said = office.release("a1")
    assert (status, said["state"]) == (200, "released")
    assert "phase" not in said
    assert office.state.nodes["n0"].instances == 0


BEFORE_REPORTS = [
    b'{"kind":"tenant-set","tenant":"acme"}',
    b'{"kind":"model-entered","geometry":' + msgspec.json.encode(H200) + b"}",
    b'{"kind":"node-added","node":"g","model":"H200-141GB","gpus":1,"first":0}',
    b'{"kind":"agent-joined","node":"g","session":"s1.1000.","boot":"b1","driver":"580",'
    b'"version":"1.0","since":1.0,"gpus":["GPU-0"]}',
    b'{"kind":"allocated","allocation":{"id":"a1","tenant":"acme","want":'
    b'{"profile":"3g.71gb"},"requested":1.0,"placed":1.0,"parts":[{"node":"g","gpu":0,'
    b'"model":"H200-141GB","profile":"3g.71gb","start":4,"size":4,"compute":3,'
    b'"memory_gb":71.0,"phase":"placed","gpu_uuid":"GPU-0"}]}}',
]
"""As an older version wrote it: a session without its hold, and something placed in it."""
FOUND_LATER = [
    b'{"kind":"foreign-seen","node":"g","name":"MIG-x","foreign":{"gpu":0,"uuid":"MIG-x",'
    b'"profile":"3g.71gb","start":4,"size":4}}',
    b'{"kind":"gpu-held","node":"g","gpu":0,"reasons":{"foreign":"it is in the way"}}',
]
"""And what the session's first report told then: somebody else has been there."""


def test_a_journal_from_before_first_reports_were_waited_for_is_read_as_it_was() -> None:
    for journal in (BEFORE_REPORTS, BEFORE_REPORTS + FOUND_LATER):
        site = Site.__new__(Site)
        site.office, site.session, site.gpus = Office(), "s1.1000.", ("GPU-0",)
        twin = Occupancy()
        for seq, data in enumerate(journal, 1):
            entry = decode(data)
            assert twin.take(entry) == []
            site.state.apply(Row(seq, 1.0, "t", entry))
        assert site.node.holds == {}
        image = image_of(site.state)
        assert image_of(restore(decode_image(encode_image(image)), site.office.fresh())) == image
        # From here on all is as it is now: what met is told, and the next session waits.
        failed = {"allocation": "a1", "index": 0, "phase": "failed", "detail": "taken"}
        site.report(failed, foreign=(stranger(),))
        site.report({"allocation": "a1", "index": 0, "phase": "gone"}, foreign=(stranger(),))
        assert site.node.agent.foreign["MIG-x"].blocks
        assert not site.holds()
        assert site.node.holds == {}
        site.hello(reports=False)
        assert set(site.node.holds) == {"unreported"}
