"""Nodes, tenants, quotas and tokens over HTTP."""

from __future__ import annotations

import httpx
import pytest
from tests.server.harness import Harness


def test_the_life_of_a_node(harness: Harness) -> None:
    made = harness.post(
        "/v1/nodes", {"name": "n1", "model": "a100", "gpus": 2, "labels": {"r": "1"}}
    )
    assert made.status_code == 201
    assert made.json() == {
        "name": "n1",
        "model": "A100-80GB",
        "gpus": 2,
        "state": "ready",
        "instances": 0,
        "slices": 16,
        "free_slices": 16,
        "labels": {"r": "1"},
        "managed": False,
        "holds": {},
        "held_gpus": 0,
        "foreign": 0,
    }
    assert harness.get("/v1/nodes").json() == {"nodes": [made.json()], "next": None}
    identity = harness.place("3g.40gb")["id"]
    detail = harness.get("/v1/nodes/n1").json()
    assert detail["free_slices"] == 12
    (used,) = [gpu for gpu in detail["devices"] if gpu["instances"]]
    assert used["mask"].count("1") == 4
    assert used["instances"][0]["allocation"] == identity
    assert used["instances"][0]["tenant"] == "default"
    assert harness.post("/v1/nodes/n1/cordon").json()["state"] == "cordoned"
    assert harness.post("/v1/allocations", {"profile": "1g.10gb"}).status_code == 409
    assert harness.post("/v1/nodes/n1/uncordon").json()["state"] == "ready"
    assert harness.delete("/v1/nodes/n1").status_code == 409
    assert harness.post("/v1/nodes/n1/drain").json()["state"] == "draining"
    harness.delete(f"/v1/allocations/{identity}")
    assert harness.get("/v1/nodes/n1").json()["state"] == "drained"
    assert harness.delete("/v1/nodes/n1").status_code == 200
    assert harness.get("/v1/nodes/n1").status_code == 404
    for path in ("cordon", "uncordon", "drain"):
        assert harness.post(f"/v1/nodes/n1/{path}").status_code == 404
    assert harness.delete("/v1/nodes/n1").status_code == 404


def test_drain_with_evict(busy: Harness) -> None:
    identity = busy.place()["id"]
    assert busy.post("/v1/nodes/n1/drain", {"evict": True}).json()["state"] == "drained"
    assert busy.get(f"/v1/allocations/{identity}").json()["cause"] == "evicted"
    assert busy.post("/v1/nodes/n1/drain", {"evict": 1}).status_code == 400


def test_a_repeated_registration_is_replayed(harness: Harness) -> None:
    body = {"name": "n1", "model": "A100-80GB", "gpus": 1}
    first = harness.post("/v1/nodes", body, key="k")
    again = harness.post("/v1/nodes", body, key="k")
    assert (first.status_code, again.status_code) == (201, 201)
    assert again.headers["idempotency-replayed"] == "true"
    assert harness.post("/v1/nodes", body).status_code == 409


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"name": "n1", "model": "A1000", "gpus": 1}, "model"),
        ({"name": "n 1", "model": "A100-80GB", "gpus": 1}, "name"),
        ({"name": "n1", "model": "A100-80GB", "gpus": 0}, "gpus"),
        ({"name": "n1", "model": "A100-80GB"}, None),
        ({"name": "n1", "model": "GB300-DGX-Station-252GB", "gpus": 1}, "model"),
    ],
)
def test_invalid_nodes_are_refused(harness: Harness, body: object, field: str | None) -> None:
    answer = harness.post("/v1/nodes", body)
    assert answer.status_code == 400
    assert answer.json().get("field") == field


def test_pages_of_nodes(harness: Harness) -> None:
    for name in ("b", "a", "c"):
        harness.node(name=name, gpus=1)
    page = harness.get("/v1/nodes?limit=2").json()
    assert [node["name"] for node in page["nodes"]] == ["a", "b"]
    page = harness.get(f"/v1/nodes?limit=2&cursor={page['next']}").json()
    assert [node["name"] for node in page["nodes"]] == ["c"]
    assert page["next"] is None


def test_the_life_of_a_tenant(busy: Harness) -> None:
    made = busy.post("/v1/tenants", {"name": "acme", "quota": {"instances": 2}})
    assert made.status_code == 201
    assert made.json()["quota"]["instances"] == 2
    assert busy.post("/v1/tenants", {"name": "acme"}).status_code == 409
    token = busy.token("tenant", tenant="acme")
    identity = busy.place(token=token)["id"]
    assert busy.get("/v1/tenants/acme").json()["usage"]["instances"] == 1
    changed = busy.call(
        "PATCH", "/v1/tenants/acme", {"quota": {"instances": None, "memory_slices": 3}}
    )
    assert changed.status_code == 200
    assert changed.json()["quota"].get("instances") is None
    assert changed.json()["quota"]["memory_slices"] == 3
    changed = busy.call("PATCH", "/v1/tenants/acme", {"quota": {"max_priority": 0}})
    assert changed.json()["quota"]["memory_slices"] == 3
    terms = {"default_lease_seconds": 60, "max_lease_seconds": 3600, "weight": 2.5}
    changed = busy.call("PATCH", "/v1/tenants/acme", {"quota": terms})
    assert changed.json()["quota"] == {"memory_slices": 3} | terms
    for guarantee in (4, None, -1):
        body = {"quota": {"guarantee": guarantee}}
        answer = busy.call("PATCH", "/v1/tenants/acme", body)
        assert (answer.status_code, answer.json()["field"]) == (400, "quota.guarantee")
    changes = {"quota": {"default_lease_seconds": 3601.5}}
    answer = busy.call("PATCH", "/v1/tenants/acme", changes)
    assert (answer.status_code, answer.json()["detail"]) == (
        400,
        "the default lease of 3601.5 seconds exceeds the maximum of 3600: "
        "lower default_lease_seconds, or raise max_lease_seconds",
    )
    wanted = {"profile": "1g.10gb", "lease_seconds": 3601}
    answer = busy.post("/v1/allocations", wanted, token=token)
    assert (answer.status_code, answer.json()["reason"]) == (409, "quota")
    assert (
        answer.json()["detail"] == "a lease of tenant 'acme' lasts at most 3600 seconds, not 3601"
    )
    assert busy.delete("/v1/tenants/acme").status_code == 409
    busy.delete(f"/v1/allocations/{identity}")
    assert busy.delete("/v1/tenants/acme").status_code == 200
    assert busy.get("/v1/whoami", token=token).status_code == 401
    assert busy.get("/v1/tenants/acme").status_code == 404
    assert busy.call("PATCH", "/v1/tenants/acme", {"quota": {}}).status_code == 404
    assert busy.delete("/v1/tenants/acme").status_code == 404


def test_pages_of_tenants(harness: Harness) -> None:
    token = harness.tenant("acme")
    listed = harness.get("/v1/tenants").json()["tenants"]
    assert [tenant["name"] for tenant in listed] == ["acme", "default"]
    page = harness.get("/v1/tenants?limit=1").json()
    assert page["next"] is not None
    listed = harness.get("/v1/tenants", token=token).json()["tenants"]
    assert [tenant["name"] for tenant in listed] == ["acme"]
    assert harness.get("/v1/tenants/acme", token=token).status_code == 200
    assert harness.get("/v1/tenants/default", token=token).status_code == 404


def test_the_life_of_a_token(harness: Harness) -> None:
    made = harness.post("/v1/tokens", {"role": "operator", "note": "on call"})
    assert made.status_code == 201
    body = made.json()
    secret = body.pop("token")
    assert secret.startswith("sw_")
    assert body["note"] == "on call"
    who = harness.get("/v1/whoami", token=secret).json()
    assert (who["id"], who["role"], who["tenant"]) == (body["id"], "operator", None)
    listed = harness.get("/v1/tokens").json()["tokens"]
    assert body in listed
    assert secret not in harness.get("/v1/tokens").text
    assert "digest" not in harness.get("/v1/tokens").text
    assert harness.delete(f"/v1/tokens/{body['id']}").status_code == 200
    assert harness.get("/v1/whoami", token=secret).status_code == 401
    assert harness.delete(f"/v1/tokens/{body['id']}").status_code == 404


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"role": "tenant"}, 400),
        ({"role": "tenant", "tenant": "unknown"}, 404),
        ({"role": "admin", "tenant": "default"}, 400),
        ({"role": "agent"}, 400),
        ({"role": "operator", "node": "n1"}, 400),
        ({"role": "king"}, 400),
        ({"role": "read-only", "tenant": "default"}, 201),
        ({"role": "read-only"}, 201),
        ({"role": "agent", "node": "n1"}, 201),
    ],
)
def test_tokens_need_the_tenant_or_node_of_their_role(
    harness: Harness, body: object, status: int
) -> None:
    assert harness.post("/v1/tokens", body).status_code == status


def test_tokens_expire(harness: Harness) -> None:
    token = harness.token("operator", expires_in_seconds=10)
    assert harness.get("/v1/whoami", token=token).json()["expires_at"] is not None
    harness.clock.now += 10
    answer = harness.get("/v1/whoami", token=token)
    assert answer.status_code == 401
    assert "expired" in answer.json()["detail"]


def test_a_key_is_bound_to_one_body(harness: Harness) -> None:
    harness.post("/v1/tenants", {"name": "acme"})

    def limit(instances: int) -> httpx.Response:
        body = {"quota": {"instances": instances}}
        return harness.call("PATCH", "/v1/tenants/acme", body, key="k")

    first = limit(5)
    assert first.json()["quota"]["instances"] == 5
    assert limit(5).json() == first.json()
    assert limit(6).status_code == 422


def test_a_replayed_issue_shows_no_secret(harness: Harness) -> None:
    issued = harness.post("/v1/tokens", {"role": "read-only"}, key="k").json()
    again = harness.post("/v1/tokens", {"role": "read-only"}, key="k")
    assert again.status_code == 409
    assert f"token {issued['id']} was already issued" in again.json()["detail"]
    assert len(harness.get("/v1/tokens").json()["tokens"]) == 2  # the admin's, and this one


def test_an_agent_sees_its_own_node(harness: Harness) -> None:
    harness.node(name="n1")
    harness.node(name="n2")
    token = harness.token("agent", node="n1")
    assert harness.get("/v1/nodes/n1", token=token).status_code == 200
    assert harness.get("/v1/nodes/n2", token=token).status_code == 404
    assert harness.get("/v1/nodes", token=token).status_code == 403
