"""Gangs on a real control plane: their pods are bound all together or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from tests.kubernetes_e2e.api import Json, until
from tests.kubernetes_e2e.cluster import (
    allocated,
    claim,
    claims_in,
    device_request,
    pod,
    pods_in,
)
from tests.kubernetes_e2e.conftest import Nodes
from tests.kubernetes_e2e.faults import Fault, Proxy, Write
from tests.kubernetes_e2e.plane import Plane
from tests.kubernetes_e2e.replica import OUR_CLASS, Replica, running, wants
from tests.kubernetes_e2e.test_controller import make_template
from tests.kubernetes_e2e.test_install import told
from tests.kubernetes_e2e.test_quarantine import locking_policy, unlock


@pytest.fixture
def replica(plane: Plane, tmp_path: Path) -> Iterator[Replica]:
    with running(plane.kubeconfig, tmp_path, "--lease-seconds", "2") as one:
        yield one
        print(one.log.read_text())


def in_gang(size: int | str) -> dict[str, str]:
    return {"slicewise.dev/gang": "g", "slicewise.dev/gang-size": str(size)}


def join(plane: Plane, space: str, name: str, size: int | str, template: str = "whole") -> None:
    """A pod of the gang g."""
    made = pod(name, templates=[template])
    made["metadata"]["annotations"] = in_gang(size)
    plane.api.create(pods_in(space), made)


def found(plane: Plane, space: str, name: str) -> Json:
    return plane.api.get(f"{pods_in(space)}/{name}")


def all_run(plane: Plane, space: str, *names: str) -> bool:
    return all(found(plane, space, name)["status"].get("phase") == "Running" for name in names)


def test_a_gang_gets_devices_on_several_nodes_at_once(
    plane: Plane, nodes: Nodes, space: str, replica: Replica
) -> None:
    nodes(3, "A100-80GB", gpus=1)
    make_template(plane, space, "whole", profile="7g.80gb")
    for name in ("a", "b"):
        join(plane, space, name, 3)
    condition = until("a is told that it waits", lambda: told(plane, space, "a"))
    assert condition["reason"] == "Gang"
    assert allocated(plane.api, space, "a") == allocated(plane.api, space, "b") == []
    join(plane, space, "c", 3)
    until("all run", lambda: all_run(plane, space, "a", "b", "c"))
    assert len({allocated(plane.api, space, name)[0][0] for name in "abc"}) == 3


def test_a_gang_that_does_not_fit_takes_nothing(
    plane: Plane, nodes: Nodes, space: str, replica: Replica
) -> None:
    nodes(2, "A100-80GB", gpus=1)
    make_template(plane, space, "whole", profile="7g.80gb")
    for name in ("a", "b", "c"):
        join(plane, space, name, 3)
    condition = until("a is told why it waits", lambda: told(plane, space, "a"))
    assert condition["reason"] == "Capacity"
    assert "2 of 3 pods of the gang find room" in condition["message"]
    # Other pods use the room meanwhile.
    plane.api.create(pods_in(space), pod("other", templates=["whole"]))
    until("it runs", lambda: all_run(plane, space, "other"))
    assert all(allocated(plane.api, space, name) == [] for name in "abc")
    nodes(2, "A100-80GB", gpus=1)
    until("all run", lambda: all_run(plane, space, "a", "b", "c"))


def test_bad_annotations_are_told(plane: Plane, nodes: Nodes, space: str, replica: Replica) -> None:
    nodes(1, "A100-80GB", gpus=1)
    make_template(plane, space, "whole", profile="7g.80gb")
    join(plane, space, "a", "all")
    condition = until("a is told", lambda: told(plane, space, "a"))
    assert condition["reason"] == "Invalid"
    assert "'all' is not a number from 1 to 256" in condition["message"]


def test_no_pod_is_bound_while_the_write_for_another_is_refused(
    plane: Plane, nodes: Nodes, space: str, replica: Replica
) -> None:
    """The first allocation is written and held back; after a while it is given up."""
    nodes(2, "A100-80GB", gpus=1)
    config = [wants(profile="7g.80gb")]
    for name, labels in (("a", {}), ("b", {"locked": "yes"})):
        made = claim(name, device_request(OUR_CLASS), config=config)
        made["metadata"]["labels"] = labels
        plane.api.create(claims_in(space), made)

    def has_devices() -> bool:
        bound = [name for name in "ab" if found(plane, space, name)["spec"].get("nodeName")]
        assert bound == []
        return bool(allocated(plane.api, space, "a"))

    with locking_policy(plane.api):
        for name in ("a", "b"):
            made = pod(name, claims=[name])
            made["metadata"]["annotations"] = in_gang(2)
            plane.api.create(pods_in(space), made)
        until("a has devices", has_devices)
        until("a has lost them", lambda: not has_devices())
        unlock(plane.api)
        until("all run", lambda: all_run(plane, space, "a", "b"))


def test_a_new_leader_completes_a_gang(
    plane: Plane, nodes: Nodes, space: str, tmp_path: Path
) -> None:
    """What the former leader wrote for one pod is held until the others have theirs."""
    nodes(2, "A100-80GB", gpus=1)
    make_template(plane, space, "whole", profile="7g.80gb")
    killed: list[Replica] = []
    flags = ["--lease-seconds", "2"]
    with (
        closing(Proxy(plane, tmp_path, "first")) as proxy,
        running(proxy.kubeconfig, tmp_path, *flags, name="first") as first,
    ):
        until("it leads", lambda: "leading as first" in first.log.read_text())
        begun: list[str] = []

        def kill(_: Write) -> None:
            first.kill()
            killed.append(first)

        def choose(write: Write) -> Fault | None:
            if not write.of_claim or "allocation" not in write.body.get("status", {}):
                return None
            begun.append(write.path)
            return Fault(after=kill) if len(begun) == 1 else Fault(forward=False, cut=True)

        proxy.choose = choose
        join(plane, space, "a", 2)
        join(plane, space, "b", 2)
        until("it was killed", lambda: killed)
    given = [name for name in "ab" if allocated(plane.api, space, name)]
    assert len(given) == 1
    assert not any(found(plane, space, name)["spec"].get("nodeName") for name in "ab")
    with running(plane.kubeconfig, tmp_path, *flags, name="second"):
        until("all run", lambda: all_run(plane, space, "a", "b"))
