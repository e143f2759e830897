"""A new leader does not give out the slices of pods that vanished before it was started."""

from __future__ import annotations

import msgspec
import pytest
from tests.kubernetes.actors import TEAM, make_pod, seats_of
from tests.kubernetes.fake_api import LEASES
from tests.kubernetes.objects import claim
from tests.kubernetes.simulated import LEASE
from tests.kubernetes.simulation import Simulation
from tests.kubernetes.test_cool_down import SEAT, SECONDS, Scenes, booted
from tests.kubernetes.test_cycle import DRIVER, device

from slicewise.kubernetes.allocations import DeviceId
from slicewise.kubernetes.claim_states import ClaimState
from slicewise.kubernetes.cooling_notes import CoolingNote, decode, encode
from slicewise.kubernetes.informer import CLAIMS, KUBELET_STARTS, PODS
from slicewise.kubernetes.leader_election import NOTE


def note(number: int, until: float = 100.0, namespace: str = "team") -> CoolingNote:
    devices = (DeviceId(DRIVER, "n1", f"gpu-{number}"),)
    return CoolingNote(namespace, f"c{number}", f"u{number}", devices, until, until + 1)


def test_notes_can_be_read_again() -> None:
    notes = [note(2, 200.0), note(1)]
    assert decode(encode(notes)) == notes
    assert encode([]) == ""
    assert decode("") == decode('[{"of": "another version"}]') == decode("odd") == []


def test_if_there_are_too_many_those_that_end_first_are_left_out() -> None:
    notes = [note(number, float(number)) for number in range(2000)]
    text = encode(notes)
    kept = decode(text)
    assert len(text) < 64_000
    assert 300 < len(kept) < 2000
    assert [one.until for one in kept] == [float(2000 - n) for n in range(1, len(kept) + 1)]


# In the cache


def noted() -> list[CoolingNote]:
    """What a leader notes that saw a pod with a whole GPU vanish at 0 s."""
    leader = Scenes()
    leader.free()
    return leader.cache.cooling()


class Successor(Scenes):
    """A replica that was started when the pod was gone."""

    def __init__(self, seconds: float = SECONDS) -> None:
        super().__init__(seconds)
        self.cool_down.pod_changed(self.become(self.a, "n1", "Succeeded"))
        self.free()
        assert self.taken == 0


def test_a_new_leader_lets_the_slices_cool_down() -> None:
    [told] = noted()
    assert told.devices == (DeviceId(DRIVER, "n1", SEAT),)
    assert told.until == SECONDS
    scene = Successor()
    scene.now = 10.0
    scene.cache.resume_cooling(told)
    assert scene.state() is ClaimState.COOLING
    assert scene.taken == 8
    scene.now = SECONDS - 1
    assert scene.taken == 8
    scene.now = SECONDS
    assert scene.taken == 0
    assert scene.state() is ClaimState.PENDING


def test_it_may_be_deleted_meanwhile() -> None:
    [told] = noted()
    scene = Successor()
    scene.cache.forget("uid-a")
    scene.cache.resume_cooling(told)
    assert scene.taken == 8
    assert scene.cache.cooling() == [told]
    scene.now = SECONDS
    assert scene.taken == 0


def test_the_kubelet_may_have_been_started_meanwhile() -> None:
    [told] = noted()
    scene = Successor()
    scene.cool_down.kubelet_started("n1", 30.0)
    scene.cache.resume_cooling(told)
    scene.now = 30.0 + SECONDS - 1
    assert scene.taken == 8
    scene.now += 1
    assert scene.taken == 0


def test_what_was_given_out_since_does_not_cool_down() -> None:
    [told] = noted()
    scene = Successor()
    small = device("1g.10gb", 6).removeprefix("n1/")
    scene.cache.update(claim("b", seats=[("n1", small)]))
    scene.cache.resume_cooling(told)
    assert scene.cool_down.count == 0
    assert scene.taken == 1


def test_what_is_known_already_is_not_changed_by_a_note() -> None:
    [told] = noted()
    scene = Scenes()
    scene.cache.resume_cooling(told)
    assert scene.cool_down.count == 0  # the claim has its devices
    scene.now = 20.0
    scene.free()
    scene.cache.resume_cooling(told)
    assert scene.cool_down.next_time == 20.0 + SECONDS


@pytest.mark.parametrize("pool", ["n1", "n9"])
def test_devices_that_are_not_known_any_more_do_not_cool_down(pool: str) -> None:
    scene = Successor()
    odd = (DeviceId(DRIVER, pool, "gpu-7"),)
    scene.cache.resume_cooling(CoolingNote("team", "x", "u", odd, 60.0, 600.0))
    assert scene.cool_down.count == 0


def test_it_is_not_resumed_where_it_is_switched_off() -> None:
    [told] = noted()
    scene = Successor(0.0)
    scene.cache.resume_cooling(told)
    assert scene.taken == 0


def test_a_deleted_namespace_is_removed_when_its_slices_have_cooled_down() -> None:
    [told] = noted()
    scene = Successor()
    scene.cool_down.node_changed(booted("one"))
    scene.cache.resume_cooling(msgspec.structs.replace(told, namespace="gone"))
    assert "gone" in scene.cache.state.tenants_by_name
    scene.cool_down.node_changed(booted("two"))
    assert scene.taken == 0
    assert "gone" not in scene.cache.state.tenants_by_name


# With two replicas, of which the second is started when the pod is gone


def vanished() -> tuple[Simulation, str]:
    """A pod that was deleted by force under a leader; and what it leaves in the lease."""
    made = Simulation(b"")
    made._cool_down = SECONDS
    made.replicas[0] = made._replica("one")
    made.replicas[0].controller.elector.beat()
    make_pod(made.api, "p0", ["4g.24gb"], [])
    for _ in range(6):
        made.claim_controller.see_to_pod(f"{TEAM}/p0")
        made._busy(made.replicas[0])
        made.scheduler.hear(100)
        made.scheduler.see_to(f"{TEAM}/p0")
        made.scheduler.finish_plans()
    pod = made.api.there[PODS.name][f"{TEAM}/p0"]
    assert pod["spec"]["nodeName"]
    made._busy(made.replicas[0])
    [key] = made.api.there[CLAIMS.name]
    assert seats_of(made.api.there[CLAIMS.name][key])
    made.api.delete(PODS.name, f"{TEAM}/p0")
    while key in made.api.there[CLAIMS.name]:
        made.claim_controller.see_to_claim(key)
    made._busy(made.replicas[0])
    made.replicas[0].controller.elector.beat()
    [lease] = made.api.there[LEASES].values()
    return made, lease["metadata"]["annotations"].get(NOTE, "")


def test_the_leader_leaves_a_note_and_the_next_one_goes_by_it() -> None:
    story, left = vanished()
    assert len(decode(left)) == 1
    story.replicas[0].end()
    next_one = story.replicas[1] = story._replica("late")
    story._busy(next_one)
    next_one.controller.elector.beat()
    story.now += LEASE + 1
    next_one.controller.elector.beat()
    story._busy(next_one)
    assert next_one.controller.deciding
    assert next_one.controller.cool_down.count == 1
    assert next_one.controller.stats.cooling == 1
    story.now += SECONDS
    for _ in range(2):  # the lease has lapsed
        next_one.controller.elector.beat()
        story._busy(next_one)
    next_one.controller.elector.beat()
    [lease] = story.api.there[LEASES].values()
    assert NOTE not in lease["metadata"]["annotations"]
    for one in story.replicas:
        one.end()


def test_the_start_of_a_kubelet_is_heard() -> None:
    story, _ = vanished()
    leader = story.replicas[0]
    before = leader.controller.cool_down.next_time
    assert before is not None
    story.now += 40
    [node, *_] = [one.home for one in leader.controller.cool_down._cooling.values()]
    told = {"reason": "Starting", "involvedObject": {"name": node}}
    story.api.make(KUBELET_STARTS.name, {"metadata": {"name": "e", "namespace": "default"}, **told})
    story._busy(leader)
    assert leader.controller.cool_down.next_time == story.now + SECONDS
    for one in story.replicas:
        one.end()
