"""Volumes restrict the nodes of a pod, by the rules of kube-scheduler."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.kubernetes.objects import claim, node, pod, wants
from tests.kubernetes.test_controller import controller, lead, slices, tell

from slicewise.kubernetes.api import (
    Node,
    PersistentVolume,
    PersistentVolumeClaim,
    Pod,
    StorageClass,
)
from slicewise.kubernetes.informer import (
    CLAIMS,
    NODES,
    PODS,
    SLICES,
    STORAGE,
    VOLUME_CLAIMS,
    VOLUMES,
    Changed,
    Deleted,
)
from slicewise.kubernetes.node_resources import NodeResources
from slicewise.kubernetes.volumes import Volumes


def on(*names: str) -> dict[str, Any]:
    term = {"matchExpressions": [{"key": "host", "operator": "In", "values": list(names)}]}
    return {"required": {"nodeSelectorTerms": [term]}}


def host(name: str, **labels: str) -> Node:
    made = node(name)
    meta = msgspec.structs.replace(made.metadata, labels={"host": name, **labels})
    return msgspec.structs.replace(made, metadata=meta)


def volume(name: str, labels: dict[str, str] | None = None, **spec: Any) -> PersistentVolume:
    whole = {
        "capacity": {"storage": "10Gi"},
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": "local",
        **spec,
    }
    made = {"metadata": {"name": name, "labels": labels or {}}, "spec": whole}
    return msgspec.convert(made, PersistentVolume)


def wanted(
    name: str = "v", annotations: dict[str, str] | None = None, **spec: Any
) -> PersistentVolumeClaim:
    whole = {
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": "local",
        "resources": {"requests": {"storage": "5Gi"}},
        **spec,
    }
    meta = {"name": name, "namespace": "team", "uid": name, "annotations": annotations or {}}
    return msgspec.convert({"metadata": meta, "spec": whole}, PersistentVolumeClaim)


def storage(provisioner: str = "kubernetes.io/no-provisioner", **more: Any) -> StorageClass:
    made = {
        "metadata": {"name": "local"},
        "provisioner": provisioner,
        "volumeBindingMode": "WaitForFirstConsumer",
        **more,
    }
    return msgspec.convert(made, StorageClass)


def user(name: str = "a", *claims: str) -> Pod:
    volumes = [{"name": one, "persistentVolumeClaim": {"claimName": one}} for one in claims or "v"]
    return pod(name, ["c"], volumes=volumes)


def fitting(*things: Any, one: Pod | None = None) -> list[str]:
    volumes = Volumes()
    for thing in things:
        volumes.put(thing)
    hosts = [host("n1", zone="a"), host("n2", **{"topology.kubernetes.io/zone": "b"})]
    return [h.metadata.name for h in hosts if volumes.misfit(one or user(), h) is None]


def test_a_bound_volume_is_where_its_affinity_and_its_zone_are() -> None:
    bound = wanted(volumeName="pv")
    assert fitting(bound, volume("pv")) == ["n1", "n2"]
    assert fitting(bound, volume("pv", nodeAffinity=on("n2"))) == ["n2"]
    zone = {"topology.kubernetes.io/zone": "a__c"}
    assert fitting(bound, volume("pv", zone)) == ["n1"]  # n1 has no zone, n2 another
    assert fitting(bound) == []  # it does not exist
    assert fitting(volume("pv")) == []


def test_an_unbound_claim_of_another_kind_keeps_the_pod_waiting() -> None:
    assert fitting(wanted(), volume("pv")) == []  # no such class
    assert fitting(wanted(), volume("pv"), storage(volumeBindingMode="Immediate")) == []
    gone = msgspec.structs.replace(
        wanted(volumeName="pv"),
        metadata=msgspec.structs.replace(wanted().metadata, deletion_timestamp="now"),
    )
    assert fitting(gone, volume("pv")) == []


@pytest.mark.parametrize(
    ("spec", "fits"),
    [
        ({}, True),
        ({"capacity": {"storage": "1Gi"}}, False),
        ({"capacity": {"storage": "much"}}, False),
        ({"accessModes": ["ReadOnlyMany"]}, False),
        ({"volumeMode": "Block"}, False),
        ({"storageClassName": "other"}, False),
        ({"claimRef": {"namespace": "team", "name": "other"}}, False),
        ({"claimRef": {"namespace": "team", "name": "v"}}, True),
        ({"claimRef": {"namespace": "team", "name": "v", "uid": "former"}}, False),
    ],
)
def test_a_local_volume_must_be_free_and_suit(spec: dict[str, Any], fits: bool) -> None:
    made = volume("pv", nodeAffinity=on("n2"), **spec)
    assert fitting(wanted(), storage(), made) == (["n2"] if fits else [])


def test_a_claim_may_select_volumes_by_label() -> None:
    for labels, nodes in (({"disk": "fast"}, ["n1", "n2"]), ({"disk": "slow"}, []), ({}, [])):
        chosen = wanted(selector={"matchLabels": {"disk": "fast"}})
        assert fitting(chosen, storage(), volume("pv", labels)) == nodes


def test_a_provisioner_serves_the_nodes_that_its_class_allows() -> None:
    assert fitting(wanted(), storage("csi.example.com")) == ["n1", "n2"]
    term = {"matchLabelExpressions": [{"key": "zone", "values": ["a"]}]}
    assert fitting(wanted(), storage("csi.example.com", allowedTopologies=[term])) == ["n1"]
    selected = wanted(annotations={"volume.kubernetes.io/selected-node": "n2"})
    assert fitting(selected, storage("csi.example.com")) == ["n2"]


def test_two_claims_of_a_pod_need_two_volumes() -> None:
    things = [wanted("v"), wanted("w"), storage(), volume("p1", nodeAffinity=on("n1", "n2"))]
    two = user("a", "v", "w")
    assert fitting(*things, one=two) == []
    assert fitting(*things, volume("p2", nodeAffinity=on("n2")), one=two) == ["n2"]


def test_a_volume_of_an_assumed_pod_is_not_free() -> None:
    volumes = Volumes()
    things = (wanted("v"), wanted("w"), storage(), volume("p1", nodeAffinity=on("n1")))
    for thing in things:
        volumes.put(thing)
    a, b, n1 = user("a", "v"), user("b", "w"), host("n1")
    volumes.assume(a, n1)
    volumes.assume(a, n1)
    assert volumes.misfit(a, n1) is None
    assert volumes.misfit(b, n1) == "has no free volume for the pod (volume claim 'w')"
    before = volumes.version
    volumes.forget(a.metadata.uid)
    assert volumes.misfit(b, n1) is None
    assert volumes.version > before


def test_pods_with_equal_volumes_are_interchangeable_and_others_are_not() -> None:
    volumes = Volumes()
    for name in ("v", "w", "x"):
        volumes.put(wanted(name, volumeName=f"p{name}"))
        volumes.put(volume(f"p{name}", nodeAffinity=on("n1" if name != "x" else "n2")))
    resources = NodeResources(volumes)
    kinds = [resources.kind(user(name, name)) for name in ("v", "w", "x")]
    assert kinds[0] == kinds[1] != kinds[2]
    assert resources.kind(user("a", "none")) == resources.kind(user("b", "none")) != kinds[0]


def test_ephemeral_volumes_are_claims_of_the_pod() -> None:
    one = pod("a", volumes=[{"name": "scratch", "ephemeral": {}}, {"name": "other"}])
    made = wanted("a-scratch", volumeName="pv")
    assert fitting(made, volume("pv", nodeAffinity=on("n1")), one=one) == ["n1"]


def test_without_knowledge_volumes_are_left_to_the_scheduler() -> None:
    resources = NodeResources()
    resources.node_changed(host("n1"))
    assert resources.misfit(user(), "n1") is None


def test_a_pod_is_placed_where_its_volume_is_as_soon_as_it_is_known() -> None:
    one = controller()
    for name in ("n1", "n2"):
        tell(one, Changed(NODES, host(name)), *(Changed(SLICES, s) for s in slices(name)))
    lead(one)
    one._fenced = one.elector.term
    tell(one, Changed(CLAIMS, claim("c", config=[wants(profile="1g.10gb")])))
    tell(one, Changed(PODS, user()))
    assert one.stats.decided == 0
    tell(one, Changed(VOLUME_CLAIMS, wanted()), Changed(STORAGE, storage()))
    assert one.stats.decided == 0
    tell(one, Changed(VOLUMES, volume("pv", nodeAffinity=on("n2"))))
    assert one.stats.decided == 1
    assert one._handlers._known_keys(VOLUMES) == {"pv"}
    for kind, thing in ((VOLUMES, volume("pv")), (VOLUME_CLAIMS, wanted()), (STORAGE, storage())):
        tell(one, Deleted(kind, thing))
        assert one._handlers._known_keys(kind) == set()
    tell(one, Deleted(PODS, user()))
    assert not one.node_resources.volumes or not one.node_resources.volumes._users
