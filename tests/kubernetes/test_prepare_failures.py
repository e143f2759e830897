"""Bound pods whose devices the driver cannot prepare are told, counted and cool down for longer."""

from __future__ import annotations

import msgspec
from tests.kubernetes.objects import pod

from slicewise.kubernetes.api import Condition, KubeletEvent, Pod
from slicewise.kubernetes.cool_down import CoolDown
from slicewise.kubernetes.pending_claims import PendingClaims
from slicewise.kubernetes.prepare_failures import PrepareFailures, PrepareMessage
from slicewise.kubernetes.stats import Stats


class Desk:
    def __init__(self) -> None:
        self.pending, self.stats = PendingClaims(), Stats()
        self.cool_down = CoolDown(60.0, lambda: 0.0)
        self.told: list[PrepareMessage] = []
        self.failures = PrepareFailures(
            self.pending, self.cool_down, self.stats, lambda _, message: self.told.append(message)
        )

    def show(self, node: str = "n1", phase: str = "Pending", *conditions: Condition) -> Pod:
        made = pod("a", ["c"], nodeName=node)
        status = msgspec.structs.replace(made.status, phase=phase, conditions=conditions)
        made = msgspec.structs.replace(made, status=status)
        self.pending.set_pod(made)
        self.cool_down.pod_changed(made)
        self.failures.pod_changed(made)
        return made

    def event(self, uid: str = "uid-a", text: str = "Failed to prepare: odd") -> None:
        about = {"name": "a", "namespace": "team", "uid": uid}
        made = {"metadata": {"name": "e"}, "involvedObject": about, "message": text}
        self.failures.event(msgspec.convert(made, KubeletEvent))


def test_a_pod_whose_devices_cannot_be_prepared_is_told_until_it_starts() -> None:
    desk = Desk()
    desk.show()
    desk.event()
    desk.event(text="x" * 2000)
    assert [one.prepared for one in desk.told] == [False, False]
    assert desk.told[0].text.startswith("node n1: Failed to prepare: odd; the pod keeps its slices")
    assert len(desk.told[1].text) < 700
    assert (desk.stats.prepare_failures, desk.stats.prepares_failing) == (1, 1)
    assert "team/a" in desk.failures.summary()
    assert desk.cool_down.start("uid-c", "n1", ["uid-a"], "5")
    assert desk.cool_down.next_time == 600.0
    desk.show("n1", "Pending", Condition("PodReadyToStartContainers", "True"))
    assert desk.told[-1].prepared
    assert desk.failures.summary() == ""
    assert (desk.stats.prepare_failures, desk.stats.prepares_failing) == (1, 0)


def test_only_the_events_of_bound_pods_that_have_not_started_count() -> None:
    desk = Desk()
    desk.event()
    desk.show(node="")
    desk.event()
    desk.show()
    desk.event(uid="uid-of-another")
    desk.show("n1", "Running")
    desk.event()
    assert desk.told == []
    assert desk.stats.prepares_failing == 0


def test_a_pod_that_is_deleted_or_fails_is_not_told() -> None:
    desk = Desk()
    desk.show()
    desk.event()
    desk.failures.pod_deleted("uid-a")
    assert desk.stats.prepares_failing == 0
    desk.show()
    desk.event()
    desk.show("n1", "Failed")
    assert [one.prepared for one in desk.told] == [False, False]
    assert desk.failures.summary() == ""


def test_the_slices_of_a_pod_that_recovered_cool_down_as_usual() -> None:
    desk = Desk()
    desk.show()
    desk.event()
    desk.show("n1", "Running")
    assert desk.cool_down.start("uid-c", "n1", ["uid-a"], "5")
    assert desk.cool_down.next_time == 60.0


def test_a_driver_that_was_not_called_has_left_nothing_behind() -> None:
    """The pod is told as well, but its slices are not in doubt."""
    desk = Desk()
    desk.show()
    why = "prepare dynamic resources: DRA driver gpu.nvidia.com is not registered"
    desk.event(text=f"Failed to prepare dynamic resources: {why}")
    assert [one.prepared for one in desk.told] == [False]
    assert desk.cool_down.start("uid-c", "n1", ["uid-a"], "5")
    assert desk.cool_down.next_time == 60.0
