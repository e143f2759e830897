"""The control plane of the other tests: it starts, fails on request and leaves nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.kubernetes_e2e.api import CORE, RBAC, ApiError, until
from tests.kubernetes_e2e.plane import Plane, the_plane

# It starts etcd alone, says where, and waits to be killed.
SHORT_LIVED = """
import time
from tests.kubernetes_e2e.plane import Plane
with Plane(parts=["etcd"]) as plane:
    print(plane.process_id("etcd"), plane.folder, flush=True)
    time.sleep(3600)
"""


@pytest.fixture(scope="module")
def small() -> Iterator[Plane]:
    """A server and what it keeps, to be broken."""
    the_plane()  # skips with a reason if there is none
    with Plane(parts=["etcd", "apiserver"]) as plane:
        yield plane


def state(process: int) -> str:
    """The letter of a process's state: T was stopped, Z has ended; empty when it is gone."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def there(process: int) -> bool:
    """Whether a process runs."""
    return state(process) not in ("", "Z")


def test_kubectl_connects(plane: Plane) -> None:
    assert json.loads(plane.kubectl("version", "-o", "json"))["serverVersion"]["gitVersion"]
    with pytest.raises(RuntimeError, match="not found"):
        plane.kubectl("get", "node", "nowhere")


def test_a_service_account_has_its_own_kubeconfig_and_no_rights(plane: Plane, space: str) -> None:
    plane.api.create(
        f"{CORE}/namespaces/{space}/serviceaccounts", {"metadata": {"name": "another"}}
    )
    account = f"{space}/another"
    config = json.loads(plane.kubeconfig_for(account).read_text())
    assert config["clusters"][0]["cluster"]["server"] == plane.server
    with plane.api_for(account) as api:
        with pytest.raises(ApiError) as refused:
            api.get(f"{CORE}/namespaces/{space}/pods")
        assert refused.value.status == 403
        subject = {"kind": "ServiceAccount", "name": "another", "namespace": space}
        role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "view"}
        plane.api.create(
            f"{RBAC}/namespaces/{space}/rolebindings",
            {"metadata": {"name": "r"}, "roleRef": role, "subjects": [subject]},
        )
        until("it may look", lambda: api.get(f"{CORE}/namespaces/{space}/pods"))


@pytest.mark.parametrize("part", ["etcd", "apiserver"])
def test_a_killed_part_restarts_with_its_state(small: Plane, part: str) -> None:
    path = f"{CORE}/namespaces/default/configmaps"
    small.api.create(path, {"metadata": {"name": f"kept-{part}"}, "data": {"a": "b"}})
    before = small.process_id(part)
    small.kill(part)
    assert not small.runs(part)
    small.restart(part)
    assert small.process_id(part) != before
    found = until("it answers", lambda: small.api.get(f"{path}/kept-{part}"))
    assert found["data"] == {"a": "b"}


def test_a_part_can_be_stopped_and_started(small: Plane) -> None:
    before = small.process_id("apiserver")
    small.restart("apiserver")
    assert small.process_id("apiserver") != before
    assert not there(before)
    assert small.api.get(f"{CORE}/namespaces/default")


def test_a_part_can_be_paused(small: Plane) -> None:
    process = small.process_id("apiserver")
    small.pause("apiserver")
    until("it stands still", lambda: state(process) == "T")
    small.resume("apiserver")
    assert small.api.get(f"{CORE}/namespaces/default")


def test_nothing_is_left_behind(plane: Plane) -> None:
    with Plane(parts=["etcd"]) as another:
        process, folder = another.process_id("etcd"), another.folder
        assert there(process)
    assert not there(process)
    assert not folder.exists()
    assert plane.api.get(f"{CORE}/namespaces/default")


def test_a_plane_ends_with_the_process_that_started_it(plane: Plane) -> None:
    if sys.platform != "linux":
        pytest.skip("the kernel's part in this is Linux's")
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    with subprocess.Popen(
        [sys.executable, "-c", SHORT_LIVED], env=environment, stdout=subprocess.PIPE, text=True
    ) as starter:
        assert starter.stdout is not None
        process, folder = starter.stdout.readline().split()
        assert there(int(process))
        starter.send_signal(signal.SIGKILL)
    until("it is gone", lambda: not there(int(process)))
    assert Path(folder).name.startswith("slicewise-k8s-")
    subprocess.run(["rm", "-r", folder], check=True)
