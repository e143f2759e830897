"""What has happened lately: counted as it happens, kept for a day, a tenant told its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.service.house import House

from slicewise.control.entries import (
    Allocated,
    AllocationRecord,
    Rejected,
    Row,
    Want,
)
from slicewise.control.ports import StoreError
from slicewise.service import history
from slicewise.service.history import History, Tally


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    made = House(tmp_path)
    yield made
    made.close()


def lately(house: House, query: str = "", **options: Any) -> Any:
    answer = house.get(f"/v1/lately{query}", **options)
    assert answer.status_code == 200, answer.text
    return answer.json()


def look(house: House) -> None:
    house.run(house.service.site.history.look())


def test_nothing_has_happened_yet(house: House) -> None:
    view = lately(house)
    (point,) = view["points"]
    assert (point["accepted"], point["rejected"], point["slices"]) == (0, {}, 0)
    assert view["rejections"] == []
    assert view["step"] == 10


def test_decisions_are_counted_as_they_happen(house: House) -> None:
    house.node(gpus=1)
    lately(house)  # from here on
    first = house.place("4g.40gb")
    house.place("3g.40gb")
    refused = house.post("/v1/allocations", {"profile": "1g.10gb"})
    assert refused.status_code == 409
    house.post("/v1/allocations", {"profile": "2g.20gb", "wait_seconds": 60})
    house.clock.now += 4
    house.delete(f"/v1/allocations/{first['id']}")
    house.wait_for(lambda: not house.service.site.state.tickets)
    (point,) = lately(house)["points"]
    assert point["accepted"] == 3
    assert point["queued"] == 1
    assert point["ended"] == 1
    assert point["rejected"] == {"capacity": 1}
    assert (point["waited"], point["mean_wait"], point["longest_wait"]) == (1, 4.0, 4.0)
    assert point["instances"] == 2
    assert point["slices"] - point["free_slices"] == 6
    cluster = house.get("/v1/cluster").json()
    assert point["fragmentation"] == cluster["fragmentation"]["partial"]
    assert point["placements"] == cluster["models"][0]["placements"]
    (rejection,) = lately(house)["rejections"]
    assert rejection["detail"] == refused.json()["detail"]
    assert (rejection["tenant"], rejection["wanted"]) == ("default", "1g.10gb")


def test_those_who_wait_in_vain_are_rejected(house: House) -> None:
    house.node(gpus=1)
    lately(house)
    house.place("7g.80gb")
    asked = house.post("/v1/allocations", {"profile": "1g.10gb", "wait_seconds": 5}).json()
    house.clock.now += 6
    house.wait_for(lambda: asked["id"] not in house.service.site.state.allocations)
    assert lately(house)["points"][-1]["rejected"] == {"waited too long": 1}


def test_points_over_time(house: House) -> None:
    house.node(gpus=2)
    lately(house)
    for _ in range(4):
        house.place("1g.10gb")
        house.clock.now += 10
        look(house)
    points = lately(house)["points"]
    assert [point["accepted"] for point in points] == [1, 1, 1, 1, 0]
    assert [point["instances"] for point in points] == [1, 2, 3, 4, 4]
    (day,) = lately(house, "?seconds=86400")["points"]  # 4 minutes a point
    assert day["accepted"] == 4
    assert day["instances"] == 4
    house.clock.now += 3600
    assert not any(p["accepted"] for p in lately(house, "?seconds=60")["points"])


def test_a_tenant_is_told_its_own(house: House) -> None:
    house.node(gpus=1)
    lately(house)
    mine, other = house.tenant("acme"), house.tenant("zen")
    house.place("4g.40gb", token=mine)
    house.place("3g.40gb", token=other)
    house.post("/v1/allocations", {"profile": "1g.10gb"}, token=mine)
    house.clock.now += 10
    look(house)
    seen = lately(house, token=other)
    assert [point["accepted"] for point in seen["points"]] == [1, 0]
    assert all(point["rejected"] == {} for point in seen["points"])
    assert seen["rejections"] == []
    assert seen["points"][-1]["instances"] == 2  # as in /v1/cluster
    own = lately(house, token=mine)
    assert own["points"][0]["rejected"] == {"capacity": 1}
    assert [one["tenant"] for one in own["rejections"]] == ["acme"]
    assert sum(point["accepted"] for point in lately(house)["points"]) == 2


def test_rejections_are_remembered_by_the_journal(house: House) -> None:
    house.node(gpus=1)
    house.post("/v1/allocations", {"profile": "7g.80gb", "count": 2})
    house.post("/v1/allocations", {"profile": "7g.80gb", "count": 3})
    later = house.open("second")
    house.wait_for(lambda: len(later.site.history.rejections(None, 9)) == 2)
    view = lately(house, service=later)
    assert [one["count"] for one in view["rejections"]] == [3, 2]
    assert [one["count"] for one in lately(house, "?rejections=1")["rejections"]] == [3]
    assert view["points"][-1]["rejected"] == {}  # but not counted as new


def test_a_standby_counts_the_same(house: House) -> None:
    house.node(gpus=1)
    standby = house.open("second")
    lately(house, service=standby)
    lately(house)
    house.place("1g.10gb")
    house.wait_for(lambda: standby.plant.replica.seq == house.service.plant.replica.seq)
    leader, follower = lately(house)["points"], lately(house, service=standby)["points"]
    assert [p["accepted"] for p in leader] == [p["accepted"] for p in follower] == [1]


def row(number: int, tenant: str, reason: str | None = None) -> Row:
    """Somebody got something, or was refused."""
    if reason is not None:
        return Row(number, 0, "t", Rejected(tenant, Want("1g.10gb"), 1, reason, "a sentence"))
    return Row(number, 0, "t", Allocated(AllocationRecord(f"a{number}", tenant, Want("1g.10gb"))))


def test_only_so_much_is_kept(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "KEPT_SAMPLES", 5)
    monkeypatch.setattr(history, "KEPT_REJECTIONS", 3)
    monkeypatch.setattr(history, "MAX_TALLIES", 6)
    site = house.service.site
    kept = History(house.service.plant, lambda: site.capacity)
    for number in range(8):
        kept.count(
            [row(3 * number, "x"), row(3 * number + 1, "y"), row(3 * number + 2, "z", "quota")]
        )
        house.clock.now += 10
        house.run(kept.look())
    samples = kept.samples(1000)
    assert len(samples) == 6  # and the one that is not over
    assert [len(sample.by_tenant) for sample in samples] == [0, 0, 0, 3, 3, 0]
    assert sum(sample.tally.accepted for sample in samples) == 10
    assert samples[0].of("x") == Tally()  # given up
    assert samples[3].of("x").accepted == 1
    assert [one.seq for one in kept.rejections(None, 10)] == [23, 20, 17]


def test_rows_that_are_not_at_hand_come_from_the_store(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.node(gpus=1)
    lately(house)
    house.place("1g.10gb")
    monkeypatch.setattr(house.service.plant.replica, "since", lambda seq, limit: None)
    store = house.service.plant.store
    asked: list[int] = []
    real = store.rows

    def rows(after: int, limit: int) -> list[Row]:
        asked.append(after)
        return real(after, limit)

    monkeypatch.setattr(store, "rows", rows)
    assert lately(house)["points"][-1]["accepted"] == 1
    assert asked


def test_a_clock_that_is_set_back_does_not_stop_the_points(house: House) -> None:
    site = house.service.site
    kept = History(house.service.plant, lambda: site.capacity)
    for seconds in (10, -3600, 10):
        house.clock.now += seconds
        house.run(kept.look())
    assert len(kept.samples(86400)) == 4  # three, and the one that is not over


def test_a_store_that_fails_at_the_start_loses_no_rejections(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.node(gpus=1)
    house.post("/v1/allocations", {"profile": "7g.80gb", "count": 2})
    site, store = house.service.site, house.service.plant.store

    def fail(**asked: object) -> list[Row]:
        raise StoreError("gone fishing")

    kept = History(house.service.plant, lambda: site.capacity)
    with monkeypatch.context() as away:
        away.setattr(store, "history", fail)
        house.run(kept.look())
    house.run(kept.look())
    assert len(kept.rejections(None, 9)) == 1


def test_a_store_that_fails_loses_nothing(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    house.node(gpus=1)
    lately(house)
    house.place("1g.10gb")
    replica, store = house.service.plant.replica, house.service.plant.store

    def fail(after: int, limit: int) -> list[Row]:
        raise StoreError("gone")

    with monkeypatch.context() as patch:
        patch.setattr(replica, "since", lambda seq, limit: None)
        patch.setattr(store, "rows", fail)
        assert lately(house)["points"][-1]["accepted"] == 0
    assert lately(house)["points"][-1]["accepted"] == 1


@pytest.mark.parametrize("query", ["seconds=59", "seconds=86401", "rejections=501", "x=1"])
def test_nonsense_is_refused(house: House, query: str) -> None:
    assert house.get(f"/v1/lately?{query}").status_code == 400
