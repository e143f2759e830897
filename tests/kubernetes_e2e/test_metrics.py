"""Metrics of the controller, and a readiness check that reports what is missing."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.kubernetes_e2e.api import CORE, until
from tests.kubernetes_e2e.cluster import (
    device_request,
    pod,
    pods_in,
    template,
    templates_in,
    until_running,
)
from tests.kubernetes_e2e.conftest import Nodes
from tests.kubernetes_e2e.plane import Plane
from tests.kubernetes_e2e.replica import OUR_CLASS, Replica, running, wants


class Seen:
    """A replica, queried over HTTP."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        found = until("it listens", self._address)
        self.url = found[1]

    def _address(self) -> re.Match[str] | None:
        return re.search(r"listening at (\S+); dashboard:", self.replica.log.read_text())

    def ask(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", trust_env=False)

    def metrics(self) -> dict[str, float]:
        """All values without labels."""
        answer = self.ask("/metrics")
        assert answer.status_code == 200, answer.text
        return {
            name: float(value)
            for name, value in re.findall(r"^(\w+) (\S+)$", answer.text, re.MULTILINE)
        }


FLAGS = ("--listen", "127.0.0.1:0", "--open-metrics", "--lease-seconds", "2")


@pytest.fixture
def seen(plane: Plane, tmp_path: Path) -> Iterator[Seen]:
    with running(plane.kubeconfig, tmp_path, *FLAGS) as replica:
        yield Seen(replica)


def test_decisions_and_allocations_are_counted(
    plane: Plane, nodes: Nodes, space: str, seen: Seen
) -> None:
    nodes(1, "A100-80GB", gpus=1)
    for name, profile in (("small", "1g.10gb"), ("whole", "7g.80gb")):
        request = device_request(OUR_CLASS)
        made = template(name, request, config=[wants(profile=profile)])
        plane.api.create(templates_in(space), made)
    for name in ("a", "b"):
        plane.api.create(pods_in(space), pod(name, templates=["small"]))
        until_running(plane.api, space, name)
    plane.api.create(pods_in(space), pod("c", templates=["whole"]))
    until("it is seen to wait", lambda: seen.metrics()["slicewise_k8s_pods_waiting"] == 1)
    found = seen.metrics()
    assert found["slicewise_k8s_claims_allocated_total"] == 2
    assert found["slicewise_k8s_pods_decided_total"] == 2
    assert found["slicewise_k8s_leading"] == found["slicewise_is_leader"] == 1
    assert found["slicewise_k8s_ready"] == 1
    assert found["slicewise_k8s_elections_total"] == 1
    assert found["slicewise_k8s_deciding_seconds_total"] > 0
    # The metrics of the service, over the same cluster.
    until("two instances are shown", lambda: seen.metrics()["slicewise_instances"] == 2)
    until("one waits there, too", lambda: seen.metrics()["slicewise_queue_depth"] == 1)
    placed = re.findall(
        r'^slicewise_instances_placed_total\{.*profile="1g.10gb"\} (\S+)$',
        seen.ask("/metrics").text,
        re.MULTILINE,
    )
    assert placed == ["2.0"]


def test_an_outage_of_the_api_is_reported_and_survived(plane: Plane, seen: Seen) -> None:
    until("it is ready", lambda: seen.ask("/readyz").status_code == 200)
    plane.kill("apiserver")
    try:
        answer = until(
            "it says what is missing",
            lambda: answer if (answer := seen.ask("/readyz")).status_code == 503 else None,
        )
        [problem] = answer.json()["problems"]
        assert re.search("a watch was interrupted|does not answer", problem)
        assert seen.ask("/healthz").status_code == 200
        assert seen.metrics()["slicewise_k8s_ready"] == 0
    finally:
        plane.start("apiserver")
    until("it is ready again", lambda: seen.ask("/readyz").status_code == 200)
    until("it leads again", lambda: seen.metrics()["slicewise_k8s_leading"] == 1)
    assert seen.metrics()["slicewise_k8s_watch_failures_total"] >= 1


def test_missing_rights_are_reported(plane: Plane, tmp_path: Path) -> None:
    name = f"s-{uuid.uuid4().hex[:10]}"
    plane.api.create(f"{CORE}/namespaces/default/serviceaccounts", {"metadata": {"name": name}})
    account = plane.kubeconfig_for(f"default/{name}")
    with running(account, tmp_path, *FLAGS) as replica:
        seen = Seen(replica)
        answer = until(
            "it says what is missing",
            lambda: answer if "forbidden" in (answer := seen.ask("/readyz")).text else None,
        )
        assert answer.status_code == 503
        assert name in answer.json()["problems"][0]
        until("its log says so", lambda: "cannot list resource" in replica.log.read_text())
        assert replica.stop() == 0
