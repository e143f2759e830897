"""Gangs: pods that get their devices together or not at all."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.kubernetes.objects import claim, pod, wants
from tests.kubernetes.test_cycle import Scene as CycleScene
from tests.tenants import ref

from slicewise.journal.entries import QuotaRecord
from slicewise.kubernetes.api import Pod
from slicewise.kubernetes.claim_client import Decision
from slicewise.kubernetes.gangs import STUCK_SECONDS
from slicewise.kubernetes.pending_claims import GANG, SIZE


class Scene(CycleScene):
    """A cluster without an API, and pods with the annotations of gangs."""

    def join(self, name: str, size: object, *profiles: str, gang: str = "g", **spec: Any) -> Pod:
        self.ask(name, *profiles, **spec)
        return self.annotate(name, {GANG: gang, SIZE: str(size)})

    def annotate(self, name: str, annotations: dict[str, str], **status: Any) -> Pod:
        known = self.pending.pods[f"team/{name}"]
        meta = msgspec.structs.replace(known.metadata, annotations=annotations)
        made = Pod(meta, known.spec, msgspec.structs.replace(known.status, **status))
        self.node_resources.pod_changed(made)
        self.pending.set_pod(made)
        self.cycle.requeue(made.metadata.key)
        return made

    def decisions(self) -> list[Decision]:
        """What is decided, without its being written yet."""
        self.cycle.update_queue()
        return self.cycle.schedule()

    def reasons(self) -> dict[str, tuple[str, str]]:
        self.decide()
        return self.told()


def test_no_pod_is_placed_before_all_are_there() -> None:
    scene = Scene("n1", "n2")
    scene.join("a", 3, "4g.40gb")
    scene.join("b", 3, "4g.40gb")
    told = scene.reasons()
    assert told["a"] == ("Gang", "2 of the 3 pods of gang 'g' are there and ready")
    assert scene.cache.state.cluster.instance_count == 0
    scene.join("c", 3, "1g.10gb")
    assert sorted(scene.decide()) == ["a", "b", "c"]


def test_all_or_none_across_nodes() -> None:
    scene = Scene("n1", "n2")
    for name in ("a", "b", "c"):
        scene.join(name, 3, "7g.80gb")
    assert scene.decide() == {}
    assert scene.cache.state.cluster.instance_count == 0
    told = scene.told()
    assert told["a"][0] == "Capacity"
    assert told["a"][1].startswith("2 of 3 pods of the gang find room: ")
    assert told["b"] == ("Gang", "the 3 pods of gang 'g' get devices together: see pod 'a'")
    scene.ask("single", "7g.80gb")
    assert list(scene.decide()) == ["single"]  # a gang that waits holds up no other pod
    scene.end("single")
    scene.end("c")
    for name in ("a", "b"):
        scene.annotate(name, {GANG: "g", SIZE: "2"})
    served = scene.decide()
    assert {name: devices[0].partition("/")[0] for name, devices in served.items()} in (
        {"a": "n1", "b": "n2"},
        {"a": "n2", "b": "n1"},
    )


def test_a_refused_gang_costs_nothing_until_something_changes() -> None:
    scene = Scene("n1")
    for name in ("a", "b"):
        scene.join(name, 2, "7g.80gb")
    scene.decide()
    attempts = scene.cycle._dispatcher.attempts
    for _ in range(5):
        scene.decide()
    assert scene.cycle._dispatcher.attempts == attempts


def test_members_count_against_each_other_on_a_node() -> None:
    """Two pods with 5 CPUs each do not fit on a node with 8, although their slices do."""
    scene = Scene("n1")
    container = {"name": "m", "resources": {"requests": {"cpu": "5"}}}
    for name in ("a", "b"):
        scene.join(name, 2, "1g.10gb", containers=[container])
    assert scene.decide() == {}
    assert not scene.node_resources._assumed
    told = scene.told()
    assert "1 of 2 pods of the gang find room" in told["a"][1]


def test_the_quota_counts_all_of_a_gang() -> None:
    scene = Scene("n1")
    scene.cache.set_tenant(ref("team"), QuotaRecord(memory_slices=3))
    for name in ("a", "b"):
        scene.join(name, 2, "2g.20gb")
    assert scene.decide() == {}
    assert scene.told()["a"][0] == "Quota"
    scene.cache.set_tenant(ref("team"), QuotaRecord(memory_slices=4))
    assert sorted(scene.decide()) == ["a", "b"]


def test_gangs_of_equal_shape_are_separate() -> None:
    scene = Scene("n1", "n2")
    for gang in ("g", "h"):
        for number in range(2):
            scene.join(f"{gang}{number}", 2, "4g.40gb", gang=gang)
    assert sorted(scene.decide()) == ["g0", "g1"]
    for name in ("g0", "g1"):
        scene.end(name)
    assert sorted(scene.decide()) == ["h0", "h1"]


def test_a_pod_in_the_place_of_another_is_placed_alone() -> None:
    scene = Scene("n1")
    for name in ("a", "b"):
        scene.join(name, 2, "1g.10gb")
    assert sorted(scene.decide()) == ["a", "b"]
    scene.end("b")
    scene.join("b2", 2, "1g.10gb")
    assert list(scene.decide()) == ["b2"]
    scene.join("extra", 2, "1g.10gb")
    assert list(scene.decide()) == ["extra"]


def test_pods_that_have_ended_well_count() -> None:
    scene = Scene("n1")
    for name in ("a", "b"):
        scene.join(name, 2, "1g.10gb")
    scene.decide()
    done = scene.annotate("a", {GANG: "g", SIZE: "2"}, phase="Succeeded")
    assert done.over
    scene.end("b")
    scene.join("b2", 2, "1g.10gb")
    assert list(scene.decide()) == ["b2"]
    # If it is deleted too, the gang begins anew.
    scene.pending.drop_pod("team/a")
    scene.end("b2")
    scene.join("b3", 2, "1g.10gb")
    assert scene.decide() == {}


def test_a_pod_that_leaves_holds_up_the_others_again() -> None:
    scene = Scene("n1")
    scene.ask("block", "7g.80gb")
    scene.decide()
    for name in ("a", "b"):
        scene.join(name, 2, "1g.10gb")
    assert scene.decide() == {}
    scene.end("a")
    scene.end("block")
    assert scene.decide() == {}
    assert scene.told()["b"] == ("Gang", "1 of the 2 pods of gang 'g' are there and ready")


@pytest.mark.parametrize(
    ("annotations", "words"),
    [
        ({GANG: "g", SIZE: "many"}, "'many' is not a number from 1 to 256"),
        ({GANG: "g", SIZE: "0"}, "'0' is not a number"),
        ({GANG: "g", SIZE: "257"}, "'257' is not a number"),
        ({GANG: "g"}, "'' is not a number"),
        ({SIZE: "2"}, f"annotation {SIZE} without {GANG}"),
    ],
)
def test_bad_annotations_are_named(annotations: dict[str, str], words: str) -> None:
    scene = Scene("n1")
    scene.ask("a", "1g.10gb")
    scene.annotate("a", annotations)
    reason, text = scene.reasons()["a"]
    assert reason == "Invalid"
    assert words in text


def test_different_sizes_are_named() -> None:
    scene = Scene("n1")
    scene.join("a", 2, "1g.10gb")
    scene.join("b", 3, "1g.10gb")
    for reason, text in scene.reasons().values():
        assert reason == "Invalid"
        assert text == f"gang 'g': its pods differ in {SIZE}: 2, 3"


def test_a_claim_that_two_pods_of_a_gang_share_is_named() -> None:
    scene = Scene("n1")
    scene.pending.claims["team/shared"] = claim("shared", config=[wants(profile="1g.10gb")])
    for name in ("a", "b"):
        scene.pending.set_pod(pod(name, ["shared"]))
        scene.annotate(name, {GANG: "g", SIZE: "2"})
    for reason, text in scene.reasons().values():
        assert reason == "Invalid"
        assert text == "two pods of gang 'g' share a claim that has no devices yet"


# Until all are written


def test_allocations_are_tentative_and_held_until_the_last_is_written() -> None:
    scene = Scene("n1")
    for name in ("a", "b"):
        scene.join(name, 2, "1g.10gb")
    first, second = scene.decisions()
    assert first.tentative
    assert second.tentative
    scene.write(first)
    gangs = scene.cycle.gangs
    assert gangs.holds(scene.pending.claims["team/a-0"])
    scene.write(second)
    assert not gangs.holds(scene.pending.claims["team/a-0"])
    assert not gangs.holds(scene.pending.claims["team/b-0"])
    assert gangs.take_stuck() == []
    assert gangs.next_time is None


def test_a_part_of_a_gang_gives_its_devices_up_after_a_while() -> None:
    scene = Scene("n1")
    for name in ("a", "b"):
        scene.join(name, 2, "1g.10gb")
    first, second = scene.decisions()
    scene.write(first)
    assert scene.cycle.gangs.holds(scene.pending.claims["team/a-0"])
    scene.write(second, fails=True)
    assert scene.cycle.gangs.next_time == STUCK_SECONDS
    assert scene.cycle.gangs.take_stuck() == []
    scene.now += STUCK_SECONDS
    assert [one.metadata.name for one in scene.cycle.gangs.take_stuck()] == ["a-0"]


def test_a_failed_write_is_repeated_for_that_pod_alone() -> None:
    scene = Scene("n1")
    for name in ("a", "b"):
        scene.join(name, 2, "1g.10gb")
    first, second = scene.decisions()
    scene.write(first)
    scene.write(second, fails=True)
    assert list(scene.decide()) == ["b"]
    assert not scene.cycle.gangs.holds(scene.pending.claims["team/a-0"])
