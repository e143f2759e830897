"""How pods wait: lines, fair order between namespaces, reservations, and what they are told."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec
import pytest
from tests.kubernetes.objects import claim, node, pod, wants
from tests.kubernetes.test_controller import controller, tell, with_node
from tests.kubernetes.test_cycle import Scene, device, names
from tests.tenants import ref

from slicewise.engine.reservation_rules import ReservationRules
from slicewise.engine.reservations import Window
from slicewise.journal.entries import QuotaRecord
from slicewise.kubernetes.api import Pod
from slicewise.kubernetes.controller import Leads
from slicewise.kubernetes.event_recorder import UPDATE_SECONDS
from slicewise.kubernetes.informer import CLAIMS, PODS, Changed
from slicewise.kubernetes.pod_lifetimes import OVERDUE_SECONDS, START_SECONDS

AFTER = 300.0
GRACE = 30


def fill(scene: Scene, *names: str, profile: str = "1g.10gb", namespace: str = "team") -> None:
    """Place pods one after the other."""
    for name in names:
        scene.ask(name, profile, namespace=namespace)
        assert len(scene.decide()) == 1
    scene.told()


def starved(gpus: int = 1, **spec: object) -> Scene:
    """A large pod that waited long and was overtaken by small ones."""
    scene = Scene("n1", gpus=gpus, rules=ReservationRules(AFTER, 0.5))
    fill(scene, *[f"old{number}" for number in range(gpus)], profile="4g.40gb")
    scene.ask("large", "7g.80gb", namespace="other", **spec)
    scene.decide()
    scene.now = 10.0
    fill(scene, "quick")
    scene.now = AFTER
    scene.decide()
    assert len(scene.cycle.reservations) == 1
    return scene


def started(scene: Scene, made: Pod, at: float) -> None:
    """The kubelet has started a pod."""
    text = datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    status = msgspec.structs.replace(made.status, start_time=text)
    scene.pending.set_pod(msgspec.structs.replace(made, status=status))


# Order


def test_a_flood_of_one_namespace_does_not_block_another() -> None:
    scene = Scene("n1")
    fill(scene, "first")
    for number in range(300):
        scene.ask(f"flood{number}", "7g.80gb")
    scene.ask("small", "1g.10gb", namespace="other")
    assert names(scene.decide()) == ["other/small"]
    scene.ask("another", "3g.40gb")  # nor its own pods that ask for something else
    assert names(scene.decide()) == ["another"]


def test_the_namespace_with_the_lower_share_is_next() -> None:
    scene = Scene("n1")
    fill(scene, "a", profile="3g.40gb")
    scene.ask("b", "4g.40gb", namespace="other")
    scene.decide()
    scene.ask("c", "4g.40gb")
    scene.ask("d", "4g.40gb", namespace="third")
    assert names(scene.decide()) == []
    scene.end("b", "other")
    assert names(scene.decide()) == ["third/d"]  # c came first, but its namespace has a 3g


def test_a_weight_divides_the_share() -> None:
    scene = Scene("n1", gpus=2)
    scene.cache.set_tenant(ref("heavy"), QuotaRecord(weight=10.0))
    fill(scene, "a", profile="3g.40gb", namespace="heavy")
    fill(scene, "b", profile="1g.10gb", namespace="light")
    fill(scene, "x", profile="7g.80gb")
    scene.ask("light2", "7g.80gb", namespace="light")
    scene.ask("heavy2", "7g.80gb", namespace="heavy")
    scene.decide()
    scene.end("x")
    assert names(scene.decide()) == ["heavy/heavy2"]


def test_a_pod_within_the_guarantee_of_its_namespace_is_next() -> None:
    scene = Scene("n1", gpus=2)
    scene.cache.set_tenant(ref("sure"), QuotaRecord(guarantee=12))
    fill(scene, "a", profile="3g.40gb", namespace="sure")
    fill(scene, "x", profile="7g.80gb", namespace="third")
    scene.ask("poor", "7g.80gb")
    scene.ask("big", "4g.40gb", "3g.40gb", "1g.10gb", namespace="sure")  # 4 + 9 slices
    scene.ask("exact", "7g.80gb", namespace="sure")  # 4 + 8 slices
    scene.decide()
    scene.end("x", "third")
    assert names(scene.decide()) == ["sure/exact"]


def test_priority_counts_between_namespaces_up_to_their_highest() -> None:
    scene = Scene("n1", gpus=2)
    fill(scene, "x", profile="7g.80gb", namespace="third")
    fill(scene, "y", namespace="other")
    scene.ask("first", "7g.80gb")
    scene.ask("urgent", "7g.80gb", namespace="other", priority=1000)
    scene.decide()
    scene.end("x", "third")
    assert names(scene.decide()) == ["first"]
    scene.cache.set_tenant(ref("other"), QuotaRecord(max_priority=10))
    scene.ask("second", "7g.80gb")
    scene.decide()
    scene.end("first")
    assert names(scene.decide()) == ["other/urgent"]


def test_identical_pods_are_not_tried_one_by_one() -> None:
    scene = Scene("n1")
    fill(scene, "x")
    for number in range(50):
        scene.ask(f"p{number}", "7g.80gb", "1g.10gb")
    scene.decide()
    scene.ask("last", "7g.80gb", "1g.10gb")
    before = scene.cycle._dispatcher.attempts
    scene.decide()
    assert scene.cycle._dispatcher.attempts == before  # what is known of the others holds for it
    scene.end("x")
    assert names(scene.decide()) == []  # the two do not fit on one GPU
    assert scene.cycle._dispatcher.attempts == before + 1


def test_pods_that_fit_other_nodes_have_a_line_of_their_own() -> None:
    scene = Scene("n1", "n2")
    labelled = node("n2")
    meta = msgspec.structs.replace(labelled.metadata, labels={"zone": "b"})
    scene.node_resources.node_changed(msgspec.structs.replace(labelled, metadata=meta))
    fill(scene, "x", profile="7g.80gb")
    scene.ask("picky", "7g.80gb", nodeSelector={"zone": "c"})
    scene.ask("easy", "7g.80gb")
    assert names(scene.decide()) == ["easy"]
    assert scene.told()["picky"][0] == "NoNode"
    assert scene.stats.lines == 1


def test_a_pod_that_avoids_a_node_does_not_keep_it_from_its_line() -> None:
    scene = Scene("n1")
    scene.ask("a", "7g.80gb")
    scene.decide()
    before = scene.pending.claims["team/a-0"]
    scene.change(msgspec.structs.replace(before, status=type(before.status)()))
    scene.cycle.unbound.back_off(before)
    scene.ask("b", "7g.80gb")
    assert names(scene.decide()) == ["b"]


def test_pods_keep_their_order_when_their_namespace_is_created_again() -> None:
    scene = Scene("n1")
    fill(scene, "x", profile="7g.80gb", namespace="third")
    scene.ask("a", "7g.80gb")
    scene.ask("b", "7g.80gb")
    scene.decide()
    scene.cache.drop_tenant("team")
    scene.cache.set_tenant(ref("team"), QuotaRecord(guarantee=8))
    scene.ask("c", "7g.80gb", namespace="other")
    scene.end("x", "third")
    assert names(scene.decide()) == ["a"]


# Reservations


def test_a_window_is_reserved_for_a_pod_that_waited_and_was_overtaken() -> None:
    scene = Scene("n1", gpus=2, rules=ReservationRules(AFTER, 0.5))
    fill(scene, "x", "y", profile="4g.40gb")
    scene.ask("large", "7g.80gb")
    scene.decide()
    scene.now = AFTER + 1
    scene.decide()
    assert len(scene.cycle.reservations) == 0  # it was not overtaken
    scene.ask("z", "1g.10gb")
    assert names(scene.decide()) == ["z"]
    assert len(scene.cycle.reservations) == 1
    assert scene.stats.reservations == 1
    reason, text = scene.told()["large"]
    assert reason == "OwnReservation"
    assert text == (
        "reserved on GPU 1 of node n1 from slice 0; it opens when 1 instance ends, "
        "at a time that is not known"
    )


def test_a_reserved_window_is_kept_from_others_and_used() -> None:
    scene = starved()
    scene.ask("small", "1g.10gb")
    assert names(scene.decide()) == []
    assert scene.told()["small"] == (
        "Reserved",
        "a window is open on GPU 0 of node n1, reserved for a pod that has waited longer",
    )
    scene.ask("pair", "1g.10gb", "1g.10gb")
    scene.decide()
    reason, text = scene.told()["pair"]
    assert reason == "Reserved"
    assert text.startswith("node n1 has room for 1g.10gb and 1g.10gb together, but")
    scene.end("old0")
    assert names(scene.decide()) == []
    scene.end("quick")
    assert names(scene.decide()) == ["other/large"]
    assert len(scene.cycle.reservations) == 0
    assert scene.told()["small"][0] == "Capacity"


def test_a_pod_that_disappears_gives_its_reservation_back() -> None:
    scene = starved()
    scene.ask("small", "1g.10gb")
    assert names(scene.decide()) == []
    scene.end("large", "other")
    assert names(scene.decide()) == ["small"]
    assert len(scene.cycle.reservations) == 0


def test_pods_with_several_devices_get_no_reservation() -> None:
    scene = Scene("n1", gpus=2, rules=ReservationRules(AFTER, 1.0))
    fill(scene, "x", "y", profile="4g.40gb")
    scene.ask("pair", "7g.80gb", "7g.80gb")
    scene.decide()
    scene.now = 10.0
    fill(scene, "quick")
    scene.now = 2 * AFTER
    scene.decide()
    assert len(scene.cycle.reservations) == 0


def test_reservations_end_when_another_replica_leads() -> None:
    scene = starved()
    scene.cycle.drop_reservations()
    assert len(scene.cycle.reservations) == 0
    scene.ask("small", "1g.10gb")
    assert names(scene.decide()) == ["small"]


def test_a_replica_that_lost_the_lease_has_no_reservations() -> None:
    one = controller()
    with_node(one)
    tell(one, Changed(CLAIMS, claim("a", config=[wants(profile="7g.80gb")])))
    tell(one, Changed(PODS, pod("p", ["a"])))
    (ticket,) = one._cycle._queue
    one._cycle.reserve(ticket.line, (Window(0, 0, None),))
    one.step(0)
    assert len(one._cycle.reservations) == 1  # a pause of the watches is no reason to end it
    tell(one, Leads(False))
    assert len(one._cycle.reservations) == 0
    assert one.cache.state.cluster.reserved(0) is None


def test_a_pod_with_a_part_of_its_devices_gets_the_rest_on_the_same_node() -> None:
    scene = Scene("n1", "n2")
    half = device("4g.40gb", 0, "n2").removeprefix("n2/")
    scene.ask("y", "4g.40gb", "3g.40gb")
    scene.change(claim("y-0", seats=[("n2", half)], node="n2", version=2))
    assert scene.decide() == {"y": [device("3g.40gb", 4, "n2")]}
    assert scene.cycle.unbound.take_stuck() == []
    assert scene.decide() == {}


def test_a_window_is_reserved_only_on_a_node_that_can_run_the_pod() -> None:
    scene = Scene("n1", "n2", rules=ReservationRules(AFTER, 1.0))
    scene.node_resources.node_changed(node("n1", cpu="4"))
    scene.node_resources.node_changed(node("n2", cpu="16"))
    needs = [{"name": "main", "resources": {"requests": {"cpu": "6"}}}]
    scene.ask("a", "4g.40gb")
    scene.ask("b", "4g.40gb", containers=needs)
    assert len(scene.decide()) == 2
    many = [{"name": "main", "resources": {"requests": {"cpu": "12"}}}]
    scene.ask("large", "7g.80gb", containers=many)
    scene.decide()
    scene.now = AFTER
    scene.ask("quick", "1g.10gb")
    assert names(scene.decide()) == ["quick"]
    # n1 is too small. On n2 are 10 CPUs free now, and 16 once the pod in the window has ended.
    assert scene.told()["large"][1].startswith("reserved on GPU 0 of node n2 from slice 0; ")
    scene.node_resources.node_changed(node("n2", cpu="8"))
    scene.ask("another", "1g.10gb")
    scene.decide()
    assert len(scene.cycle.reservations) == 0  # useless now


def test_a_reservation_ends_with_its_node() -> None:
    scene = starved()
    scene.cache.pools.withdraw(("gpu.nvidia.com", "n1"))
    scene.end("old0")
    scene.end("quick")
    assert scene.cache.state.nodes == {}
    scene.decide()
    assert len(scene.cycle.reservations) == 0


def test_a_known_end_is_told_and_lets_a_short_pod_pass() -> None:
    scene = Scene("n1", rules=ReservationRules(AFTER, 1.0))
    scene.now = 1_000_000.0
    old = scene.ask("old", "4g.40gb", activeDeadlineSeconds=3600)
    quick = scene.ask("quick", "1g.10gb", activeDeadlineSeconds=600)
    scene.decide()
    started(scene, old, scene.now)
    started(scene, quick, scene.now)
    scene.ask("large", "7g.80gb", namespace="other")
    scene.decide()
    scene.now += 1
    fill(scene, "later")
    scene.end("later")
    scene.now += AFTER
    scene.decide()
    assert len(scene.cycle.reservations) == 1
    opens = 1_000_000.0 + 3600 + GRACE
    told = datetime.fromtimestamp(opens, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    left = opens - scene.now - START_SECONDS - GRACE
    scene.ask("long", "1g.10gb", activeDeadlineSeconds=int(left) + 1)
    scene.ask("unknown", "1g.10gb")
    scene.ask("short", "1g.10gb", activeDeadlineSeconds=int(left))
    assert names(scene.decide()) == ["short"]
    messages = scene.told()
    assert messages["long"][0] == messages["unknown"][0] == "Reserved"
    assert messages["other/large"] == (
        "OwnReservation",
        f"reserved on GPU 0 of node n1 from slice 0; it opens at {told} at the latest",
    )


def test_a_pod_that_has_not_ended_in_time_has_an_unknown_end() -> None:
    scene = Scene("n1")
    scene.ask("a", "4g.40gb", activeDeadlineSeconds=100, terminationGracePeriodSeconds=5)
    scene.decide()
    (instance,) = scene.cache.state.cluster.instances_on(0)
    ends = START_SECONDS + 105
    assert scene.cycle.ends(instance) == ends
    scene.now = ends + OVERDUE_SECONDS
    assert scene.cycle.ends(instance) is None


def test_a_claim_that_other_pods_may_use_has_an_unknown_end() -> None:
    scene = Scene("n1")
    made = scene.ask("a", "4g.40gb", activeDeadlineSeconds=100)
    free = scene.pending.claims["team/a-0"]
    meta = msgspec.structs.replace(free.metadata, owner_references=())
    scene.pending.claims["team/a-0"] = msgspec.structs.replace(free, metadata=meta)
    pending_pod = scene.pending.pending_pod("team/a")
    assert pending_pod is not None
    assert scene.cycle._lifetimes.lease(pending_pod) is None
    scene.decide()
    (instance,) = scene.cache.state.cluster.instances_on(0)
    assert scene.cycle.ends(instance) is None
    assert list(scene.cycle._lifetimes.users(instance)) == [made.metadata.uid]


def test_a_device_of_another_controller_has_an_unknown_end() -> None:
    scene = Scene("n1")
    placement = scene.cache.state.cluster.state(0).geometry.placements[0]
    instance = scene.cache.state.cluster.put(0, placement.number)
    assert scene.cycle.ends(instance) is None
    assert list(scene.cycle._lifetimes.users(instance)) == []


def test_without_reservations_nothing_is_looked_at() -> None:
    scene = Scene("n1", rules=ReservationRules(float("inf"), 0.1))
    fill(scene, "x", profile="4g.40gb")
    scene.ask("large", "7g.80gb")
    scene.decide()
    fill(scene, "quick")
    assert scene.cycle.next_time is None
    scene.now = 1e6
    scene.decide()
    assert len(scene.cycle.reservations) == 0


# What they are told


@pytest.mark.parametrize(
    ("ahead", "said"),
    [
        (0, ""),
        (1, "; 1 pod of this namespace that asks for the same is ahead"),
        (2, "; 2 pods of this namespace that ask for the same are ahead"),
        (10, "; 10 pods of this namespace that ask for the same are ahead"),
        (11, "; more than 10 pods of this namespace that ask for the same are ahead"),
        (20, "; more than 10 pods of this namespace that ask for the same are ahead"),
        (21, "; more than 20 pods of this namespace that ask for the same are ahead"),
    ],
)
def test_a_pod_is_told_how_many_are_ahead(ahead: int, said: str) -> None:
    scene = Scene("n1")
    fill(scene, "x", profile="7g.80gb")
    for number in range(ahead + 1):
        scene.ask(f"p{number}", "7g.80gb")
    scene.ask("other", "7g.80gb", namespace="other")
    scene.decide()
    text = scene.told()[f"p{ahead}"][1]
    assert text == f"no GPU has enough free for 7g.80gb (0 slices are free in all){said}"


def test_pods_behind_the_first_are_told_in_turn() -> None:
    scene = Scene("n1")
    fill(scene, "x", profile="7g.80gb")
    for number in range(60):
        scene.ask(f"p{number}", "7g.80gb")
    scene.decide()
    assert len(scene.told()) == 60  # all are new
    scene.end("x")
    scene.decide()
    told = [set(scene.told())]
    while (due := scene.cycle.next_time) is not None and due < scene.now + 2:
        scene.now = due
        scene.decide()
        told.append(set(scene.told()))
    assert told[0] == {"p1"}  # the first now
    assert [len(one) for one in told[1:4]] == [20, 20, 19]
    assert set().union(*told) == {f"p{number}" for number in range(1, 60)}


def test_a_message_that_came_too_soon_is_repeated() -> None:
    scene = Scene("n1")
    fill(scene, "x", profile="7g.80gb")
    scene.ask("a", "7g.80gb")
    scene.decide()
    assert "a" in scene.told()
    scene.cycle.report_again()
    assert scene.cycle.next_time is not None
    assert scene.cycle.next_time <= UPDATE_SECONDS
    scene.now = UPDATE_SECONDS
    scene.decide()
    assert "a" in scene.told()
