"""A tenant's name used again: the second one of that name sees nothing of the first."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.service.house import House

from slicewise.control.actors import internal
from slicewise.control.commands import RemoveTenant, SetTenant
from slicewise.control.entries import QuotaRecord
from slicewise.control.image import image_of
from slicewise.control.memory import MemoryStore
from slicewise.control.writer import load
from slicewise.store import backup, open_store, restore, verify


def _again(house: House) -> tuple[str, str, str]:
    """Two lives of acme; an id of the first, one of the second, and the second one's token."""
    token = house.tenant("acme")
    first = house.place(token=token, key="k")["id"]
    assert house.post("/v1/allocations", {"profile": "7g.80gb", "count": 9}, token=token)
    assert house.delete(f"/v1/allocations/{first}", token=token, key="d").status_code == 200
    assert house.get("/v1/lately", token=token).json()["points"][-1]["accepted"] == 1
    assert house.delete("/v1/tenants/acme").status_code == 200
    token = house.tenant("acme")
    answer = house.post("/v1/allocations", {"profile": "1g.10gb"}, token=token, key="k")
    assert "idempotency-replayed" not in answer.headers
    second = answer.json()["id"]
    assert second != first
    return first, second, token


def _events(house: House, token: str, count: int) -> list[dict[str, Any]]:
    async def read() -> list[dict[str, Any]]:
        async with house.stream("/v1/events?after=0", token=token) as reader:
            return [await reader.event() for _ in range(count)]

    return house.run(read())


def _sees_its_own(house: House, first: str, second: str, token: str) -> None:
    assert house.get(f"/v1/allocations/{first}", token=token).status_code == 404
    assert house.delete(f"/v1/allocations/{first}", token=token).status_code == 404
    assert house.get(f"/v1/allocations/{second}", token=token).status_code == 200
    assert house.get(f"/v1/allocations/{first}").json()["tenant"] == "acme"  # to an admin
    ended = "/v1/allocations?state=released"
    nothing = house.get(ended, token=token).json()
    assert (nothing["allocations"], nothing["next"]) == ([], None)
    assert house.get(f"{ended}&tenant=acme").json()["allocations"] == []
    assert [one["id"] for one in house.get(ended).json()["allocations"]] == [first]
    kinds = ["tenant-set", "token-issued", "allocated"]
    assert [event["event"] for event in _events(house, token, 3)] == kinds
    audit = house.get("/v1/audit?tenant=acme").json()
    assert [event["kind"] for event in reversed(audit["events"])] == kinds
    assert audit["next"] is None
    lately = house.get("/v1/lately", token=token).json()
    assert lately["rejections"] == []
    again = house.post("/v1/allocations", {"profile": "1g.10gb"}, token=token, key="k")
    assert (again.json()["id"], again.headers["idempotency-replayed"]) == (second, "true")


def test_the_second_of_a_name_sees_its_own(busy: House) -> None:
    first, second, token = _again(busy)
    _sees_its_own(busy, first, second, token)
    points = busy.get("/v1/lately", token=token).json()["points"]
    assert sum(point["accepted"] for point in points) == 1


@pytest.mark.parametrize("kept", ["nothing", "an image", "an image of an older version"])
def test_a_restart_changes_nothing(busy: House, kept: str) -> None:
    first, second, token = _again(busy)
    store = busy.store
    assert isinstance(store, MemoryStore)
    image = image_of(busy.service.plant.state)
    busy.run(busy.service.stop())
    store.images.clear()
    if kept == "an image":
        store.images.append(image)
    elif kept != "nothing":
        store.images.append(msgspec.structs.replace(image, since=None))
    busy.services.clear()
    busy.service = busy.open("second")
    _sees_its_own(busy, first, second, token)
    assert image_of(load(store, busy.service.plant._fresh_state())).since == (
        image_of(busy.service.plant.state).since
    )


def test_a_backup_that_is_restored_changes_nothing(tmp_path: Path) -> None:
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
    store = open_store(tmp_path / "old")
    house = House(tmp_path / "one", store=store)
    try:
        house.node()
        first, second, token = _again(house)
    finally:
        house.close()
    assert verify(store).findings == []
    backup(store, tmp_path / "backup")
    store.close()
    store = open_store(tmp_path / "new")
    restore(tmp_path / "backup", store)
    house = House(tmp_path / "two", store=store)
    try:
        _sees_its_own(house, first, second, token)
    finally:
        house.close()
        store.close()


def test_keys_belong_to_a_life(busy: House) -> None:
    """Whether or not the journal still tells of another tenant of that name."""
    store = busy.store
    assert isinstance(store, MemoryStore)
    busy.place(token=busy.tenant("acme"), key="k")
    since = busy.service.plant.state.tenants["acme"].since
    assert list(store.kept_answers)[-1] == (f"acme:acme:{since}", "k")


def test_a_request_that_took_too_long_to_say_is_nobodys(busy: House) -> None:
    """Its token was one when it began, and its tenant is another by the time it is complete."""
    token = busy.tenant("acme")

    async def slowly() -> AsyncIterator[bytes]:
        yield b'{"profile":'
        for command in (RemoveTenant("acme"), SetTenant("acme", QuotaRecord(), new=True)):
            assert (await busy.service.plant.ask(command, internal("t"))).answer.status < 300
        yield b'"1g.10gb"}'

    answer = busy.post("/v1/allocations", content=slowly(), token=token)
    assert answer.status_code == 401
    assert busy.get("/v1/allocations").json()["total"] == 0


def test_all_is_found_by_a_name_that_nobody_has_now(busy: House) -> None:
    first, second, token = _again(busy)
    assert busy.delete(f"/v1/allocations/{second}", token=token).status_code == 200
    assert busy.delete("/v1/tenants/acme").status_code == 200
    found = busy.get("/v1/allocations?state=released&tenant=acme").json()["allocations"]
    assert [one["id"] for one in found] == [second, first]
