"""Who is served, in which order, where, and what the others are told."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from tests.k8s.nvidia import devices_at
from tests.k8s_units.objects import OURS, claim, device_class, node, pod, wants
from tests.k8s_units.publishing import decoded, nvidia

from slicewise.control.entries import QuotaRecord
from slicewise.engine.queue import Discipline
from slicewise.k8s.api import Condition, Node, Pod, ResourceClaim, Toleration
from slicewise.k8s.avoiding import FIRST_SECONDS
from slicewise.k8s.board import Board
from slicewise.k8s.deciding import STUCK_SECONDS, Decider
from slicewise.k8s.devices import Library, read_pool
from slicewise.k8s.fitness import Estate
from slicewise.k8s.rivals import Rivals
from slicewise.k8s.tally import Tally
from slicewise.k8s.wishes import Wishes
from slicewise.k8s.writing import Decision

A100, DRIVER = "A100-80GB", "gpu.nvidia.com"
LIBRARY = Library()


class Scene:
    """A small cluster and its decider, without an API: claims change when told to."""

    def __init__(self, *nodes: str, gpus: int = 1, discipline: Discipline | None = None) -> None:
        self.now = 0.0
        self.board = Board("default", lambda: self.now, lambda: "")
        self.wishes, self.estate, self.tally = Wishes(), Estate(), Tally()
        self.rivals = Rivals(5.0)
        self.wishes.classes[OURS] = device_class()
        self.decider = Decider(
            self.board,
            self.wishes,
            self.estate,
            self.rivals,
            self.tally,
            discipline or Discipline(256, 1024),
            lambda: self.now,
        )
        for name in nodes:
            self.estate.node_changed(node(name))
            self.board.pools.set_open(name, True)
            reading = read_pool(decoded(nvidia(A100, gpus, name)), LIBRARY)
            self.board.set_pool((DRIVER, name), reading, name)

    def ask(self, name: str, *profiles: str, **spec: object) -> Pod:
        """A pod with a claim for each profile."""
        names = [f"{name}-{number}" for number in range(len(profiles))]
        for one, profile in zip(names, profiles, strict=True):
            self.wishes.claims[f"team/{one}"] = claim(one, config=[wants(profile=profile)])
        made = pod(name, names, **spec)
        self.estate.pod_changed(made)
        self.wishes.set_pod(made)
        self.decider.look_at(f"team/{name}")
        return made

    def decide(self) -> dict[str, list[str]]:
        """By pod that is served: its devices; they are written, as the API would show it."""
        self.decider.look()
        served = {}
        for decision in self.decider.decide():
            served[decision.pod.removeprefix("team/")] = [
                f"{decision.node}/{seat.device}"
                for grant in decision.grants
                for seat in grant.seats
            ]
            self.write(decision)
        return served

    def write(self, decision: Decision, fails: bool = False) -> None:
        self.decider.finished(decision)
        for grant in decision.grants:
            name = grant.claim.metadata.name
            if fails:
                self.board.settle(grant.claim)
                continue
            seats = [(seat.pool, seat.device) for seat in grant.seats]
            self.change(claim(name, seats=seats, node=decision.node, version=2))
        self.decider.look()

    def change(self, made: ResourceClaim) -> None:
        key = made.metadata.key
        before = self.wishes.claims.get(key)
        spec = made.spec if before is None else before.spec
        made = msgspec.structs.replace(made, spec=spec)
        self.wishes.claims[key] = made
        self.board.settle(made)
        for user in self.wishes.users(key):
            self.decider.look_at(user)

    def end(self, name: str) -> None:
        """A pod ends, and Kubernetes takes its claims back."""
        gone = self.wishes.drop_pod(f"team/{name}")
        assert gone is not None
        self.estate.pod_gone(f"team/{name}")
        self.decider.look_at(f"team/{name}")
        for key in [key for key in self.wishes.claims if key.startswith(f"team/{name}-")]:
            self.board.forget(self.wishes.claims.pop(key).metadata.uid)

    def told(self) -> dict[str, tuple[str, str]]:
        return {
            key.removeprefix("team/"): (told.reason, told.text)
            for key, told in self.decider.take_told()
            if not told.placed
        }


def device(profile: str, start: int, where: str = "n1", gpu: int = 0) -> str:
    return f"{where}/{devices_at(A100, gpu, profile)[start]}"


def names(served: dict[str, list[str]]) -> Sequence[str]:
    return list(served)


def test_priority_goes_first_then_age() -> None:
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


def test_small_ones_may_pass_a_large_one_that_does_not_fit_only_so_often() -> None:
    scene = Scene("n1", discipline=Discipline(backfill=10, overtakes=2))
    scene.ask("a", "1g.10gb")
    scene.decide()
    scene.ask("large", "7g.80gb")
    for name in "bcd":
        scene.ask(name, "1g.10gb")
    assert names(scene.decide()) == ["b", "c"]
    scene.end("a")
    assert names(scene.decide()) == []  # nobody passes any more
    scene.end("b")
    scene.end("c")
    assert names(scene.decide()) == ["large"]


def test_nothing_is_tried_again_until_something_changes() -> None:
    scene = Scene("n1")
    scene.ask("a", "7g.80gb")
    scene.decide()
    scene.ask("b", "3g.40gb")
    scene.decide()
    assert scene.told()["b"][0] == "Capacity"
    scene.decide()
    assert scene.told() == {}


def test_the_claims_of_a_pod_are_on_one_node_or_nowhere() -> None:
    scene = Scene("n1", "n2")
    scene.ask("a", "4g.40gb")
    assert scene.decide() == {"a": [device("4g.40gb", 0)]}
    scene.ask("both", "4g.40gb", "3g.40gb")
    assert scene.decide() == {"both": [device("4g.40gb", 0, "n2"), device("3g.40gb", 4, "n2")]}
    scene.ask("pair", "2g.20gb", "2g.20gb", "1g.10gb")
    assert scene.decide() == {}
    assert "together" in scene.told()["pair"][1]
    assert scene.board.state.cluster.occupied_slices == 12


def test_a_node_that_cannot_run_the_pod_is_passed_over_and_named() -> None:
    scene = Scene("n1", "n2")
    scene.estate.node_changed(node("n1", cpu="1"))
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
    scene.ask("d", "1g.10gb")  # who needs no CPU is not kept waiting
    assert names(scene.decide()) == ["d"]
    scene.estate.pod_gone("team/a")
    assert names(scene.decide()) == ["c"]


def test_a_node_that_gave_an_allocation_back_is_left_out_for_a_while() -> None:
    scene = Scene("n1", "n2")
    scene.ask("a", "1g.10gb")
    assert scene.decide() == {"a": [device("1g.10gb", 4)]}
    before = scene.wishes.claims["team/a-0"]
    scene.change(claim("a-0", version=3))  # the stock scheduler took it back
    scene.decider.avoid(before)
    assert scene.decide() == {"a": [device("1g.10gb", 4, "n2")]}
    assert scene.tally.returned == 1


def test_where_no_other_node_is_left_it_is_tried_again_later() -> None:
    scene = Scene("n1")
    scene.ask("a", "1g.10gb")
    scene.decide()
    before = scene.wishes.claims["team/a-0"]
    scene.change(claim("a-0", version=3))
    scene.decider.avoid(before)
    assert scene.decide() == {}
    assert "did not take the pod" in scene.told()["a"][1]
    assert scene.decider.next_time == FIRST_SECONDS
    scene.now = FIRST_SECONDS
    assert names(scene.decide()) == ["a"]
    scene.change(claim("a-0", version=5))
    scene.decider.avoid(scene.wishes.claims["team/a-0"])  # it has none: nothing to avoid
    assert scene.decider.next_time is None


def test_devices_are_taken_back_from_a_pod_that_the_stock_scheduler_cannot_bind() -> None:
    scene = Scene("n1", "n2")
    old = scene.ask("a", "1g.10gb")
    scene.decide()
    scene.decide()
    assert scene.decider.take_stuck() == []
    told = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    condition = msgspec.convert(told | {"message": "no free ports"}, Condition)
    status = msgspec.structs.replace(old.status, conditions=(condition,))
    scene.wishes.set_pod(msgspec.structs.replace(old, status=status))
    scene.decider.look_at("team/a")
    scene.decide()
    assert scene.decider.take_stuck() == []  # it may yet succeed
    assert scene.decider.next_time == STUCK_SECONDS
    scene.now = STUCK_SECONDS
    assert [one.metadata.name for one in scene.decider.take_stuck()] == ["a-0"]
    scene.change(claim("a-0", version=4))
    assert scene.decide() == {"a": [device("1g.10gb", 4, "n2")]}


def test_quotas_are_those_of_the_namespace() -> None:
    scene = Scene("n1")
    scene.board.set_tenant("team", QuotaRecord(memory_slices=3))
    scene.ask("a", "2g.20gb")
    scene.ask("b", "2g.20gb")
    scene.ask("c", "1g.10gb")
    assert names(scene.decide()) == ["a", "c"]  # b's quota is no business of c's
    reason, text = scene.told()["b"]
    assert reason == "Quota"
    assert text.startswith("namespace 'team' uses 2 of its 3 memory slices")
    scene.board.set_tenant("team", QuotaRecord(memory_slices=8))
    assert names(scene.decide()) == ["b"]


def test_a_write_that_fails_keeps_its_place_in_the_queue() -> None:
    scene = Scene("n1")
    scene.ask("a", "7g.80gb")
    scene.ask("b", "7g.80gb")
    scene.decider.look()
    (decision,) = scene.decider.decide()
    assert decision.pod == "team/a"
    scene.decider.stale["uid-a-0"] = "1"
    scene.write(decision, fails=True)
    assert names(scene.decide()) == ["b"]  # a's next version has yet to come
    scene.end("b")
    scene.ask("c", "7g.80gb")
    scene.decider.stale.clear()
    assert names(scene.decide()) == ["a"]


def test_half_of_a_pods_devices_are_given_up_when_the_rest_is_not_to_be_had_there() -> None:
    scene = Scene("n1", "n2")
    scene.ask("x", "7g.80gb")
    assert scene.decide() == {"x": [device("7g.80gb", 0)]}
    scene.end("x")
    scene.ask("y", "4g.40gb", "4g.40gb", "3g.40gb")  # needs two GPUs: no node has them
    half = device("4g.40gb", 0).removeprefix("n1/")
    scene.change(claim("y-0", seats=[("n1", half)], node="n1", version=2))
    assert scene.decide() == {}
    assert [one.metadata.name for one in scene.decider.take_given_up()] == ["y-0"]


def test_where_rivals_are_expected_decisions_are_tentative() -> None:
    scene = Scene("n1")
    stock = {"name": "r", "exactly": {"deviceClassName": "mig.nvidia.com"}}
    scene.rivals.note(claim("s", stock), True, 0.0)
    scene.ask("a", "1g.10gb")
    scene.decider.look()
    (decision,) = scene.decider.decide()
    assert decision.tentative


def test_what_is_wrong_or_unknown_is_said_and_nobody_waits_for_it() -> None:
    scene = Scene("n1")
    scene.ask("odd", "9g.90gb")
    scene.wishes.claims["team/bad-0"] = claim("bad-0", config=[wants(profil="x")])
    made = pod("bad", ["bad-0"])
    scene.wishes.set_pod(made)
    scene.decider.look_at("team/bad")
    scene.ask("good", "1g.10gb")
    assert names(scene.decide()) == ["good"]
    told = scene.told()
    assert told["odd"][0] == "UnknownProfile"
    assert told["bad"][0] == "Invalid"
    assert "'profil'" in told["bad"][1]


def test_a_pod_that_goes_is_not_waited_for() -> None:
    scene = Scene("n1")
    scene.ask("a", "7g.80gb")
    scene.decide()
    scene.ask("b", "7g.80gb")
    scene.decide()
    assert scene.decider.waiting == 1
    assert len(scene.board.state.waiting) == 1
    scene.end("b")
    scene.decide()
    assert scene.decider.waiting == 0
    assert len(scene.board.state.waiting) == 0


def test_what_is_remembered_of_a_pod_goes_with_it() -> None:
    scene = Scene("n1")
    scene.ask("a", "1g.10gb")
    scene.decide()
    before = scene.wishes.claims["team/a-0"]
    scene.change(claim("a-0", version=3))
    scene.decider.avoid(before)
    assert scene.decide() == {}
    scene.end("a")
    scene.decide()
    assert scene.decider.next_time is None
    scene.ask("a", "1g.10gb")  # another of its name
    assert names(scene.decide()) == ["a"]


def test_a_pod_that_takes_another_ones_name_at_once_takes_nothing_else_of_it() -> None:
    scene = Scene("n1")
    scene.ask("a", "7g.80gb")
    scene.decide()
    scene.ask("b", "7g.80gb", priority=10)
    scene.ask("c", "7g.80gb")
    scene.decide()
    scene.wishes.drop_pod("team/b")
    scene.decider.gone("team/b")
    scene.ask("b", "7g.80gb")
    scene.end("a")
    assert names(scene.decide()) == ["c"]


def test_a_pod_that_has_become_fit_is_tried_again() -> None:
    scene = Scene("n1")
    taint = {"key": "dedicated", "effect": "NoSchedule"}
    tainted = msgspec.convert(msgspec.to_builtins(node("n1")) | {"spec": {"taints": [taint]}}, Node)
    scene.estate.node_changed(tainted)
    scene.ask("a", "1g.10gb")
    assert scene.decide() == {}
    assert "dedicated" in scene.told()["a"][1]
    old = scene.wishes.pods["team/a"]
    tolerations = (Toleration(key="dedicated", operator="Exists"),)
    spec = msgspec.structs.replace(old.spec, tolerations=tolerations)
    scene.wishes.set_pod(msgspec.structs.replace(old, spec=spec))
    scene.decider.look_at("team/a")
    assert names(scene.decide()) == ["a"]


def test_a_pod_whose_claim_is_gone_takes_nothing_of_the_node_it_was_to_have() -> None:
    scene = Scene("n1")
    needs = [{"name": "main", "resources": {"requests": {"cpu": "6"}}}]
    scene.ask("a", "1g.10gb", containers=needs)
    scene.decide()
    scene.ask("b", "1g.10gb", containers=needs)
    assert scene.decide() == {}
    scene.board.forget(scene.wishes.claims.pop("team/a-0").metadata.uid)
    scene.decider.look_at("team/a")
    assert names(scene.decide()) == ["b"]


def test_what_the_api_refuses_to_have_written_is_tried_again_later_and_later() -> None:
    scene = Scene("n1")
    scene.ask("a", "1g.10gb")
    scene.decider.look()
    (decision,) = scene.decider.decide()
    scene.write(decision, fails=True)
    scene.decider.put_off(decision, "refused (422 Invalid): odd")
    assert scene.decide() == {}
    reason, text = scene.told()["a"]
    assert reason == "Invalid"
    assert "422" in text
    assert scene.decider.next_time == FIRST_SECONDS
    scene.now = FIRST_SECONDS
    scene.decider.look()
    (decision,) = scene.decider.decide()
    scene.write(decision, fails=True)
    scene.decider.put_off(decision, "refused (422 Invalid): odd")
    assert scene.decide() == {}
    assert scene.decider.next_time == 3 * FIRST_SECONDS
    scene.now = 3 * FIRST_SECONDS
    assert names(scene.decide()) == ["a"]
