"""The controller against a real control plane: pods get slices, and kube-scheduler binds them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.kubernetes_e2e.api import CORE, RESOURCE, until
from tests.kubernetes_e2e.cluster import (
    allocated,
    claim,
    claims_in,
    device_request,
    make_classes,
    pod,
    pods_in,
    template,
    templates_in,
    until_running,
)
from tests.kubernetes_e2e.conftest import Nodes
from tests.kubernetes_e2e.plane import Plane
from tests.kubernetes_e2e.replica import OUR_CLASS, SEALED, Replica, running, wants

from slicewise.control.pods import EXPECTED


@pytest.fixture
def replica(plane: Plane, tmp_path: Path) -> Iterator[Replica]:
    with running(plane.kubeconfig, tmp_path, "--lease-seconds", "2") as one:
        yield one
        print(one.log.read_text())


def make_template(plane: Plane, space: str, name: str, count: int = 1, **what: object) -> None:
    plane.api.create(
        templates_in(space),
        template(name, device_request(OUR_CLASS, count=count), config=[wants(**what)]),
    )


def test_a_pod_gets_the_slices_that_lose_the_fewest_placements(
    plane: Plane, nodes: Nodes, space: str, replica: Replica
) -> None:
    [node] = nodes(1, "A100-80GB", gpus=2)
    make_template(plane, space, "small", profile="1g.10gb")
    make_template(plane, space, "large", profile="4g.40gb")
    plane.api.create(pods_in(space), pod("a", templates=["small"]))
    until_running(plane.api, space, "a")
    # Not slice 0, which the stock scheduler takes: 4g.40gb can only be there.
    assert allocated(plane.api, space, "a") == [(node, "gpu-0-mig-1g10gb-19-4")]
    plane.api.create(pods_in(space), pod("b", templates=["large"]))
    until_running(plane.api, space, "b")
    assert allocated(plane.api, space, "b") == [(node, "gpu-0-mig-4g40gb-5-0")]


def test_all_devices_of_a_pod_are_on_one_node(
    plane: Plane, nodes: Nodes, space: str, replica: Replica
) -> None:
    nodes(2, "A100-80GB", gpus=1)
    make_template(plane, space, "three", count=3, compute=2, memoryGB=15)
    make_template(plane, space, "one", profile="1g.10gb")
    plane.api.create(pods_in(space), pod("a", templates=["three", "one"]))
    until_running(plane.api, space, "a")
    got = allocated(plane.api, space, "a")
    assert len(got) == 4
    assert len({node for node, _ in got}) == 1
    assert sum("2g20gb" in device for _, device in got) == 3


def test_a_sealed_class_may_hold_the_parameters_of_its_claims(
    plane: Plane, nodes: Nodes, space: str, replica: Replica
) -> None:
    nodes(1, "A100-80GB", gpus=1)
    half = {**SEALED, "metadata": {"name": "half.slicewise.dev"}}
    half["spec"] = {**SEALED["spec"], "config": [wants(profile="3g.40gb")]}
    make_classes(plane.api, [half])
    plane.api.create(templates_in(space), template("t", device_request("half.slicewise.dev")))
    plane.api.create(pods_in(space), pod("a", templates=["t"]))
    until_running(plane.api, space, "a")
    [(_, device)] = allocated(plane.api, space, "a")
    assert "3g40gb" in device
    plane.api.delete(f"{RESOURCE}/deviceclasses/half.slicewise.dev")


def test_a_shared_claim_is_allocated_once(
    plane: Plane, nodes: Nodes, space: str, replica: Replica
) -> None:
    nodes(1, "H200-141GB", gpus=1)
    plane.api.create(
        claims_in(space),
        claim("shared", device_request(OUR_CLASS), config=[wants(profile="3g.71gb")]),
    )
    for name in ("a", "b"):
        plane.api.create(pods_in(space), pod(name, claims=["shared"]))
    for name in ("a", "b"):
        until_running(plane.api, space, name)
    assert allocated(plane.api, space, "a") == allocated(plane.api, space, "b")


def test_freed_slices_go_to_a_waiting_pod(
    plane: Plane, nodes: Nodes, space: str, replica: Replica
) -> None:
    nodes(1, "A100-80GB", gpus=1)
    make_template(plane, space, "whole", profile="7g.80gb")
    plane.api.create(pods_in(space), pod("a", templates=["whole"]))
    until_running(plane.api, space, "a")
    plane.api.create(pods_in(space), pod("b", templates=["whole"]))

    def told() -> dict[str, str] | None:
        found = plane.api.get(f"{pods_in(space)}/b")
        conditions = {c["type"]: c for c in found["status"].get("conditions", [])}
        return conditions.get("slicewise.dev/Placed")

    condition = until("b is told why it waits", told)
    assert condition["status"] == "False"
    assert condition["reason"] == "Capacity"
    plane.api.delete(f"{pods_in(space)}/a")
    until_running(plane.api, space, "b")


def test_a_pod_goes_beside_those_that_leave_when_it_does(
    plane: Plane, nodes: Nodes, space: str, tmp_path: Path
) -> None:
    """The GPU whose pod leaves soon is kept for a whole one: an annotation, a Job, a deadline."""
    [node] = nodes(1, "A100-80GB", gpus=2)
    make_template(plane, space, "half", profile="3g.40gb")
    soon = pod("soon", templates=["half"])
    soon["metadata"]["annotations"] = {EXPECTED: "300"}
    filler = pod("filler", templates=["half"])
    with running(plane.kubeconfig, tmp_path, "--policy", "lease-aware", "--lease-seconds", "2"):
        for one in (soon, filler):
            plane.api.create(pods_in(space), one)
            until_running(plane.api, space, one["metadata"]["name"])
        late = pod("", templates=["half"])["spec"] | {"restartPolicy": "Never"}
        spec = {"activeDeadlineSeconds": 7200, "template": {"spec": late}}
        jobs = f"/apis/batch/v1/namespaces/{space}/jobs"
        plane.api.create(jobs, {"metadata": {"name": "late"}, "spec": spec})

        def of_job() -> str | None:
            found = plane.api.get(f"{pods_in(space)}?labelSelector=job-name%3Dlate")["items"]
            return found[0]["metadata"]["name"] if found else None

        name = until("the Job has a pod", of_job)
        until_running(plane.api, space, name)
        assert allocated(plane.api, space, "soon") == [(node, "gpu-0-mig-3g40gb-9-4")]
        assert allocated(plane.api, space, name) == [(node, "gpu-1-mig-3g40gb-9-4")]
        plane.api.delete(f"{pods_in(space)}/filler")
        until("its claim is gone", lambda: len(plane.api.get(claims_in(space))["items"]) == 2)
        new = pod("new", templates=["half"])
        new["spec"]["activeDeadlineSeconds"] = 7200
        plane.api.create(pods_in(space), new)
        until_running(plane.api, space, "new")
        assert allocated(plane.api, space, "new") == [(node, "gpu-1-mig-3g40gb-9-0")]


def test_a_pod_whose_annotation_cannot_be_read_is_told_and_placed(
    plane: Plane, nodes: Nodes, space: str, replica: Replica
) -> None:
    nodes(1, "A100-80GB", gpus=1)
    make_template(plane, space, "small", profile="1g.10gb")
    odd = pod("odd", templates=["small"])
    odd["metadata"]["annotations"] = {EXPECTED: "an hour"}
    plane.api.create(pods_in(space), odd)
    until_running(plane.api, space, "odd")

    def told() -> list[str]:
        events = plane.api.get(f"/apis/events.k8s.io/v1/namespaces/{space}/events")["items"]
        return [one["note"] for one in events if one["reason"] == "AnnotationUnreadable"]

    [note] = until("the pod is told", told)
    assert note == f"annotation {EXPECTED}: 'an hour' is not a positive number: it is ignored"


def test_a_pod_runs_where_its_local_volume_is(
    plane: Plane, nodes: Nodes, space: str, replica: Replica
) -> None:
    """Although the policy would take the other node, and the claim waits for its consumer."""
    first, second = nodes(2, "A100-80GB", gpus=1)
    make_template(plane, space, "small", profile="1g.10gb")
    name = f"local-{space}"
    storage = {
        "metadata": {"name": name},
        "provisioner": "kubernetes.io/no-provisioner",
        "volumeBindingMode": "WaitForFirstConsumer",
    }
    plane.api.create("/apis/storage.k8s.io/v1/storageclasses", storage)
    host = {"key": "kubernetes.io/hostname", "operator": "In", "values": [second]}
    volume = {
        "metadata": {"name": name},
        "spec": {
            "capacity": {"storage": "1Gi"},
            "accessModes": ["ReadWriteOnce"],
            "storageClassName": name,
            "local": {"path": "/data"},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [host]}]}},
        },
    }
    wanted = {
        "metadata": {"name": "data"},
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "storageClassName": name,
            "resources": {"requests": {"storage": "1Gi"}},
        },
    }
    plane.api.create(f"{CORE}/persistentvolumes", volume)
    try:
        plane.api.create(f"{CORE}/namespaces/{space}/persistentvolumeclaims", wanted)
        data = {"name": "data", "persistentVolumeClaim": {"claimName": "data"}}
        plane.api.create(pods_in(space), pod("a", templates=["small"], volumes=[data]))
        until_running(plane.api, space, "a")
        [(node, _)] = allocated(plane.api, space, "a")
        assert node == second != first
    finally:
        plane.api.delete(f"{CORE}/persistentvolumes/{name}")
        plane.api.delete(f"/apis/storage.k8s.io/v1/storageclasses/{name}")
