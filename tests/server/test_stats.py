"""Recent statistics: counted as events happen, kept for a day; a tenant sees only its own."""

from __future__ import annotations

from typing import Any

import pytest
from tests.server.harness import Harness
from tests.tenants import ref

from slicewise.control.ports import StoreError
from slicewise.journal.entries import (
    Allocated,
    AllocationRecord,
    Rejected,
    Row,
    Want,
)
from slicewise.server import recent_stats
from slicewise.server.recent_stats import Counts, RecentStats


def stats(harness: Harness, query: str = "", **options: Any) -> Any:
    answer = harness.get(f"/v1/stats{query}", **options)
    assert answer.status_code == 200, answer.text
    return answer.json()


def update(harness: Harness) -> None:
    harness.run(harness.service.context.recent_stats.update())


def test_statistics_of_an_empty_service(harness: Harness) -> None:
    view = stats(harness)
    (point,) = view["points"]
    assert (point["accepted"], point["rejected"], point["slices"]) == (0, {}, 0)
    assert view["rejections"] == []
    assert view["step"] == 10


def test_decisions_are_counted_as_they_happen(harness: Harness) -> None:
    harness.node(gpus=1)
    stats(harness)  # starts counting
    first = harness.place("4g.40gb")
    harness.place("3g.40gb")
    refused = harness.post("/v1/allocations", {"profile": "1g.10gb"})
    assert refused.status_code == 409
    harness.post("/v1/allocations", {"profile": "2g.20gb", "wait_seconds": 60})
    harness.clock.now += 4
    harness.delete(f"/v1/allocations/{first['id']}")
    harness.wait_for(lambda: not harness.service.context.state.tickets)
    (point,) = stats(harness)["points"]
    assert point["accepted"] == 3
    assert point["queued"] == 1
    assert point["ended"] == 1
    assert point["rejected"] == {"capacity": 1}
    assert (point["waited"], point["mean_wait"], point["longest_wait"]) == (1, 4.0, 4.0)
    assert point["instances"] == 2
    assert point["slices"] - point["free_slices"] == 6
    cluster = harness.get("/v1/cluster").json()
    assert point["fragmentation"] == cluster["fragmentation"]["partial"]
    assert point["placements"] == cluster["models"][0]["placements"]
    (rejection,) = stats(harness)["rejections"]
    assert rejection["detail"] == refused.json()["detail"]
    assert (rejection["tenant"], rejection["wanted"]) == ("default", "1g.10gb")


def test_requests_that_time_out_in_the_queue_count_as_rejected(harness: Harness) -> None:
    harness.node(gpus=1)
    stats(harness)
    harness.place("7g.80gb")
    asked = harness.post("/v1/allocations", {"profile": "1g.10gb", "wait_seconds": 5}).json()
    harness.clock.now += 6
    harness.wait_for(lambda: asked["id"] not in harness.service.context.state.allocations)
    assert stats(harness)["points"][-1]["rejected"] == {"waited too long": 1}


def test_points_over_time(harness: Harness) -> None:
    harness.node(gpus=2)
    stats(harness)
    for _ in range(4):
        harness.place("1g.10gb")
        harness.clock.now += 10
        update(harness)
    points = stats(harness)["points"]
    assert [point["accepted"] for point in points] == [1, 1, 1, 1, 0]
    assert [point["instances"] for point in points] == [1, 2, 3, 4, 4]
    (day,) = stats(harness, "?seconds=86400")["points"]  # points of 4 minutes
    assert day["accepted"] == 4
    assert day["instances"] == 4
    harness.clock.now += 3600
    assert not any(p["accepted"] for p in stats(harness, "?seconds=60")["points"])


def test_a_tenant_gets_its_own_statistics(harness: Harness) -> None:
    harness.node(gpus=1)
    stats(harness)
    mine, other = harness.tenant("acme"), harness.tenant("zen")
    harness.place("4g.40gb", token=mine)
    harness.place("3g.40gb", token=other)
    harness.post("/v1/allocations", {"profile": "1g.10gb"}, token=mine)
    harness.clock.now += 10
    update(harness)
    seen = stats(harness, token=other)
    assert [point["accepted"] for point in seen["points"]] == [1, 0]
    assert all(point["rejected"] == {} for point in seen["points"])
    assert seen["rejections"] == []
    assert seen["points"][-1]["instances"] == 2  # as in /v1/cluster
    own = stats(harness, token=mine)
    assert own["points"][0]["rejected"] == {"capacity": 1}
    assert [one["tenant"] for one in own["rejections"]] == ["acme"]
    assert sum(point["accepted"] for point in stats(harness)["points"]) == 2


def test_earlier_rejections_are_read_from_the_journal(harness: Harness) -> None:
    harness.node(gpus=1)
    harness.post("/v1/allocations", {"profile": "7g.80gb", "count": 2})
    harness.post("/v1/allocations", {"profile": "7g.80gb", "count": 3})
    later = harness.open("second")
    harness.wait_for(lambda: len(later.context.recent_stats.rejections(None, 9)) == 2)
    view = stats(harness, service=later)
    assert [one["count"] for one in view["rejections"]] == [3, 2]
    assert [one["count"] for one in stats(harness, "?rejections=1")["rejections"]] == [3]
    assert view["points"][-1]["rejected"] == {}  # they are not counted again


def test_a_standby_has_the_same_statistics(harness: Harness) -> None:
    harness.node(gpus=1)
    standby = harness.open("second")
    stats(harness, service=standby)
    stats(harness)
    harness.place("1g.10gb")
    harness.wait_for(lambda: standby.runtime.replica.seq == harness.service.runtime.replica.seq)
    leader, follower = stats(harness)["points"], stats(harness, service=standby)["points"]
    assert [p["accepted"] for p in leader] == [p["accepted"] for p in follower] == [1]


def row(number: int, tenant: str, reason: str | None = None) -> Row:
    """A row of an allocation, or of a rejection for this reason."""
    if reason is not None:
        return Row(number, 0, "t", Rejected(ref(tenant), Want("1g.10gb"), 1, reason, "detail"))
    return Row(
        number, 0, "t", Allocated(AllocationRecord(f"a{number}", ref(tenant), Want("1g.10gb")))
    )


def test_samples_and_rejections_are_bounded(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recent_stats, "KEPT_SAMPLES", 5)
    monkeypatch.setattr(recent_stats, "KEPT_REJECTIONS", 3)
    monkeypatch.setattr(recent_stats, "MAX_TALLIES", 6)
    context = harness.service.context
    kept = RecentStats(harness.service.runtime, lambda: context.capacity)
    for number in range(8):
        kept.count(
            [row(3 * number, "x"), row(3 * number + 1, "y"), row(3 * number + 2, "z", "quota")]
        )
        harness.clock.now += 10
        harness.run(kept.update())
    samples = kept.samples(1000)
    assert len(samples) == 6  # including the current interval
    assert [len(sample.by_tenant) for sample in samples] == [0, 0, 0, 3, 3, 0]
    assert sum(sample.counts.accepted for sample in samples) == 10
    assert samples[0].of(ref("x")) == Counts()  # dropped
    assert samples[3].of(ref("x")).accepted == 1
    assert [one.seq for one in kept.rejections(None, 10)] == [23, 20, 17]


def test_rows_that_the_replica_dropped_come_from_the_store(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.node(gpus=1)
    stats(harness)
    harness.place("1g.10gb")
    monkeypatch.setattr(harness.service.runtime.replica, "since", lambda seq, limit: None)
    store = harness.service.runtime.store
    asked: list[int] = []
    real = store.rows

    def rows(after: int, limit: int) -> list[Row]:
        asked.append(after)
        return real(after, limit)

    monkeypatch.setattr(store, "rows", rows)
    assert stats(harness)["points"][-1]["accepted"] == 1
    assert asked


def test_samples_continue_after_the_clock_is_set_back(harness: Harness) -> None:
    context = harness.service.context
    kept = RecentStats(harness.service.runtime, lambda: context.capacity)
    for seconds in (10, -3600, 10):
        harness.clock.now += seconds
        harness.run(kept.update())
    assert len(kept.samples(86400)) == 4  # three, and the current interval


def test_a_failing_store_at_the_start_loses_no_rejections(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.node(gpus=1)
    harness.post("/v1/allocations", {"profile": "7g.80gb", "count": 2})
    context, store = harness.service.context, harness.service.runtime.store

    def fail(**asked: object) -> list[Row]:
        raise StoreError("unavailable")

    kept = RecentStats(harness.service.runtime, lambda: context.capacity)
    with monkeypatch.context() as patch:
        patch.setattr(store, "history", fail)
        harness.run(kept.update())
    harness.run(kept.update())
    assert len(kept.rejections(None, 9)) == 1


def test_a_failing_store_loses_no_counts(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    harness.node(gpus=1)
    stats(harness)
    harness.place("1g.10gb")
    replica, store = harness.service.runtime.replica, harness.service.runtime.store

    def fail(after: int, limit: int) -> list[Row]:
        raise StoreError("unavailable")

    with monkeypatch.context() as patch:
        patch.setattr(replica, "since", lambda seq, limit: None)
        patch.setattr(store, "rows", fail)
        assert stats(harness)["points"][-1]["accepted"] == 0
    assert stats(harness)["points"][-1]["accepted"] == 1


@pytest.mark.parametrize("query", ["seconds=59", "seconds=86401", "rejections=501", "x=1"])
def test_invalid_parameters_are_refused(harness: Harness, query: str) -> None:
    assert harness.get(f"/v1/stats?{query}").status_code == 400
