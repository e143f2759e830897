"""Unmodified pods: deploy/kubernetes/unmodified-pods on a real control plane."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from scripts.test_services import MissingServiceError
from tests.kubernetes_e2e.api import CORE, RBAC, ApiError, Json, until
from tests.kubernetes_e2e.cluster import (
    allocated,
    claims_in,
    make_classes,
    namespace,
    node,
    pods_in,
    publish,
    templates_in,
    until_running,
)
from tests.kubernetes_e2e.plane import Plane
from tests.kubernetes_e2e.replica import running
from tests.kubernetes_e2e.test_install import ACCOUNT, MANIFESTS, told

APPS = "/apis/apps/v1/namespaces"
POLICIES = "/apis/admissionregistration.k8s.io/v1/mutatingadmissionpolicies"
ROLE = f"{RBAC}/clusterroles/slicewise-unmodified-pods"
SMALL = "nvidia.com/mig-1g.10gb"
OPTING_OUT = {"slicewise.dev/rewrite": "disabled"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Plane]:
    """A control plane with the controller's manifests and the policies, and two nodes."""
    try:
        plane = Plane()
    except MissingServiceError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))
    with plane:
        make_classes(plane.api)
        publish(plane.api, [node("u-1"), node("u-2")], "A100-80GB", 2)
        plane.kubectl("apply", "-f", str(MANIFESTS))
        enable(plane)
        yield plane


def enable(plane: Plane) -> None:
    """Apply the policies, and wait until the API server follows them."""
    plane.kubectl("apply", "-f", str(MANIFESTS / "unmodified-pods"))
    until_in_force(plane)


def until_in_force(plane: Plane) -> None:
    """Wait until the API server follows both policies."""

    def follows() -> bool:
        made = plane.api.create(f"{pods_in('default')}?dryRun=All", asking("probe", {SMALL: 1}))
        try:
            plane.api.create(f"{pods_in('default')}?dryRun=All", asking("probe", {f"{SMALL}x": 1}))
        except ApiError:
            return bool(made["spec"].get("resourceClaims"))
        return False

    until("the policies are in force", follows)


@pytest.fixture
def space(cluster: Plane) -> Iterator[str]:
    with namespace(cluster.api) as name:
        yield name


@pytest.fixture
def replica(cluster: Plane, tmp_path: Path) -> Iterator[None]:
    """The controller with the rights that are installed."""
    with controller(cluster, tmp_path) as one:
        yield
        print(one.log.read_text())


def controller(cluster: Plane, folder: Path, name: str = "r0"):  # type: ignore[no-untyped-def]
    flags = ["--namespace", "slicewise", "--lease-seconds", "2"]
    return running(cluster.kubeconfig_for(ACCOUNT), folder, *flags, name=name)


def container(limits: Json, name: str = "main", **more: object) -> Json:
    return {"name": name, "image": "none", "resources": {"limits": limits}, **more}


def spec(limits: Json, **more: object) -> Json:
    return {"containers": [container(limits)], "terminationGracePeriodSeconds": 0, **more}


def asking(name: str, limits: Json, labels: Json | None = None, **more: object) -> Json:
    """A pod as users of a device plugin write it."""
    metadata = {"name": name, "labels": labels or {}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec(limits, **more)}


def workload(kind: str, name: str, limits: Json, restart: str = "Always", **more: object) -> Json:
    """A Deployment, a Job or a StatefulSet."""
    labels = {"app": name}
    pods = {"metadata": {"labels": labels}, "spec": spec(limits, restartPolicy=restart)}
    return {"kind": kind, "metadata": {"name": name}, "spec": {"template": pods, **more}}


def profiles(plane: Plane, space: str, name: str) -> list[str]:
    """The profiles of a pod's devices, as in their names."""
    return sorted(device.split("-")[3] for _, device in allocated(plane.api, space, name))


def pods_of(plane: Plane, space: str, app: str) -> list[str]:
    """The pods of a workload that run."""
    found = plane.api.items(f"{pods_in(space)}?labelSelector=app%3D{app}")
    return [one["metadata"]["name"] for one in found if one["status"].get("phase") == "Running"]


def test_a_pod_of_a_device_plugin_runs_unchanged(cluster: Plane, space: str, replica: None) -> None:
    cluster.api.create(pods_in(space), asking("a", {SMALL: 1, "cpu": 1}))
    found = until_running(cluster.api, space, "a")
    assert profiles(cluster, space, "a") == ["1g10gb"]
    [main] = found["spec"]["containers"]
    assert main["resources"]["limits"] == {"cpu": "1"}
    assert found["metadata"]["annotations"]["slicewise.dev/rewritten"] == f"main: {SMALL}=1"
    # Each slice is where it loses the fewest placements, not where the first device is.
    assert allocated(cluster.api, space, "a")[0][1].endswith("-19-4")


def test_several_profiles_and_counts_and_the_media_extension(
    cluster: Plane, space: str, replica: None
) -> None:
    limits = {SMALL: 2, "nvidia.com/mig-1g.10gb.me": 1, "nvidia.com/mig-3g.40gb": 1}
    cluster.api.create(pods_in(space), asking("a", limits))
    until_running(cluster.api, space, "a")
    assert profiles(cluster, space, "a") == ["1g10gb", "1g10gb", "1g10gb", "3g40gb"]
    assert sum("me" in one for _, one in allocated(cluster.api, space, "a")) == 1


@pytest.mark.parametrize(
    ("limits", "profile"),
    [
        ({"slicewise.dev/compute": 2}, "2g20gb"),
        ({"slicewise.dev/memory": "15G"}, "1g20gb"),
        ({"slicewise.dev/compute": 3, "slicewise.dev/memory": "20Gi"}, "3g40gb"),
    ],
)
def test_a_pod_asks_for_what_it_needs(
    cluster: Plane, space: str, replica: None, limits: Json, profile: str
) -> None:
    cluster.api.create(pods_in(space), asking("a", limits))
    until_running(cluster.api, space, "a")
    assert profiles(cluster, space, "a") == [profile]


def test_deployments_jobs_and_stateful_sets(cluster: Plane, space: str, replica: None) -> None:
    selector = {"matchLabels": {"app": "web"}}
    made = cluster.api.create(
        f"{APPS}/{space}/deployments",
        workload("Deployment", "web", {SMALL: 1}, replicas=2, selector=selector),
    )
    cluster.api.create(
        f"{APPS}/{space}/statefulsets",
        workload(
            "StatefulSet", "db", {"nvidia.com/mig-2g.20gb": 1},
            replicas=2, selector={"matchLabels": {"app": "db"}}, serviceName="db",
        ),
    )  # fmt: skip
    cluster.api.create(
        f"/apis/batch/v1/namespaces/{space}/jobs",
        workload("Job", "train", {"slicewise.dev/compute": 1}, "Never", parallelism=2),
    )
    for app, profile in (("web", "1g10gb"), ("db", "2g20gb"), ("train", "1g10gb")):
        until(f"{app} runs", lambda app=app: len(pods_of(cluster, space, app)) == 2)  # type: ignore[misc]
        for name in pods_of(cluster, space, app):
            assert profiles(cluster, space, name) == [profile]
    # What users keep in their repository stays as it is.
    there = cluster.api.get(f"{APPS}/{space}/deployments/web")
    assert there["spec"]["template"] == made["spec"]["template"]
    assert there["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"] == {SMALL: "1"}
    # A pod that ends is replaced by another with slices.
    [first, _] = pods_of(cluster, space, "db")
    cluster.api.delete(f"{pods_in(space)}/{first}")
    until("it is back", lambda: len(pods_of(cluster, space, "db")) == 2)
    for kind in ("deployments", "statefulsets"):
        cluster.api.delete(f"{APPS}/{space}/{kind}/{'web' if kind == 'deployments' else 'db'}")
    cluster.api.delete(f"/apis/batch/v1/namespaces/{space}/jobs/train?propagationPolicy=Background")


def test_an_init_container_shares_the_slices_of_a_later_one(
    cluster: Plane, space: str, replica: None
) -> None:
    init = [
        container({SMALL: 1}, "warm"),
        container({SMALL: 1}, "beside", restartPolicy="Always"),
        container({"nvidia.com/mig-2g.20gb": 1}, "convert"),
    ]
    cluster.api.create(pods_in(space), asking("a", {SMALL: 1}, initContainers=init))
    found = until_running(cluster.api, space, "a")
    used = {
        one["name"]: one["resources"]["claims"][0]["name"]
        for one in (*found["spec"]["containers"], *found["spec"]["initContainers"])
    }
    assert used["warm"] == used["main"]
    assert len(set(used.values())) == 3
    assert profiles(cluster, space, "a") == ["1g10gb", "1g10gb", "2g20gb"]


def test_claims_of_a_pod_are_kept(cluster: Plane, space: str, replica: None) -> None:
    """Claims that the user wrote stay beside the new ones."""
    template = {
        "metadata": {"name": "own"},
        "spec": {"spec": {"devices": {"requests": [
            {"name": "r", "exactly": {"deviceClassName": "mig.slicewise.dev"}}
        ], "config": [{"opaque": {"driver": "slicewise.dev", "parameters": {
            "apiVersion": "slicewise.dev/v1", "kind": "Slices", "profile": "3g.40gb"}}}]}}},
    }  # fmt: skip
    cluster.api.create(templates_in(space), template)
    made = asking("a", {SMALL: 1}, resourceClaims=[
        {"name": "mine", "resourceClaimTemplateName": "own"}
    ])  # fmt: skip
    made["spec"]["containers"][0]["resources"]["claims"] = [{"name": "mine"}]
    made["metadata"]["annotations"] = {"team/note": "kept"}
    cluster.api.create(pods_in(space), made)
    found = until_running(cluster.api, space, "a")
    assert profiles(cluster, space, "a") == ["1g10gb", "3g40gb"]
    assert found["metadata"]["annotations"]["team/note"] == "kept"


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"nvidia.com/mig-half": 1}, "container main: nvidia.com/mig-half: 1: this is no MIG"),
        ({SMALL: 33}, "container main: nvidia.com/mig-1g.10gb: 33: ask for 1 to 32 instances"),
        ({"slicewise.dev/memory": 20}, "slicewise.dev/memory: 20: ask for 1G to 1P of memory"),
        ({"slicewise.dev/compute": 1001}, "slicewise.dev/compute: 1001: ask for 1 to 1000"),
        ({"slicewise.dev/gpus": 1, SMALL: 1}, "slicewise.dev/gpus: 1: slicewise knows"),
        ({"slicewise.dev/compute": "500m"}, "must be an integer"),
    ],
)
def test_what_has_no_meaning_is_refused_by_name(
    cluster: Plane, space: str, limits: Json, words: str
) -> None:
    with pytest.raises(ApiError) as error:
        cluster.api.create(pods_in(space), asking("a", limits))
    assert error.value.status == 422
    assert words in error.value.message


def test_a_request_of_nothing_and_other_pods_are_left_alone(cluster: Plane, space: str) -> None:
    for number, limits in enumerate(({SMALL: 0}, {"cpu": 1}, {})):
        made = cluster.api.create(pods_in(space), asking(f"p{number}", limits))
        assert "resourceClaims" not in made["spec"]
        assert made["metadata"].get("annotations", {}) == {}


def test_a_profile_that_no_gpu_has_waits_with_a_reason(
    cluster: Plane, space: str, replica: None
) -> None:
    cluster.api.create(pods_in(space), asking("a", {"nvidia.com/mig-9g.990gb": 1}))
    condition = until("it is told", lambda: told(cluster, space, "a"))
    assert condition["reason"] == "UnknownProfile"


# Opting out


def test_a_pod_or_a_namespace_opts_out(cluster: Plane, space: str) -> None:
    made = cluster.api.create(pods_in(space), asking("a", {SMALL: 1}, OPTING_OUT))
    assert made["spec"]["containers"][0]["resources"]["limits"] == {SMALL: "1"}
    cluster.api.patch(f"{CORE}/namespaces/{space}", {"metadata": {"labels": OPTING_OUT}})

    def left_alone() -> bool:
        made = cluster.api.create(f"{pods_in(space)}?dryRun=All", asking("b", {SMALL: 1}))
        return "resourceClaims" not in made["spec"]

    until("the namespace has opted out", left_alone)


def test_another_value_of_the_label_is_refused(cluster: Plane, space: str) -> None:
    label = {"slicewise.dev/rewrite": "off"}
    with pytest.raises(ApiError, match="rewrite=off of the pod: write enabled or disabled"):
        cluster.api.create(pods_in(space), asking("a", {SMALL: 1}, label))
    cluster.api.patch(f"{CORE}/namespaces/{space}", {"metadata": {"labels": label}})

    def refused() -> bool:
        try:
            cluster.api.create(f"{pods_in(space)}?dryRun=All", asking("a", {SMALL: 1}))
        except ApiError as error:
            return "rewrite=off of the namespace: write enabled" in error.message
        return False

    until("it is refused", refused)


# Without slicewise


def test_pods_are_created_while_no_replica_runs(cluster: Plane, space: str, tmp_path: Path) -> None:
    cluster.api.create(pods_in(space), asking("a", {SMALL: 1}))
    assert cluster.api.items(templates_in(space)) == []
    with controller(cluster, tmp_path):
        until_running(cluster.api, space, "a")
        [made] = cluster.api.items(templates_in(space))
        assert made["metadata"]["labels"] == {"app.kubernetes.io/managed-by": "slicewise"}
        # A template that was deleted is created for the next pod.
        cluster.api.delete(f"{templates_in(space)}/{made['metadata']['name']}")
        cluster.api.create(pods_in(space), asking("b", {SMALL: 1}))
        until_running(cluster.api, space, "b")


def test_a_missing_right_is_told_and_nothing_is_lost(
    cluster: Plane, space: str, tmp_path: Path
) -> None:
    role = cluster.api.get(ROLE)
    del role["metadata"]["resourceVersion"]
    cluster.api.put(ROLE, {**role, "rules": []})
    try:
        with controller(cluster, tmp_path) as one:
            cluster.api.create(pods_in(space), asking("a", {SMALL: 1}))
            condition = until("it is told", lambda: told(cluster, space, "a"))
            assert condition["reason"] == "ClaimTemplate"
            assert 'cannot create resource "resourceclaimtemplates"' in condition["message"]
            cluster.api.put(ROLE, role)
            until_running(cluster.api, space, "a")
            assert "cannot be created" in one.log.read_text()
    finally:
        cluster.api.put(ROLE, role)


def test_removing_slicewise_leaves_running_pods_alone(
    cluster: Plane, space: str, tmp_path: Path
) -> None:
    with controller(cluster, tmp_path):
        cluster.api.create(pods_in(space), asking("runs", {SMALL: 1}))
        until_running(cluster.api, space, "runs")
    before = allocated(cluster.api, space, "runs")
    cluster.kubectl("delete", "-f", str(MANIFESTS / "unmodified-pods"))
    try:

        def untouched() -> bool:
            made = cluster.api.create(f"{pods_in(space)}?dryRun=All", asking("b", {SMALL: 1}))
            return "resourceClaims" not in made["spec"]

        until("pods are as before", untouched)
        assert until_running(cluster.api, space, "runs")["status"]["phase"] == "Running"
        assert allocated(cluster.api, space, "runs") == before
        cluster.api.delete(f"{pods_in(space)}/runs")
        gone = partial(cluster.api.items, claims_in(space))
        until("its claim is gone", lambda: gone() == [])
    finally:
        enable(cluster)
    assert cluster.api.find(f"{POLICIES}/slicewise-unmodified-pods") is not None
