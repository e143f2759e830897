"""Preemption: which victims are chosen, and how an attempt ends."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from tests.kubernetes.objects import claim, pod
from tests.kubernetes.test_cycle import Scene as CycleScene
from tests.tenants import ref

from slicewise.journal.entries import QuotaRecord
from slicewise.kubernetes.api import Pod, PodDisruptionBudget
from slicewise.kubernetes.backoff import FIRST_SECONDS
from slicewise.kubernetes.preemption import PATIENCE_SECONDS, RETRY_SECONDS

URGENT: dict[str, Any] = {"priority": 100, "priorityClassName": "urgent"}


def budget(allowed: int, namespace: str = "team", **labels: str) -> PodDisruptionBudget:
    made = {
        "metadata": {"name": "b", "namespace": namespace},
        "spec": {"selector": {"matchLabels": labels}},
        "status": {"disruptionsAllowed": allowed},
    }
    return msgspec.convert(made, PodDisruptionBudget)


class Scene(CycleScene):
    """A cluster where pods of the class `urgent` preempt."""

    def __init__(self, *nodes: str, gpus: int = 1, preempt: Sequence[str] = ("urgent",)) -> None:
        super().__init__(*nodes, gpus=gpus, preempt=preempt)
        self.budgets: list[PodDisruptionBudget] = []

    def run(self, name: str, *profiles: str, namespace: str = "team", **spec: Any) -> None:
        """A pod that gets its devices and is bound; pods of `seats` come in their order."""
        self.ask(name, *profiles, namespace=namespace, **spec)
        key = name if namespace == "team" else f"{namespace}/{name}"
        assert key in self.decide()
        self.bind(f"{namespace}/{name}")

    def bind(self, key: str, **metadata: Any) -> None:
        """Bind a pod, or change its metadata: a start time, labels, or its deletion."""
        known = self.pending.pods[key]
        start = metadata.pop("start", None)
        meta = msgspec.structs.replace(known.metadata, **metadata)
        spec = msgspec.structs.replace(known.spec, node_name="n1")
        status = msgspec.structs.replace(known.status, phase="Running")
        if start is not None:
            status = msgspec.structs.replace(status, start_time=start)
        made = Pod(meta, spec, status)
        self.node_resources.pod_changed(made)
        self.pending.set_pod(made)
        self.cycle.requeue(key)

    def preempt(self) -> list[str] | None:
        """Choose victims for the next pod that may preempt; None if there is no such pod."""
        self.decide()
        one = self.cycle.preemption.next_pod()
        if one is None:
            return None
        if not self.cycle.preemption.choose(one, self.budgets):
            return []
        return [
            victim.metadata.name
            for attempt, victims in self.cycle.preemption.to_evict()
            if attempt.pod.metadata.uid == one.metadata.uid
            for victim in victims
        ]

    @property
    def attempts(self) -> int:
        return len(self.cycle.preemption.attempts)


def test_nothing_is_evicted_unless_the_operator_names_a_class() -> None:
    scene = Scene("n1", preempt=())
    scene.run("a", "7g.80gb")
    scene.ask("u", "7g.80gb", **URGENT)
    assert scene.preempt() is None


def test_a_window_is_cleared_and_kept_for_the_pod_until_it_is_used() -> None:
    scene = Scene("n1")
    scene.run("a", "7g.80gb")
    scene.ask("u", "4g.40gb", **URGENT)
    assert scene.preempt() == ["a"]
    assert scene.preempt() is None  # once is enough
    scene.end("a")
    scene.ask("late", "7g.80gb", priority=50)
    scene.ask("small", "1g.10gb", priority=1)
    served = scene.decide()
    assert served["u"] == ["n1/gpu-0-mig-4g40gb-5-0"]
    assert "late" not in served
    scene.cycle.preemption.check()
    assert scene.attempts == 0


def test_others_do_not_take_the_window_while_it_is_cleared() -> None:
    scene = Scene("n1")
    scene.run("a", "4g.40gb")
    scene.run("b", "3g.40gb")
    scene.ask("u", "7g.80gb", **URGENT)
    assert scene.preempt() == ["a", "b"]
    scene.end("a")
    scene.ask("thief", "1g.10gb")
    assert scene.decide() == {}
    scene.end("b")
    assert list(scene.decide()) == ["u"]


def test_pods_of_the_same_or_a_higher_priority_stay() -> None:
    scene = Scene("n1")
    scene.run("a", "7g.80gb", priority=100)
    scene.ask("u", "7g.80gb", **URGENT)
    assert scene.preempt() is None


@pytest.mark.parametrize(
    "spec",
    [
        {"priority": 100},
        {"priority": 100, "priorityClassName": "normal"},
        {**URGENT, "preemptionPolicy": "Never"},
    ],
)
def test_only_pods_of_a_named_class_preempt(spec: dict[str, Any]) -> None:
    scene = Scene("n1")
    scene.run("a", "7g.80gb")
    scene.ask("u", "7g.80gb", **spec)
    assert scene.preempt() is None


def test_a_pod_with_several_devices_does_not_preempt() -> None:
    scene = Scene("n1")
    scene.run("a", "7g.80gb")
    scene.ask("u", "3g.40gb", "3g.40gb", **URGENT)
    assert scene.preempt() is None


def test_a_pod_that_finds_room_evicts_no_pod() -> None:
    scene = Scene("n1", gpus=2)
    scene.run("a", "7g.80gb")
    scene.ask("u", "7g.80gb", **URGENT)
    assert list(scene.decide()) == ["u"]
    assert scene.preempt() is None


# The choice


def test_the_fewest_pods_are_evicted() -> None:
    scene = Scene("n1", gpus=2)
    scene.run("a", "7g.80gb", priority=50)
    scene.run("b", "4g.40gb")
    scene.run("c", "3g.40gb")
    scene.ask("u", "7g.80gb", **URGENT)
    assert scene.preempt() == ["a"]


def test_among_as_many_those_of_the_lowest_priority() -> None:
    scene = Scene("n1", gpus=3)
    for name, priority in (("a", 5), ("b", 3), ("c", 4)):
        scene.run(name, "7g.80gb", priority=priority)
    scene.ask("u", "7g.80gb", **URGENT)
    assert scene.preempt() == ["b"]


def test_among_those_the_youngest() -> None:
    scene = Scene("n1", gpus=3)
    for name, hour in (("a", 10), ("b", 12), ("c", 11)):
        scene.run(name, "7g.80gb")
        scene.bind(f"team/{name}", start=f"2026-01-01T{hour}:00:00Z")
    scene.ask("u", "7g.80gb", **URGENT)
    assert scene.preempt() == ["b"]


def test_among_those_the_one_with_the_fewest_slices() -> None:
    scene = Scene("n1", gpus=2)
    scene.run("large", "7g.80gb")
    scene.run("small", "4g.40gb")
    scene.run("other", "3g.40gb", priority=200)
    scene.ask("u", "3g.40gb", **URGENT)
    assert scene.preempt() == ["small"]


def test_a_pod_with_devices_on_two_gpus_is_one_victim() -> None:
    scene = Scene("n1", gpus=2)
    scene.run("a", "7g.80gb", "7g.80gb")
    scene.ask("u", "7g.80gb", **URGENT)
    assert scene.preempt() == ["a"]


def test_pods_that_are_ending_already_count_as_gone() -> None:
    """A new leader continues with the victims of the former one."""
    scene = Scene("n1", gpus=2)
    scene.run("a", "7g.80gb")
    scene.run("b", "7g.80gb", priority=300)
    scene.bind("team/b", deletion_timestamp="2026-01-01T00:00:00Z")
    scene.ask("u", "7g.80gb", **URGENT)
    assert scene.preempt() == []
    assert scene.attempts == 1
    scene.end("b")
    assert list(scene.decide()) == ["u"]


def test_a_shared_claim_is_left_alone() -> None:
    scene = Scene("n1")
    scene.run("a", "7g.80gb")
    other = pod("b", ["a-0"])
    scene.pending.set_pod(other)
    scene.ask("u", "7g.80gb", **URGENT)
    assert scene.preempt() is None


def test_claims_of_other_classes_are_left_alone() -> None:
    scene = Scene("n1")
    stock = {"name": "r", "exactly": {"deviceClassName": "mig.nvidia.com"}}
    scene.change(claim("s", stock, seats=[("n1", "gpu-0-mig-7g80gb-0-0")], reserved=["uid-a"]))
    scene.pending.set_pod(pod("a", ["s"], nodeName="n1"))
    scene.ask("u", "7g.80gb", **URGENT)
    assert scene.preempt() is None


def test_a_node_that_cannot_run_the_pod_is_left_alone() -> None:
    scene = Scene("n1")
    scene.run("a", "7g.80gb")
    scene.ask("u", "7g.80gb", nodeSelector={"zone": "b"}, **URGENT)
    assert scene.preempt() is None


# Budgets, namespaces and guarantees


def labelled(scene: Scene, *names: str) -> None:
    for name in names:
        scene.bind(f"team/{name}", labels={"app": "x"})


def test_budgets_are_kept_for_all_victims_together() -> None:
    scene = Scene("n1", gpus=2)
    scene.run("a", "4g.40gb")
    scene.run("b", "3g.40gb")
    scene.run("c", "4g.40gb", priority=50)
    scene.run("d", "3g.40gb", priority=50)
    labelled(scene, "a", "b")
    scene.budgets = [budget(1, app="x"), budget(0, "elsewhere", app="x"), budget(0, app="y")]
    scene.ask("u", "7g.80gb", **URGENT)
    assert scene.preempt() == ["c", "d"]


def test_a_pod_waits_while_budgets_allow_nothing_and_tries_again() -> None:
    scene = Scene("n1")
    scene.run("a", "7g.80gb")
    labelled(scene, "a")
    scene.budgets = [budget(0, app="x")]
    scene.ask("u", "7g.80gb", **URGENT)
    assert scene.preempt() == []
    assert scene.attempts == 0
    assert scene.preempt() is None  # it rests
    assert scene.cycle.preemption.next_time == FIRST_SECONDS
    scene.budgets = [budget(1, app="x")]
    scene.now += FIRST_SECONDS
    assert scene.preempt() == ["a"]


def test_a_budget_without_a_selector_concerns_no_pod() -> None:
    scene = Scene("n1")
    scene.run("a", "7g.80gb")
    made = msgspec.convert({"metadata": {"namespace": "team"}}, PodDisruptionBudget)
    scene.budgets = [made]
    scene.ask("u", "7g.80gb", **URGENT)
    assert scene.preempt() == ["a"]


def test_pods_of_other_namespaces_only_up_to_the_priority_that_counts_there() -> None:
    scene = Scene("n1")
    scene.run("a", "7g.80gb", namespace="other", priority=5)
    scene.ask("u", "7g.80gb", **URGENT)
    assert scene.preempt() is None
    scene.now += FIRST_SECONDS
    scene.cache.set_tenant(ref("team"), QuotaRecord(max_priority=5))
    assert scene.preempt() is None
    scene.now += FIRST_SECONDS
    scene.cache.set_tenant(ref("team"), QuotaRecord(max_priority=6))
    assert scene.preempt() == ["a"]


def test_no_other_namespace_falls_below_its_guarantee() -> None:
    scene = Scene("n1")
    scene.cache.set_tenant(ref("team"), QuotaRecord(max_priority=100))
    scene.cache.set_tenant(ref("other"), QuotaRecord(guarantee=8))
    scene.run("a", "7g.80gb", namespace="other")
    scene.ask("u", "7g.80gb", **URGENT)
    assert scene.preempt() is None
    scene.now += FIRST_SECONDS
    scene.cache.set_tenant(ref("other"), QuotaRecord(guarantee=0))
    assert scene.preempt() == ["a"]


def test_a_pod_beyond_its_quota_preempts_no_other() -> None:
    scene = Scene("n1")
    scene.cache.set_tenant(ref("team"), QuotaRecord(memory_slices=8))
    scene.run("a", "7g.80gb")
    scene.ask("u", "7g.80gb", **URGENT)
    assert scene.preempt() is None


# Attempts


def test_an_eviction_that_was_refused_is_repeated_until_the_time_is_over() -> None:
    scene = Scene("n1")
    scene.run("a", "7g.80gb", terminationGracePeriodSeconds=20)
    scene.ask("u", "7g.80gb", **URGENT)
    assert scene.preempt() == ["a"]
    preemption = scene.cycle.preemption
    assert preemption.to_evict() == []
    scene.now += RETRY_SECONDS
    assert [victims[0].metadata.name for _, victims in preemption.to_evict()] == ["a"]
    scene.bind("team/a", deletion_timestamp="2026-01-01T00:00:00Z")
    scene.now += RETRY_SECONDS
    assert preemption.to_evict() == []
    preemption.check()
    assert scene.attempts == 1
    scene.now = 20 + PATIENCE_SECONDS
    preemption.check()
    assert scene.attempts == 0
    assert len(scene.cycle.reservations) == 0


def test_each_failure_makes_the_next_attempt_wait_longer() -> None:
    scene = Scene("n1")
    scene.run("a", "7g.80gb")
    scene.ask("u", "7g.80gb", **URGENT)
    waits = []
    for _ in range(4):
        assert scene.preempt() == ["a"]
        scene.cycle.preemption.abandon("uid-u")
        began = scene.now
        while scene.preempt() is None:
            scene.now += FIRST_SECONDS
        waits.append(scene.now - began)
        scene.cycle.preemption.abandon("uid-u")
        scene.now += 1000.0
    assert waits == sorted(waits)
    assert waits[0] == FIRST_SECONDS < waits[1]
    scene.cycle.preemption.abandon("unknown")


def test_an_attempt_ends_with_its_pod() -> None:
    scene = Scene("n1")
    scene.run("a", "7g.80gb")
    scene.ask("u", "7g.80gb", **URGENT)
    assert scene.preempt() == ["a"]
    scene.end("u")
    scene.decide()
    scene.cycle.preemption.check()
    assert scene.attempts == 0
    assert len(scene.cycle.reservations) == 0


def test_an_attempt_ends_with_its_window() -> None:
    scene = Scene("n1")
    scene.run("a", "7g.80gb")
    scene.ask("u", "7g.80gb", **URGENT)
    assert scene.preempt() == ["a"]
    scene.cache.pools.set_open("n1", False)
    scene.decide()
    scene.cycle.preemption.check()
    assert scene.attempts == 0
    scene.now += FIRST_SECONDS
    assert scene.preempt() is None


def test_each_pod_of_a_line_gets_a_window_of_its_own() -> None:
    scene = Scene("n1", gpus=2)
    scene.run("a", "7g.80gb")
    scene.run("b", "7g.80gb")
    for name in ("u", "v", "w"):
        scene.ask(name, "7g.80gb", **URGENT)
    assert scene.preempt() == ["a"]
    assert scene.preempt() == ["b"]
    assert scene.preempt() is None
    scene.end("b")
    scene.end("a")
    assert sorted(scene.decide()) == ["u", "v"]


def test_a_replica_that_leads_no_more_forgets() -> None:
    scene = Scene("n1")
    scene.run("a", "7g.80gb")
    scene.ask("u", "7g.80gb", **URGENT)
    assert scene.preempt() == ["a"]
    scene.cycle.drop_reservations()
    assert scene.attempts == 0
    assert scene.cycle.preemption.next_time is None


def test_a_pod_that_changed_meanwhile_chooses_no_victims() -> None:
    scene = Scene("n1")
    scene.run("a", "7g.80gb")
    made = scene.ask("u", "7g.80gb", **URGENT)
    scene.decide()
    assert scene.cycle.preemption.next_pod() == made
    scene.end("u")
    scene.decide()
    assert scene.cycle.preemption.choose(made, []) is False
    assert scene.attempts == 0


@pytest.mark.parametrize("seed", range(8))
def test_pods_that_are_created_again_never_evict_one_another_in_turn(seed: int) -> None:
    """Whatever the priorities, it comes to rest with the highest ones placed."""
    chance = random.Random(seed)
    scene = Scene("n1", gpus=2)
    profiles = ("7g.80gb", "4g.40gb", "3g.40gb", "2g.20gb", "1g.10gb")
    owners = {f"o{number}": (chance.choice(profiles), chance.randrange(4)) for number in range(12)}
    born = dict.fromkeys(owners, 0)

    def create(owner: str) -> None:
        profile, priority = owners[owner]
        name = f"{owner}-{born[owner]}"
        scene.ask(name, profile, priority=priority, priorityClassName="urgent")

    for owner in owners:
        create(owner)
    evicted = 0
    for _ in range(300):
        for name in scene.decide():
            scene.bind(f"team/{name}")
        preemption = scene.cycle.preemption
        preemption.check()
        for attempt, victims in preemption.to_evict():
            for victim in victims:
                assert victim.spec.priority < attempt.pod.spec.priority
                evicted += 1
                owner = victim.metadata.name.partition("-")[0]
                scene.end(victim.metadata.name)
                born[owner] += 1
                create(owner)
        one = preemption.next_pod()
        if one is not None:
            assert preemption.choose(one, [])
        scene.now += 1.0
    assert evicted <= 12 * 4
    before = evicted
    for _ in range(400):
        scene.decide()
        preemption.check()
        assert preemption.to_evict() == []
        assert preemption.next_pod() is None
        scene.now += 5.0
    assert evicted == before
