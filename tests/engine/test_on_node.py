"""Nodes with room for several instances together, each considered as if it were alone."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slicewise import Cluster, Scheduler, load_geometry
from slicewise.core.errors import SlicewiseError
from slicewise.core.request import Reason, Rejection, Request
from slicewise.engine import node_plans, offers
from slicewise.engine.offers import Offers

A100, A30 = load_geometry("A100-80GB"), load_geometry("A30-24GB")
POLICIES = ["least-lost", "mfi", "first-fit", "best-fit-strict", "round-robin"]
PROFILES = ["1g.10gb", "2g.20gb", "3g.40gb", "7g.80gb", "1g.6gb"]
NODES = ("n0", "n1", "n2", "small")


def cluster_with(placings: list[tuple[str, int, int]]) -> Cluster:
    """Return nodes with two A100 each and one with A30, with those placements that fit."""
    cluster = Cluster()
    for name in NODES[:3]:
        cluster.add_node(name, A100, 2)
    cluster.add_node("small", A30, 2)
    for profile, gpu, choice in placings:
        node = cluster.node_of(gpu)
        if node.geometry.has(profile):
            starts = cluster.state(gpu).feasible_starts(node.geometry.profile(profile))
            if starts:
                cluster.place(gpu, profile, starts[choice % len(starts)])
    return cluster


def masks(cluster: Cluster) -> list[int]:
    return [cluster.state(gpu).mask for gpu in range(cluster.gpus)]


placings = st.lists(
    st.tuples(st.sampled_from(PROFILES), st.integers(0, 7), st.integers(0, 6)), max_size=24
)
wants = st.lists(st.sampled_from(PROFILES).map(Request), min_size=1, max_size=4)


@pytest.mark.unmeasured
@settings(max_examples=150, deadline=None)
@given(placings, wants, st.sampled_from(POLICIES), st.sets(st.sampled_from(NODES)))
def test_the_first_node_is_that_of_the_first_offer(
    placed: list[tuple[str, int, int]], wanted: list[Request], policy: str, among: set[str]
) -> None:
    cluster = cluster_with(placed)
    scheduler = Scheduler(cluster, policy)
    scheduler.turn = 3
    before = masks(cluster)
    names = Offers(scheduler).nodes(wanted, among)
    assert masks(cluster) == before
    assert scheduler.turn == 3
    assert set(names) <= among
    assert len(set(names)) == len(names)
    got = Offers(Scheduler(cluster_with(placed), policy))
    got._ranking.turn = 3
    outcome = got.place(wanted, lambda node: node in among)
    if names:
        assert isinstance(outcome, tuple)
        assert got._cluster.node_of(outcome[0].gpu).name == names[0]
    else:
        assert not isinstance(outcome, tuple)


@settings(max_examples=150, deadline=None)
@given(placings, wants, st.sampled_from(POLICIES), st.sampled_from(NODES))
def test_a_listed_node_has_room_and_another_has_a_reason(
    placed: list[tuple[str, int, int]], wanted: list[Request], policy: str, name: str
) -> None:
    cluster = cluster_with(placed)
    offers = Offers(Scheduler(cluster, policy))
    named = offers.nodes(wanted, NODES)
    before = masks(cluster)
    outcome = offers.place_on(name, wanted)
    if isinstance(outcome, Rejection):
        assert name not in named
        assert masks(cluster) == before
        assert str(outcome.request) in outcome.detail
    else:
        assert name in named or "strict" in policy
        assert [one.profile for one in outcome] == [want.want for want in wanted]
        assert {cluster.node_of(one.gpu).name for one in outcome} == {name}
        offers.take_back(outcome, wanted)
        assert masks(cluster) == before
        assert offers.place_on(name, wanted) == outcome, "the same, to the ids"


def test_the_reasons() -> None:
    cluster = cluster_with([("1g.10gb", gpu, 0) for gpu in (0, 1)])
    offers = Offers(Scheduler(cluster, "first-fit"))

    def why(name: str, *profiles: str) -> tuple[Reason, str]:
        outcome = offers.place_on(name, [Request(profile) for profile in profiles])
        assert isinstance(outcome, Rejection)
        return outcome.reason, outcome.detail

    assert why("small", "3g.40gb") == (
        Reason.UNKNOWN_PROFILE,
        "node 'small': A30-24GB has no 3g.40gb",
    )
    assert why("n0", "7g.80gb")[0] is Reason.CAPACITY
    assert why("n1", *["7g.80gb"] * 3) == (
        Reason.CAPACITY,
        "node 'n1': there is no room for 3 x 7g.80gb together",
    )
    for gpu in (2, 3):  # every other slice of node n1
        for start in (0, 2, 4, 6):
            cluster.place(gpu, "1g.10gb", start)
    assert why("n1", "2g.20gb")[0] is Reason.FRAGMENTED
    cluster.drain("n2")
    assert why("n2", "1g.10gb")[0] is Reason.CAPACITY


def test_a_scan_policy_has_no_order() -> None:
    scheduler = Scheduler(cluster_with([]), "first-fit")
    scheduler._table = None
    with pytest.raises(SlicewiseError, match="ranks states"):
        Offers(scheduler)


def test_the_search_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without search steps nothing is found; with an exhausted total, counting decides."""
    cluster = cluster_with([("2g.20gb", 0, 0), ("1g.10gb", 1, 2)])
    wanted = [Request("3g.40gb"), Request("2g.20gb"), Request("1g.10gb")]
    assert "n0" in Offers(Scheduler(cluster)).nodes(wanted, NODES)
    monkeypatch.setattr(node_plans, "MOST_STEPS", 1)
    assert Offers(Scheduler(cluster)).nodes(wanted, NODES) == []
    assert isinstance(Offers(Scheduler(cluster)).place_on("n0", wanted), Rejection)
    monkeypatch.setattr(offers, "MOST_STEPS_IN_ALL", 0)
    assert set(Offers(Scheduler(cluster)).nodes(wanted, NODES)) == {"n0", "n1", "n2"}
    assert "small" not in Offers(Scheduler(cluster)).nodes(wanted, NODES)


@pytest.mark.unmeasured
@settings(max_examples=60, deadline=None)
@given(placings, st.sampled_from(PROFILES), st.integers(1, 12), st.sampled_from(NODES))
def test_counting_is_exact_for_one_profile(
    placed: list[tuple[str, int, int]], profile: str, count: int, name: str
) -> None:
    """The slow twin tries every legal sequence of placements."""
    cluster = cluster_with(placed)

    def most(gpu: int, beyond: int = -1) -> int:
        # From left to right only, because the order does not matter.
        if not cluster.node_of(gpu).geometry.has(profile):
            return 0
        found = 0
        for start in cluster.state(gpu).feasible_starts(
            cluster.node_of(gpu).geometry.profile(profile)
        ):
            if start > beyond:
                made = cluster.place(gpu, profile, start)
                found = max(found, 1 + most(gpu, start))
                cluster.undo_place(made)
        return found

    room = sum(most(gpu) for gpu in cluster.node(name).gpus)
    named = Offers(Scheduler(cluster, "mfi")).nodes([Request(profile)] * count, {name})
    assert (named == [name]) == (room >= count)
