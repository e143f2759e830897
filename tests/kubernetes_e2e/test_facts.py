"""Assumptions of the Kubernetes integration, checked with the real scheduler and controllers.

A claim of a sealed class (its selector is ``false``) is never served by the scheduler, only by
a client that writes its allocation. In these tests, the test is that client.
"""

from __future__ import annotations

import pytest
from tests.kubernetes_e2e.api import Api, ApiError, Json, until
from tests.kubernetes_e2e.cluster import (
    FINALIZER,
    allocated,
    claim,
    claims_in,
    claims_of,
    clear_allocation,
    device_request,
    make_classes,
    pod,
    pods_in,
    results,
    set_condition,
    template,
    templates_in,
    unscheduled_because,
    until_running,
    write_allocation,
)
from tests.kubernetes_e2e.conftest import Nodes
from tests.kubernetes_e2e.nvidia import devices_at
from tests.kubernetes_e2e.plane import Plane

MODEL = "H200-141GB"
SMALL = "1g.18gb"
SEALED = "sealed.slicewise.test"
CONFIRMED, CONFLICT = "slicewise.dev/confirmed", "slicewise.dev/conflict"
HELD = {"bindingConditions": [CONFIRMED], "bindingFailureConditions": [CONFLICT]}
NO_NODE = "cannot allocate all claims"


@pytest.fixture
def api(plane: Plane) -> Api:
    """The API as an admin, with a sealed class."""
    sealed: Json = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "DeviceClass",
        "metadata": {"name": SEALED},
        "spec": {"selectors": [{"cel": {"expression": "false"}}]},
    }
    make_classes(plane.api, [sealed])
    return plane.api


def here(node: str) -> Json:
    """The choice of one node in a pod's specification."""
    return {"kubernetes.io/hostname": node}


def stock_pod(api: Api, space: str, name: str, profile: str) -> tuple[str, str]:
    """A pod as users of the stock driver write it; where it runs and with what device."""
    with_template = f"t-{name}"
    api.create(templates_in(space), template(with_template, device_request(profile=profile)))
    api.create(pods_in(space), pod(name, [with_template]))
    found = until_running(api, space, name)
    [(node, device)] = allocated(api, space, name)
    assert found["spec"]["nodeName"] == node
    return node, device


def waiting_pod(api: Api, space: str, name: str, claims: int = 1, cpu: str = "100m") -> list[str]:
    """A pod with claims of the sealed class, which the scheduler has tried; the claims' names."""
    if not api.items(templates_in(space)):
        api.create(templates_in(space), template("sealed", device_request(SEALED)))
    api.create(pods_in(space), pod(name, ["sealed"] * claims, cpu=cpu))
    until(f"{name} was tried", lambda: unscheduled_because(api, space, name))
    return claims_of(api, space, name)


def status(api: Api, space: str, name: str) -> Json:
    """A claim's status."""
    found: Json = api.get(f"{claims_in(space)}/{name}").get("status", {})
    return found


def until_reserved(api: Api, space: str, name: str) -> None:
    """Wait until the scheduler has taken a claim for its pod: from then on it is binding."""
    until(f"{name} is reserved", lambda: status(api, space, name).get("reservedFor"))


def until_cleared(api: Api, space: str, name: str) -> None:
    """Wait until a claim has no allocation."""
    until(f"{name} is cleared", lambda: "allocation" not in status(api, space, name))


def node_of(api: Api, space: str, name: str) -> str | None:
    """The node a pod is bound to."""
    found: str | None = api.get(f"{pods_in(space)}/{name}")["spec"].get("nodeName")
    return found


# The stock scheduler


def test_the_scheduler_takes_the_first_device_by_name(api: Api, nodes: Nodes, space: str) -> None:
    [node] = nodes(1, MODEL, gpus=2)
    small = [devices_at(MODEL, gpu, SMALL) for gpu in (0, 1)]
    big = [devices_at(MODEL, gpu, "4g.71gb") for gpu in (0, 1)]
    assert stock_pod(api, space, "a", SMALL) == (node, small[0][0])
    # Slice 0 is the only start of the largest half, which has to use the next GPU.
    assert stock_pod(api, space, "b", "4g.71gb") == (node, big[1][0])
    assert stock_pod(api, space, "c", SMALL) == (node, small[0][1])


def test_the_scheduler_counts_allocations_of_others(api: Api, nodes: Nodes, space: str) -> None:
    [node] = nodes(1, MODEL, gpus=2)
    [ours] = waiting_pod(api, space, "ours")
    whole = devices_at(MODEL, 0, "7g.141gb")[0]
    write_allocation(api, space, ours, node, results(node, [whole]))
    until_running(api, space, "ours")
    assert stock_pod(api, space, "stock", SMALL) == (node, devices_at(MODEL, 1, SMALL)[0])


# A sealed class


def test_the_scheduler_never_allocates_a_sealed_class(api: Api, nodes: Nodes, space: str) -> None:
    nodes(1, MODEL, gpus=2)
    [sealed] = waiting_pod(api, space, "p")
    nodes(1, MODEL, gpus=2)
    until(
        "the second node was tried", lambda: f"2 {NO_NODE}" in unscheduled_because(api, space, "p")
    )
    assert "allocation" not in status(api, space, sealed)
    assert FINALIZER not in api.get(f"{claims_in(space)}/{sealed}")["metadata"].get(
        "finalizers", []
    )
    assert stock_pod(api, space, "stock", SMALL)  # there was room


def test_the_scheduler_honours_allocations_of_others(api: Api, nodes: Nodes, space: str) -> None:
    _, second = nodes(2, MODEL, gpus=2)
    [sealed] = waiting_pod(api, space, "p")
    device = devices_at(MODEL, 1, SMALL)[3]
    written = write_allocation(api, space, sealed, second, results(second, [device]))
    found = until_running(api, space, "p")
    assert found["spec"]["nodeName"] == second
    now = status(api, space, sealed)
    assert now["allocation"] == written["status"]["allocation"]
    assert [one["uid"] for one in now["reservedFor"]] == [found["metadata"]["uid"]]


def test_an_allocation_without_a_timestamp_is_never_bound(
    api: Api, nodes: Nodes, space: str
) -> None:
    [node] = nodes(1, MODEL)
    [sealed] = waiting_pod(api, space, "p")
    device = devices_at(MODEL, 0, SMALL)[3]
    found = results(node, [device])
    write_allocation(api, space, sealed, node, found, allocationTimestamp=None)
    until("it fails", lambda: "field is immutable" in unscheduled_because(api, space, "p"))
    assert node_of(api, space, "p") is None


def test_the_api_does_not_check_that_a_device_is_free_or_exists(
    api: Api, nodes: Nodes, space: str
) -> None:
    [node] = nodes(1, MODEL)
    device = devices_at(MODEL, 0, SMALL)[3]
    for name, taken in (("a", device), ("b", device), ("c", "no-such-device")):
        [sealed] = waiting_pod(api, space, name)
        write_allocation(api, space, sealed, node, results(node, [taken]))
        until_running(api, space, name)
    assert allocated(api, space, "a") == allocated(api, space, "b") == [(node, device)]


def test_a_stale_version_is_refused(api: Api, nodes: Nodes, space: str) -> None:
    [node] = nodes(1, MODEL)
    api.create(claims_in(space), claim("c", device_request(SEALED)))
    before = api.get(f"{claims_in(space)}/c")
    api.patch(f"{claims_in(space)}/c", {"metadata": {"annotations": {"touched": "yes"}}})
    write_allocation(api, space, "c", node, results(node, ["d"]))
    clear_allocation(api, space, "c")
    with pytest.raises(ApiError) as refused:
        api.put(f"{claims_in(space)}/c/status", before)
    assert refused.value.status == 409


def test_the_allocation_of_one_claim_stays_while_another_is_sealed(
    api: Api, nodes: Nodes, space: str
) -> None:
    node, _ = nodes(2, MODEL)
    first, second = waiting_pod(api, space, "p", claims=2)
    small = devices_at(MODEL, 0, SMALL)
    write_allocation(api, space, first, node, results(node, [small[3]]))
    nodes(1, MODEL)
    until("it is tried again", lambda: f"3 {NO_NODE}" in unscheduled_because(api, space, "p"))
    assert "allocation" in status(api, space, first)
    write_allocation(api, space, second, node, results(node, [small[4]]))
    assert until_running(api, space, "p")["spec"]["nodeName"] == node
    assert allocated(api, space, "p") == [(node, small[3]), (node, small[4])]


# A node that does not fit


def test_an_allocation_on_a_full_node_is_cleared_if_another_node_fits(
    api: Api, nodes: Nodes, space: str
) -> None:
    full, _ = nodes(2, MODEL, cpu="2")
    api.create(pods_in(space), pod("big", cpu="1500m", nodeSelector=here(full)))
    until_running(api, space, "big")
    [sealed] = waiting_pod(api, space, "p", cpu="1")
    device = devices_at(MODEL, 0, SMALL)[3]
    write_allocation(api, space, sealed, full, results(full, [device]))
    until_cleared(api, space, sealed)
    assert node_of(api, space, "p") is None
    assert FINALIZER in api.get(f"{claims_in(space)}/{sealed}")["metadata"]["finalizers"]


def test_an_allocation_on_a_full_node_stays_without_another_node(
    api: Api, nodes: Nodes, space: str
) -> None:
    [full] = nodes(1, MODEL, cpu="2")
    api.create(pods_in(space), pod("big", cpu="1500m", nodeSelector=here(full)))
    until_running(api, space, "big")
    [sealed] = waiting_pod(api, space, "p", cpu="1")
    device = devices_at(MODEL, 0, SMALL)[3]
    write_allocation(api, space, sealed, full, results(full, [device]))
    full_only = "0/1 nodes are available: 1 Insufficient cpu."
    until("it is tried", lambda: unscheduled_because(api, space, "p").startswith(full_only))
    assert "allocation" in status(api, space, sealed)
    api.delete(f"{pods_in(space)}/big")
    assert until_running(api, space, "p")["spec"]["nodeName"] == full
    assert allocated(api, space, "p") == [(full, device)]


# Conditions for binding


def test_a_pod_is_held_back_until_its_allocation_is_confirmed(
    api: Api, nodes: Nodes, space: str
) -> None:
    [node] = nodes(1, MODEL)
    [sealed] = waiting_pod(api, space, "p")
    device = devices_at(MODEL, 0, SMALL)[3]
    write_allocation(api, space, sealed, node, results(node, [device], **HELD))
    until_reserved(api, space, sealed)
    assert node_of(api, space, "p") is None
    set_condition(api, space, sealed, CONFIRMED)
    assert until_running(api, space, "p")["spec"]["nodeName"] == node


def test_an_allocation_that_failed_is_cleared_by_the_scheduler(
    api: Api, nodes: Nodes, space: str
) -> None:
    first, second = nodes(2, MODEL)
    [sealed] = waiting_pod(api, space, "p")
    device = devices_at(MODEL, 0, SMALL)[3]
    write_allocation(api, space, sealed, first, results(first, [device], **HELD))
    until_reserved(api, space, sealed)
    set_condition(api, space, sealed, CONFLICT)
    until_cleared(api, space, sealed)
    assert status(api, space, sealed) == {}
    assert node_of(api, space, "p") is None
    write_allocation(api, space, sealed, second, results(second, [device]))
    assert until_running(api, space, "p")["spec"]["nodeName"] == second


def test_clearing_an_allocation_during_binding_misplaces_the_pod(
    api: Api, nodes: Nodes, space: str
) -> None:
    """Why conflicts are reported by the condition: the scheduler ignores a changed allocation."""
    first, second = nodes(2, MODEL)
    [sealed] = waiting_pod(api, space, "p")
    device = devices_at(MODEL, 0, SMALL)[3]
    write_allocation(api, space, sealed, first, results(first, [device], **HELD))
    until_reserved(api, space, sealed)
    clear_allocation(api, space, sealed)
    write_allocation(api, space, sealed, second, results(second, [device]))
    assert until_running(api, space, "p")["spec"]["nodeName"] == first
    assert allocated(api, space, "p") == [(second, device)]


# The end


@pytest.mark.parametrize("end", ["deleted", "succeeded"])
def test_a_template_claim_is_deleted_with_its_pod(
    api: Api, nodes: Nodes, space: str, end: str
) -> None:
    [node] = nodes(1, MODEL)
    [sealed] = waiting_pod(api, space, "p")
    device = devices_at(MODEL, 0, SMALL)[3]
    write_allocation(api, space, sealed, node, results(node, [device]))
    until_running(api, space, "p")
    if end == "deleted":
        api.delete(f"{pods_in(space)}/p")
    else:
        labels = {"metadata": {"labels": {"slicewise.dev/ends": "now"}}}
        api.patch(f"{pods_in(space)}/p", labels)
    until("it is gone", lambda: api.find(f"{claims_in(space)}/{sealed}") is None)


def test_a_shared_claim_is_cleared_after_its_last_pod(api: Api, nodes: Nodes, space: str) -> None:
    [node] = nodes(1, MODEL)
    api.create(claims_in(space), claim("shared", device_request(SEALED)))
    device = devices_at(MODEL, 0, SMALL)[3]
    write_allocation(api, space, "shared", node, results(node, [device]))
    for name in ("a", "b"):
        api.create(pods_in(space), pod(name, claims=["shared"]))
        until_running(api, space, name)
    api.delete(f"{pods_in(space)}/a")
    until("a has left", lambda: len(status(api, space, "shared")["reservedFor"]) == 1)
    assert "allocation" in status(api, space, "shared")
    api.delete(f"{pods_in(space)}/b")
    until_cleared(api, space, "shared")

    def finalizers() -> list[str]:
        found: list[str] = api.get(f"{claims_in(space)}/shared")["metadata"].get("finalizers", [])
        return found

    until("another write has let it go", lambda: FINALIZER not in finalizers())


def test_the_allocation_of_an_unbound_pod_is_deleted_with_it(
    api: Api, nodes: Nodes, space: str
) -> None:
    [node] = nodes(1, MODEL)
    [sealed] = waiting_pod(api, space, "p", cpu="1000")
    device = devices_at(MODEL, 0, SMALL)[3]
    write_allocation(api, space, sealed, node, results(node, [device]))
    until("it is tried", lambda: "Insufficient cpu" in unscheduled_because(api, space, "p"))
    assert allocated(api, space, "p") == [(node, device)]
    api.delete(f"{pods_in(space)}/p")
    until("it is gone", lambda: api.find(f"{claims_in(space)}/{sealed}") is None)
