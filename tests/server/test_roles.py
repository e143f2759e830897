"""Every route, requested with every role."""

from __future__ import annotations

import pytest
from tests.server.harness import Harness

from slicewise.journal.entries import Role
from slicewise.server.app import Route
from slicewise.server.routes.table import ROUTES

ALL = {"admin", "operator", "tenant", "agent", "read-only", "read-only of a tenant"}
LOOK = ALL - {"agent"}
USE = {"admin", "operator", "tenant"}
STAFF = {"admin", "operator"}
OPEN = ALL | {"stranger"}

MAY: dict[str, set[str]] = {
    "createAllocation": USE,
    "releaseAllocation": USE,
    "extendLease": USE,
    "getAllocation": LOOK,
    "listAllocations": LOOK,
    "createAllocations": USE,
    "dryRun": USE,
    "getQueue": LOOK,
    "addNode": STAFF,
    "listNodes": LOOK,
    "getNode": ALL,
    "removeNode": STAFF,
    "cordonNode": STAFF,
    "uncordonNode": STAFF,
    "drainNode": STAFF,
    "acceptNode": STAFF,
    "adoptForeign": STAFF,
    "evictForeign": STAFF,
    "agentHello": {"agent"},
    "agentDesired": {"agent"},
    "agentReport": {"agent"},
    "addTenant": {"admin"},
    "listTenants": LOOK,
    "getTenant": LOOK,
    "changeTenant": {"admin"},
    "removeTenant": {"admin"},
    "issueToken": {"admin"},
    "listTokens": {"admin"},
    "rotateToken": {"admin"},
    "revokeToken": {"admin"},
    "whoami": ALL,
    "getCluster": LOOK,
    "getStats": LOOK,
    "getPolicy": LOOK,
    "listModels": ALL,
    "listPolicies": ALL,
    "planDefrag": {"admin", "operator", "read-only"},
    "defrag": STAFF,
    "followEvents": LOOK,
    "audit": STAFF,
    "getClock": LOOK,
    "acceptClock": {"admin"},
    "getBackup": {"admin"},
    "metrics": {"admin", "operator", "read-only"},
    "getSignIn": OPEN,
    "exchangeCode": OPEN,
    "openapi": OPEN,
    "healthz": OPEN,
    "readyz": OPEN,
}
"""Written out by hand: the table of routes must agree with it."""


def test_every_route_is_in_the_matrix() -> None:
    assert {route.name for route in ROUTES} == set(MAY)


def tokens(harness: Harness) -> dict[str, str | None]:
    own = harness.tenant("acme")
    made: dict[str, str | None] = {"stranger": None, "tenant": own}
    for role in (Role.ADMIN, Role.OPERATOR, Role.READ_ONLY):
        made[str(role)] = harness.token(role)
    made["agent"] = harness.token("agent", node="n1")
    made["read-only of a tenant"] = harness.token("read-only", tenant="acme")
    return made


ENDING = [route for route in ROUTES if route.name != "followEvents"]
"""All but the one whose answer does not end, which tests/server/test_events.py asks for."""


@pytest.mark.parametrize("route", ENDING, ids=lambda route: route.name)
def test_roles_of_every_route(busy: Harness, route: Route) -> None:
    path = route.path.replace("{id}", "unknown").replace("{name}", "n1").replace("{uuid}", "MIG-1")
    for who, token in tokens(busy).items():
        # The body is invalid: only 401 and 403 matter here.
        answer = busy.call(
            route.method, path, content=b"[]" if route.method == "POST" else None, token=token
        )
        if who in MAY[route.name]:
            assert answer.status_code not in (401, 403), (who, answer.text)
        elif who == "stranger":
            assert answer.status_code == 401, answer.text
            assert answer.headers["www-authenticate"].startswith("Bearer")
        else:
            assert answer.status_code == 403, (who, answer.text)
        assert answer.status_code < 500


def test_an_unknown_token_is_refused(harness: Harness) -> None:
    for header in ("Bearer sw_unknown", "Basic abc", "Bearer", "Bearer ", "sw_x", ""):
        answer = harness.get("/v1/whoami", token=None, headers={"authorization": header})
        assert answer.status_code == 401, header
        assert answer.headers["content-type"] == "application/problem+json"
    secret = harness.admin
    ok = harness.get("/v1/whoami", token=None, headers={"authorization": f"bearer  {secret} "})
    assert ok.status_code == 200


def test_resources_of_other_tenants_are_hidden(busy: Harness) -> None:
    mine, other = busy.tenant("acme"), busy.tenant("other")
    looker = busy.token("read-only", tenant="other")
    living = busy.place(token=mine)["id"]
    ended = busy.place(token=mine)["id"]
    busy.delete(f"/v1/allocations/{ended}", token=mine)
    unknown = busy.get("/v1/allocations/unknown", token=other)
    for identity in (living, ended):
        for token in (other, looker):
            answer = busy.get(f"/v1/allocations/{identity}", token=token)
            assert answer.status_code == 404
            assert answer.json()["detail"] == unknown.json()["detail"].replace("unknown", identity)
        for key in (None, f"key-{identity}"):
            answer = busy.delete(f"/v1/allocations/{identity}", token=other, key=key)
            assert answer.status_code == 404
            path, body = f"/v1/allocations/{identity}/extend", {"lease_seconds": 60}
            answer = busy.post(path, body, token=other, key=key and f"{key}-more")
            assert answer.status_code == 404
            assert answer.json()["detail"] == unknown.json()["detail"].replace("unknown", identity)
    assert busy.get(f"/v1/allocations/{living}", token=mine).json()["state"] == "placed"
    assert busy.get("/v1/tenants/acme", token=other).status_code == 404
    for path in ("/v1/cluster?gpus=true", "/v1/nodes/n1", "/v1/allocations", "/v1/queue"):
        text = busy.get(path, token=other).text
        assert "acme" not in text
        assert living not in text
