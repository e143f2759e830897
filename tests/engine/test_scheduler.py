"""The scheduler: events, rejections, and policies that misbehave."""

from __future__ import annotations

import pytest
from tests.engine.last_gpu import LastGpu

from slicewise import (
    AdaptivePolicy,
    Cluster,
    Geometry,
    Instance,
    Need,
    Placed,
    PlacementError,
    Policy,
    PolicyError,
    Reason,
    Rejection,
    Released,
    Request,
    ScanPolicy,
    Scheduler,
    SlicewiseError,
    Spot,
    TablePolicy,
)
from slicewise.engine import scheduler as scheduler_module
from slicewise.engine.moves import Move, Moved
from slicewise.engine.reasons import Reasons
from slicewise.policies.fits import BestFit, WorstFit
from slicewise.policies.mfi import Mfi
from slicewise.policies.ranking import Ranking


class Stubborn(ScanPolicy):
    """A policy that always returns the same spot, legal or not."""

    name = "stubborn"
    summary = "Always the same."

    def __init__(self, spot: Spot) -> None:
        self.spot = spot

    def choose(self, cluster: Cluster, request: Request) -> Spot | None:
        return self.spot


def test_events_are_published_after_the_change(a100: Geometry) -> None:
    cluster = Cluster.of(a100, 1)
    scheduler = Scheduler(cluster)
    seen: list[object] = []
    scheduler.subscribe(seen.append)
    instance = scheduler.submit("7g.80gb")
    assert isinstance(instance, Instance)
    rejection = scheduler.submit("1g.10gb")
    scheduler.release(instance)
    assert seen == [Placed(instance), rejection, Released(instance)]


def test_a_scan_policy_works_and_is_marked_as_such(a100: Geometry) -> None:
    cluster = Cluster.of(a100, 3)
    scheduler = Scheduler(cluster, LastGpu())
    assert scheduler.scans
    assert not Scheduler(cluster, "mfi").scans
    outcomes = [scheduler.submit("4g.40gb") for _ in range(4)]
    assert [o.gpu for o in outcomes if isinstance(o, Instance)] == [2, 1, 0]
    assert isinstance(outcomes[3], Rejection)
    assert outcomes[3].reason is Reason.FRAGMENTED
    unknown = scheduler.submit("5g.50gb")
    assert isinstance(unknown, Rejection)
    assert unknown.reason is Reason.UNKNOWN_PROFILE


class SpreadThenPack(AdaptivePolicy):
    """Spread instances while most of the cluster is free, then pack them."""

    name = "spread-then-pack"
    summary = "Worst-fit up to half full, best-fit above."

    def __init__(self) -> None:
        self.spread, self.pack = WorstFit(), BestFit()

    def table(self, cluster: Cluster) -> TablePolicy:
        return self.spread if cluster.free_slices * 2 > cluster.slices else self.pack


def test_an_adaptive_policy_sees_cluster_totals(a100: Geometry) -> None:
    scheduler = Scheduler(Cluster.of(a100, 2), SpreadThenPack())
    assert not scheduler.scans
    placed = [scheduler.submit("3g.40gb") for _ in range(2)] + [scheduler.submit("1g.10gb")]
    assert [p.gpu for p in placed if isinstance(p, Instance)] == [0, 1, 0]
    more = [scheduler.submit("2g.20gb"), scheduler.submit("1g.10gb")]
    assert [p.gpu for p in more if isinstance(p, Instance)] == [0, 0], "it packs now"


def test_illegal_choices_of_a_policy_are_refused(a100: Geometry) -> None:
    cluster = Cluster.of(a100, 2)
    cluster.place(0, "1g.10gb", 0)
    four = a100.placement("4g.40gb", 0)
    assert four is not None
    with pytest.raises(
        PolicyError, match=r"made an illegal choice: 4g\.40gb at slice 0 of GPU 0 overlaps"
    ):
        Scheduler(cluster, Stubborn(Spot(0, four))).submit("4g.40gb")
    with pytest.raises(PolicyError, match="not schedulable"):
        Scheduler(cluster, Stubborn(Spot(7, four))).submit("4g.40gb")
    alien = Geometry("alien", 1, 1, (a100.profiles[0].__class__("1g", 1, 1, 1, (0,)),))
    with pytest.raises(PolicyError, match="not a placement of GPU 1's model"):
        Scheduler(cluster, Stubborn(Spot(1, alien.placements[0]))).submit("4g.40gb")
    assert cluster.instance_count == 1

    class Neither(Policy):
        name = "neither"
        summary = "Nothing."

    with pytest.raises(PolicyError, match="neither a table, an adaptive nor a scan policy"):
        Scheduler(cluster, Neither())


def test_text_of_rejections(a100: Geometry) -> None:
    scheduler = Scheduler(Cluster.of(a100, 1), "first-fit-strict")
    scheduler.submit("3g.40gb")
    assert str(scheduler.submit("4g.40gb")) == (
        "no window for 4g.40gb is open on GPU 0, which the policy picked for its 4 free slices"
    )
    assert str(scheduler.submit("7g.80gb")) == (
        "no GPU has enough free for 7g.80gb (4 slices are free in all)"
    )
    scheduler.submit("2g.20gb")
    scheduler.submit("1g.10gb")
    assert str(scheduler.submit("7g.80gb")) == (
        "no GPU has enough free for 7g.80gb (1 slice is free in all)"
    )
    assert str(Scheduler(Cluster(), "mfi").submit("1g.10gb")) == (
        "no GPU model of this cluster offers 1g.10gb (models here: none)"
    )


def test_a_model_added_later_is_used(a100: Geometry) -> None:
    from slicewise import load_geometry

    cluster = Cluster.of(a100, 1)
    scheduler = Scheduler(cluster)
    assert isinstance(scheduler.submit("4g.24gb"), Rejection)
    cluster.add_node("late", load_geometry("A30"), 1)
    found = scheduler.submit("4g.24gb")
    assert isinstance(found, Instance)
    assert found.gpu == 1


def test_a_need_takes_the_least_wasteful_profile_across_models(a100: Geometry) -> None:
    from slicewise import load_geometry

    cluster = Cluster.of(a100, 1)
    cluster.add_node("small", load_geometry("A30"), 1)
    scheduler = Scheduler(cluster)
    request = Request(Need(2, 12))
    chosen = [scheduler.submit(request) for _ in range(3)]
    assert [c.profile for c in chosen if isinstance(c, Instance)] == [
        "2g.12gb",
        "2g.12gb",
        "2g.20gb",
    ]


def test_caches_are_bounded(a100: Geometry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "_REMEMBERED_NAMES", 2)
    scheduler = Scheduler(Cluster.of(a100, 1))
    for number in range(5):
        scheduler.submit(f"x{number}")
    assert list(scheduler._named) == ["x0", "x1"]
    cluster = Cluster.of(a100, 1)
    ranking, reasons = Ranking(Mfi(), cluster, keep=2), Reasons(cluster, keep=2)
    for memory in range(4):
        ranking.row(Request(Need(1, memory)))
        reasons.for_cluster(Request(Need(9, memory)))
    assert len(ranking._rows) == len(reasons._obstacles) == 2


def test_several_instances_are_placed_together_then_published(a100: Geometry) -> None:
    cluster = Cluster.of(a100, 2)
    scheduler = Scheduler(cluster, "first-fit")
    seen: list[object] = []
    states: list[int] = []
    scheduler.subscribe(seen.append)
    scheduler.subscribe(lambda event: states.append(cluster.instance_count))
    placed = scheduler.submit_all("3g.40gb", 3)
    assert isinstance(placed, tuple)
    assert [(instance.gpu, instance.start) for instance in placed] == [(0, 0), (0, 4), (1, 0)]
    assert seen == [Placed(instance) for instance in placed]
    assert states == [3, 3, 3], "no event before the last one is placed"


def test_several_instances_are_placed_all_or_none(a100: Geometry) -> None:
    cluster = Cluster.of(a100, 2)
    scheduler = Scheduler(cluster, "mfi")
    held = scheduler.submit_all(Request("2g.20gb"), 1)
    before = list(cluster.state_of)
    seen: list[object] = []
    scheduler.subscribe(seen.append)
    rejection = scheduler.submit_all("3g.40gb", 4)
    assert isinstance(rejection, Rejection)
    assert rejection.reason is Reason.CAPACITY
    assert rejection.detail == (
        "only 3 of 4 can be placed; with them, no GPU has enough free for 3g.40gb "
        "(2 slices are free in all)"
    )
    one_short = scheduler.submit_all("7g.80gb", 2, waits=True)
    assert isinstance(one_short, Rejection)
    assert one_short.detail.startswith("only 1 of 2 can be placed; with it, no ")
    assert seen == [rejection], "what was taken back was never there"
    assert cluster.state_of == before
    assert isinstance(scheduler.submit_all("3g.40gb", 4, waits=True), Rejection)
    assert seen == [rejection], "a request that goes on waiting was not rejected"
    with pytest.raises(SlicewiseError, match=r"cannot place 0 instances of 3g\.40gb"):
        scheduler.submit_all("3g.40gb", 0)
    assert isinstance(held, tuple)
    scheduler.release(held[0])
    assert isinstance(scheduler.submit_all("3g.40gb", 4), tuple)


def test_a_policy_error_undoes_earlier_instances(a100: Geometry) -> None:
    class GivesOut(LastGpu):
        left = 2

        def choose(self, cluster: Cluster, request: Request) -> Spot | None:
            self.left -= 1
            if self.left < 0:
                raise ZeroDivisionError
            return super().choose(cluster, request)

    cluster = Cluster.of(a100, 3)
    scheduler = Scheduler(cluster, GivesOut())
    seen: list[object] = []
    scheduler.subscribe(seen.append)
    with pytest.raises(ZeroDivisionError):
        scheduler.submit_all("7g.80gb", 3)
    assert cluster.instance_count == 0
    assert seen == []


def test_the_position_of_round_robin_can_be_restored(a100: Geometry) -> None:
    scheduler = Scheduler(Cluster.of(a100, 3), "round-robin")
    scheduler.submit("1g.10gb")
    assert scheduler.turn == 1
    scheduler.turn = 2
    placed = scheduler.submit("1g.10gb")
    assert isinstance(placed, Instance)
    assert placed.gpu == 2
    scan = Scheduler(Cluster.of(a100, 3), LastGpu())
    scan.turn = 2
    assert scan.turn == 0, "a scan policy keeps what it likes by itself"


def test_moves_are_published_after_the_last_one(a100: Geometry) -> None:
    cluster = Cluster.of(a100, 2)
    scheduler = Scheduler(cluster, "first-fit")
    heard: list[object] = []
    scheduler.subscribe(heard.append)
    instance = scheduler.submit("3g.40gb")
    assert isinstance(instance, Instance)
    heard.clear()
    (there,) = scheduler.move([Move(instance, 1, 4)])
    assert (there.gpu, there.start) == (1, 4)
    assert heard == [Moved(instance, there)]
    with pytest.raises(PlacementError):
        scheduler.move([Move(there, 0, 0), Move(instance, 0, 4)])  # the second does not exist
    assert heard == [Moved(instance, there)]
    assert list(cluster.instances()) == [there]
