"""A tenant's name is used again: the new tenant sees nothing of the removed one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.server.harness import Harness

from slicewise.control.actors import internal
from slicewise.control.commands import RemoveTenant, SetTenant
from slicewise.control.snapshot import snapshot_of
from slicewise.journal.entries import QuotaRecord
from slicewise.store import backup, open_store, restore, verify
from slicewise.store.memory import MemoryStore


class Reused(NamedTuple):
    """Two tenants named acme, of which the first was removed."""

    old_id: str
    """The id of the removed tenant."""
    old_token: str
    old: str
    """An allocation of the removed tenant."""
    new_id: str
    token: str
    new: str


def _tenant_id(harness: Harness) -> str:
    return str(harness.get("/v1/tenants/acme").json()["id"])


def _reuse(harness: Harness) -> Reused:
    old_token = harness.tenant("acme")
    old_id = _tenant_id(harness)
    old = harness.place(token=old_token, key="k")["id"]
    full = harness.post("/v1/allocations", {"profile": "7g.80gb", "count": 9}, token=old_token)
    assert full.status_code == 409
    assert harness.delete(f"/v1/allocations/{old}", token=old_token, key="d").status_code == 200
    assert harness.get("/v1/stats", token=old_token).json()["points"][-1]["accepted"] == 1
    assert harness.delete("/v1/tenants/acme").status_code == 200
    token = harness.tenant("acme")
    answer = harness.post("/v1/allocations", {"profile": "1g.10gb"}, token=token, key="k")
    assert "idempotency-replayed" not in answer.headers
    return Reused(old_id, old_token, old, _tenant_id(harness), token, answer.json()["id"])


def _events(harness: Harness, token: str, count: int) -> list[dict[str, Any]]:
    async def read() -> list[dict[str, Any]]:
        async with harness.stream("/v1/events?after=0", token=token) as reader:
            return [await reader.event() for _ in range(count)]

    return harness.run(read())


def _audit(harness: Harness, query: str) -> list[dict[str, Any]]:
    page = harness.get(f"/v1/audit?{query}").json()
    assert page["next"] is None
    return list(reversed(page["events"]))


def _check(harness: Harness, reused: Reused) -> None:
    """The new tenant sees its own objects only, and an admin can tell the two tenants apart."""
    token, old, new = reused.token, reused.old, reused.new
    assert reused.old_id != reused.new_id
    assert old != new
    assert harness.get("/v1/allocations", token=reused.old_token).status_code == 401
    assert harness.get(f"/v1/allocations/{old}", token=token).status_code == 404
    assert harness.delete(f"/v1/allocations/{old}", token=token).status_code == 404
    assert harness.get(f"/v1/allocations/{new}", token=token).status_code == 200

    ended = "/v1/allocations?state=released"
    nothing = harness.get(ended, token=token).json()
    assert (nothing["allocations"], nothing["next"]) == ([], None)
    assert harness.get(f"{ended}&tenant={reused.old_id}", token=token).json()["allocations"] == []
    assert harness.get(f"{ended}&tenant=acme").json()["allocations"] == []

    kinds = ["tenant-set", "token-issued", "allocated"]
    events = _events(harness, token, 3)
    assert [event["event"] for event in events] == kinds
    assert {event["data"]["tenant_id"] for event in events} == {reused.new_id}
    assert [event["kind"] for event in _audit(harness, "tenant=acme")] == kinds
    assert harness.get("/v1/stats", token=token).json()["rejections"] == []

    again = harness.post("/v1/allocations", {"profile": "1g.10gb"}, token=token, key="k")
    assert (again.json()["id"], again.headers["idempotency-replayed"]) == (new, "true")

    # The history of the removed tenant: its id finds it, and it is shown under its name.
    assert harness.get(f"/v1/allocations/{old}").json()["tenant"] == "acme"
    for query in (ended, f"{ended}&tenant={reused.old_id}"):
        found = harness.get(query).json()["allocations"]
        assert [(one["id"], one["tenant"]) for one in found] == [(old, "acme")]
    history = _audit(harness, f"tenant={reused.old_id}")
    assert [event["kind"] for event in history] == [
        "tenant-set", "token-issued", "allocated", "rejected", "ended", "tenant-removed",
    ]  # fmt: skip
    assert {(event["tenant"], event["tenant_id"]) for event in history} == {("acme", reused.old_id)}
    (removed,) = _audit(harness, "kind=tenant-removed&subject=acme")
    assert removed["entry"]["tenant"] == {"id": reused.old_id, "name": "acme"}


def test_a_new_tenant_sees_nothing_of_a_removed_one_of_its_name(busy: Harness) -> None:
    reused = _reuse(busy)
    _check(busy, reused)
    points = busy.get("/v1/stats", token=reused.token).json()["points"]
    assert sum(point["accepted"] for point in points) == 1


@pytest.mark.parametrize("snapshot", [False, True])
def test_a_restart_changes_nothing(busy: Harness, snapshot: bool) -> None:
    reused = _reuse(busy)
    store = busy.store
    assert isinstance(store, MemoryStore)
    kept = [snapshot_of(busy.service.runtime.state)] if snapshot else []
    busy.run(busy.service.stop())
    store.snapshots[:] = kept
    busy.services.clear()
    busy.service = busy.open("second")
    _check(busy, reused)


def test_a_restored_backup_changes_nothing(tmp_path: Path) -> None:
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
    store = open_store(tmp_path / "old")
    harness = Harness(tmp_path / "one", store=store)
    try:
        harness.node()
        reused = _reuse(harness)
    finally:
        harness.close()
    assert verify(store).findings == []
    backup(store, tmp_path / "backup")
    store.close()
    store = open_store(tmp_path / "new")
    restore(tmp_path / "backup", store)
    harness = Harness(tmp_path / "two", store=store)
    try:
        _check(harness, reused)
    finally:
        harness.close()
        store.close()


def test_idempotency_keys_belong_to_the_tenant_id(busy: Harness) -> None:
    """Keys of staff that acts for a tenant are apart from the tenant's own."""
    store = busy.store
    assert isinstance(store, MemoryStore)
    busy.place(token=busy.tenant("acme"), key="k")
    assert list(store.kept_answers)[-1] == (_tenant_id(busy), "k")
    busy.place(tenant="acme", key="k")
    assert list(store.kept_answers)[-1] == (f"staff {_tenant_id(busy)}", "k")


def test_a_key_of_staff_is_not_replayed_for_the_next_tenant_of_a_name(busy: Harness) -> None:
    busy.tenant("acme")
    old = busy.place(tenant="acme", key="k")["id"]
    assert busy.delete(f"/v1/allocations/{old}").status_code == 200
    assert busy.delete("/v1/tenants/acme").status_code == 200
    busy.tenant("acme")
    assert busy.place(tenant="acme", key="k")["id"] != old


def test_a_request_whose_tenant_is_replaced_while_it_is_sent_is_refused(busy: Harness) -> None:
    token = busy.tenant("acme")

    async def slowly() -> AsyncIterator[bytes]:
        yield b'{"profile":'
        for command in (RemoveTenant("acme"), SetTenant("acme", QuotaRecord(), new=True)):
            assert (await busy.service.runtime.submit(command, internal("t"))).answer.status < 300
        yield b'"1g.10gb"}'

    answer = busy.post("/v1/allocations", content=slowly(), token=token)
    assert answer.status_code == 401
    assert busy.get("/v1/allocations").json()["total"] == 0


def test_the_history_of_removed_tenants_is_found_by_id(busy: Harness) -> None:
    reused = _reuse(busy)
    assert busy.delete(f"/v1/allocations/{reused.new}", token=reused.token).status_code == 200
    assert busy.delete("/v1/tenants/acme").status_code == 200
    for identity, allocation in ((reused.old_id, reused.old), (reused.new_id, reused.new)):
        query = f"/v1/allocations?state=released&tenant={identity}"
        assert [one["id"] for one in busy.get(query).json()["allocations"]] == [allocation]
