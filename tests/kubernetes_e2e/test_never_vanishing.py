"""Never two claims on the same slices: nodes, slices and pods deleted at any moment."""

from __future__ import annotations

import time
from pathlib import Path

from tests.kubernetes_e2e.api import CORE, RESOURCE, Api, Json, until
from tests.kubernetes_e2e.checker import until_quiet
from tests.kubernetes_e2e.cluster import (
    allocated,
    claims_in,
    make_classes,
    node,
    pods_in,
    publish,
    unscheduled_because,
    withdraw,
)
from tests.kubernetes_e2e.conftest import Nodes
from tests.kubernetes_e2e.faults import Fault, Write
from tests.kubernetes_e2e.nvidia import resource_slices
from tests.kubernetes_e2e.plane import Plane
from tests.kubernetes_e2e.replica import SEALED
from tests.kubernetes_e2e.scene import (
    MODEL,
    Living,
    condition,
    living,
    make_claim,
    make_pod,
    make_templates,
    remove_pod,
    sample,
    until_run,
    witnessed,
)

# Nodes and slices


def publish_again(api: Api, name: str, model: str, gpus: int, generation: int) -> None:
    """Slices for a node that is there, as its driver publishes them when it starts again."""
    uid = api.get(f"{CORE}/nodes/{name}")["metadata"]["uid"]
    for one in resource_slices(name, model, gpus, uid, generation):
        api.create(f"{RESOURCE}/resourceslices", one)


def unpublish(api: Api, name: str) -> None:
    """Delete a node's slices, one after the other."""
    for one in api.items(f"{RESOURCE}/resourceslices"):
        if one["spec"].get("nodeName") == name:
            api.delete(f"{RESOURCE}/resourceslices/{one['metadata']['name']}")


def test_slices_are_republished_while_pods_wait(
    plane: Plane, nodes: Nodes, space: str, tmp_path: Path
) -> None:
    make_classes(plane.api, [SEALED])
    [a] = nodes(1, MODEL, gpus=2)
    api = plane.api
    make_templates(api, space)
    with witnessed(plane), living(plane, tmp_path) as one:
        for name in ("x", "y"):
            make_pod(api, space, name, "three", "one")
        make_pod(api, space, "z", "one")
        until_run(api, space, "x", "y", "z")
        make_pod(api, space, "waits", "whole")
        had = {name: allocated(api, space, name) for name in ("x", "y", "z")}
        until("it is told", lambda: condition(api, space, "waits"))
        # The driver restarts: the same again, then with one GPU less, then with another.
        for generation, gpus in ((2, 2), (3, 1), (4, 3)):
            unpublish(api, a)
            make_pod(api, space, f"new-{generation}", "one")
            publish_again(api, a, MODEL, gpus, generation)
        until_run(api, space, "waits", "new-2", "new-3", "new-4")
        assert had == {name: allocated(api, space, name) for name in ("x", "y", "z")}
        assert one.lives == 1


def test_a_node_is_replaced_by_another_model(
    plane: Plane, nodes: Nodes, space: str, tmp_path: Path
) -> None:
    """The pods of a missing node are not deleted for a while, and keep their devices."""
    make_classes(plane.api, [SEALED])
    [a] = nodes(1, MODEL, gpus=1)
    api = plane.api
    make_templates(api, space)
    with witnessed(plane) as witness, living(plane, tmp_path) as one:
        make_pod(api, space, "x", "whole")
        until_run(api, space, "x")
        for name in ("p", "q"):
            make_pod(api, space, name, "three")
        until("p and q wait", lambda: condition(api, space, "q"))
        withdraw(api, [a])
        publish(api, [node(a)], MODEL, 1)
        [b] = nodes(1, MODEL, gpus=1)
        until_run(api, space, "p", "q")
        assert {allocated(api, space, name)[0][0] for name in ("p", "q")} == {b}
        # Another model, with devices of the same names: x still has what is called the same.
        withdraw(api, [a])
        publish(api, [node(a)], "H100-80GB", 1)
        make_pod(api, space, "r", "two")
        until("r waits", lambda: condition(api, space, "r"))
        remove_pod(api, space, "x")
        until_run(api, space, "r")
        assert allocated(api, space, "r")[0][0] == a
        # And one on which there is no such device.
        withdraw(api, [a])
        make_pod(api, space, "s", "whole")
        publish(api, [node(a)], "A30-24GB", 2)
        until("s waits", lambda: condition(api, space, "s"))
        withdraw(api, [a])
        publish(api, [node(a)], MODEL, 2)
        until_run(api, space, "p", "q", "s")
        assert not witness.verdict().overlaps
        assert one.lives == 1


# Pods


def test_the_slices_of_a_pod_that_is_deleted_by_force_cool_down(
    plane: Plane, nodes: Nodes, space: str, tmp_path: Path
) -> None:
    """Those of a pod that has ended do not."""
    make_classes(plane.api, [SEALED])
    nodes(1, MODEL, gpus=1)
    api = plane.api
    make_templates(api, space)
    with witnessed(plane), living(plane, tmp_path, "--cool-down", "6s"):
        for number, name in enumerate("abc"):
            make_pod(api, space, name, "whole")
            began = time.monotonic()
            until_run(api, space, name)
            waited = time.monotonic() - began
            assert (waited > 5) == (number == 1), (name, waited)
            if number == 0:
                remove_pod(api, space, name)
            else:  # kwok ends it as a kubelet does
                status = {"status": {"phase": "Succeeded"}}
                api.patch(f"{pods_in(space)}/{name}/status", status)


def test_a_pod_with_claims_that_kubernetes_records_in_turns(
    plane: Plane, nodes: Nodes, space: str, tmp_path: Path
) -> None:
    """Kubernetes 1.36.4 may drop one of two claims from a pod's status, then the other, for ever.

    See https://github.com/kubernetes/kubernetes/issues/138407. It starts here by applying one claim
    only, as its controller does when its cache is late. Newer versions recover by themselves.
    """
    make_classes(plane.api, [SEALED])
    nodes(1, MODEL, gpus=1)
    api = plane.api
    make_templates(api, space)

    def recorded() -> list[Json]:
        found: list[Json] = api.get(f"{pods_in(space)}/p")["status"].get(
            "resourceClaimStatuses", []
        )
        return found

    make_pod(api, space, "p", "three", "one")
    claims = until("its claims are recorded", lambda: recorded() if len(recorded()) == 2 else None)
    one_of_them = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "p", "namespace": space},
        "status": {"resourceClaimStatuses": claims[1:]},
    }
    api.call(
        "PATCH",
        f"{pods_in(space)}/p/status?fieldManager=ResourceClaimController&force=true",
        one_of_them,
        {"Content-Type": "application/apply-patch+yaml"},
    )
    with witnessed(plane), living(plane, tmp_path):
        until_run(api, space, "p")
    assert sorted(one["name"] for one in recorded()) == ["c0", "c1"]


def test_pods_deleted_at_every_write_of_their_allocation(
    plane: Plane, nodes: Nodes, space: str, tmp_path: Path
) -> None:
    """The pod goes when the write is on its way, or when it has just been done."""
    make_classes(plane.api, [SEALED])
    nodes(1, MODEL, gpus=1)
    api = plane.api
    make_templates(api, space)

    def round_with(one: Living, step: int, fault: Fault) -> int:
        one.proxy.begin({step: fault})
        make_pod(api, space, "p", "three", "one", "pair")
        gone = step > 6 or until("p is gone", lambda: api.find(f"{pods_in(space)}/p") is None)
        remove_pod(api, space, "p") if step > 6 else None
        assert gone
        until_quiet(api)
        until("nothing is left", lambda: not api.items(claims_in(space)))
        return len(one.proxy.writes)

    with witnessed(plane), living(plane, tmp_path) as one:

        def go(_: Write) -> None:
            # The write may be a late one for the pod of the round before.
            until("p is there", lambda: api.find(f"{pods_in(space)}/p"))
            remove_pod(api, space, "p")

        for step in sample(range(12), 12):
            fault = Fault(after=go) if step % 2 else Fault(before=go)
            round_with(one, step // 2 + 1, fault)
        make_pod(api, space, "whole", "whole")  # nothing was kept back
        until_run(api, space, "whole")
        assert one.proxy.met == 12
        assert one.lives == 1


# Claims


def test_claims_that_outlive_their_pods(
    plane: Plane, nodes: Nodes, space: str, tmp_path: Path
) -> None:
    make_classes(plane.api, [SEALED])
    nodes(1, MODEL, gpus=1)
    api = plane.api
    make_templates(api, space)
    with witnessed(plane), living(plane, tmp_path) as one:
        for name in ("never-bound", "ran", "shared"):
            make_claim(api, space, name, "2g.20gb")
        # Given devices, but the pod cannot run: another scheduler was asked for.
        make_pod(api, space, "a", shared=["never-bound"], schedulerName="unknown")
        until("it has a device", lambda: allocated(api, space, "a"))
        make_pod(api, space, "b", shared=["ran"])
        make_pod(api, space, "c", shared=["shared"])
        make_pod(api, space, "d", shared=["shared", "ran"])
        until_run(api, space, "b", "c", "d")
        make_pod(api, space, "waits", "whole")
        until("it waits", lambda: condition(api, space, "waits"))
        for name in ("a", "b", "c"):
            remove_pod(api, space, name)
        until_quiet(api)
        found = api.items(claims_in(space))
        held = {c["metadata"]["name"] for c in found if c.get("status", {}).get("allocation")}
        assert held == {"shared", "ran"}  # which d still uses
        remove_pod(api, space, "d")
        until_run(api, space, "waits")
        make_pod(api, space, "e", shared=["ran", "shared"])
        until("e waits", lambda: condition(api, space, "e"))
        remove_pod(api, space, "waits")
        until_run(api, space, "e")
        assert one.lives == 1


# Constraints that only the scheduler knows


def test_cpu_only_on_another_node(plane: Plane, nodes: Nodes, space: str, tmp_path: Path) -> None:
    """This is known in advance: no device of the other node is ever allocated."""
    make_classes(plane.api, [SEALED])
    [small] = nodes(1, MODEL, gpus=2, cpu="2")
    [large] = nodes(1, MODEL, gpus=1, cpu="16")
    api = plane.api
    make_templates(api, space)
    with witnessed(plane) as witness, living(plane, tmp_path):
        make_pod(api, space, "fills", "one", cpu="1500m", nodeName=None)
        make_pod(api, space, "big", "three", cpu="8")
        until_run(api, space, "fills", "big")
        assert allocated(api, space, "big")[0][0] == large
        assert witness.verdict().allocations == 2
        # Nothing is left for this one, until the other has gone.
        make_pod(api, space, "late", "one", cpu="10")
        told = until("it is told why", lambda: condition(api, space, "late"))
        assert told["reason"] == "NoNode"
        assert "cpu" in told["message"].lower()
        remove_pod(api, space, "big")
        until_run(api, space, "late")
        assert allocated(api, space, "late")[0][0] == large != small


def test_a_port_that_only_the_scheduler_checks(
    plane: Plane, nodes: Nodes, space: str, tmp_path: Path
) -> None:
    """A port of the node is taken: the scheduler gives the devices back, another node is tried."""
    make_classes(plane.api, [SEALED])
    nodes(2, MODEL, gpus=1)
    api = plane.api
    make_templates(api, space)

    def with_port(name: str) -> None:
        containers = [
            {
                "name": "main",
                "image": "none",
                "ports": [{"containerPort": 80, "hostPort": 80}],
                "resources": {"claims": [{"name": "c0"}]},
            }
        ]
        make_pod(api, space, name, "one", containers=containers)

    with witnessed(plane) as witness, living(plane, tmp_path) as one:
        for name in ("a", "b"):
            with_port(name)
        until_run(api, space, "a", "b")
        homes = [allocated(api, space, name)[0][0] for name in ("a", "b")]
        assert len(set(homes)) == 2
        with_port("c")
        until("the scheduler says why", lambda: "port" in unscheduled_because(api, space, "c"))
        remove_pod(api, space, "a")
        until_run(api, space, "b", "c")
        assert allocated(api, space, "c")[0][0] == homes[0]
        assert witness.verdict().allocations >= 4
        assert one.lives == 1
