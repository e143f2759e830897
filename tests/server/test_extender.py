"""The scheduler extender: filter, prioritize, bind, and the watch of pods."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.core.result import Ok
from tests.server.harness import Harness
from tests.server.test_agents import Agent
from tests.server.test_openapi import CHECKS

from slicewise.cli.main import exit_status
from slicewise.config.settings import Settings
from slicewise.config.values import Address
from slicewise.control.actors import internal
from slicewise.control.answers import RefusedError
from slicewise.control.pods import (
    EveryPod,
    Pod,
    PodGone,
    PodNews,
    PodSeen,
    PodsError,
    PodsUnknown,
)
from slicewise.core.errors import SlicewiseError
from slicewise.journal.agent_entries import Phase as InstancePhase
from slicewise.journal.entries import Part
from slicewise.runtime.steady_clock import SteadyClock
from slicewise.server.extender import pod_watch
from slicewise.server.extender.binding import allocations_by_pod
from slicewise.server.extender.extender import Extender
from slicewise.server.extender.pod_requests import annotations_for, instances_wanted, shares
from slicewise.server.openapi import document
from slicewise.server.server import listening, serve
from slicewise.server.service import Service
from slicewise.store.memory import MemoryStore

MIG = "nvidia.com/mig-"
_pod = msgspec.json.Decoder(Pod).decode


def container(name: str = "main", always: bool = False, **asks: int) -> dict[str, Any]:
    """A container; ``g3=1`` requests one 3g.40gb."""
    profiles = {"g1": "1g.10gb", "g2": "2g.20gb", "g3": "3g.40gb", "g7": "7g.80gb"}
    limits = {f"{MIG}{profiles[short]}": str(count) for short, count in asks.items()}
    made: dict[str, Any] = {"name": name, "resources": {"limits": limits, "requests": limits}}
    return made | ({"restartPolicy": "Always"} if always else {})


def pod_object(
    name: str, *containers: dict[str, Any], space: str = "team", **spec: Any
) -> dict[str, Any]:
    """A pod as JSON of the API."""
    return {
        "metadata": {"name": name, "namespace": space, "uid": f"uid-{space}-{name}"},
        "spec": {"containers": list(containers), "schedulerName": "default-scheduler"} | spec,
        "status": {"phase": "Pending"},
    }


class FakePods:
    """The pods of a simulated cluster; every write changes the resource version of a pod."""

    def __init__(self) -> None:
        self.pods: dict[tuple[str, str], dict[str, Any]] = {}
        self.writes: list[tuple[str, str]] = []
        self.version = 0
        self.unreachable = False
        self.refuses = False
        """Whether bindings are refused."""
        self.delays = False
        """Whether the next binding is delayed."""
        self.late: tuple[Pod, str] | None = None
        self.loses_answer = False
        """Whether bindings succeed but report an error."""
        self.before_bind: Callable[[], object] = lambda: None
        self.on_touch: Callable[[], object] = lambda: None
        self._tellers: list[Callable[[PodNews], None]] = []
        self._lock = threading.RLock()

    # Actions of tests

    def add(self, pod: dict[str, Any]) -> dict[str, Any]:
        """Create a pod."""
        meta = pod["metadata"]
        self._write(pod)
        self.pods[meta["namespace"], meta["name"]] = pod
        self._tell(PodSeen(self._as_pod(pod)))
        return pod

    def end(self, pod: dict[str, Any], phase: str) -> None:
        """End the containers of a pod."""
        pod["status"] = {"phase": phase}
        self._write(pod)
        self._tell(PodSeen(self._as_pod(pod)))

    def remove(self, pod: dict[str, Any], tell: bool = True) -> None:
        """Delete a pod."""
        del self.pods[pod["metadata"]["namespace"], pod["metadata"]["name"]]
        if tell:
            self._tell(PodGone(self._as_pod(pod)))

    def tell_all(self) -> None:
        """List all pods again."""
        self._tell(EveryPod({p["metadata"]["uid"]: self._as_pod(p) for p in self.pods.values()}))

    @property
    def followed(self) -> bool:
        """Whether pods are watched."""
        return bool(self._tellers)

    def _tell(self, news: PodNews) -> None:
        for tell in list(self._tellers):
            tell(news)

    def _write(self, pod: dict[str, Any]) -> None:
        self.version += 1
        pod["metadata"]["resourceVersion"] = str(self.version)

    def _as_pod(self, pod: dict[str, Any]) -> Pod:
        return _pod(msgspec.json.encode(pod))

    def _reach(self) -> None:
        if self.unreachable:
            raise PodsError("the API does not answer")

    # The port of the service

    def get(self, namespace: str, name: str) -> Pod | None:
        with self._lock:
            self._reach()
            found = self.pods.get((namespace, name))
            return None if found is None else self._as_pod(found)

    def bind(self, pod: Pod, node: str, annotations: Mapping[str, str]) -> None:
        self.before_bind()
        if self.delays:
            self.delays, self.late = False, (pod, node)
            raise PodsError("no answer in time")
        with self._lock:
            self._reach()
            found = self.pods.get((pod.metadata.namespace, pod.metadata.name))
            as_given = (
                found is not None
                and found["metadata"]
                | {
                    "uid": pod.uid,
                    "resourceVersion": pod.metadata.resource_version,
                }
                == found["metadata"]
            )
            if self.refuses or found is None or not as_given or found["spec"].get("nodeName"):
                raise PodsError("the binding was refused")
            found["spec"]["nodeName"] = node
            found["metadata"].setdefault("annotations", {}).update(annotations)
            self._write(found)
            self.writes.append(("bind", node))
            if self.loses_answer:
                raise PodsError("the connection was lost")
            self._tell(PodSeen(self._as_pod(found)))

    def touch(self, pod: Pod, annotation: str, value: str) -> Pod | None:
        with self._lock:
            self._reach()
            found = self.pods.get((pod.metadata.namespace, pod.metadata.name))
            if found is None or found["metadata"]["uid"] != pod.uid:
                return None
            found["metadata"].setdefault("annotations", {})[annotation] = value
            self._write(found)
            self.on_touch()
            self.writes.append(("touch", annotation))
            return self._as_pod(found)

    def follow(self, tell: Callable[[PodNews], None]) -> Callable[[], None]:
        self._tellers.append(tell)
        tell(PodsUnknown("not yet"))
        self.tell_all()
        tell(PodsUnknown(""))
        return lambda: self._tellers.remove(tell)


class Cluster(Harness):
    """A service with the extender, and simulated pods."""

    def __post_init__(self) -> None:
        self.pods = FakePods()
        super().__post_init__()
        self.wait_for(lambda: self.pods.followed)

    def open(self, name: str, address: str = "", **more: Any) -> Service:
        assert self.store is not None
        chosen = {"lease_seconds": 0.5, "strangers_per_second": 1e6} | self.settings | more
        settings = Settings(data=self.folder / name, extender_enabled=True, **chosen)
        self.extender = Extender(self.pods, settings)
        made = Service(
            self.store,
            settings,
            SteadyClock(self.clock, self.clock),
            lambda: self.ticks,
            routes=self.extender.routes(),
            companions=(self.extender.run,),
        )
        self.services.append(made)
        self.run(made.start(address or f"http://{name}"))
        return made

    def args(self, pod: dict[str, Any], *names: str) -> dict[str, Any]:
        """Send a request of a scheduler."""
        return {"Pod": pod, "Nodes": None, "NodeNames": list(names)}

    def filter(self, pod: dict[str, Any], *names: str) -> Any:
        answer = self.post("/v1/extender/filter", self.args(pod, *names))
        assert answer.status_code == 200, answer.text
        return answer.json()

    def scores(self, pod: dict[str, Any], *names: str) -> dict[str, int]:
        answer = self.post("/v1/extender/prioritize", self.args(pod, *names))
        assert answer.status_code == 200, answer.text
        return {one["Host"]: one["Score"] for one in answer.json()}

    def bind(self, pod: dict[str, Any], node: str, **options: Any) -> str:
        meta = pod["metadata"]
        body = {
            "PodName": meta["name"],
            "PodNamespace": meta["namespace"],
            "PodUID": meta["uid"],
            "Node": node,
        }
        answer = self.post("/v1/extender/bind", body, **options)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["Error"])

    def living(self) -> list[dict[str, Any]]:
        return list(self.get("/v1/allocations").json()["allocations"])

    def three(self) -> tuple[str, str, str]:
        """Three nodes with two A100 each."""
        for name in ("n1", "n2", "n3"):
            self.node(name=name)
        return "n1", "n2", "n3"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path, {"extender_active_seconds": 1.0})
    yield made
    made.close()


def open_cluster(folder: Path, **more: Any) -> Cluster:
    return Cluster(folder, more)


# Requests of pods


def summed(*containers: dict[str, Any], init: tuple[dict[str, Any], ...] = ()) -> dict[str, int]:
    pod = _pod(msgspec.json.encode(pod_object("p", *containers, initContainers=list(init))))
    return instances_wanted(pod, ())


def test_a_pod_needs_the_maximum_over_time() -> None:
    assert summed(container(g1=1), container(g1=2, g3=1)) == {"1g.10gb": 3, "3g.40gb": 1}
    assert summed(container(g1=1), init=(container(g1=4), container(g2=1))) == {
        "1g.10gb": 4,
        "2g.20gb": 1,
    }
    sidecar = container("side", always=True, g1=1)
    assert summed(container(g1=2), init=(container(g1=3), sidecar, container(g1=1))) == {
        "1g.10gb": 3
    }
    assert summed(container(g1=2), init=(sidecar, container(g1=3))) == {"1g.10gb": 4}
    assert summed(container(), {"name": "bare"}) == {}


def test_quantities_are_whole_and_bounded() -> None:
    with pytest.raises(RefusedError, match="not a number of instances"):
        summed({"resources": {"limits": {f"{MIG}1g.10gb": "500m"}}})
    with pytest.raises(RefusedError, match="the maximum is 64"):
        summed({"resources": {"limits": {f"{MIG}1g.10gb": "1k"}}})
    assert summed({"resources": {"limits": {f"{MIG}1g.10gb": 2, "cpu": "500m"}}}) == {"1g.10gb": 2}


def test_the_name_of_a_resource_has_no_plus(cluster: Cluster) -> None:
    cluster.node()
    geometries = cluster.service.context.state.geometries.values()
    media = {"resources": {"limits": {f"{MIG}1g.10gb.me": "1"}}}
    assert instances_wanted(_pod(msgspec.json.encode(pod_object("p", media))), geometries) == {
        "1g.10gb+me": 1
    }


def part(uuid: str, profile: str = "1g.10gb") -> Part:
    return Part("n", 0, "A100-80GB", profile, 0, 1, 1, 10, InstancePhase.ACTIVE, uuid)


def test_instances_are_distributed_to_containers() -> None:
    raw = pod_object(
        "p",
        container("a", g1=1),
        container("b", g1=1),
        container("c" * 60, g3=1),
        container("idle"),
        initContainers=[container("first", g1=2), container("side", always=True, g1=1)],
    )
    pod = _pod(msgspec.json.encode(raw))
    parts = [part("MIG-1"), part("MIG-2"), part("MIG-3"), part("MIG-4", "3g.40gb")]
    assert instances_wanted(pod, ()) == {"1g.10gb": 3, "3g.40gb": 1}
    mine = {name: [one.uuid for one in got] for name, got in shares(pod, parts, ())}
    assert mine == {
        "first": ["MIG-1", "MIG-2"],  # it ends before the others start
        "side": ["MIG-1"],
        "a": ["MIG-2"],
        "b": ["MIG-3"],
        "c" * 60: ["MIG-4"],
        "idle": [],
    }
    notes = annotations_for(pod, ["a1", "a2"], parts, ())
    assert notes["slicewise.dev/allocations"] == "a1,a2"
    assert notes["slicewise.dev/devices"] == "MIG-1,MIG-2,MIG-3,MIG-4"
    assert notes["cdi.k8s.io/slicewise"].startswith("slicewise.dev/mig=MIG-1,slicewise.dev/mig=")
    assert notes["a.slicewise.dev/devices"] == "MIG-2"
    assert notes["cdi-devices.noderesource.dev/container.a"] == "- slicewise.dev/mig=MIG-2\n"
    assert "idle.slicewise.dev/devices" not in notes
    assert all(len(key.partition("/")[2]) <= 63 for key in notes)
    assert list(annotations_for(pod, ["a1"], [part("")], ())) == ["slicewise.dev/allocations"]


# Filter and prioritize


def test_a_feasible_node_has_room_for_all_instances(cluster: Cluster) -> None:
    names = cluster.three()
    cluster.node(name="small", model="A30-24GB")
    pod = pod_object("p", container(g7=1, g3=1), container(g3=1))
    said = cluster.filter(pod, *names, "small", "elsewhere")
    assert sorted(said["NodeNames"]) == list(names)
    assert said["Error"] == ""
    assert said["FailedNodes"] == {}
    assert said["FailedAndUnresolvableNodes"] == {
        "small": "A30-24GB has no 3g.40gb",
        "elsewhere": "the node is unknown to slicewise",
    }
    cluster.post("/v1/nodes/n1/cordon")
    held = pod_object("q", container(g1=1), space="default")
    cluster.pods.add(held)
    assert cluster.bind(held, "n2") == ""
    said = cluster.filter(pod, *names)
    assert said["NodeNames"] == ["n3"]
    assert said["FailedNodes"] == {"n2": "there is no room for 2 x 3g.40gb and 7g.80gb together"}
    assert said["FailedAndUnresolvableNodes"] == {"n1": "the node is cordoned in slicewise"}
    assert cluster.filter(pod)["NodeNames"] == []
    assert len(cluster.living()) == 1, "asking changes nothing"


def test_reasons_against_a_node(cluster: Cluster) -> None:
    cluster.node(name="n1", gpus=1)
    every = [cluster.place("1g.10gb") for _ in range(7)]
    assert (
        "enough free" in cluster.filter(pod_object("p", container(g3=1)), "n1")["FailedNodes"]["n1"]
    )
    for one in every:
        if one["start"] % 2:
            cluster.delete(f"/v1/allocations/{one['id']}")
    said = cluster.filter(pod_object("p", container(g2=1)), "n1")
    assert said["FailedNodes"]["n1"].startswith("no window for 2g.20gb is open, ")
    cluster.tenant("small", memory_slices=1)
    said = cluster.filter(pod_object("p", container(g1=2), space="small"), "n1")
    assert said["FailedNodes"]["n1"] == (
        "tenant 'small' uses 0 of its 1 memory slices, and this would take 2 more"
    )
    said = cluster.filter(pod_object("p", {"resources": {"limits": {f"{MIG}1g.10gb": "x"}}}), "n1")
    assert said["NodeNames"] is None
    assert "not a number of instances" in said["Error"]


def test_the_best_node_is_the_choice_of_the_policy(cluster: Cluster) -> None:
    names = cluster.three()
    for node, asks in (("n2", container(g3=1)), ("n3", container(g1=1))):
        taken = cluster.pods.add(pod_object(f"on-{node}", asks))
        assert cluster.bind(taken, node) == ""
    pod = pod_object("p", container(g3=1))
    best = cluster.post("/v1/allocations/dry-run", {"profile": "3g.40gb"}).json()
    scores = cluster.scores(pod, *names)
    assert scores[best["instances"][0]["node"]] == 10
    assert sorted(scores.values()) == [8, 9, 10]
    assert cluster.scores(pod, "elsewhere", "n1") == {"elsewhere": 0, "n1": 10}
    many = [f"m{number}" for number in range(14)]
    for name in many:
        cluster.node(name=name, gpus=1)
    scores = cluster.scores(pod, *many)
    assert list(scores.values()) == [*range(10, -1, -1), 0, 0, 0]


def test_pods_without_mig_requests_pass(cluster: Cluster) -> None:
    pod = cluster.pods.add(pod_object("p", container()))
    assert cluster.filter(pod, "a", "b")["NodeNames"] == ["a", "b"]
    assert cluster.scores(pod, "a", "b") == {"a": 0, "b": 0}
    assert cluster.bind(pod, "b") == ""
    assert cluster.bind(pod, "b") == ""
    assert pod["spec"]["nodeName"] == "b"
    assert cluster.living() == []


def test_invalid_requests_of_a_scheduler_are_refused(cluster: Cluster) -> None:
    cluster.node()
    pod = pod_object("p", container(g1=1))
    full = {"Pod": pod, "Nodes": {"items": [{"metadata": {"name": "n1"}}]}, "NodeNames": None}
    answer = cluster.post("/v1/extender/filter", full)
    assert (answer.status_code, answer.json()["field"]) == (400, "NodeNames")
    assert "nodeCacheCapable" in answer.json()["detail"]
    assert cluster.post("/v1/extender/filter", {"NodeNames": ["n1"]}).status_code == 400
    answer = cluster.post(
        "/v1/extender/bind", {"PodName": "..", "PodNamespace": "x", "PodUID": "u", "Node": "n1"}
    )
    assert (answer.status_code, answer.json()["field"]) == (400, "PodName")
    large = pod | {"note": "x" * (1 << 17)}
    assert cluster.filter(large, "n1")["NodeNames"] == ["n1"]


# Binding


def test_a_pod_is_bound_once_its_instances_are_placed(cluster: Cluster) -> None:
    cluster.three()
    pod = cluster.pods.add(pod_object("p", container(g3=2), container(g1=1)))
    seen: list[int] = []
    cluster.pods.before_bind = lambda: seen.append(len(cluster.service.context.state.allocations))
    assert cluster.bind(pod, "n2") == ""
    assert seen == [2], "durable first"
    living = sorted(cluster.living(), key=lambda one: one["profile"])
    assert {one["node"] for one in living} == {"n2"}
    assert [(one["wanted"]["profile"], one["count"]) for one in living] == [
        ("1g.10gb", 1),
        ("3g.40gb", 2),
    ]
    assert {one["tenant"] for one in living} == {"team"}
    assert living[0]["labels"] == {
        "k8s/pod": "p",
        "k8s/namespace": "team",
        "k8s/uid": "uid-team-p",
    }
    assert pod["spec"]["nodeName"] == "n2"
    ids = ",".join(one["id"] for one in living)
    assert pod["metadata"]["annotations"] == {"slicewise.dev/allocations": ids}
    before = cluster.service.context.state.seq
    assert cluster.bind(pod, "n2") == "", "asked again, it is the same"
    assert cluster.service.context.state.seq == before
    assert cluster.bind(pod, "n1") == "team/p is bound to node 'n2' already"


@pytest.mark.parametrize(
    ("deadline", "hint", "expected"),
    [(None, "90", 90), (60, "90", 60), (600, "soon", 600), (0, "", None), (10**400, "", 315360000)],
)
def test_an_allocation_knows_how_long_its_pod_is_expected_to_run(
    cluster: Cluster, deadline: int | None, hint: str, expected: float | None
) -> None:
    cluster.three()
    made = pod_object("p", container(g3=1), activeDeadlineSeconds=deadline)
    made["metadata"]["annotations"] = {"slicewise.dev/expected-seconds": hint} if hint else {}
    pod = cluster.pods.add(made)
    assert max(cluster.scores(pod, "n1", "n2").values()) == 10
    assert cluster.bind(pod, "n2") == ""
    [living] = cluster.living()
    assert living.get("expected_seconds") == expected


def test_a_pod_without_room_is_not_bound(cluster: Cluster) -> None:
    cluster.node(gpus=1)
    full, late = (cluster.pods.add(pod_object(name, container(g7=1))) for name in ("a", "b"))
    assert cluster.bind(full, "n1") == ""
    assert cluster.bind(late, "n1") == "node 'n1': no GPU has enough free for 7g.80gb"
    assert "no node 'zz'" in cluster.bind(late, "zz")
    assert "nodeName" not in late["spec"]
    odd = cluster.pods.add(pod_object("odd", {"resources": {"limits": {f"{MIG}9g.1gb": "1"}}}))
    assert "9g.1gb" in cluster.bind(odd, "n1")
    over = cluster.pods.add(pod_object("over", container(g1=1)))
    cluster.pods.end(over, "Failed")
    assert cluster.bind(over, "n1") == "team/over is over"
    gone = pod_object("gone", container(g1=1))
    assert cluster.bind(gone, "n1") == "pod team/gone is gone"
    other = cluster.pods.add(pod_object("other", container(g1=1)))
    other["metadata"]["uid"] = "uid-of-a-later-one"
    assert cluster.bind(pod_object("other"), "n1") == "pod team/other is gone"


def test_queued_requests_come_first(tmp_path: Path) -> None:
    cluster = open_cluster(tmp_path)
    cluster.node(gpus=1)
    held = cluster.place("7g.80gb")
    waits = cluster.post("/v1/allocations", {"profile": "7g.80gb", "wait_seconds": 60})
    assert waits.status_code == 202
    pod = cluster.pods.add(pod_object("p", container(g1=2)))
    cluster.delete(f"/v1/allocations/{held['id']}")
    assert "no GPU has enough free for 1g.10gb" in cluster.bind(pod, "n1")
    assert len(cluster.living()) == 1
    cluster.delete(f"/v1/allocations/{waits.json()['id']}")
    assert cluster.bind(pod, "n1") == ""
    cluster.close()


def test_the_quota_of_a_tenant_holds(cluster: Cluster) -> None:
    cluster.three()
    cluster.tenant("team", instances=2)
    first, second = (cluster.pods.add(pod_object(name, container(g1=2))) for name in ("a", "b"))
    assert cluster.bind(first, "n1") == ""
    free = cluster.get("/v1/cluster").json()["free_slices"]
    assert cluster.bind(second, "n2") == (
        "tenant 'team' uses 2 of its 2 instances, and this would take 2 more"
    )
    assert cluster.get("/v1/cluster").json()["free_slices"] == free


def test_namespaces_without_a_tenant_may_be_refused(tmp_path: Path) -> None:
    cluster = open_cluster(tmp_path, extender_tenants="refuse")
    cluster.node()
    pod = cluster.pods.add(pod_object("p", container(g1=1)))
    said = cluster.filter(pod, "n1")
    assert said["NodeNames"] == []
    assert "namespace 'team' is not a tenant" in said["FailedAndUnresolvableNodes"]["n1"]
    assert cluster.bind(pod, "n1") == "namespace 'team' is not a tenant"
    cluster.tenant("team")
    assert cluster.bind(pod, "n1") == ""
    cluster.close()


def test_a_failed_binding_releases_its_allocations(cluster: Cluster) -> None:
    cluster.node()
    pod = cluster.pods.add(pod_object("p", container(g3=1)))
    cluster.pods.refuses = True
    assert cluster.bind(pod, "n1") == "the binding was refused"
    assert cluster.living() == []
    assert cluster.pods.writes == [("touch", "slicewise.dev/returned")]
    cluster.pods.refuses = False
    assert cluster.bind(pod, "n1") == ""
    assert len(cluster.living()) == 1


def test_a_binding_with_a_lost_answer_is_kept(cluster: Cluster) -> None:
    cluster.node()
    pod = cluster.pods.add(pod_object("p", container(g3=1)))
    cluster.pods.loses_answer = True
    assert cluster.bind(pod, "n1") == ""
    assert len(cluster.living()) == 1
    assert pod["spec"]["nodeName"] == "n1"


def test_an_abandoned_binding_cannot_succeed_later(cluster: Cluster) -> None:
    cluster.node()
    pod = cluster.pods.add(pod_object("p", container(g3=1)))
    cluster.pods.delays = True
    assert cluster.bind(pod, "n1") == "no answer in time"
    assert cluster.living() == []
    assert cluster.pods.late is not None
    with pytest.raises(PodsError, match="refused"):
        cluster.pods.bind(*cluster.pods.late, {})
    assert "nodeName" not in pod["spec"]


def test_a_pod_that_changed_meanwhile_is_not_bound(cluster: Cluster) -> None:
    cluster.node()
    pod = cluster.pods.add(pod_object("p", container(g3=1)))
    cluster.pods.before_bind = lambda: cluster.pods._write(pod)
    assert cluster.bind(pod, "n1") == "the binding was refused"
    assert cluster.living() == []


def test_allocations_are_kept_while_the_outcome_is_unknown(cluster: Cluster) -> None:
    cluster.node()
    pod = cluster.pods.add(pod_object("p", container(g3=1)))

    def cut() -> None:
        cluster.pods.unreachable = True

    cluster.pods.before_bind = cut
    said = cluster.bind(pod, "n1")
    assert said.startswith("the API does not answer; whether it is bound is not known")
    assert len(cluster.living()) == 1
    cluster.clock.now += 60
    cluster.run(asyncio.sleep(1.2))
    assert len(cluster.living()) == 1, "it is still not known"
    cluster.pods.unreachable = False
    cluster.wait_for(lambda: not cluster.service.context.state.allocations)
    assert ("touch", "slicewise.dev/returned") in cluster.pods.writes


def test_an_earlier_attempt_is_continued_or_released(cluster: Cluster) -> None:
    cluster.three()
    labels = {"k8s/pod": "p", "k8s/namespace": "team", "k8s/uid": "uid-team-p"}
    cluster.tenant("team")
    for name in ("n2", "n3"):
        cluster.post(f"/v1/nodes/{name}/cordon")
    cluster.place("3g.40gb", tenant="team", labels=labels)  # left by a bind that crashed
    for name in ("n2", "n3"):
        cluster.post(f"/v1/nodes/{name}/uncordon")
    pod = cluster.pods.add(pod_object("p", container(g3=1)))
    said = cluster.filter(pod, "n2", "n1")
    assert said["NodeNames"] == ["n1"]
    assert said["FailedAndUnresolvableNodes"] == {
        "n2": "team/p has its instances on node 'n1' already"
    }
    assert sorted(cluster.filter(pod, "n2", "n3")["NodeNames"]) == ["n2", "n3"]
    assert cluster.bind(pod, "n2") == ""
    assert [one["node"] for one in cluster.living()] == ["n2"]
    assert cluster.pods.writes == [("touch", "slicewise.dev/returned"), ("bind", "n2")]


def test_an_earlier_attempt_for_less_is_not_continued(cluster: Cluster) -> None:
    cluster.node()
    labels = {"k8s/pod": "p", "k8s/namespace": "team", "k8s/uid": "uid-team-p"}
    cluster.tenant("team")
    cluster.place("1g.10gb", tenant="team", labels=labels)
    pod = cluster.pods.add(pod_object("p", container(g3=1)))
    assert "other allocations" in cluster.bind(pod, "n1")
    assert "nodeName" not in pod["spec"]


def test_concurrent_binds_of_a_pod_get_the_same_answer(cluster: Cluster) -> None:
    cluster.node()
    pod = cluster.pods.add(pod_object("p", container(g3=1)))
    site, binder = cluster.service.context, cluster.extender.binder

    async def both() -> list[str]:
        mine = (internal("t"), "team", "p", "uid-team-p", "n1")
        return list(await asyncio.gather(binder.bind(site, *mine), binder.bind(site, *mine)))

    assert cluster.run(both()) == ["", ""]
    assert len(cluster.living()) == 1
    assert cluster.pods.writes == [("bind", "n1")]
    assert pod["spec"]["nodeName"] == "n1"
    assert not binder.busy


def test_only_a_leader_binds(cluster: Cluster) -> None:
    cluster.node()
    pod = cluster.pods.add(pod_object("p", container(g3=1)))
    standby = cluster.open("second")
    answer = cluster.post("/v1/extender/filter", cluster.args(pod, "n1"), service=standby).json()
    assert answer["NodeNames"] == ["n1"]
    assert "does not accept writes" in cluster.bind(pod, "n1", service=standby)
    assert cluster.bind(pod, "n1") == ""


# With an agent on the node


def h200_pod(name: str) -> dict[str, Any]:
    return pod_object(name, {"name": "main", "resources": {"limits": {f"{MIG}3g.71gb": "2"}}})


def test_a_pod_is_annotated_with_its_devices(cluster: Cluster) -> None:
    agent = Agent(cluster)
    agent.hello()
    pod = cluster.pods.add(h200_pod("p"))
    binding = cluster.loop.create_task(
        cluster.extender.binder.bind(
            cluster.service.context, internal("t"), "team", "p", "uid-team-p", "gpu-07"
        )
    )
    cluster.wait_for(lambda: cluster.service.context.state.allocations)
    told = agent.desired()
    assert not binding.done()
    assert "nodeName" not in pod["spec"]
    agent.report(
        *(
            {
                "allocation": one["allocation"],
                "index": one["index"],
                "phase": "active",
                "uuid": f"MIG-{one['index']}",
            }
            for one in told
        )
    )
    cluster.wait_for(binding.done)
    assert binding.result() == ""
    notes = pod["metadata"]["annotations"]
    assert notes["slicewise.dev/devices"] == "MIG-0,MIG-1"
    assert notes["main.slicewise.dev/devices"] == "MIG-0,MIG-1"
    assert notes["cdi.k8s.io/slicewise"] == "slicewise.dev/mig=MIG-0,slicewise.dev/mig=MIG-1"


def test_a_binding_times_out_if_the_agent_is_too_slow(cluster: Cluster) -> None:
    agent = Agent(cluster)
    agent.hello()
    pod = cluster.pods.add(h200_pod("p"))
    said = cluster.bind(pod, "gpu-07")
    assert said == "its instances were not active in 1 s"
    assert cluster.living() == []
    assert "nodeName" not in pod["spec"]


def test_failed_instances_fail_the_binding(cluster: Cluster) -> None:
    agent = Agent(cluster)
    agent.hello()
    cluster.pods.add(h200_pod("p"))
    binding = cluster.loop.create_task(
        cluster.extender.binder.bind(
            cluster.service.context, internal("t"), "team", "p", "uid-team-p", "gpu-07"
        )
    )
    cluster.wait_for(lambda: cluster.service.context.state.allocations)
    (one, _) = agent.desired()
    failed = {"allocation": one["allocation"], "index": 0, "phase": "failed", "detail": "no such"}
    agent.report(failed)
    cluster.wait_for(binding.done)
    assert binding.result() == ("3g.71gb on gpu-07 GPU 0 at slice 4 could not be created: no such")


# The watch of pods


@pytest.mark.parametrize("how", ["Succeeded", "Failed", "removed"])
def test_allocations_end_with_their_pod(cluster: Cluster, how: str) -> None:
    cluster.node()
    pod, other = (cluster.pods.add(pod_object(name, container(g1=1))) for name in ("p", "q"))
    assert cluster.bind(pod, "n1") == cluster.bind(other, "n1") == ""
    cluster.pods.add(pod_object("unrelated", container()))
    mine = cluster.place("1g.10gb")["id"]
    if how == "removed":
        cluster.pods.remove(pod)
    else:
        cluster.pods.end(pod, how)
    cluster.wait_for(lambda: len(cluster.service.context.state.allocations) == 2)
    assert {one["labels"].get("k8s/pod") for one in cluster.living()} == {"q", None}
    (ended,) = (one for one in cluster.get("/v1/audit?kind=ended").json()["events"])
    assert ended["actor"] == "extender"
    assert mine in {one["id"] for one in cluster.living()}


def test_pods_that_ended_without_a_watch_are_detected(cluster: Cluster) -> None:
    cluster.node()
    gone, over, stays, new = (
        cluster.pods.add(pod_object(name, container(g1=1))) for name in ("a", "b", "c", "d")
    )
    for pod in (gone, over, stays, new):
        assert cluster.bind(pod, "n1") == ""
    cluster.pods.remove(gone, tell=False)
    over["status"] = {"phase": "Failed"}
    del cluster.pods.pods["team", "d"]  # a list may be older than a pod that it lacks
    every = EveryPod(
        {p["metadata"]["uid"]: cluster.pods._as_pod(p) for p in cluster.pods.pods.values()}
    )
    cluster.pods.pods["team", "d"] = new
    cluster.pods._tell(every)
    cluster.wait_for(lambda: len(cluster.service.context.state.allocations) == 2)
    cluster.run(asyncio.sleep(1))
    assert {one["labels"]["k8s/pod"] for one in cluster.living()} == {"c", "d"}


def test_a_new_leader_checks_all_pods(tmp_path: Path) -> None:
    cluster = open_cluster(tmp_path)
    cluster.node()
    pods = [cluster.pods.add(pod_object(name, container(g1=1))) for name in ("p", "q")]
    assert [cluster.bind(pod, "n1") for pod in pods] == ["", ""]
    cluster.run(cluster.service.stop())
    cluster.services.remove(cluster.service)
    cluster.pods.remove(pods[0])
    cluster.service = cluster.open("first")
    cluster.wait_for(lambda: len(cluster.service.context.state.allocations) == 1)
    assert [one["labels"]["k8s/pod"] for one in cluster.living()] == ["q"]
    cluster.close()


def test_allocations_of_a_pod_that_was_never_bound_are_released(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pod_watch, "_TICKS_PER_SCAN", 1)
    cluster.node()
    cluster.tenant("team")
    for name in ("p", "q"):
        labels = {"k8s/pod": name, "k8s/namespace": "team", "k8s/uid": f"uid-team-{name}"}
        cluster.place("1g.10gb", tenant="team", labels=labels)
    theirs = {"k8s/pod": "p", "k8s/namespace": "other", "k8s/uid": "uid"}
    cluster.place("1g.10gb", tenant="team", labels=theirs)
    cluster.pods.add(pod_object("p", container(g1=1)))
    elsewhere = cluster.pods.add(pod_object("q", container(g1=1)))
    elsewhere["spec"]["nodeName"] = "n9"
    cluster.run(asyncio.sleep(1.2))
    assert len(cluster.living()) == 3, "a binding may still be under way"
    cluster.clock.now += 60
    cluster.wait_for(lambda: len(cluster.service.context.state.allocations) == 1)
    assert cluster.living()[0]["labels"] == theirs, "which another client wrote"


def test_pods_are_retried_when_there_is_room(cluster: Cluster) -> None:
    cluster.node(gpus=1)
    full = cluster.place("7g.80gb")
    pod = cluster.pods.add(pod_object("p", container(g3=1)))
    cluster.filter(pod, "n1")
    cluster.run(asyncio.sleep(1.2))
    assert cluster.pods.writes == []
    cluster.delete(f"/v1/allocations/{full['id']}")
    cluster.wait_for(lambda: cluster.pods.writes)
    assert cluster.pods.writes == [("touch", "slicewise.dev/room")]
    assert cluster.filter(pod, "n1")["NodeNames"] == ["n1"]
    cluster.place("1g.10gb")
    cluster.run(asyncio.sleep(1.2))
    assert len(cluster.pods.writes) == 1


def test_a_pod_may_be_scheduled_while_others_are_annotated(cluster: Cluster) -> None:
    cluster.node(gpus=1)
    full = cluster.place("7g.80gb")
    pods = [cluster.pods.add(pod_object(name, container(g1=1))) for name in ("a", "b")]
    for pod in pods:
        cluster.filter(pod, "n1")
    cluster.pods.on_touch = lambda: cluster.extender.pod_watch.forget("uid-team-b")
    cluster.delete(f"/v1/allocations/{full['id']}")
    cluster.wait_for(lambda: cluster.pods.writes)
    assert cluster.bind(pods[1], "n1") == ""
    cluster.pods.remove(pods[1])
    cluster.wait_for(lambda: not cluster.service.context.state.allocations)
    assert [what for what, _ in cluster.pods.writes] == ["touch", "bind"]


def test_all_waiting_pods_are_retried(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod_watch, "_PODS_PER_TICK", 1)
    monkeypatch.setattr(pod_watch, "_TICK_SECONDS", 0.01)
    cluster.node(gpus=1)
    full = cluster.place("7g.80gb")
    large = cluster.pods.add(pod_object("large", container(g7=2)))
    small = cluster.pods.add(pod_object("small", container(g1=1)))
    for pod in (large, small):
        cluster.filter(pod, "n1")
    # The API fails once when there is room; nothing changes after that.
    cluster.pods.unreachable = True
    cluster.delete(f"/v1/allocations/{full['id']}")
    cluster.run(asyncio.sleep(0.1))
    cluster.pods.unreachable = False
    cluster.wait_for(lambda: cluster.pods.writes)
    assert cluster.pods.writes == [("touch", "slicewise.dev/room")]
    assert "annotations" in small["metadata"]


def test_a_pod_that_cannot_be_read_does_not_block_others(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pod_watch, "_PODS_PER_TICK", 1)
    monkeypatch.setattr(pod_watch, "_TICK_SECONDS", 0.01)
    cluster.node(gpus=1)
    pods = [cluster.pods.add(pod_object(name, container(g1=1))) for name in ("a", "b", "c")]
    for pod in pods:
        assert cluster.bind(pod, "n1") == ""
    get = cluster.pods.get

    def sometimes(namespace: str, name: str) -> Pod | None:
        if name == "a":
            raise PodsError("forbidden")
        return get(namespace, name)

    monkeypatch.setattr(cluster.pods, "get", sometimes)
    for pod in pods:
        cluster.pods.remove(pod, tell=False)
    cluster.pods.tell_all()
    cluster.wait_for(lambda: len(cluster.service.context.state.allocations) == 1)
    assert [one["labels"]["k8s/pod"] for one in cluster.living()] == ["a"]


def test_the_watch_survives_errors(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.node(gpus=1)
    pod = cluster.pods.add(pod_object("p", container(g1=1)))
    assert cluster.bind(pod, "n1") == ""
    failed: list[str] = []

    async def fail(site: object) -> None:
        failed.append("once more")
        raise ZeroDivisionError

    monkeypatch.setattr(cluster.extender.pod_watch, "_retry_waiting", fail)
    cluster.wait_for(lambda: failed)
    cluster.pods.remove(pod)
    cluster.wait_for(lambda: not cluster.service.context.state.allocations)


def test_the_number_of_waiting_pods_is_bounded(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pod_watch, "_MAX_WAITING", 2)
    watch = cluster.extender.pod_watch
    for name in ("a", "b", "c"):
        watch.remember(_pod(msgspec.json.encode(pod_object(name))), frozenset())
    assert list(watch._waiting) == ["uid-team-b", "uid-team-c"]


@pytest.mark.parametrize("seed", range(12))
def test_bound_pods_and_instances_converge(tmp_path: Path, seed: int) -> None:
    cluster = open_cluster(tmp_path, extender_active_seconds=1.0)
    chance, pods = random.Random(seed), cluster.pods
    nodes = cluster.three()
    everyone: list[dict[str, Any]] = []

    def faults() -> None:
        """Bindings fail at random."""
        pods.refuses = chance.random() < 0.15
        pods.loses_answer = chance.random() < 0.15
        if chance.random() < 0.1:
            pods.unreachable = True
        if everyone and chance.random() < 0.1:
            pods._write(chance.choice(everyone))

    pods.before_bind = faults
    for number in range(120):
        pods.unreachable = chance.random() < 0.1
        deeds = ["new"] * 4 + ["again"] * 4 + ["gone", "gone", "over", "forgotten", "listed"]
        match chance.choice(deeds):
            case "new":
                asks = container(**{chance.choice(["g1", "g2", "g3"]): chance.randint(1, 2)})  # type: ignore[arg-type]
                everyone.append(pods.add(pod_object(f"p{number}", asks)))
                cluster.bind(everyone[-1], chance.choice(nodes))
            case "again" if everyone:
                cluster.bind(chance.choice(everyone), chance.choice(nodes))
            case "gone" if everyone:
                pods.remove(everyone.pop(chance.randrange(len(everyone))))
            case "over" if everyone:
                pods.end(chance.choice(everyone), "Succeeded")
            case "forgotten" if everyone:
                pods.remove(everyone.pop(chance.randrange(len(everyone))), tell=False)
            case "listed":
                pods.tell_all()
    pods.unreachable = False
    cluster.clock.now += 120
    pods.tell_all()

    def agree() -> bool:
        bound = {
            pod["metadata"]["uid"]: pod["spec"]["nodeName"]
            for pod in everyone
            if "nodeName" in pod["spec"] and pod["status"]["phase"] == "Pending"
        }
        state = cluster.service.context.state
        held = {uid: one.node for uid, one in allocations_by_pod(state).items()}
        return bound == held and not cluster.extender.binder.busy

    cluster.wait_for(agree)
    assert {what for what, _ in pods.writes} == {"bind", "touch"}
    for allocation in cluster.living():
        (mine,) = (p for p in everyone if p["metadata"]["uid"] == allocation["labels"]["k8s/uid"])
        assert {part["node"] for part in allocation["instances"]} == {mine["spec"]["nodeName"]}
        assert allocation["id"] in mine["metadata"]["annotations"]["slicewise.dev/allocations"]
    cluster.close()


# Authentication


def test_tokens_of_operators_only(cluster: Cluster) -> None:
    body = cluster.args(pod_object("p", container(g1=1)), "n1")
    assert cluster.post("/v1/extender/filter", body, token=None).status_code == 401
    for role, more in (
        ("tenant", {"tenant": "default"}),
        ("read-only", {}),
        ("agent", {"node": "n"}),
    ):
        token = cluster.token(role, **more)
        assert cluster.post("/v1/extender/filter", body, token=token).status_code == 403
    assert cluster.post("/v1/extender/filter", body, token=cluster.token("operator")).is_success


def test_the_extender_is_disabled_by_default(harness: Harness) -> None:
    assert harness.post("/v1/extender/filter", {}).status_code == 404


def test_a_certificate_needs_tls(tmp_path: Path) -> None:
    with pytest.raises(SlicewiseError, match=r"extender\.client_ca"):
        Settings(extender_client_ca=tmp_path)


def test_an_invalid_kubeconfig_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "kubeconfig").write_text("{}")
    words = ["serve", "--data", str(tmp_path / "data"), "--listen", "127.0.0.1:0"]
    words += ["--set", "extender.enabled=true"]
    assert exit_status([*words, "--set", f"extender.kubeconfig={tmp_path / 'kubeconfig'}"]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(
        "slicewise: error: extender.kubeconfig: cannot connect to a Kubernetes cluster"
    )


def openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)


def certificate(folder: Path, name: str, common: str, signer: str = "") -> None:
    """A certificate, signed by another or by itself."""
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    signed = ("-CA", f"{signer}.pem", "-CAkey", f"{signer}.key") if signer else ()
    more = ("-addext", "subjectAltName=IP:127.0.0.1") if name == "server" else ()
    openssl(
        folder, "req", "-x509", *key, "-keyout", f"{name}.key", "-out", f"{name}.pem",
        "-days", "2", "-subj", f"/O=cluster/CN={common}", *signed, *more,
    )  # fmt: skip


@pytest.mark.skipif(
    shutil.which("openssl") is None and not os.environ.get("CI"),  # there nothing is skipped
    reason="makes certificates with openssl",
)
def test_a_client_certificate_replaces_the_token(tmp_path: Path) -> None:
    for name, common, signer in (
        ("ca", "cluster", ""),
        ("server", "slicewise", "ca"),
        ("scheduler", "system:kube-scheduler", "ca"),
        ("kubelet", "system:node:n1", "ca"),
        ("stranger", "system:kube-scheduler", ""),
    ):
        certificate(tmp_path, name, common, signer)
    settings = Settings(
        data=tmp_path / "data",
        listen=Address("127.0.0.1", 0),
        tls_cert=tmp_path / "server.pem",
        tls_key=tmp_path / "server.key",
        extender_client_ca=tmp_path / "ca.pem",
        lease_seconds=0.5,
    )

    async def ask(url: str, who: str | None, path: str = "/v1/extender/filter") -> int:
        context = ssl.create_default_context(cafile=tmp_path / "ca.pem")
        if who is not None:
            context.load_cert_chain(tmp_path / f"{who}.pem", tmp_path / f"{who}.key")
        body = {"Pod": pod_object("p", container(g1=1)), "NodeNames": []}
        async with httpx.AsyncClient(verify=context, trust_env=False) as client:
            return (await client.post(url + path, json=body)).status_code

    async def run() -> dict[str, int]:
        extender = Extender(FakePods(), settings)
        service = Service(MemoryStore(time.time), settings, routes=extender.routes())
        urls: asyncio.Queue[str] = asyncio.Queue()
        serving = asyncio.create_task(serve(service, listening(settings.listen), urls.put_nowait))
        url = await urls.get()
        found = {
            "scheduler": await ask(url, "scheduler"),
            "kubelet": await ask(url, "kubelet"),
            "no certificate": await ask(url, None),
            "scheduler elsewhere": await ask(url, "scheduler", "/v1/tenants"),
        }
        with pytest.raises(httpx.TransportError):
            await ask(url, "stranger")
        service.failed.set()
        await serving
        return found

    assert asyncio.run(run()) == {
        "scheduler": 200,
        "kubelet": 401,
        "no certificate": 401,
        "scheduler elsewhere": 401,
    }


def test_a_policy_must_rank_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    from slicewise.engine.scheduler import Scheduler

    monkeypatch.setattr(Scheduler, "ranking", None)
    with pytest.raises(SlicewiseError, match="ranks states"):
        Extender(FakePods(), Settings())


# Generated requests

SCHEMA = schemathesis.openapi.from_dict(document(Extender(FakePods(), Settings()).routes()))
OPERATIONS: list[Any] = [one.ok() for one in SCHEMA.get_all_operations() if isinstance(one, Ok)]


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """An extender for generated requests."""
    made = open_cluster(tmp_path_factory.mktemp("fuzzed"))
    made.node(gpus=8)
    yield made
    made.close()


def test_the_routes_are_in_the_openapi_document(cluster: Cluster) -> None:
    served = cluster.get("/openapi.json", token=None).json()
    mine = [path for path in served["paths"] if path.startswith("/v1/extender/")]
    assert mine == [f"/v1/extender/{verb}" for verb in ("filter", "prioritize", "bind")]
    for path in mine:
        assert served["paths"][path]["post"]["security"] == [{"token": []}, {"certificate": []}]


@pytest.mark.parametrize("with_token", [True, False], ids=["token", "no token"])
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda o: o.definition.raw["operationId"])
def test_all_answers_are_documented(fuzzed: Cluster, operation: Any, with_token: bool) -> None:
    strategy = st.one_of(
        operation.as_strategy(generation_mode=GenerationMode.POSITIVE),
        operation.as_strategy(generation_mode=GenerationMode.NEGATIVE),
    )
    statuses: set[int] = set()

    @settings(max_examples=40, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
    @given(case=strategy)
    def fuzz(case: Any) -> None:
        sent = case.as_transport_kwargs(base_url="http://test")
        request: Any = requests.Request(**sent).prepare()
        headers = {k: v for k, v in request.headers.items() if k.lower() != "authorization"}
        if with_token:
            headers["authorization"] = f"Bearer {fuzzed.admin}"
        body = request.body.encode() if isinstance(request.body, str) else request.body
        answer = fuzzed.raw(request.method, request.url, headers, body)
        case.validate_response(answer, checks=CHECKS)
        statuses.add(answer.status_code)

    fuzz()
    assert (200 in statuses) == with_token
