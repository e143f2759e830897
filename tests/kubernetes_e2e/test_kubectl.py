"""`kubectl slicewise` on a real control plane, run by kubectl itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.kubernetes_e2e.api import CORE, RBAC, until
from tests.kubernetes_e2e.cluster import allocated, pod, pods_in, until_running
from tests.kubernetes_e2e.conftest import Nodes
from tests.kubernetes_e2e.plane import Plane
from tests.kubernetes_e2e.replica import running
from tests.kubernetes_e2e.test_controller import make_template
from tests.kubernetes_e2e.test_install import told


@pytest.fixture
def scene(plane: Plane, nodes: Nodes, space: str, tmp_path: Path) -> Iterator[str]:
    """A node with two GPUs: a pod on each runs, and one waits for a whole GPU."""
    [name] = nodes(1, "A100-80GB", gpus=2)
    make_template(plane, space, "half", profile="3g.40gb")
    make_template(plane, space, "whole", profile="7g.80gb")
    with running(plane.kubeconfig, tmp_path, "--policy", "worst-fit", "--lease-seconds", "2"):
        owner = plane.api.create(
            f"{CORE}/namespaces/{space}/configmaps", {"metadata": {"name": "owner"}}
        )
        reference = {
            "apiVersion": "v1", "kind": "ConfigMap", "name": "owner",
            "uid": owner["metadata"]["uid"], "controller": True,
        }  # fmt: skip
        for one in ("a", "b"):
            made = pod(one, templates=["half"])
            made["metadata"]["ownerReferences"] = [reference]
            plane.api.create(pods_in(space), made)
            until_running(plane.api, space, one)
        assert len({device[:5] for one in "ab" for _, device in allocated(plane.api, space, one)})
        plane.api.create(pods_in(space), pod("waits", templates=["whole"]))
        until("it is told why it waits", lambda: told(plane, space, "waits"))
        yield name


def test_map_draws_the_slices(plane: Plane, space: str, scene: str) -> None:
    text = plane.plugin("map", "--node", scene)
    assert text.startswith(f"{scene}: 2 GPUs")
    for one in ("a", "b"):
        assert f"a  3g.40gb  {space}/{one}\n" in text
    found = json.loads(plane.plugin("map", "--node", scene, "--json"))
    placed = {
        one["pods"][0]: (f"gpu-{gpu['gpu']}", one["start"])
        for gpu in found["nodes"][0]["gpus"]
        for one in gpu["instances"]
    }
    for one in ("a", "b"):
        [(_, device)] = allocated(plane.api, space, one)
        gpu, start = placed[f"{space}/{one}"]
        assert device.startswith(f"{gpu}-")
        assert device.endswith(f"-{start}")


def test_why_gives_the_reason_of_each_node(plane: Plane, space: str, scene: str) -> None:
    text = plane.plugin("why", "waits", "-n", space)
    assert f"Pod {space}/waits waits for slices.\nslicewise says: Capacity: " in text
    assert f"  {scene}: no GPU has enough free for 7g.80gb\n" in text
    found = json.loads(plane.plugin("why", "a", "--namespace", space, "--json"))
    assert found["state"] == "runs"
    assert [one["profile"] for one in found["devices"]] == ["3g.40gb"]


def test_top_counts_what_is_used_and_waits(plane: Plane, space: str, scene: str) -> None:
    text = plane.plugin("top")
    assert "LARGEST THAT FITS" in text
    assert f"{space}/waits" in text
    found = json.loads(plane.plugin("top", "--json"))
    [node] = [one for one in found["nodes"] if one["node"] == scene]
    assert (node["slices"], node["free"], node["largest_fit"]) == (16, 8, "3g.40gb")
    [used] = [one for one in found["namespaces"] if one["namespace"] == space]
    assert (used["memory_slices"], used["waiting"]) == (8, 1)


def test_plan_moves_one_pod(plane: Plane, space: str, scene: str) -> None:
    text = plane.plugin("plan", "waits", "-n", space)
    assert f"7g.80gb ({space}/waits):\n  1. {space}/" in text
    assert f"  fits on {scene} GPU " in text
    found = json.loads(plane.plugin("plan", "--json"))
    [plan] = [one for one in found["plans"] if f"{space}/waits" in one["pods"]]
    assert len(plan["moves"]) == 1
    # Nothing was moved.
    assert until_running(plane.api, space, "a")
    assert until_running(plane.api, space, "b")


BAD: dict[tuple[str, ...], str] = {
    ("why", "missing"): "there is no pod 'missing' in namespace",
    ("why", "../a"): "'../a' is no name of a pod",
    ("map", "--node", "nowhere"): "node 'nowhere' does not exist",
    ("plan", "--for", "9g.1gb"): "unknown profile in this cluster '9g.1gb'",
    ("plan", "a"): "does not wait for slices: see kubectl slicewise why a",
    ("plan", "a", "--for", "1g.10gb"): "not both",
    ("plan", "--budget", "2000"): "budget must be 0 to 1000",
    ("map", "--context", "nowhere"): "cannot connect to a Kubernetes cluster",
    ("nonsense",): "No such command",
}


def test_bad_input_is_refused_in_one_line(plane: Plane, space: str, scene: str) -> None:
    for words, problem in BAD.items():
        where = ("-n", space) if words[0] in ("why", "plan") else ()
        with pytest.raises(RuntimeError) as error:
            plane.plugin(*words, *where)
        _, _, line = str(error.value).partition("kubectl slicewise: error: ")
        assert problem in line, words
        assert "\n" not in line, words


def test_it_needs_no_more_than_rights_to_read(plane: Plane, space: str, scene: str) -> None:
    """A user of one namespace is told why; what needs the cluster names the missing right."""
    api, path = plane.api, f"{RBAC}/namespaces/{space}"
    api.create(f"{CORE}/namespaces/{space}/serviceaccounts", {"metadata": {"name": "user"}})
    rule = {"apiGroups": [""], "resources": ["pods"], "verbs": ["get"]}
    api.create(f"{path}/roles", {"metadata": {"name": "user"}, "rules": [rule]})
    api.create(
        f"{path}/rolebindings",
        {
            "metadata": {"name": "user"},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "user"},
            "subjects": [{"kind": "ServiceAccount", "name": "user", "namespace": space}],
        },
    )
    kubeconfig = plane.kubeconfig_for(f"{space}/user")

    def said() -> str | None:
        try:
            return plane.plugin("why", "waits", kubeconfig=kubeconfig)  # its own namespace
        except RuntimeError:
            return None  # the right is not in force yet

    assert "slicewise says: Capacity: " in until("it may look", said)
    for words in (("map",), ("top",), ("plan",)):
        with pytest.raises(RuntimeError, match="may not list the ResourceSlices of the cluster"):
            plane.plugin(*words, kubeconfig=kubeconfig)
