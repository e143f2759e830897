"""The rights that a ServiceAccount needs to allocate claims: these, and no fewer."""

from __future__ import annotations

import copy
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pytest
from tests.kubernetes_e2e.api import CORE, RBAC, Api, ApiError, Json, until
from tests.kubernetes_e2e.cluster import (
    FINALIZER,
    claim,
    claims_in,
    device_request,
    pod,
    pods_in,
    results,
    set_condition,
    write_allocation,
)
from tests.kubernetes_e2e.nvidia import DRIVER
from tests.kubernetes_e2e.plane import Plane

COORDINATION = "/apis/coordination.k8s.io/v1"
NODE = "n-nowhere"
HELD = {
    "bindingConditions": ["slicewise.dev/confirmed"],
    "bindingFailureConditions": ["slicewise.dev/conflict"],
}
DRY = "?dryRun=All"
"""Everything is checked and nothing is written."""


class Right(NamedTuple):
    """One thing that a rule allows; with a name, on the object of that name alone."""

    verb: str
    group: str
    resource: str
    name: str = ""

    def rule(self) -> Json:
        rule: Json = {
            "apiGroups": [self.group],
            "resources": [self.resource],
            "verbs": [self.verb],
        }
        return rule | ({"resourceNames": [self.name]} if self.name else {})


def on_claims(verb: str, part: str = "", name: str = "") -> Right:
    """A right on claims, or on a part of them."""
    return Right(verb, "resource.k8s.io", f"resourceclaims{part}", name)


class Claims(NamedTuple):
    """A claim in each state, as an admin reads it."""

    space: str
    fresh: Json
    finalized: Json
    allocated: Json
    confirmed: Json


Act = Callable[[Api, Claims], object]


def path_of(found: Json, part: str = "") -> str:
    """Where a claim is, for a dry run."""
    told = found["metadata"]
    return f"{claims_in(told['namespace'])}/{told['name']}{part}{DRY}"


def with_status(found: Json, status: Json) -> Json:
    """A claim with another status."""
    changed = copy.deepcopy(found)
    changed["status"] = status
    return changed


def just_status(found: Json) -> Json:
    """A merge patch that gives a claim the status of this one, which must not have changed."""
    version = found["metadata"]["resourceVersion"]
    return {"metadata": {"resourceVersion": version}, "status": found["status"]}


def finalizer(api: Api, claims: Claims) -> None:
    changed = copy.deepcopy(claims.fresh)
    changed["metadata"]["finalizers"] = [FINALIZER]
    api.put(path_of(claims.fresh), changed)


def finalizer_by_patch(api: Api, claims: Claims) -> None:
    api.patch(path_of(claims.fresh), {"metadata": {"finalizers": [FINALIZER]}})


def allocation(api: Api, claims: Claims) -> None:
    changed = with_status(claims.finalized, claims.allocated["status"])
    api.put(path_of(claims.finalized, "/status"), changed)


def allocation_by_patch(api: Api, claims: Claims) -> None:
    changed = with_status(claims.finalized, claims.allocated["status"])
    api.patch(path_of(claims.finalized, "/status"), just_status(changed))


def with_condition(claims: Claims) -> Json:
    """The allocated claim with the confirmed one's conditions.

    Its allocation stays its own: the API server stamps an allocation with the second it was
    written, and that may differ between the two claims.
    """
    devices = claims.confirmed["status"]["devices"]
    return with_status(claims.allocated, {**claims.allocated["status"], "devices": devices})


def condition(api: Api, claims: Claims) -> None:
    changed = with_condition(claims)
    api.put(path_of(claims.allocated, "/status"), changed)


def condition_by_patch(api: Api, claims: Claims) -> None:
    changed = with_condition(claims)
    api.patch(path_of(claims.allocated, "/status"), just_status(changed))


def both_at_once(api: Api, claims: Claims) -> None:
    changed = with_status(claims.finalized, claims.confirmed["status"])
    api.put(path_of(claims.finalized, "/status"), changed)


def clearing(api: Api, claims: Claims) -> None:
    api.put(path_of(claims.confirmed, "/status"), with_status(claims.confirmed, {}))


def placed(api: Api, claims: Claims) -> None:
    told = {"type": "slicewise.dev/Placed", "status": "False", "reason": "Capacity"}
    headers = {"Content-Type": "application/strategic-merge-patch+json"}
    path = f"{pods_in(claims.space)}/p/status{DRY}"
    api.call("PATCH", path, {"status": {"conditions": [told]}}, headers)


def event(api: Api, claims: Claims) -> None:
    about = {"kind": "Pod", "name": "p", "namespace": claims.space}
    told = {"involvedObject": about, "reason": "Capacity", "message": "full", "type": "Warning"}
    api.create(f"{CORE}/namespaces/{claims.space}/events{DRY}", {"metadata": {"name": "e"}, **told})


def lease(api: Api, claims: Claims) -> None:
    path = f"{COORDINATION}/namespaces/{claims.space}/leases"
    found = api.get(f"{path}/there")
    api.create(f"{path}{DRY}", {"metadata": {"name": "new"}})
    api.put(f"{path}/there{DRY}", found)


ACTS: dict[str, tuple[Act, set[Right]]] = {
    "finalizer": (finalizer, {on_claims("update")}),
    "finalizer by patch": (finalizer_by_patch, {on_claims("patch")}),
    "allocation": (allocation, {on_claims("update", "/status"), on_claims("update", "/binding")}),
    "allocation by patch": (
        allocation_by_patch,
        {on_claims("patch", "/status"), on_claims("patch", "/binding")},
    ),
    "condition": (
        condition,
        {on_claims("update", "/status"), on_claims("arbitrary-node:update", "/driver", DRIVER)},
    ),
    "condition by patch": (
        condition_by_patch,
        {on_claims("patch", "/status"), on_claims("arbitrary-node:patch", "/driver", DRIVER)},
    ),
    "allocation and condition": (
        both_at_once,
        {
            on_claims("update", "/status"),
            on_claims("update", "/binding"),
            on_claims("arbitrary-node:update", "/driver", DRIVER),
        },
    ),
    "clearing": (clearing, {on_claims("update", "/status"), on_claims("update", "/binding")}),
    "pod condition": (placed, {Right("patch", "", "pods/status")}),
    "event": (event, {Right("create", "", "events")}),
    "lease": (
        lease,
        {Right(verb, "coordination.k8s.io", "leases") for verb in ("get", "create", "update")},
    ),
}


@pytest.fixture(scope="module")
def claims(plane: Plane) -> Iterator[Claims]:
    """Claims in every state, a pod and a lease."""
    api = plane.api
    space = f"t-{uuid.uuid4().hex[:10]}"
    api.create(f"{CORE}/namespaces", {"metadata": {"name": space}})
    for name in ("fresh", "finalized", "allocated", "confirmed"):
        api.create(claims_in(space), claim(name, device_request()))
    api.patch(f"{claims_in(space)}/finalized", {"metadata": {"finalizers": [FINALIZER]}})
    for name in ("allocated", "confirmed"):
        write_allocation(api, space, name, NODE, results(NODE, ["d"], **HELD))
    set_condition(api, space, "confirmed", "slicewise.dev/confirmed")
    api.create(pods_in(space), pod("p", schedulingGates=[{"name": "slicewise.dev/never"}]))
    api.create(f"{COORDINATION}/namespaces/{space}/leases", {"metadata": {"name": "there"}})
    names = ("fresh", "finalized", "allocated", "confirmed")
    yield Claims(space, *(api.get(f"{claims_in(space)}/{name}") for name in names))
    for name in ("finalized", "allocated", "confirmed"):
        path = f"{claims_in(space)}/{name}"
        api.put(f"{path}/status", {**api.get(path), "status": {}})
        api.patch(path, {"metadata": {"finalizers": []}})
    api.delete(f"{CORE}/namespaces/{space}")


@contextmanager
def account_with(
    plane: Plane, space: str, rights: Iterable[Right], role_in: str = ""
) -> Iterator[Api]:
    """A ServiceAccount with these rights in the whole cluster, or in one namespace."""
    name = f"s-{uuid.uuid4().hex[:10]}"
    kind, scope = ("Role", f"/namespaces/{role_in}") if role_in else ("ClusterRole", "")
    seen = Right("get", "", "configmaps", name)
    # It exists by the time the rules are in effect.
    rules = [right.rule() for right in (*rights, seen)]
    accounts = f"{CORE}/namespaces/{space}/serviceaccounts"
    plane.api.create(accounts, {"metadata": {"name": name}})
    plane.api.create(
        f"{RBAC}{scope}/{kind.lower()}s",
        {"metadata": {"name": name}, "rules": rules},
    )
    plane.api.create(
        f"{RBAC}{scope}/{kind.lower()}bindings",
        {
            "metadata": {"name": name},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": name},
            "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": space}],
        },
    )
    configmap = f"{CORE}/namespaces/{space}/configmaps/{name}"
    with plane.api_for(f"{space}/{name}") as api:
        # Not found: only callers with read access get this answer.
        until("the rights are in force", lambda: api.find(configmap) is None)
        yield api
    for part in ("bindings", "s"):
        plane.api.delete(f"{RBAC}{scope}/{kind.lower()}{part}/{name}")


def refused(act: Act, api: Api, claims: Claims) -> str:
    """What the refusal says; without one this fails."""
    with pytest.raises(ApiError) as error:
        act(api, claims)
    assert error.value.status in (403, 422), error.value
    assert "orbidden" in error.value.message
    return error.value.message


@pytest.mark.parametrize("name", ACTS)
def test_the_rights_are_sufficient_and_each_is_needed(
    plane: Plane, claims: Claims, name: str
) -> None:
    act, rights = ACTS[name]
    with account_with(plane, claims.space, rights) as api:
        act(api, claims)
    for missing in sorted(rights):
        with account_with(plane, claims.space, rights - {missing}) as api:
            refused(act, api, claims)


def test_the_right_to_bind_must_be_cluster_wide(plane: Plane, claims: Claims) -> None:
    act, rights = ACTS["allocation"]
    with account_with(plane, claims.space, rights, role_in=claims.space) as api:
        assert "resourceclaims/binding" in refused(act, api, claims)


def test_the_right_to_set_conditions_may_be_for_one_namespace(plane: Plane, claims: Claims) -> None:
    act, rights = ACTS["condition"]
    with account_with(plane, claims.space, rights, role_in=claims.space) as api:
        act(api, claims)
