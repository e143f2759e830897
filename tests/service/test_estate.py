"""Nodes, tenants, quotas and tokens over HTTP."""

from __future__ import annotations

import httpx
import pytest
from tests.service.house import House


def test_a_node_from_beginning_to_end(house: House) -> None:
    made = house.post("/v1/nodes", {"name": "n1", "model": "a100", "gpus": 2, "labels": {"r": "1"}})
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
    assert house.get("/v1/nodes").json() == {"nodes": [made.json()], "next": None}
    identity = house.place("3g.40gb")["id"]
    detail = house.get("/v1/nodes/n1").json()
    assert detail["free_slices"] == 12
    (used,) = [gpu for gpu in detail["devices"] if gpu["instances"]]
    assert used["mask"].count("1") == 4
    assert used["instances"][0]["allocation"] == identity
    assert used["instances"][0]["tenant"] == "default"
    assert house.post("/v1/nodes/n1/cordon").json()["state"] == "cordoned"
    assert house.post("/v1/allocations", {"profile": "1g.10gb"}).status_code == 409
    assert house.post("/v1/nodes/n1/uncordon").json()["state"] == "ready"
    assert house.delete("/v1/nodes/n1").status_code == 409
    assert house.post("/v1/nodes/n1/drain").json()["state"] == "draining"
    house.delete(f"/v1/allocations/{identity}")
    assert house.get("/v1/nodes/n1").json()["state"] == "drained"
    assert house.delete("/v1/nodes/n1").status_code == 200
    assert house.get("/v1/nodes/n1").status_code == 404
    for path in ("cordon", "uncordon", "drain"):
        assert house.post(f"/v1/nodes/n1/{path}").status_code == 404
    assert house.delete("/v1/nodes/n1").status_code == 404


def test_draining_may_evict(busy: House) -> None:
    identity = busy.place()["id"]
    assert busy.post("/v1/nodes/n1/drain", {"evict": True}).json()["state"] == "drained"
    assert busy.get(f"/v1/allocations/{identity}").json()["cause"] == "evicted"
    assert busy.post("/v1/nodes/n1/drain", {"evict": 1}).status_code == 400


def test_nodes_are_registered_once_however_often_it_is_sent(house: House) -> None:
    body = {"name": "n1", "model": "A100-80GB", "gpus": 1}
    first = house.post("/v1/nodes", body, key="k")
    again = house.post("/v1/nodes", body, key="k")
    assert (first.status_code, again.status_code) == (201, 201)
    assert again.headers["idempotency-replayed"] == "true"
    assert house.post("/v1/nodes", body).status_code == 409


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
def test_nodes_must_make_sense(house: House, body: object, field: str | None) -> None:
    answer = house.post("/v1/nodes", body)
    assert answer.status_code == 400
    assert answer.json().get("field") == field


def test_nodes_by_name_in_pages(house: House) -> None:
    for name in ("b", "a", "c"):
        house.node(name=name, gpus=1)
    page = house.get("/v1/nodes?limit=2").json()
    assert [node["name"] for node in page["nodes"]] == ["a", "b"]
    page = house.get(f"/v1/nodes?limit=2&cursor={page['next']}").json()
    assert [node["name"] for node in page["nodes"]] == ["c"]
    assert page["next"] is None


def test_a_tenant_from_beginning_to_end(busy: House) -> None:
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
    answer = busy.post("/v1/allocations", {"profile": "1g.10gb", "priority": 1}, token=token)
    assert (answer.status_code, answer.json()["reason"]) == (409, "quota")
    assert busy.delete("/v1/tenants/acme").status_code == 409
    busy.delete(f"/v1/allocations/{identity}")
    assert busy.delete("/v1/tenants/acme").status_code == 200
    assert busy.get("/v1/whoami", token=token).status_code == 401
    assert busy.get("/v1/tenants/acme").status_code == 404
    assert busy.call("PATCH", "/v1/tenants/acme", {"quota": {}}).status_code == 404
    assert busy.delete("/v1/tenants/acme").status_code == 404


def test_tenants_by_name_in_pages(house: House) -> None:
    token = house.tenant("acme")
    listed = house.get("/v1/tenants").json()["tenants"]
    assert [tenant["name"] for tenant in listed] == ["acme", "default"]
    page = house.get("/v1/tenants?limit=1").json()
    assert page["next"] is not None
    listed = house.get("/v1/tenants", token=token).json()["tenants"]
    assert [tenant["name"] for tenant in listed] == ["acme"]
    assert house.get("/v1/tenants/acme", token=token).status_code == 200
    assert house.get("/v1/tenants/default", token=token).status_code == 404


def test_a_token_from_beginning_to_end(house: House) -> None:
    made = house.post("/v1/tokens", {"role": "operator", "note": "on call"})
    assert made.status_code == 201
    body = made.json()
    secret = body.pop("token")
    assert secret.startswith("sw_")
    assert body["note"] == "on call"
    who = house.get("/v1/whoami", token=secret).json()
    assert (who["id"], who["role"], who["tenant"]) == (body["id"], "operator", None)
    listed = house.get("/v1/tokens").json()["tokens"]
    assert body in listed
    assert secret not in house.get("/v1/tokens").text
    assert "digest" not in house.get("/v1/tokens").text
    assert house.delete(f"/v1/tokens/{body['id']}").status_code == 200
    assert house.get("/v1/whoami", token=secret).status_code == 401
    assert house.delete(f"/v1/tokens/{body['id']}").status_code == 404


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"role": "tenant"}, 400),
        ({"role": "tenant", "tenant": "nobody"}, 404),
        ({"role": "admin", "tenant": "default"}, 400),
        ({"role": "agent"}, 400),
        ({"role": "operator", "node": "n1"}, 400),
        ({"role": "king"}, 400),
        ({"role": "read-only", "tenant": "default"}, 201),
        ({"role": "read-only"}, 201),
        ({"role": "agent", "node": "n1"}, 201),
    ],
)
def test_tokens_are_for_somebody(house: House, body: object, status: int) -> None:
    assert house.post("/v1/tokens", body).status_code == status


def test_tokens_expire(house: House) -> None:
    token = house.token("operator", expires_in_seconds=10)
    assert house.get("/v1/whoami", token=token).json()["expires_at"] is not None
    house.clock.now += 10
    answer = house.get("/v1/whoami", token=token)
    assert answer.status_code == 401
    assert "expired" in answer.json()["detail"]


def test_a_key_stands_for_one_body_wherever_it_is_sent(house: House) -> None:
    house.post("/v1/tenants", {"name": "acme"})

    def limit(instances: int) -> httpx.Response:
        body = {"quota": {"instances": instances}}
        return house.call("PATCH", "/v1/tenants/acme", body, key="k")

    first = limit(5)
    assert first.json()["quota"]["instances"] == 5
    assert limit(5).json() == first.json()
    assert limit(6).status_code == 422


def test_a_secret_is_not_made_up_for_a_token_that_was_issued_before(house: House) -> None:
    issued = house.post("/v1/tokens", {"role": "read-only"}, key="k").json()
    again = house.post("/v1/tokens", {"role": "read-only"}, key="k")
    assert again.status_code == 409
    assert f"token {issued['id']} was issued" in again.json()["detail"]
    assert len(house.get("/v1/tokens").json()["tokens"]) == 2  # the admin's, and this one


def test_an_agent_sees_its_own_node(house: House) -> None:
    house.node(name="n1")
    house.node(name="n2")
    token = house.token("agent", node="n1")
    assert house.get("/v1/nodes/n1", token=token).status_code == 200
    assert house.get("/v1/nodes/n2", token=token).status_code == 404
    assert house.get("/v1/nodes", token=token).status_code == 403
