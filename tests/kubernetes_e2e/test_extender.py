"""The extender with a real scheduler: pods that request extended resources, from creation to end.

A separate scheduler calls a real service over TLS, with the example configuration and rights in
deploy/kubernetes/extender. kwok simulates the nodes; one has a fake driver and a real agent.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import ssl
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml  # type: ignore[import-untyped]
from tests.e2e.agents.site import Node, SteadyServer
from tests.kubernetes_e2e.api import CORE, Json, until
from tests.kubernetes_e2e.cluster import (
    namespace,
    node,
    pods_in,
    unscheduled_because,
    until_running,
)
from tests.kubernetes_e2e.plane import TIED, Plane, free_ports

from slicewise.control.pods import PodsError
from slicewise.fakedriver import Machine, build
from slicewise.kubernetes.extender_pods import ClusterPods

ROOT = Path(__file__).parents[2]
MANIFESTS = ROOT / "deploy" / "kubernetes" / "extender"
MIG = "nvidia.com/mig-"
OWN = "with-slicewise"
"""The scheduler that has the extender; the plane's own leaves its pods alone."""

pytestmark = pytest.mark.skipif(
    shutil.which("openssl") is None and not os.environ.get("CI"),  # there nothing is skipped
    reason="makes certificates with openssl",
)


class TlsServer(SteadyServer):
    """A server with TLS."""

    ca = Path()

    @property
    def url(self) -> str:
        """The base URL."""
        return "https://{}:{}".format(*self.address)

    def _exchange(
        self, method: str, path: str, body: bytes | None, headers: dict[str, str], timeout: float
    ) -> tuple[int, Any]:
        context = ssl.create_default_context(cafile=self.ca)
        connection = http.client.HTTPSConnection(*self.address, timeout=timeout, context=context)
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        return answer.status, json.loads(content) if content else None


class World:
    """A control plane, a scheduler with the extender, and the service."""

    def __init__(self, plane: Plane, folder: Path) -> None:
        self.plane = plane
        self.folder = folder
        self.nodes: list[str] = []
        self.agents: list[Node] = []
        for name, common in (
            ("ca", "cluster"),
            ("server", "slicewise"),
            ("scheduler", "system:kube-scheduler"),
        ):
            self._certificate(name, common)
        plane.kubectl("apply", "-f", str(MANIFESTS / "rbac.yaml"))
        account = plane.kubeconfig_for("slicewise/slicewise-extender")
        self.server = TlsServer(
            folder / "server",
            settings=(
                f"tls.cert={folder / 'server.pem'}",
                f"tls.key={folder / 'server.key'}",
                "extender.enabled=true",
                f"extender.kubeconfig={account}",
                f"extender.client_ca={folder / 'ca.pem'}",
                "lease.seconds=0.5",
            ),
        )
        self.server.ca = folder / "ca.pem"
        self.server.start()
        self.scheduler = self._start_scheduler()

    def _certificate(self, name: str, common: str) -> None:
        signed = () if name == "ca" else ("-CA", "ca.pem", "-CAkey", "ca.key")
        more = ("-addext", "subjectAltName=IP:127.0.0.1") if name == "server" else ()
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
             "-nodes", "-keyout", f"{name}.key", "-out", f"{name}.pem", "-days", "2",
             "-subj", f"/CN={common}", *signed, *more],
            cwd=self.folder, check=True, capture_output=True,
        )  # fmt: skip

    def _start_scheduler(self) -> subprocess.Popen[bytes]:
        """A scheduler with the example configuration; only addresses and paths are changed."""
        config = yaml.safe_load((MANIFESTS / "scheduler.yaml").read_text())
        config["clientConnection"] = {
            "kubeconfig": str(self.plane.kubeconfig), "qps": 1000, "burst": 2000,
        }  # fmt: skip
        config["profiles"] = [{"schedulerName": OWN}]
        (extender,) = config["extenders"]
        extender["urlPrefix"] = f"{self.server.url}/v1/extender"
        extender["tlsConfig"] = {
            "caFile": str(self.folder / "ca.pem"),
            "certFile": str(self.folder / "scheduler.pem"),
            "keyFile": str(self.folder / "scheduler.key"),
        }
        models = ("3g.71gb", "1g.18gb")
        extender["managedResources"] += [
            {"name": MIG + name, "ignoredByScheduler": True} for name in models
        ]
        path = self.folder / "scheduler.json"
        path.write_text(json.dumps(config))
        (port,) = free_ports(1)
        command = [
            str(self.plane.programs / "kube-scheduler"), f"--config={path}", "-v=4",
            "--leader-elect=false", "--bind-address=127.0.0.1", f"--secure-port={port}",
            f"--cert-dir={self.folder / 'scheduler'}",
        ]  # fmt: skip
        with (self.folder / "scheduler.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-S", "-c", TIED, str(os.getpid()), *command],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    def close(self) -> None:
        """End everything."""
        for agent in self.agents:
            agent.kill()
        self.scheduler.kill()
        self.scheduler.wait()
        self.server.kill()
        for name in self.nodes:
            self.plane.api.delete(f"{CORE}/nodes/{name}")

    def told(self) -> str:
        """The last log lines of scheduler and service."""
        log = (self.folder / "scheduler.log").read_text(errors="replace")
        return f"scheduler:\n{log[-3000:]}\nservice:\n{self.server.last_lines()}"

    def ask(self, status: int, method: str, path: str, body: object = None) -> Any:
        """Send a request to the service and check its status."""
        got, said = self.server.ask(method, path, body)
        assert got == status, said
        return said

    def kube_node(self, **labels: str) -> str:
        """A node in Kubernetes only."""
        name = f"x-{uuid.uuid4().hex[:8]}"
        self.nodes.append(name)
        self.plane.api.create(f"{CORE}/nodes", node(name, **labels))
        return name

    def node(self, gpus: int = 1, model: str = "A100-80GB", **labels: str) -> str:
        """A node that both know, without an agent."""
        name = self.kube_node(**labels)
        self.ask(201, "POST", "/v1/nodes", {"name": name, "model": model, "gpus": gpus})
        return name

    def pod(self, space: str, name: str, profile: str, count: int = 1, **spec: object) -> Json:
        """A pod that asks for instances."""
        limits = {f"{MIG}{profile}": str(count)}
        labels = spec.pop("labels", {})
        return self.plane.api.create(
            pods_in(space),
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": name, "labels": labels},
                "spec": {
                    "schedulerName": OWN,
                    "terminationGracePeriodSeconds": 0,
                    "containers": [
                        {"name": "main", "image": "none", "resources": {"limits": limits}}
                    ],
                    **spec,
                },
            },
        )

    def allocations(self, space: str) -> dict[str, dict[str, Any]]:
        """The allocations of a namespace, by pod."""
        said = self.ask(200, "GET", f"/v1/allocations?tenant={space}&limit=1000")
        return {one["labels"]["k8s/pod"]: one for one in said["allocations"]}

    def until_held(self, space: str, *names: str) -> dict[str, dict[str, Any]]:
        """Wait until exactly these pods have allocations."""

        def look() -> bool:
            return set(self.allocations(space)) == set(names)

        until(f"{names} hold something in {space}\n{self.told()}", look)
        return self.allocations(space)


@pytest.fixture(scope="module")
def world(plane: Plane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    made = World(plane, tmp_path_factory.mktemp("extender"))
    yield made
    made.close()


@pytest.fixture
def space(world: World) -> Iterator[str]:
    """A separate namespace, whose nodes get no pods of the next test."""
    before = list(world.nodes)
    with namespace(world.plane.api) as name:
        yield name
    for gone in world.nodes[len(before) :]:
        path = f"/v1/nodes/{gone}"
        until(f"{gone} is empty", lambda: world.server.ask("DELETE", path)[0] in (200, 404))  # noqa: B023
        world.plane.api.delete(f"{CORE}/nodes/{gone}")
    del world.nodes[len(before) :]


@contextmanager
def cordoned(world: World, name: str) -> Iterator[None]:
    world.ask(200, "POST", f"/v1/nodes/{name}/cordon")
    yield
    world.ask(200, "POST", f"/v1/nodes/{name}/uncordon")


def test_pods_go_where_the_policy_places_them(world: World, space: str) -> None:
    nodes = [world.node() for _ in range(3)]
    world.pod(space, "first", "3g.40gb")
    first = until_running(world.plane.api, space, "first")["spec"]["nodeName"]
    for number in range(5):
        run = world.ask(200, "POST", "/v1/allocations/dry-run", {"profile": "1g.10gb"})
        world.pod(space, f"p{number}", "1g.10gb")
        pod = until_running(world.plane.api, space, f"p{number}")
        assert pod["spec"]["nodeName"] == run["instances"][0]["node"], "the best score wins"
    held = world.until_held(space, "first", *(f"p{number}" for number in range(5)))
    for name, one in held.items():
        pod = world.plane.api.get(f"{pods_in(space)}/{name}")
        assert one["node"] == pod["spec"]["nodeName"]
        assert one["labels"]["k8s/uid"] == pod["metadata"]["uid"]
        assert pod["metadata"]["annotations"]["slicewise.dev/allocations"] == one["id"]
    assert first in nodes


def test_a_waiting_pod_gets_the_reason(world: World, space: str) -> None:
    full, other = world.node(), world.node()
    for _ in range(2):
        world.kube_node()
    with cordoned(world, other):
        world.pod(space, "big", "7g.80gb")
        assert until_running(world.plane.api, space, "big")["spec"]["nodeName"] == full
        world.pod(space, "late", "3g.40gb")
        said = until(
            "the scheduler says why", lambda: unscheduled_because(world.plane.api, space, "late")
        )
        assert "1 no GPU has enough free for 3g.40gb" in said
        assert "1 the node is cordoned in slicewise" in said
        assert "2 the node is unknown to slicewise" in said, "nodes alike are counted"
        world.plane.api.delete(f"{pods_in(space)}/big")
        assert until_running(world.plane.api, space, "late")["spec"]["nodeName"] == full
        world.until_held(space, "late")


def test_room_unknown_to_kubernetes_is_used(world: World, space: str) -> None:
    name = world.node()
    taken = world.ask(201, "POST", "/v1/allocations", {"profile": "7g.80gb"})
    assert taken["node"] == name
    world.pod(space, "waits", "2g.20gb")
    until("it waits", lambda: unscheduled_because(world.plane.api, space, "waits"))
    world.ask(200, "DELETE", f"/v1/allocations/{taken['id']}")
    pod = until_running(world.plane.api, space, "waits")
    assert "slicewise.dev/room" in pod["metadata"]["annotations"]


def test_all_instances_of_a_pod_are_on_one_node(world: World, space: str) -> None:
    small, large = world.node(gpus=1), world.node(gpus=2)
    world.pod(space, "two", "3g.40gb", count=2)
    world.pod(space, "three", "3g.40gb", count=3)
    assert until_running(world.plane.api, space, "three")["spec"]["nodeName"] == large
    two = until_running(world.plane.api, space, "two")["spec"]["nodeName"]
    held = world.until_held(space, "two", "three")
    assert {part["node"] for part in held["three"]["instances"]} == {large}
    assert {part["node"] for part in held["two"]["instances"]} == {two}
    assert two == small


def test_allocations_end_with_their_pod(world: World, space: str) -> None:
    world.node()
    world.pod(space, "job", "1g.10gb", labels={"slicewise.dev/ends": "soon"})
    world.pod(space, "web", "1g.10gb")
    until_running(world.plane.api, space, "web")

    def succeeded() -> bool:
        found = world.plane.api.get(f"{pods_in(space)}/job")
        return bool(found["status"]["phase"] == "Succeeded")

    until("the job is over", succeeded)
    world.until_held(space, "web")
    world.plane.api.delete(f"{pods_in(space)}/web")
    world.until_held(space)


def test_the_scheduler_still_checks_everything_else(world: World, space: str) -> None:
    right = world.node(disk="fast")
    for _ in range(2):
        world.node()
    for number in range(3):
        world.pod(space, f"p{number}", "1g.10gb", nodeSelector={"disk": "fast"})
    for number in range(3):
        assert until_running(world.plane.api, space, f"p{number}")["spec"]["nodeName"] == right


def test_nothing_is_lost_when_the_service_is_killed(world: World, space: str) -> None:
    nodes = [world.node(gpus=2) for _ in range(2)]
    names = [f"p{number}" for number in range(24)]
    for number, name in enumerate(names):
        world.pod(space, name, "1g.10gb")
        if number in (6, 14, 20):
            world.server.kill()
            for gone in names[number - 3 : number]:
                world.plane.api.delete(f"{pods_in(space)}/{gone}")
            world.server.start()
    left = {one["metadata"]["name"] for one in world.plane.api.items(pods_in(space))}
    assert len(left) == len(names) - 9
    for name in left:
        until_running(world.plane.api, space, name)
    for name, held in world.until_held(space, *left).items():
        pod = world.plane.api.get(f"{pods_in(space)}/{name}")
        assert (held["labels"]["k8s/uid"], held["node"]) == (
            pod["metadata"]["uid"],
            pod["spec"]["nodeName"],
        )
    taken = sum(world.ask(200, "GET", f"/v1/nodes/{name}")["instances"] for name in nodes)
    assert taken == len(left), "nothing else is there, and nothing twice"


def test_watches_recover_after_an_outage_of_the_api(world: World, space: str) -> None:
    world.node()
    for name in ("gone", "stays"):
        world.pod(space, name, "1g.10gb")
        until_running(world.plane.api, space, name)
    world.plane.kill("apiserver")
    world.plane.start("apiserver")
    world.plane.api.delete(f"{pods_in(space)}/gone")
    world.until_held(space, "stays")
    world.pod(space, "new", "3g.40gb")
    until_running(world.plane.api, space, "new")
    world.until_held(space, "stays", "new")


def test_no_pod_is_evicted_for_slices(world: World, space: str) -> None:
    world.node()
    world.plane.api.create(
        "/apis/scheduling.k8s.io/v1/priorityclasses",
        {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "value": 1000,
         "metadata": {"name": space}},
    )  # fmt: skip
    world.pod(space, "low", "7g.80gb")
    uid = until_running(world.plane.api, space, "low")["metadata"]["uid"]
    world.pod(space, "high", "7g.80gb", priorityClassName=space)
    until("it waits", lambda: unscheduled_because(world.plane.api, space, "high"))
    assert world.plane.api.get(f"{pods_in(space)}/low")["metadata"]["uid"] == uid
    world.plane.api.delete(f"{pods_in(space)}/low")
    until_running(world.plane.api, space, "high")


def test_a_changed_pod_is_not_bound(world: World, space: str) -> None:
    name = world.kube_node()
    pods = ClusterPods.open(world.plane.kubeconfig_for("slicewise/slicewise-extender"))
    assert pods.get(space, "p") is None
    world.pod(space, "p", "1g.10gb", schedulerName="unknown")
    first = pods.get(space, "p")
    assert first is not None
    touched = pods.touch(first, "slicewise.dev/returned", "1")
    assert touched is not None
    assert touched.metadata.resource_version != first.metadata.resource_version
    with pytest.raises(PodsError, match="409"):
        pods.bind(first, name, {})
    world.plane.api.delete(f"{pods_in(space)}/p")
    until("it is gone", lambda: pods.get(space, "p") is None)
    assert pods.touch(first, "slicewise.dev/returned", "2") is None
    world.pod(space, "p", "1g.10gb", schedulerName="unknown")
    later = pods.get(space, "p")
    assert later is not None
    assert pods.touch(first, "slicewise.dev/returned", "3") is None, "another of the same name"
    with pytest.raises(PodsError, match="409"):
        pods.bind(msgspec.structs.replace(later, metadata=first.metadata), name, {})
    pods.bind(later, name, {"slicewise.dev/allocations": "a1"})
    bound = pods.get(space, "p")
    assert bound is not None
    assert bound.node == name
    notes = world.plane.api.get(f"{pods_in(space)}/p")["metadata"]["annotations"]
    assert notes["slicewise.dev/allocations"] == "a1"
    with pytest.raises(PodsError, match="409"):
        pods.bind(bound, name, {})
    with pytest.raises(PodsError, match="403"):
        pods.get("../..", "nodes")


def test_a_pod_gets_the_device_that_the_agent_created(
    world: World, space: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    name = world.kube_node()
    token = world.ask(201, "POST", "/v1/tokens", {"role": "agent", "node": name})["token"]
    machine = Machine.create(tmp_path / "machine", "H200-141GB", 1, mig=True, seed=1)
    library = build(tmp_path_factory.getbasetemp().parent / "fakedriver")
    agent = Node(tmp_path, name, machine, library, world.server, token)
    agent.arguments = ("--ca", str(world.server.ca))
    world.agents.append(agent)
    agent.start()
    until("the node is known", lambda: world.server.ask("GET", f"/v1/nodes/{name}")[0] == 200)
    world.pod(space, "cuda", "3g.71gb", count=2)
    pod = until_running(world.plane.api, space, "cuda")
    assert pod["spec"]["nodeName"] == name
    real = {compute.uuid for one in machine.instances() for compute in one.computes}
    assert len(real) == 2
    notes = pod["metadata"]["annotations"]
    assert set(notes["slicewise.dev/devices"].split(",")) == real
    assert set(notes["main.slicewise.dev/devices"].split(",")) == real
    assert set(notes["cdi.k8s.io/slicewise"].split(",")) == {f"slicewise.dev/mig={u}" for u in real}
    offered = [json.loads(path.read_text())["devices"][0]["name"] for path in agent.cdi.glob("*")]
    assert set(offered) == real, "and a runtime finds them by these names"
    world.plane.api.delete(f"{pods_in(space)}/cuda")
    until("the instances are destroyed", lambda: not machine.instances())
    leaving = f"/v1/allocations?state=releasing&tenant={space}"
    until("the service was told", lambda: not world.ask(200, "GET", leaving)["allocations"])
    agent.kill()
