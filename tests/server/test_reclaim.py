"""Reclaim through the API: the notice, the end, and the allocation in its place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.server.harness import A100, Harness


@pytest.fixture
def claiming(tmp_path: Path) -> Iterator[Harness]:
    """A service that reclaims, with a tenant that has a guarantee, and one GPU."""
    harness = Harness(tmp_path, {"reclaim": "guarantee", "reclaim_grace": 60.0})
    harness.post("/v1/nodes", A100 | {"gpus": 1})
    for name, guarantee in (("acme", 8), ("beta", 0)):
        made = harness.post("/v1/tenants", {"name": name, "quota": {"guarantee": guarantee}})
        assert made.status_code == 201, made.text
    yield harness
    harness.close()


def test_a_reclaimed_allocation_and_its_successor(claiming: Harness) -> None:
    def create(tenant: str, **more: object) -> dict[str, object]:
        body = {"profile": "7g.80gb", "tenant": tenant, **more}
        answer = claiming.post("/v1/allocations", body)
        assert answer.status_code in (201, 202), answer.text
        found = answer.json()
        assert isinstance(found, dict)
        return found

    def show(identity: object) -> dict[str, object]:
        found = claiming.get(f"/v1/allocations/{identity}").json()
        assert isinstance(found, dict)
        return found

    old = create("beta", preemptible=True, labels={"job": "x"})
    claiming.clock.now += 600
    mine = create("acme", wait_seconds=10_000)
    assert "reclaimed_at" not in show(old["id"])
    wait(claiming, 60)
    assert "reclaimed_at" in show(old["id"])
    assert "slicewise_reclaim_notices_total 1.0" in claiming.get("/metrics").text
    wait(claiming, 30)
    assert show(mine["id"])["state"] == "placed"
    gone = show(old["id"])
    assert (gone["state"], gone["cause"]) == ("released", "reclaimed")
    (waits,) = claiming.get("/v1/queue").json()["allocations"]
    assert str(waits["id"]) in str(gone["detail"])
    assert (waits["replaces"], waits["reclaims"], waits["labels"]) == (old["id"], 1, {"job": "x"})
    assert (waits["requested_at"], waits["waiting"]["deadline"]) == (old["requested_at"], None)
    assert waits["waiting"]["reason"] == "held back"
    behind = create("beta", wait_seconds=10_000)
    page = claiming.get("/v1/queue?limit=1").json()
    assert [one["id"] for one in page["allocations"]] == [waits["id"]]
    page = claiming.get(f"/v1/queue?limit=1&cursor={page['next']}").json()
    assert ([one["id"] for one in page["allocations"]], page["next"]) == ([behind["id"]], None)
    events = claiming.get("/v1/audit?kind=reclaiming").json()["events"]
    assert [(event["tenant"], event["subject"]) for event in events] == [("beta", old["id"])]
    assert "acme" not in str(events)
    metrics = claiming.get("/metrics").text
    assert 'slicewise_allocations_ended_total{cause="reclaimed"} 1.0' in metrics


def wait(harness: Harness, seconds: float) -> None:
    """Let time pass, and wake the commit loop, which sleeps by another clock."""
    harness.clock.now += seconds
    assert harness.post("/v1/nodes/n1/uncordon").status_code == 200
