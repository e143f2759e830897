"""What `kubectl slicewise` reports, from lists of objects."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest
from tests.kubernetes.objects import claim, node, pod, wants
from tests.kubernetes.publishing import nvidia
from tests.kubernetes_e2e.nvidia import devices_at

from slicewise.core.request import Request
from slicewise.kubernetes.api import ListOf, Pod
from slicewise.kubernetes.api.common import ListMeta
from slicewise.kubernetes.api_client import KubernetesApiError, NotFoundError
from slicewise.kubernetes.cluster_report import plans, slice_map, usage, waiting_pods, why
from slicewise.kubernetes.informer import (
    CLAIMS,
    NAMESPACES,
    NODES,
    PODS,
    SLICES,
    TAINT_RULES,
    Kind,
)
from slicewise.kubernetes.snapshot import NotVisibleError, Snapshot, read_snapshot

MODEL = "A100-80GB"


class Lists:
    """An API that only lists."""

    server = "https://lists"

    def __init__(self, **forbidden: bool) -> None:
        self.there: dict[str, list[Any]] = {}
        self.forbidden: set[str] = set()

    def add(self, kind: Kind, *things: Any) -> None:
        self.there.setdefault(kind.path, []).extend(things)

    def pages(self, path: str, kind: type[Any], fields: str = "") -> Iterator[Any]:
        if path in self.forbidden:
            raise KubernetesApiError(403, "Forbidden", f"cannot list {path}")
        if path == TAINT_RULES.path:
            raise NotFoundError(404, "NotFound", path)
        items = [msgspec.Raw(msgspec.json.encode(one)) for one in self.there.get(path, ())]
        half = len(items) // 2
        yield ListOf(ListMeta("1", "more"), items[:half])
        yield ListOf(ListMeta("1"), items[half:])


class Scene:
    """Nodes with GPUs, and pods on them."""

    def __init__(self, nodes: int = 1, gpus: int = 1) -> None:
        self.api = Lists()
        for number in range(nodes):
            name = f"n{number + 1}"
            self.api.add(NODES, node(name))
            self.api.add(SLICES, *nvidia(MODEL, gpus, name))

    def put(self, name: str, profile: str, gpu: int, start: int, where: str = "n1") -> None:
        """A pod of a ReplicaSet that runs."""
        seat = (where, devices_at(MODEL, gpu, profile)[start])
        self.api.add(
            CLAIMS,
            claim(f"{name}-c", config=[wants(profile=profile)], seats=[seat], node=where,
                  reserved=[f"uid-{name}"]),
        )  # fmt: skip
        self.pod(name, [f"{name}-c"], owned=True, nodeName=where)

    def ask(self, name: str, *profiles: str, **spec: Any) -> None:
        """A pod that waits."""
        names = [f"{name}-{number}" for number in range(len(profiles))]
        for one, profile in zip(names, profiles, strict=True):
            self.api.add(CLAIMS, claim(one, config=[wants(profile=profile)]))
        self.pod(name, names, **spec)

    def pod(self, name: str, claims: Sequence[str], owned: bool = False, **spec: Any) -> None:
        made = msgspec.to_builtins(pod(name, claims, **spec))
        if owned:
            owner = {"kind": "ReplicaSet", "name": "r", "uid": "u", "controller": True}
            made["metadata"]["ownerReferences"] = [owner]
        self.api.add(PODS, made)

    def read(self) -> Snapshot:
        return read_snapshot(self.api)  # type: ignore[arg-type]


def the_pod(snapshot: Snapshot, name: str) -> Pod:
    return snapshot.pending.pods[f"team/{name}"]


def test_the_map_shows_every_slice_and_its_pod() -> None:
    scene = Scene(nodes=2)
    scene.put("a", "3g.40gb", 0, 4)
    scene.put("b", "1g.10gb", 0, 0)
    snapshot = scene.read()
    [first, second] = slice_map(snapshot)
    assert (first["node"], first["schedulable"]) == ("n1", True)
    [gpu] = first["gpus"]
    assert (gpu["slices"], gpu["free"]) == (8, 3)
    assert [(one["profile"], one["start"], one["pods"]) for one in gpu["instances"]] == [
        ("1g.10gb", 0, ["team/b"]),
        ("3g.40gb", 4, ["team/a"]),
    ]
    assert all(one["of_slicewise"] for one in gpu["instances"])
    assert second["gpus"][0]["instances"] == []
    assert slice_map(snapshot, "n2") == [second]
    assert slice_map(snapshot, "n3") == []


def test_usage_counts_nodes_namespaces_and_waiting_pods() -> None:
    scene = Scene()
    scene.put("a", "3g.40gb", 0, 4)
    scene.ask("w", "7g.80gb", priority=5)
    scene.ask("v", "4g.40gb", "1g.10gb")
    found = usage(scene.read())
    [one] = found["nodes"]
    assert (one["slices"], one["free"], one["instances"]) == (8, 4, 1)
    assert one["largest_fit"] == "4g.40gb"
    [team] = found["namespaces"]
    assert (team["namespace"], team["memory_slices"], team["waiting"]) == ("team", 4, 2)
    assert [(one["pod"], one["asks_for"]) for one in found["waiting"]] == [
        ("team/w", ["7g.80gb"]),
        ("team/v", ["4g.40gb", "1g.10gb"]),
    ]


def test_a_full_node_has_room_for_nothing() -> None:
    scene = Scene()
    scene.put("a", "7g.80gb", 0, 0)
    [one] = usage(scene.read())["nodes"]
    assert one["largest_fit"] is None


def test_why_tells_what_each_node_lacks() -> None:
    scene = Scene(nodes=3)
    scene.put("a", "7g.80gb", 0, 0, "n1")
    scene.put("b", "1g.10gb", 0, 2, "n2")
    scene.ask("w", "4g.40gb", nodeSelector={"disk": "fast"})
    snapshot = scene.read()
    found = why(the_pod(snapshot, "w"), snapshot)
    assert found["state"] == "waits"
    assert found["asks_for"] == ["4g.40gb"]
    groups = {group["nodes"][0]: group["why"] for group in found["nodes"]}
    assert groups["n1"] == "no GPU has enough free for 4g.40gb"
    assert "no window for 4g.40gb is open" in groups["n2"]
    assert groups["n3"].startswith("there is room, but the node ")


def test_why_names_the_devices_of_a_pod() -> None:
    scene = Scene()
    scene.put("a", "3g.40gb", 0, 4)
    snapshot = scene.read()
    found = why(the_pod(snapshot, "a"), snapshot)
    assert found["state"] == "runs"
    assert found["devices"] == [{"profile": "3g.40gb", "node": "n1", "gpu": 0, "start": 4}]


@pytest.mark.parametrize(
    ("spec", "status", "state", "words"),
    [
        ({}, {"phase": "Succeeded"}, "ended", "ended"),
        ({}, {}, "none", "no resource claims"),
        (
            {"containers": [{"name": "m", "resources": {"requests": {"nvidia.com/mig-1g": "1"}}}]},
            {},
            "none",
            "asks a device plugin for slices (container m: nvidia.com/mig-1g)",
        ),
        (
            {"resourceClaims": [{"name": "a", "resourceClaimTemplateName": "t"}]},
            {},
            "not ready",
            "claims have not been created",
        ),
        (
            {"resourceClaims": [
                {"name": "a", "resourceClaimTemplateName": "slicewise-mig-1g.10gb-x1"}]},
            {},
            "not ready",
            "from the template slicewise-mig-1g.10gb-x1",
        ),
        (
            {"resourceClaims": [{"name": "a", "resourceClaimName": "t"}],
             "schedulingGates": [{"name": "wait"}]},
            {},
            "not ready",
            "scheduling gates: wait",
        ),
    ],
)  # fmt: skip
def test_why_of_pods_that_do_not_wait_for_slices(
    spec: dict[str, Any], status: dict[str, Any], state: str, words: str
) -> None:
    scene = Scene()
    meta = {"name": "p", "namespace": "team", "uid": "u"}
    made = msgspec.convert({"metadata": meta, "spec": spec, "status": status}, Pod)
    scene.api.add(PODS, made)
    found = why(made, scene.read())
    assert found["state"] == state
    assert words in found["text"]


def test_why_says_less_if_the_cluster_is_not_visible() -> None:
    condition = {"type": "slicewise.dev/Placed", "status": "False", "reason": "Quota"}
    made = msgspec.convert(
        {
            "metadata": {"name": "p", "namespace": "team", "uid": "u"},
            "spec": {"resourceClaims": [{"name": "a", "resourceClaimName": "t"}]},
            "status": {"conditions": [condition | {"message": "too much"}]},
        },
        Pod,
    )
    found = why(made, None)
    assert (found["state"], found["reason"], found["message"]) == ("waits", "Quota", "too much")


def test_an_invalid_claim_is_named() -> None:
    scene = Scene()
    scene.api.add(CLAIMS, claim("bad", config=[wants()]))
    scene.pod("p", ["bad"])
    snapshot = scene.read()
    found = why(the_pod(snapshot, "p"), snapshot)
    assert "claim 'bad'" in found["text"]
    assert found["nodes"] == []


def test_a_plan_names_the_pods_that_move() -> None:
    scene = Scene(gpus=2)
    scene.put("a", "1g.10gb", 0, 0)
    scene.put("b", "3g.40gb", 1, 4)
    scene.ask("w", "7g.80gb")
    [plan] = plans(scene.read(), 8, None)
    assert (plan["for"], plan["pods"], plan["found"]) == ("7g.80gb", ["team/w"], True)
    [move] = plan["moves"]
    assert move["pods"] == ["team/a"]
    assert move["from"] == {"node": "n1", "gpu": 0, "start": 0}
    assert move["to"]["gpu"] == 1
    assert plan["fits"] == {"node": "n1", "gpu": 0, "start": 0}


def test_a_plan_moves_no_pod_that_would_be_lost() -> None:
    scene = Scene(gpus=2)
    scene.put("a", "1g.10gb", 0, 0)
    scene.put("b", "3g.40gb", 1, 4)
    for one in scene.api.there[PODS.path]:
        one["metadata"]["ownerReferences"] = []
    [plan] = plans(scene.read(), 8, Request("7g.80gb"))
    assert plan == {"for": "7g.80gb", "pods": [], "found": False, "moves": [], "fits": None}


def test_plans_are_for_single_devices() -> None:
    scene = Scene()
    scene.ask("w", "7g.80gb", "1g.10gb")
    snapshot = scene.read()
    assert len(list(waiting_pods(snapshot))) == 1
    assert plans(snapshot, 8, None) == []


@pytest.mark.parametrize("kind", [SLICES, CLAIMS, NODES], ids=lambda kind: kind.name)
def test_what_the_user_may_not_list_is_named(kind: Kind) -> None:
    scene = Scene()
    scene.api.forbidden.add(kind.path)
    with pytest.raises(NotVisibleError, match=f"may not list the {kind.name} of the cluster"):
        scene.read()


def test_other_kinds_may_be_hidden() -> None:
    scene = Scene()
    scene.put("a", "3g.40gb", 0, 4)
    scene.api.forbidden |= {PODS.path, NAMESPACES.path}
    snapshot = scene.read()
    assert set(snapshot.hidden) == {"Pods", "Namespaces"}
    [one] = slice_map(snapshot)[0]["gpus"][0]["instances"]
    assert (one["claim"], one["pods"]) == ("team/a-c", [])
