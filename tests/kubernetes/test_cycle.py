"""The scheduling cycle: order, placement, and the messages to waiting pods."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from tests.kubernetes.objects import OURS, claim, device_class, node, pod, wants
from tests.kubernetes.publishing import decoded, nvidia
from tests.kubernetes_e2e.nvidia import devices_at
from tests.tenants import ref

from slicewise.engine.reservation_rules import ReservationRules
from slicewise.journal.entries import QuotaRecord
from slicewise.kubernetes.api import Condition, Node, Pod, ResourceClaim, Toleration
from slicewise.kubernetes.backoff import FIRST_SECONDS
from slicewise.kubernetes.cache import ClusterCache
from slicewise.kubernetes.claim_client import Decision
from slicewise.kubernetes.claim_states import ClaimState
from slicewise.kubernetes.conflicts import Conflicts
from slicewise.kubernetes.cycle import Cycle
from slicewise.kubernetes.devices.pool_reading import Library, read_pool
from slicewise.kubernetes.node_resources import NodeResources
from slicewise.kubernetes.pending_claims import PendingClaims
from slicewise.kubernetes.preemption import PreemptionRules
from slicewise.kubernetes.quarantine import Quarantine
from slicewise.kubernetes.stats import Stats
from slicewise.kubernetes.unbound_pods import STUCK_SECONDS

A100, DRIVER = "A100-80GB", "gpu.nvidia.com"
LIBRARY = Library()


class Scene:
    """A small cluster and its cycle, without an API: tests change the claims."""

    def __init__(
        self,
        *nodes: str,
        gpus: int = 1,
        rules: ReservationRules | None = None,
        preempt: Sequence[str] = (),
    ) -> None:
        self.now = 0.0
        self.cache = ClusterCache("default", lambda: self.now, lambda: "")
        self.pending, self.node_resources, self.stats = PendingClaims(), NodeResources(), Stats()
        self.conflicts = Conflicts(5.0, records=self.cache.records)
        self.quarantine = Quarantine(self.cache.records, lambda: self.now)
        self.pending.classes[OURS] = device_class()
        self.cycle = Cycle(
            self.cache,
            self.pending,
            self.node_resources,
            self.conflicts,
            self.quarantine,
            self.stats,
            rules or ReservationRules(),
            lambda: self.now,
            PreemptionRules(frozenset(preempt)),
        )
        for name in nodes:
            self.node_resources.node_changed(node(name))
            self.cache.pools.set_open(name, True)
            reading = read_pool(decoded(nvidia(A100, gpus, name)), LIBRARY)
            self.cache.set_pool((DRIVER, name), reading, name)

    def ask(self, name: str, *profiles: str, namespace: str = "team", **spec: object) -> Pod:
        """A pod with a claim for each profile, as made from templates."""
        names = [f"{name}-{number}" for number in range(len(profiles))]
        owner = {"kind": "Pod", "name": name, "uid": f"uid-{name}", "controller": True}
        for one, profile in zip(names, profiles, strict=True):
            self.pending.claims[f"{namespace}/{one}"] = claim(
                one,
                config=[wants(profile=profile)],
                namespace=namespace,
                ownerReferences=[owner],
            )
        made = pod(name, names, namespace, **spec)
        self.node_resources.pod_changed(made)
        self.pending.set_pod(made)
        self.cycle.requeue(made.metadata.key)
        return made

    def decide(self) -> dict[str, list[str]]:
        """The devices of each served pod; they are written as the API would show them."""
        self.cycle.update_queue()
        served = {}
        for decision in self.cycle.schedule():
            served[decision.pod.removeprefix("team/")] = [
                f"{decision.node}/{seat.device}"
                for grant in decision.grants
                for seat in grant.devices
            ]
            self.write(decision)
        return served

    def write(self, decision: Decision, fails: bool = False) -> None:
        self.cycle.finished(decision)
        for grant in decision.grants:
            name = grant.claim.metadata.name
            if fails:
                self.cache.update(grant.claim)
                continue
            seats = [(seat.pool, seat.device) for seat in grant.devices]
            made = claim(name, seats=seats, node=decision.node)
            meta = msgspec.structs.replace(grant.claim.metadata, resource_version="2")
            self.change(msgspec.structs.replace(made, metadata=meta))
        self.cycle.update_queue()

    def change(self, made: ResourceClaim) -> None:
        key = made.metadata.key
        before = self.pending.claims.get(key)
        spec = made.spec if before is None else before.spec
        made = msgspec.structs.replace(made, spec=spec)
        self.pending.claims[key] = made
        self.cache.update(made)
        for user in self.pending.users(key):
            self.cycle.requeue(user)

    def end(self, name: str, namespace: str = "team") -> None:
        """End a pod; Kubernetes deallocates its claims."""
        pod_key = f"{namespace}/{name}"
        gone = self.pending.drop_pod(pod_key)
        assert gone is not None
        self.node_resources.pod_deleted(pod_key)
        self.cycle.requeue(pod_key)
        for key in [key for key in self.pending.claims if key.startswith(f"{pod_key}-")]:
            self.cache.forget(self.pending.claims.pop(key).metadata.uid)

    def told(self) -> dict[str, tuple[str, str]]:
        return {
            key.removeprefix("team/"): (told.reason, told.text)
            for key, told in self.cycle.take_messages()
            if not told.placed
        }


def device(profile: str, start: int, where: str = "n1", gpu: int = 0) -> str:
    return f"{where}/{devices_at(A100, gpu, profile)[start]}"


def names(served: dict[str, list[str]]) -> Sequence[str]:
    return list(served)


def test_pods_are_placed_by_priority_then_age() -> None:
    scene = Scene("n1")
    scene.ask("first", "7g.80gb")
    scene.ask("second", "7g.80gb")
    scene.ask("urgent", "7g.80gb", priority=10)
    assert names(scene.decide()) == ["urgent"]
    reason, text = scene.told()["first"]
    assert reason == "Capacity"
    assert "7g.80gb" in text
    scene.end("urgent")
    assert names(scene.decide()) == ["first"]
    scene.end("first")
    assert names(scene.decide()) == ["second"]


def test_a_refused_pod_is_not_tried_again_without_a_change() -> None:
    scene = Scene("n1")
    scene.ask("a", "7g.80gb")
    scene.decide()
    scene.ask("b", "3g.40gb")
    scene.decide()
    assert scene.told()["b"][0] == "Capacity"
    scene.decide()
    assert scene.told() == {}


def test_all_claims_of_a_pod_are_on_one_node() -> None:
    scene = Scene("n1", "n2")
    scene.ask("a", "4g.40gb")
    assert scene.decide() == {"a": [device("4g.40gb", 0)]}
    scene.ask("both", "4g.40gb", "3g.40gb")
    assert scene.decide() == {"both": [device("4g.40gb", 0, "n2"), device("3g.40gb", 4, "n2")]}
    scene.ask("pair", "2g.20gb", "2g.20gb", "1g.10gb")
    assert scene.decide() == {}
    assert "together" in scene.told()["pair"][1]
    assert scene.cache.state.cluster.occupied_slices == 12


def test_a_node_that_cannot_run_the_pod_is_skipped_and_named() -> None:
    scene = Scene("n1", "n2")
    scene.node_resources.node_changed(node("n1", cpu="1"))
    needs = [{"name": "main", "resources": {"requests": {"cpu": "4"}}}]
    scene.ask("a", "1g.10gb", containers=needs)
    assert scene.decide() == {"a": [device("1g.10gb", 4, "n2")]}
    scene.ask("b", "1g.10gb", containers=needs)
    assert scene.decide() == {"b": [device("1g.10gb", 5, "n2")]}  # both fit its eight
    scene.ask("c", "1g.10gb", containers=needs)
    assert scene.decide() == {}
    reason, text = scene.told()["c"]
    assert reason == "NoNode"
    assert "CPU" in text
    scene.ask("d", "1g.10gb")  # a pod that needs no CPU does not wait
    assert names(scene.decide()) == ["d"]
    scene.node_resources.pod_deleted("team/a")
    assert names(scene.decide()) == ["c"]


def test_a_node_is_avoided_for_a_while_after_a_returned_allocation() -> None:
    scene = Scene("n1", "n2")
    scene.ask("a", "1g.10gb")
    assert scene.decide() == {"a": [device("1g.10gb", 4)]}
    before = scene.pending.claims["team/a-0"]
    scene.change(claim("a-0", version=3))  # the stock scheduler took it back
    scene.cycle.unbound.back_off(before)
    assert scene.decide() == {"a": [device("1g.10gb", 4, "n2")]}
    assert scene.stats.returned == 1


def test_the_only_node_is_tried_again_after_its_backoff() -> None:
    scene = Scene("n1")
    scene.ask("a", "1g.10gb")
    scene.decide()
    before = scene.pending.claims["team/a-0"]
    scene.change(claim("a-0", version=3))
    scene.cycle.unbound.back_off(before)
    assert scene.decide() == {}
    assert "did not take the pod" in scene.told()["a"][1]
    assert scene.cycle.next_time == FIRST_SECONDS
    scene.now = FIRST_SECONDS
    assert names(scene.decide()) == ["a"]
    scene.change(claim("a-0", version=5))
    scene.cycle.unbound.back_off(scene.pending.claims["team/a-0"])  # it has none: nothing to avoid
    assert scene.cycle.next_time is None


def test_devices_of_a_pod_that_cannot_be_bound_are_revoked() -> None:
    scene = Scene("n1", "n2")
    old = scene.ask("a", "1g.10gb")
    scene.decide()
    scene.decide()
    assert scene.cycle.unbound.take_stuck() == []
    told = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    condition = msgspec.convert(told | {"message": "no free ports"}, Condition)
    status = msgspec.structs.replace(old.status, conditions=(condition,))
    scene.pending.set_pod(msgspec.structs.replace(old, status=status))
    scene.cycle.requeue("team/a")
    scene.decide()
    assert scene.cycle.unbound.take_stuck() == []  # it may yet succeed
    assert scene.cycle.next_time == STUCK_SECONDS
    scene.now = STUCK_SECONDS
    assert [one.metadata.name for one in scene.cycle.unbound.take_stuck()] == ["a-0"]
    scene.change(claim("a-0", version=4))
    assert scene.decide() == {"a": [device("1g.10gb", 4, "n2")]}


def test_quotas_are_those_of_the_namespace() -> None:
    scene = Scene("n1")
    scene.cache.set_tenant(ref("team"), QuotaRecord(memory_slices=3))
    scene.ask("a", "2g.20gb")
    scene.ask("b", "2g.20gb")
    scene.ask("c", "1g.10gb")
    assert names(scene.decide()) == ["a", "c"]  # b's quota does not affect c
    reason, text = scene.told()["b"]
    assert reason == "Quota"
    assert text == "namespace 'team' uses 3 of its 3 memory slices, and this would take 2 more"
    scene.cache.set_tenant(ref("team"), QuotaRecord(memory_slices=8))
    assert names(scene.decide()) == ["b"]


def test_a_pod_keeps_its_place_in_the_queue_after_a_failed_write() -> None:
    scene = Scene("n1")
    scene.ask("a", "7g.80gb")
    scene.ask("b", "7g.80gb")
    scene.cycle.update_queue()
    (decision,) = scene.cycle.schedule()
    assert decision.pod == "team/a"
    scene.write(decision, fails=True)
    records = scene.cache.records
    records.move(records["uid-a-0"], ClaimState.STALE)
    assert names(scene.decide()) == ["b"]  # a's next version has not arrived yet
    scene.end("b")
    scene.ask("c", "7g.80gb")
    scene.change(claim("a-0", version=2))
    assert names(scene.decide()) == ["a"]


def test_devices_are_given_up_if_the_node_has_no_room_for_the_rest() -> None:
    scene = Scene("n1", "n2")
    scene.ask("x", "7g.80gb")
    assert scene.decide() == {"x": [device("7g.80gb", 0)]}
    scene.end("x")
    scene.ask("y", "4g.40gb", "4g.40gb", "3g.40gb")  # needs two GPUs: no node has them
    half = device("4g.40gb", 0).removeprefix("n1/")
    scene.change(claim("y-0", seats=[("n1", half)], node="n1", version=2))
    assert scene.decide() == {}
    assert [one.metadata.name for one in scene.cycle.take_given_up()] == ["y-0"]


def test_decisions_are_tentative_while_rivals_are_expected() -> None:
    scene = Scene("n1")
    stock = {"name": "r", "exactly": {"deviceClassName": "mig.nvidia.com"}}
    scene.conflicts.update(claim("s", stock), True, 0.0)
    scene.ask("a", "1g.10gb")
    scene.cycle.update_queue()
    (decision,) = scene.cycle.schedule()
    assert decision.tentative


def test_an_invalid_claim_is_reported_and_does_not_block_the_queue() -> None:
    scene = Scene("n1")
    scene.ask("odd", "9g.90gb")
    scene.pending.claims["team/bad-0"] = claim("bad-0", config=[wants(profil="x")])
    made = pod("bad", ["bad-0"])
    scene.pending.set_pod(made)
    scene.cycle.requeue("team/bad")
    scene.ask("good", "1g.10gb")
    assert names(scene.decide()) == ["good"]
    told = scene.told()
    assert told["odd"][0] == "UnknownProfile"
    assert told["bad"][0] == "Invalid"
    assert "'profil'" in told["bad"][1]


def test_a_deleted_pod_does_not_block_the_queue() -> None:
    scene = Scene("n1")
    scene.ask("a", "7g.80gb")
    scene.decide()
    scene.ask("b", "7g.80gb")
    scene.decide()
    assert scene.cycle.waiting == 1
    assert len(scene.cache.state.waiting) == 1
    scene.end("b")
    scene.decide()
    assert scene.cycle.waiting == 0
    assert len(scene.cache.state.waiting) == 0


def test_a_deleted_pod_leaves_no_backoff() -> None:
    scene = Scene("n1")
    scene.ask("a", "1g.10gb")
    scene.decide()
    before = scene.pending.claims["team/a-0"]
    scene.change(claim("a-0", version=3))
    scene.cycle.unbound.back_off(before)
    assert scene.decide() == {}
    scene.end("a")
    scene.decide()
    assert scene.cycle.next_time is None
    scene.ask("a", "1g.10gb")  # another pod of the same name
    assert names(scene.decide()) == ["a"]


def test_a_new_pod_of_the_same_name_inherits_only_the_name() -> None:
    scene = Scene("n1")
    scene.ask("a", "7g.80gb")
    scene.decide()
    scene.ask("b", "7g.80gb", priority=10)
    scene.ask("c", "7g.80gb")
    scene.decide()
    scene.pending.drop_pod("team/b")
    scene.cycle.remove("team/b")
    scene.ask("b", "7g.80gb")
    scene.end("a")
    assert names(scene.decide()) == ["c"]


def test_a_changed_pod_is_tried_again() -> None:
    scene = Scene("n1")
    taint = {"key": "dedicated", "effect": "NoSchedule"}
    tainted = msgspec.convert(msgspec.to_builtins(node("n1")) | {"spec": {"taints": [taint]}}, Node)
    scene.node_resources.node_changed(tainted)
    scene.ask("a", "1g.10gb")
    assert scene.decide() == {}
    assert "dedicated" in scene.told()["a"][1]
    old = scene.pending.pods["team/a"]
    tolerations = (Toleration(key="dedicated", operator="Exists"),)
    spec = msgspec.structs.replace(old.spec, tolerations=tolerations)
    scene.pending.set_pod(msgspec.structs.replace(old, spec=spec))
    scene.cycle.requeue("team/a")
    assert names(scene.decide()) == ["a"]


def test_a_pod_with_a_deleted_claim_takes_no_node_resources() -> None:
    scene = Scene("n1")
    needs = [{"name": "main", "resources": {"requests": {"cpu": "6"}}}]
    scene.ask("a", "1g.10gb", containers=needs)
    scene.decide()
    scene.ask("b", "1g.10gb", containers=needs)
    assert scene.decide() == {}
    scene.cache.forget(scene.pending.claims.pop("team/a-0").metadata.uid)
    scene.cycle.requeue("team/a")
    assert names(scene.decide()) == ["b"]


def test_a_quarantined_claim_is_not_allocated_and_its_pod_is_told() -> None:
    scene = Scene("n1")
    scene.ask("a", "1g.10gb", "1g.10gb")
    scene.ask("b", "1g.10gb")
    scene.quarantine.add(scene.cache.update(scene.pending.claims["team/a-0"]), "refused (422): odd")
    assert names(scene.decide()) == ["b"]
    reason, text = scene.told()["a"]
    assert reason == "Quarantined"
    assert text == "claim 'a-0' cannot be allocated: refused (422): odd"
    scene.change(claim("a-0", version=2))
    assert names(scene.decide()) == ["a"]


def test_claims_are_tried_again_with_growing_pauses() -> None:
    scene = Scene("n1")
    record = scene.cache.update(claim("a"))
    for pause in (FIRST_SECONDS, 2 * FIRST_SECONDS, 4 * FIRST_SECONDS):
        scene.quarantine.add(record, "x" * 1000)
        assert scene.quarantine.take_due() == []
        assert scene.quarantine.next_time == scene.now + pause
        scene.now += pause
        assert scene.quarantine.take_due() == [record]
        assert scene.quarantine.take_due() == []  # it is being tried
        assert scene.quarantine.next_time is None
    assert len(scene.quarantine.summary()) < 500
    scene.cache.forget("uid-a")
    assert scene.quarantine.take_due() == []
    assert scene.quarantine.summary() == ""
