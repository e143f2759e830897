"""The controller without an API: its reactions to notifications, and their order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from tests.kubernetes.objects import OURS, claim, device_class, node, pod, wants
from tests.kubernetes.publishing import nvidia
from tests.kubernetes_e2e.nvidia import devices_at

from slicewise.kubernetes.api import DeviceClass, Namespace, Pod, ResourceClaim
from slicewise.kubernetes.api_client import ApiUnreachableError, KubernetesApiError
from slicewise.kubernetes.claim_client import Decision
from slicewise.kubernetes.claim_states import ClaimState
from slicewise.kubernetes.controller import Controller, ControllerOptions
from slicewise.kubernetes.devices.pool_reading import read_slice
from slicewise.kubernetes.informer import (
    CLAIMS,
    CLASSES,
    EVENTS,
    KINDS,
    NAMESPACES,
    NODES,
    PODS,
    SLICES,
    Changed,
    Deleted,
    Listed,
    WatchError,
)
from slicewise.kubernetes.leader_election import running_clock


class Closed:
    """An API that answers nothing."""

    server = "https://nowhere"

    def __init__(self) -> None:
        self.asked: list[str] = []

    def pages(self, path: str, kind: type[Any], fields: str = "") -> Any:
        self.asked.append(path)
        raise ApiUnreachableError("no answer")

    def get(self, path: str, kind: type[Any]) -> Any:
        raise ApiUnreachableError("no answer")

    def write(self, *arguments: Any) -> bytes:
        raise KubernetesApiError(403, "Forbidden", "no")


class Now:
    """Writers that finish immediately."""

    def submit(self, work: Callable[[], Any]) -> None:
        work()


def controller(listed: bool = True) -> Controller:
    made = Controller(Closed(), ControllerOptions())  # type: ignore[arg-type]
    made._writer._writers = Now()  # type: ignore[assignment]
    made._writer._claim_client._pause = lambda _: None
    if listed:
        for kind in KINDS:
            made._inbox.put(Listed(kind, [], True, True, "1"))
        made.step(0)
        assert made.ready
    return made


def tell(one: Controller, *news: Any) -> None:
    for item in news:
        one._inbox.put(item)
    one.step(0)


def slices(name: str = "n1") -> list[Any]:
    return [read_slice(msgspec.json.encode(one)) for one in nvidia("A100-80GB", 1, name)]


def with_node(one: Controller) -> None:
    tell(one, Changed(NODES, node("n1")), *(Changed(SLICES, s) for s in slices()))
    assert list(one.cache.state.nodes) == ["n1"]


def lead(one: Controller) -> None:
    one.elector._hold(running_clock())
    tell(one)


SEAT = ("n1", devices_at("A100-80GB", 0, "1g.10gb")[6])


def held(version: int, **more: Any) -> ResourceClaim:
    return claim("a", seats=[SEAT], version=version, tentative=True, reserved=["p"], **more)


def test_an_invalid_slice_affects_only_its_pool() -> None:
    one = controller()
    with_node(one)
    odd = nvidia("A100-80GB", 1, "n2")
    odd[-1]["spec"]["devices"][0]["taints"] = "none"  # a list, as far as we know
    parcels = [read_slice(msgspec.json.encode(item)) for item in odd]
    tell(
        one,
        Changed(NODES, node("n2")),
        *(Changed(SLICES, slice_object) for slice_object in parcels),
    )
    assert list(one.cache.state.nodes) == ["n1"]
    tell(one, *(Changed(SLICES, slice_object) for slice_object in slices("n2")))
    assert list(one.cache.state.nodes) == ["n1", "n2"]


def test_ready_means_everything_listed_and_no_watch_failing() -> None:
    one = controller(listed=False)
    assert "still reading" in one.problem
    for kind in sorted(KINDS, key=lambda kind: kind.essential):  # the others are not needed
        assert not one.ready
        tell(one, Listed(kind, [], True, True, "1"))
    assert one.ready
    assert one.problem == ""
    tell(one, WatchError(EVENTS, "forbidden"))
    assert one.ready
    assert one.warnings == ("Events are not known: forbidden",)
    tell(one, WatchError(EVENTS, ""))
    tell(one, WatchError(PODS, "cut off"))
    assert (one.watches_down, one.stats.watches) == (1, 2)
    assert not one.ready
    assert one.problem == "cut off"
    tell(one, WatchError(PODS, ""))
    assert one.ready


def test_objects_missing_from_a_list_are_deleted() -> None:
    one = controller()
    with_node(one)
    tell(
        one,
        Changed(CLASSES, device_class()),
        Changed(NAMESPACES, msgspec.convert({"metadata": {"name": "team"}}, Namespace)),
        Changed(CLAIMS, claim("a", version=3)),
        Changed(PODS, pod("p", ["a"])),
    )
    assert one.waiting == 1
    for kind in (PODS, CLAIMS, NAMESPACES, CLASSES, SLICES, NODES):
        tell(one, Listed(kind, [], True, True, "9"))
    assert one.waiting == 0
    assert not one.pending.pods
    assert not one.pending.claims
    assert not one.pending.classes
    assert not one.node_resources.nodes
    assert not one.cache.state.nodes
    assert not one.cache.state.tenants


def test_a_paged_list_counts_as_a_whole_and_may_start_over() -> None:
    one = controller()
    tell(one, Changed(CLAIMS, claim("old", version=2)))
    tell(one, Listed(CLAIMS, [claim("a", version=3)], True, False, "9"))
    assert set(one.pending.claims) == {"team/old", "team/a"}
    tell(one, Listed(CLAIMS, [claim("b", version=4)], True, False, "9"))
    tell(one, Listed(CLAIMS, [claim("c", version=5)], False, True, "9"))
    assert set(one.pending.claims) == {"team/b", "team/c"}


def test_an_older_version_of_a_claim_is_ignored() -> None:
    one = controller()
    with_node(one)
    tell(one, Changed(CLAIMS, claim("a", seats=[SEAT], version=7)))
    tell(one, Changed(CLAIMS, claim("a", version=6)), Deleted(CLAIMS, claim("a", uid="before")))
    assert one.pending.claims["team/a"].metadata.resource_version == "7"
    tell(one, Listed(CLAIMS, [], True, True, "6"))
    assert "team/a" in one.pending.claims  # written since, and not yet delivered by the watch
    assert one.cache.state.cluster.occupied_slices == 1


def test_a_write_is_seen_when_a_list_contains_it() -> None:
    one = controller()
    with_node(one)
    tell(one, Changed(CLAIMS, claim("a", version=5)))
    one._handlers.claim_read(held(7))
    one.cache.records.move(one.cache.records["uid-a"], ClaimState.TENTATIVE)
    assert one.conflicts.tentative["uid-a"].rivals is None
    tell(one, Listed(CLAIMS, [held(7)], True, True, "9"))
    assert one.conflicts.tentative["uid-a"].rivals == set()
    assert one.conflicts.tentative["uid-a"].until is not None


def test_a_rival_is_dropped_when_its_class_becomes_ours() -> None:
    one = controller()
    with_node(one)
    tell(one, Changed(CLASSES, device_class(sealed=False)), Changed(CLAIMS, claim("a", version=3)))
    assert set(one.conflicts.rivals) == {"uid-a"}
    tell(one, Changed(CLASSES, device_class()))
    assert not one.conflicts.rivals


def test_extended_resources_of_classes_exclude_no_node() -> None:
    one = controller()
    tell(one, Changed(NODES, node("n1")))
    asks = {"name": "main", "resources": {"requests": {"nvidia.com/gpu": "1"}}}
    wanted = pod("p", containers=[asks])
    assert one.node_resources.misfit(wanted, "n1") is not None
    spec = {"extendedResourceName": "nvidia.com/gpu"}
    gpus = msgspec.convert({"metadata": {"name": "gpu"}, "spec": spec}, DeviceClass)
    tell(one, Changed(CLASSES, gpus))
    assert one.node_resources.misfit(wanted, "n1") is None
    tell(one, Deleted(CLASSES, gpus))
    assert one.node_resources.misfit(wanted, "n1") is not None


def test_a_new_pod_of_the_same_name_starts_over() -> None:
    one = controller()
    first = pod("p", ["a"], priority=10)
    tell(one, Changed(CLAIMS, claim("a", config=[wants(profile="1g.10gb")])), Changed(PODS, first))
    assert one.waiting == 1
    meta = msgspec.structs.replace(first.metadata, uid="another")
    spec = msgspec.structs.replace(first.spec, priority=1)
    tell(one, Changed(PODS, Pod(meta, spec)))
    (ticket,) = one._cycle._queue
    assert ticket.priority == 1


def test_fencing_is_repeated_only_after_a_pause() -> None:
    one = controller()
    link = one._writer._claim_client._api
    assert isinstance(link, Closed)
    lead(one)
    for _ in range(20):
        one.step(0)
    assert link.asked == [CLAIMS.path]
    patience = one._timeout()
    assert patience is not None
    assert 0 < patience <= 0.5


def test_nothing_is_decided_without_a_valid_lease() -> None:
    one = controller()
    lead(one)
    one._fenced = one.elector.term
    assert one.deciding
    one.elector._until = 0.0
    assert not one.deciding
    assert one._timeout() is not None


def test_a_step_that_could_not_decide_is_repeated_without_a_message() -> None:
    """The lease may be renewed between a step and the wait for the next message."""
    one = controller()
    lead(one)
    one._fenced = one.elector.term
    one.elector._until = 0.0  # lapsed: this step decides nothing
    tell(one)
    one.elector._until = running_clock() + 60
    assert one.deciding
    assert one._timeout() is not None
    tell(one)
    assert one._timeout() is None


def test_nothing_is_decided_in_a_new_term_before_fencing() -> None:
    one = controller()
    lead(one)
    one._fenced = one.elector.term
    one.elector._turn(False)  # another replica led for a moment
    one.elector._hold(running_clock())
    assert one.elector.valid()
    assert not one.deciding  # before this replica has seen that
    tell(one)
    assert not one.deciding


def test_blocked_work_that_is_due_causes_no_busy_loop() -> None:
    one = controller()
    lead(one)
    one._fenced = one.elector.term
    one.cache.records.move(one.cache.update(held(3)), ClaimState.TENTATIVE)
    one.conflicts.seen("uid-a")
    one.conflicts.reserved("uid-a", -100.0)
    patience = one._timeout()
    assert patience is not None
    assert patience > 0


def test_claims_are_ours_by_their_class() -> None:
    one = controller()
    tell(one, Changed(CLAIMS, claim("a")), Changed(CLASSES, device_class(OURS)))
    assert one.pending.is_ours(one.pending.claims["team/a"])
    assert not one.conflicts.rivals


def test_a_claim_abandoned_on_a_standby_is_revoked_by_the_next_leader() -> None:
    one = controller()
    with_node(one)
    tell(one, Changed(CLAIMS, claim("a", seats=[SEAT], version=3)), Changed(PODS, pod("p", ["a"])))
    lead(one)
    one._fenced = one.elector.term
    tell(one)
    tell(one, WatchError(CLAIMS, "cut off"))
    tell(one, Deleted(PODS, pod("p", ["a"])))
    assert one.stats.revoked == 0
    tell(one, WatchError(CLAIMS, ""))
    assert one.stats.revoked == 1


def test_a_claim_abandoned_during_a_short_outage_is_revoked() -> None:
    one = controller()
    with_node(one)
    tell(one, Changed(CLAIMS, claim("a", seats=[SEAT], version=3)), Changed(PODS, pod("p", ["a"])))
    lead(one)
    one._fenced = one.elector.term
    tell(one)
    gone = Deleted(PODS, pod("p", ["a"]))
    tell(one, WatchError(CLAIMS, "cut off"), gone, WatchError(CLAIMS, ""))  # all in one batch
    assert one.stats.revoked == 1


def test_a_read_of_a_deleted_claim_does_not_restore_it() -> None:
    one = controller()
    tell(one, Changed(CLAIMS, claim("b", version=9)))
    for version in (5, 12):  # the watch has delivered the first, not the second
        one._handlers.claim_read(claim("a", version=version))
        assert ("team/a" in one.pending.claims) == (version == 12)


@pytest.mark.parametrize("state", [ClaimState.TENTATIVE, ClaimState.WRITTEN])
def test_a_deallocated_claim_of_another_class_is_not_confirmed(
    state: ClaimState,
) -> None:
    one = controller()
    with_node(one)
    tell(one, Changed(CLAIMS, held(3)), Changed(PODS, pod("p", ["a"])))
    lead(one)
    one._fenced = one.elector.term
    rival = claim("r", {"name": "r", "exactly": {"deviceClassName": "gpu"}}, version=2)
    gpus = device_class("gpu", sealed=False)
    tell(one, Changed(CLASSES, gpus), Changed(CLAIMS, rival))
    assert set(one.conflicts.tentative) == {"uid-a"}
    record = one.cache.records["uid-a"]
    if state is ClaimState.WRITTEN:  # as if it had been written without binding conditions
        for step in (ClaimState.ALLOCATED, ClaimState.WRITTEN):
            one.cache.records.move(record, step)
    tell(one, Changed(CLASSES, device_class(sealed=False)), Changed(CLAIMS, claim("a", version=9)))
    assert record.state is ClaimState.PENDING


def test_a_recreated_claim_waits_in_place_of_the_old_one() -> None:
    one = controller()
    with_node(one)
    lead(one)
    one._fenced = one.elector.term
    large = [wants(profile="7g.80gb")]
    for name in "ab":
        tell(one, Changed(CLAIMS, claim(name, config=large, version=3)))
    tell(one, Changed(PODS, pod("p", ["a", "b"])))
    assert set(one.cache.state.tickets) == {"uid-a", "uid-b"}
    old, new = claim("a", version=4), claim("a", config=large, version=5, uid="new")
    tell(one, Deleted(CLAIMS, old), Changed(CLAIMS, new))
    assert set(one.cache.state.tickets) == {"new", "uid-b"}


class Loses:
    """A claim client: while it writes the second claim, the first one loses its devices."""

    def __init__(self, one: Controller) -> None:
        self._one = one
        self.judged: list[str] = []
        self.decisions = 0

    def allocate(self, decision: Decision) -> list[ResourceClaim]:
        self.decisions += 1
        first, second = (
            claim(
                grant.claim.metadata.name,
                seats=[(seat.pool, seat.device) for seat in grant.devices],
                tentative=True,
                version=10 + i,
            )
            for i, grant in enumerate(decision.grants)
        )
        for news in (first, claim("a", *ONE, version=20)):
            self._one._inbox.put(Changed(CLAIMS, news))
        return [first, second]

    def confirm(self, claim: ResourceClaim, confirmed: bool, why: str) -> None:
        self.judged.append(claim.metadata.name)

    def deallocate(self, claim: ResourceClaim) -> None:
        """The second claim, which no pod uses."""


ONE = ({"name": "r", "exactly": {"deviceClassName": OURS, "count": 1}},)


def test_a_claim_deallocated_during_the_write_of_another_is_neither_held_nor_confirmed() -> None:
    one = controller()
    with_node(one)
    lead(one)
    one._fenced = one.elector.term
    claim_client = Loses(one)
    one._writer._claim_client = claim_client  # type: ignore[assignment]
    tell(
        one,
        Changed(CLASSES, device_class(OURS, profile="1g.10gb")),
        Changed(CLAIMS, claim("a", *ONE)),
        Changed(CLAIMS, claim("b", *ONE)),
        Changed(PODS, pod("p", ["a", "b"])),
    )
    assert claim_client.decisions == 1
    tell(one, Deleted(PODS, pod("p", ["a", "b"])))
    assert claim_client.judged == []
    assert one.stats.revoked == 1  # the second one, whose pod is gone
    assert not one.conflicts.tentative
    assert not one.cache.records["uid-a"].allocated
