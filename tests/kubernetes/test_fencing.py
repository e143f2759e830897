"""A new leader fences former ones; claims that the API refuses to change do not stop it."""

from __future__ import annotations

import threading
import time

import pytest
from tests.kubernetes.actors import TEAM, make_claim, make_pod
from tests.kubernetes.objects import claim
from tests.kubernetes.simulated import LEASE
from tests.kubernetes.simulation import Simulation
from tests.kubernetes.test_controller import Closed

from slicewise.kubernetes.allocation_writer import WRITERS
from slicewise.kubernetes.api_client import KubernetesApiError
from slicewise.kubernetes.claim_client import FINALIZER
from slicewise.kubernetes.claim_states import ClaimState
from slicewise.kubernetes.controller import Controller, ControllerOptions
from slicewise.kubernetes.informer import CLAIMS, PODS


class Story:
    """A simulation in which the test chooses the steps."""

    def __init__(self) -> None:
        self.simulation = Simulation(b"")
        self.api = self.simulation.api
        self.first, self.second = self.simulation.replicas
        self.changed = 0
        """The changes by the new leader."""
        self.first.controller.elector.beat()
        self.simulation._busy(self.first)
        assert self.first.controller.deciding

    def waits(self, name: str, profile: str = "1g.6gb", **metadata: object) -> str:
        """A pod that waits for a claim from a template."""
        make_pod(self.api, name, [profile], [])
        for _ in range(2):
            self.simulation.claim_controller.see_to_pod(f"{TEAM}/{name}")
        [key] = [key for key in self.api.there[CLAIMS.name] if key.startswith(f"{TEAM}/{name}-")]
        self.api.change(CLAIMS.name, key, lambda one: one["metadata"].update(metadata))
        return key

    def take_over(self) -> None:
        """The first replica is paused, and the second one takes over."""
        self.second.hear_all()
        self.second.step()
        self.second.controller.elector.beat()  # it notices the lease
        self.simulation.now += LEASE + 1
        self.second.controller.elector.beat()
        before = self.api.changes
        self.simulation._busy(self.second)
        self.changed = self.api.changes - before

    def has_devices(self, key: str) -> bool:
        return bool(self.api.there[CLAIMS.name][key]["status"].get("allocation"))


def test_claims_without_the_finalizer_need_no_write() -> None:
    """However many wait, and for whatever."""
    story = Story()
    for number in range(50):
        make_claim(story.api, f"c{number}", "1g.6gb")
    marked = make_claim(story.api, "marked", "1g.6gb")
    story.api.change(CLAIMS.name, marked, lambda c: c["metadata"].update(finalizers=[FINALIZER]))
    story.take_over()
    assert story.second.controller.deciding
    assert story.changed == 1  # the marked one
    assert story.api.there[CLAIMS.name][marked]["metadata"]["finalizers"] == []


def test_a_claim_that_cannot_be_changed_does_not_stop_a_new_leader() -> None:
    story = Story()
    odd = story.waits("p0", finalizers=[FINALIZER])
    story.api.protected.add(odd)
    story.take_over()
    leader = story.second.controller
    assert leader.deciding
    assert (
        leader.cache.records[story.api.there[CLAIMS.name][odd]["metadata"]["uid"]].state
        is ClaimState.QUARANTINED
    )
    assert leader.stats.quarantined == 1
    assert leader.warnings == (
        f"1 claim is not allocated, because the API refuses to change them: {odd}: the Kubernetes "
        "API refused (422 Invalid): a policy protects it",
    )
    [told] = story.api.there[PODS.name][f"{TEAM}/p0"]["status"]["conditions"]
    assert told["reason"] == "Quarantined"
    fine = story.waits("p1")
    story.simulation._busy(story.second)
    assert story.has_devices(fine)
    assert not story.has_devices(odd)
    story.api.protected.clear()
    story.simulation.now += 10
    story.second.controller.elector.beat()
    story.simulation._busy(story.second)
    assert story.has_devices(odd)
    assert not any(leader.warnings)


def test_an_allocation_that_is_refused_is_told_and_tried_again() -> None:
    story = Story()
    odd = story.waits("p0")
    story.api.protected.add(odd)
    fine = story.waits("p1")
    story.simulation._busy(story.first)
    assert story.has_devices(fine)
    assert story.first.controller.stats.quarantined == 1
    before = story.first.controller.stats.failed
    for _ in range(20):
        story.simulation._busy(story.first)
    assert story.first.controller.stats.failed == before  # not without a pause
    story.api.protected.clear()
    story.simulation.now += 10
    story.first.controller.elector.beat()
    story.simulation._busy(story.first)
    assert story.has_devices(odd)


def test_claims_are_fenced_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """With real threads: as many at a time as there are writers."""
    one = Controller(Closed(), ControllerOptions())  # type: ignore[arg-type]
    client = one._writer._claim_client
    running, most, lock = [0], [0], threading.Lock()

    def fence(_: object) -> None:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        time.sleep(0.02)
        with lock:
            running[0] -= 1

    found = [claim(f"c{number}", finalizers=[FINALIZER]) for number in range(4 * WRITERS)]
    monkeypatch.setattr(client, "list_claims", lambda: found)
    monkeypatch.setattr(client, "fence", fence)
    done: list[bool] = []
    one._writer.fencing.start(done.append)
    while not done:
        one.step(1.0)
    assert done == [True]
    assert most == [WRITERS]
    one._writer.stop()


def test_a_leader_that_cannot_allocate_is_not_ready() -> None:
    story = Story()
    assert story.first.controller.problem == ""
    story.second.hear_all()
    story.second.step()
    assert story.second.controller.problem == ""  # it would be ready to lead
    make_claim(story.api, "c", "1g.6gb")
    story.second.controller.elector.beat()
    story.simulation.now += LEASE + 1
    story.second.controller.elector.beat()
    story.second.hear_all()
    story.second.step()
    assert "does not allocate yet: writes of former" in story.second.controller.problem
    story.second.writers.go_on(0, None)
    story.second.writers.go_on(0, KubernetesApiError(403, "Forbidden", "no lists for you"))
    story.second.step()
    assert "does not allocate yet: the Kubernetes API refused" in story.second.controller.problem
    story.simulation.now += 1
    story.simulation._busy(story.second)
    assert story.second.controller.problem == ""


def test_a_leader_that_lacks_a_right_is_not_ready() -> None:
    """A refusal of one claim, by a policy, is a warning only."""
    story = Story()
    story.waits("p0")
    story.first.hear_all()
    story.first.step()
    why = 'User "u" cannot patch resource "resourceclaims/status" in API group "resource.k8s.io"'
    story.first.writers.go_on(0, None)
    while story.first.writers.jobs:
        story.first.writers.go_on(0, KubernetesApiError(403, "Forbidden", why))
    story.first.step()
    assert f"may not allocate: the Kubernetes API refused (403 Forbidden): {why}" in (
        story.first.controller.problem
    )
    story.simulation.now += 10
    story.first.controller.elector.beat()
    story.simulation._busy(story.first)
    assert story.first.controller.problem == ""


def test_a_refusal_while_a_write_of_its_own_is_in_flight_is_left_to_that_write() -> None:
    """The lease was lost and won again meanwhile."""
    story = Story()
    key = story.waits("p0")
    story.first.hear_all()
    story.first.step()
    leader = story.first.controller
    uid = story.api.there[CLAIMS.name][key]["metadata"]["uid"]
    assert leader.cache.records[uid].state is ClaimState.WRITING
    refusal = KubernetesApiError(422, "Invalid", "a policy protects it")
    leader._writer.fencing._refused(leader.pending.claims[key], refusal)
    assert leader.cache.records[uid].state is ClaimState.WRITING
    assert leader.quarantine.records() == []
