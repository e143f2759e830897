"""Slices of pods that vanished are not given out again at once."""

from __future__ import annotations

import msgspec
import pytest
from tests.kubernetes.objects import claim, node, pod
from tests.kubernetes.publishing import decoded, nvidia
from tests.kubernetes.test_cycle import DRIVER, LIBRARY, Scene, device

from slicewise.kubernetes.api import Condition, Node, Pod, Taint
from slicewise.kubernetes.claim_states import ClaimState
from slicewise.kubernetes.cool_down import LONGEST, CoolDown
from slicewise.kubernetes.devices.pool_reading import read_pool

SEAT = device("7g.80gb", 0).removeprefix("n1/")
SECONDS = 60.0


class Scenes(Scene):
    """A scene with one pod that has a whole GPU, in a claim of its own or a shared one."""

    def __init__(self, seconds: float = SECONDS, name: str = "a") -> None:
        super().__init__("n1")
        self.cool_down = self.cache.cool_down = CoolDown(seconds, lambda: self.now)
        self.name = name
        self.a = self.become(pod("p", [name]), "n1")
        self.hold(1)
        self.cool_down.pod_changed(self.a)

    def deleting(self, grace: int) -> None:
        """The pod is being deleted, and has some time to end."""
        meta = msgspec.structs.replace(self.a.metadata, deletion_grace_period_seconds=grace)
        self.a = msgspec.structs.replace(self.a, metadata=meta)
        self.cool_down.pod_changed(self.a)

    def hold(self, version: int, uid: str = "uid-p") -> None:
        self.change(claim(self.name, seats=[("n1", SEAT)], reserved=[uid], version=version))

    def become(self, old: Pod, home: str, phase: str = "Running", why: str = "") -> Pod:
        conditions = (Condition("DisruptionTarget", "True", why),) if why else ()
        return msgspec.structs.replace(
            old,
            spec=msgspec.structs.replace(old.spec, node_name=home),
            status=msgspec.structs.replace(old.status, phase=phase, conditions=conditions),
        )

    def free(self, version: int = 2) -> None:
        """Kubernetes deallocates the claim."""
        self.change(claim(self.name, version=version))

    def state(self) -> ClaimState:
        return self.cache.records[f"uid-{self.name}"].state

    @property
    def taken(self) -> int:
        self.cache.take_cooled()
        return self.cache.state.cluster.occupied_slices


def booted(boot: str, *taints: str) -> Node:
    made = node("n1")
    info = msgspec.structs.replace(made.status.node_info, boot_id=boot)
    return msgspec.structs.replace(
        made,
        status=msgspec.structs.replace(made.status, node_info=info),
        spec=msgspec.structs.replace(
            made.spec, taints=tuple(Taint(key, "NoExecute") for key in taints)
        ),
    )


def test_the_slices_of_a_pod_that_has_ended_are_free_at_once() -> None:
    scene = Scenes()
    scene.cool_down.pod_changed(scene.become(scene.a, "n1", "Succeeded"))
    scene.free()
    assert scene.taken == 0
    assert scene.state() is ClaimState.PENDING


@pytest.mark.parametrize("order", ["pod first", "claim first", "claim deleted"])
def test_the_slices_of_a_vanished_pod_cool_down(order: str) -> None:
    scene = Scenes()
    scene.ask("b", "7g.80gb")
    if order == "pod first":
        scene.cool_down.pod_deleted(scene.a, True)
    if order == "claim deleted":
        scene.cache.forget("uid-a")
    else:
        scene.free()
    if order == "claim first":
        scene.cool_down.pod_deleted(scene.a, True)
    assert scene.decide() == {}
    assert scene.told()["b"][0] == "Capacity"
    assert scene.cool_down.next_time == SECONDS
    scene.now = SECONDS - 1
    assert scene.taken == 8
    scene.now = SECONDS
    assert scene.taken == 0
    assert list(scene.decide()) == ["b"]
    assert scene.cool_down.next_time is None


def test_the_end_of_the_pod_may_be_seen_after_that_of_the_claim() -> None:
    scene = Scenes()
    scene.free()
    assert scene.taken == 8
    assert scene.state() is ClaimState.COOLING
    scene.cool_down.pod_changed(scene.become(scene.a, "n1", "Failed"))
    assert scene.taken == 0
    assert scene.state() is ClaimState.PENDING


def test_the_claim_itself_waits_and_its_next_pod_is_told() -> None:
    scene = Scenes(name="b-0")
    scene.ask("b", "1g.10gb")
    scene.free(version=3)
    assert scene.decide() == {}
    reason, text = scene.told()["b"]
    assert reason == "CoolingDown"
    assert "'b-0'" in text
    scene.now = SECONDS
    assert scene.cache.take_cooled() == ["team/b-0"]
    scene.cycle.requeue("team/b")
    assert list(scene.decide()) == ["b"]


def test_a_pod_that_was_never_bound_leaves_nothing_behind() -> None:
    scene = Scenes()
    scene.cool_down.pod_deleted(pod("p", ["a"]), True)
    scene.free()
    assert scene.taken == 0


def test_a_pod_known_as_unbound_may_have_been_bound_meanwhile() -> None:
    scene = Scenes()
    waits = pod("p", ["a"])
    scene.cool_down.pod_changed(waits)
    scene.free(version=7)
    assert scene.taken == 8
    for version, taken in (("6", 8), ("8", 0)):
        meta = msgspec.structs.replace(waits.metadata, resource_version=version)
        scene.cool_down.pod_changed(msgspec.structs.replace(waits, metadata=meta))
        assert scene.taken == taken


def test_a_reservation_that_kube_scheduler_undid_leaves_nothing_behind() -> None:
    scene = Scenes()
    scene.cool_down.pod_changed(pod("p", ["a"]))
    scene.change(claim("a", seats=[("n1", SEAT)], version=2))
    scene.free(version=3)
    assert scene.taken == 0


def test_a_tentative_allocation_was_not_used() -> None:
    scene = Scenes()
    scene.free()
    scene.now = SECONDS
    assert scene.taken == 0
    scene.change(claim("a", seats=[("n1", SEAT)], reserved=["uid-p"], tentative=True, version=3))
    scene.free(version=4)
    assert scene.taken == 0


def test_a_deletion_that_was_not_watched_says_nothing_of_the_end() -> None:
    scene = Scenes()
    scene.cool_down.pod_changed(pod("p", ["a"]))
    scene.cool_down.pod_deleted(pod("p", ["a"]), False)  # it may have been bound since
    scene.free()
    assert scene.taken == 8


def test_the_garbage_collection_of_a_lost_node_is_not_the_end_of_a_pod() -> None:
    scene = Scenes()
    ended = scene.become(scene.a, "n1", "Failed", "DeletionByPodGC")
    scene.cool_down.pod_changed(ended)
    scene.cool_down.pod_deleted(ended, True)
    scene.free()
    assert scene.taken == 8


@pytest.mark.parametrize("how", ["restarted", "deleted"])
def test_a_restart_or_the_end_of_the_node_ends_it(how: str) -> None:
    scene = Scenes()
    scene.cool_down.node_changed(booted("one"))
    scene.free()
    scene.cool_down.node_changed(booted("one"))
    assert scene.taken == 8
    if how == "deleted":
        scene.cool_down.node_deleted("n1")
    else:
        scene.cool_down.node_changed(booted("two"))
    assert scene.taken == 0


def test_the_time_begins_when_the_node_is_ready() -> None:
    scene = Scenes()
    scene.cool_down.node_changed(booted("one", "node.kubernetes.io/unreachable"))
    scene.free()
    assert scene.cool_down.next_time == LONGEST * SECONDS
    scene.now = 2 * SECONDS
    assert scene.taken == 8
    scene.cool_down.node_changed(booted("one"))
    scene.now = 3 * SECONDS - 1
    assert scene.taken == 8
    scene.now = 3 * SECONDS
    assert scene.taken == 0


def test_the_time_begins_again_when_the_kubelet_starts() -> None:
    """It does not know the pod any more, and looks for what is left a minute later."""
    scene = Scenes()
    scene.cool_down.kubelet_started("n1", -100.0)
    scene.free()
    assert scene.cool_down.next_time == SECONDS
    scene.cool_down.kubelet_started("n2", 50.0)
    assert scene.cool_down.next_time == SECONDS
    scene.cool_down.kubelet_started("n1", 50.0)
    scene.cool_down.kubelet_started("n1", 20.0)  # an older event that arrives late
    assert scene.cool_down.next_time == 50.0 + SECONDS
    scene.now = SECONDS
    assert scene.taken == 8
    scene.now = 50.0 + SECONDS
    assert scene.taken == 0


def test_a_kubelet_that_starts_over_and_over_is_not_waited_for_for_ever() -> None:
    scene = Scenes()
    scene.free()
    while scene.now < LONGEST * SECONDS:
        scene.cool_down.kubelet_started("n1", scene.now)
        assert scene.taken == 8
        scene.now += SECONDS / 2
    assert scene.taken == 0


@pytest.mark.parametrize("first", ["pod", "claim"])
def test_the_time_begins_after_the_grace_period_of_a_deletion(first: str) -> None:
    """The kubelet grants the rest of it also if the pod is deleted by force then."""
    scene = Scenes()
    scene.deleting(200)
    scene.now = 10.0
    scene.deleting(0)
    if first == "pod":
        scene.cool_down.pod_deleted(scene.a, True)
    scene.free()
    assert scene.cool_down.next_time == 200.0 + SECONDS


def test_a_grace_period_that_is_over_adds_nothing() -> None:
    scene = Scenes()
    scene.deleting(20)
    scene.now = 50.0
    scene.cool_down.pod_deleted(scene.a, True)
    scene.free()
    assert scene.cool_down.next_time == 50.0 + SECONDS


def test_the_time_begins_when_the_driver_is_back() -> None:
    scene = Scenes()
    scene.cool_down.node_changed(booted("one"))
    scene.cache.withdraw_pool((DRIVER, "n9"))
    scene.free()
    scene.cache.withdraw_pool((DRIVER, "n1"))
    scene.now = 2 * SECONDS
    assert scene.taken == 8
    reading = read_pool(decoded(nvidia("A100-80GB", 1, "n1")), LIBRARY)
    scene.cache.set_pool((DRIVER, "n1"), reading, "n1")
    assert scene.cool_down.next_time == 3 * SECONDS
    scene.now = 3 * SECONDS
    assert scene.taken == 0


def test_a_driver_of_a_deleted_node_is_not_waited_for() -> None:
    scene = Scenes()
    scene.cool_down.node_changed(booted("one"))
    scene.free()
    scene.cool_down.node_deleted("n1")
    scene.cache.withdraw_pool((DRIVER, "n1"))
    assert scene.taken == 0
    assert not scene.cool_down._awaited


def test_node_and_driver_must_both_be_back() -> None:
    scene = Scenes()
    scene.cool_down.node_changed(booted("one", "node.kubernetes.io/unreachable"))
    scene.cool_down.driver_changed("n1", DRIVER, False)
    scene.free()
    scene.cool_down.node_changed(booted("one"))
    scene.now = 2 * SECONDS
    assert scene.taken == 8
    scene.cool_down.driver_changed("n1", DRIVER, True)
    assert scene.cool_down.next_time == 3 * SECONDS


def test_a_lost_node_is_not_waited_for_for_ever() -> None:
    scene = Scenes()
    scene.cool_down.node_changed(booted("one", "node.kubernetes.io/not-ready"))
    scene.free()
    scene.now = LONGEST * SECONDS
    assert scene.taken == 0


@pytest.mark.parametrize("first", ["pod", "claim"])
def test_after_a_failed_prepare_it_takes_longer(first: str) -> None:
    scene = Scenes()
    scene.cool_down.prepare_failed("uid-other")
    scene.cool_down.prepare_failed("uid-p")
    if first == "pod":
        scene.cool_down.pod_deleted(scene.a, True)
    scene.free()
    scene.now = 2 * SECONDS
    assert scene.taken == 8
    scene.now = LONGEST * SECONDS
    assert scene.taken == 0


def test_it_can_be_switched_off() -> None:
    scene = Scenes(0.0)
    scene.free()
    assert scene.taken == 0


def test_the_allocation_of_another_allocator_ends_it() -> None:
    scene = Scenes()
    scene.free()
    stock = {"name": "r", "exactly": {"deviceClassName": "mig.nvidia.com"}}
    small = device("1g.10gb", 6).removeprefix("n1/")
    scene.cache.update(claim("s", stock, seats=[("n1", small)]))
    assert not scene.cache.clashes
    assert scene.taken == 1
    assert scene.state() is ClaimState.PENDING


def test_another_leader_may_allocate_the_claim_again() -> None:
    scene = Scenes()
    scene.free()
    small = device("1g.10gb", 6).removeprefix("n1/")
    scene.change(claim("a", seats=[("n1", small)], version=5))
    assert scene.taken == 1
    assert scene.state() is ClaimState.ALLOCATED
    assert scene.cool_down.count == 0


def test_a_node_that_is_replaced_keeps_nothing() -> None:
    scene = Scenes()
    scene.free()
    reading = read_pool(decoded(nvidia("A100-80GB", 2, "n1")), LIBRARY)
    scene.cache.set_pool((DRIVER, "n1"), reading, "n1")
    assert scene.cool_down.count == 0
    assert scene.taken == 0


def test_only_the_latest_ends_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slicewise.kubernetes.cool_down._MOST_GONE", 2)
    scene = Scenes()
    for name in ("p", "q", "r"):
        scene.cool_down.pod_changed(scene.become(pod(name, ["a"]), "n1", "Succeeded"))
    scene.free()
    assert scene.taken == 8
