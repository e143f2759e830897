"""Offers are placements in the policy's order: the scheduler's choice, without excluded nodes."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slicewise import Cluster, Scheduler, load_geometry
from slicewise.core.errors import SlicewiseError
from slicewise.core.request import Need, Reason, Rejection, Request
from slicewise.engine import node_plans as module
from slicewise.engine.offers import Offers, Unfit
from slicewise.policies.base import ScanPolicy, Spot

A100, A30 = load_geometry("A100-80GB"), load_geometry("A30-24GB")
TABLES = ["least-lost", "mfi", "first-fit", "best-fit-strict", "round-robin", "peer-nvidia-dra"]
WANTS = [p.name for p in A100.profiles] + [p.name for p in A30.profiles]


def cluster_with(placings: list[tuple[str, int]], nodes: int = 3) -> Cluster:
    """Return nodes with two A100 each and one with A30, with those placements that fit."""
    cluster = Cluster()
    for number in range(nodes):
        cluster.add_node(f"n{number}", A100, 2)
    cluster.add_node("small", A30, 2)
    for profile, gpu in placings:
        node = cluster.node_of(gpu % cluster.gpus)
        state = cluster.state(gpu % cluster.gpus)
        if node.geometry.has(profile):
            starts = state.feasible_starts(node.geometry.profile(profile))
            if starts:
                cluster.place(gpu % cluster.gpus, profile, starts[-1])
    return cluster


placings = st.lists(st.tuples(st.sampled_from(WANTS), st.integers(0, 7)), max_size=20)
wants = st.sampled_from([*map(Request, WANTS), Request(Need(2, 12)), Request(Need(1, 5))])


@settings(max_examples=150, deadline=None)
@given(placings, wants, st.sampled_from(TABLES))
def test_the_first_offer_is_what_the_scheduler_chooses(
    placed: list[tuple[str, int]], want: Request, policy: str
) -> None:
    cluster = cluster_with(placed)
    scheduler = Scheduler(cluster, policy)
    scheduler.turn = 3
    found = Offers(scheduler)
    first = next(found(want), None)
    outcome = scheduler.submit(want)
    if isinstance(outcome, Rejection):
        assert first is None or "strict" in policy
    else:
        assert first is not None
        placement = cluster.node_of(first.gpu).geometry.placements[first.placement]
        assert (first.gpu, placement.profile.name, placement.start) == (
            outcome.gpu, outcome.profile, outcome.start
        )  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(placings, wants, st.sampled_from(TABLES), st.sets(st.sampled_from(["n0", "n1", "small"])))
def test_excluded_nodes_are_treated_as_absent(
    placed: list[tuple[str, int]], want: Request, policy: str, out: set[str]
) -> None:
    cluster, other = cluster_with(placed), cluster_with(placed)
    for name in out:
        other.drain(name)
    got = Offers(Scheduler(cluster, policy)).place([want], lambda node: node not in out)
    best = next(Offers(Scheduler(other, policy))(want), None)
    if isinstance(got, tuple):
        assert best is not None
        assert best.gpu == got[0].gpu
        assert other.put(*best)[1:] == got[0][1:]
    else:
        assert best is None
        assert isinstance(got, Rejection) or set(got.nodes) <= out
        assert not got


def possible(cluster: Cluster, node: str, names: tuple[str, ...]) -> bool:
    """Return whether all profiles fit on a node together, by exhaustive search."""
    if not names:
        return True
    for gpu in cluster.node(node).gpus:
        profile = A100.profile(names[0])
        for start in cluster.state(gpu).feasible_starts(profile):
            made = cluster.place(gpu, profile.name, start)
            fine = possible(cluster, node, names[1:])
            cluster.undo_place(made)
            if fine:
                return True
    return False


@settings(max_examples=100, deadline=None)
@given(
    placings,
    st.lists(st.sampled_from([p.name for p in A100.profiles]), min_size=2, max_size=3),
    st.sampled_from(["least-lost", "first-fit", "peer-nvidia-dra"]),
)
def test_several_instances_are_offered_exactly_where_they_fit(
    placed: list[tuple[str, int]], names: list[str], policy: str
) -> None:
    cluster = cluster_with(placed, nodes=2)
    before = [cluster.state_of[gpu] for gpu in range(cluster.gpus)]
    fine = [node for node in ("n0", "n1") if possible(cluster, node, tuple(names))]
    got = Offers(Scheduler(cluster, policy)).place([Request(n) for n in names], lambda node: True)
    if isinstance(got, tuple):
        assert [one.profile for one in got] == names
        (node,) = {cluster.node_of(one.gpu).name for one in got}
        assert node in fine
    else:
        assert not fine
        assert isinstance(got, Rejection)
        assert [cluster.state_of[gpu] for gpu in range(cluster.gpus)] == before


def test_gpus_on_which_a_strict_policy_rejects_are_not_offered() -> None:
    cluster = Cluster.of(A100, 2)
    cluster.place(0, "1g.10gb", 0)
    scheduler = Scheduler(cluster, "best-fit-strict")
    assert [offer.gpu for offer in Offers(scheduler)(Request("4g.40gb"))] == [1]
    outcome = scheduler.submit("4g.40gb")
    assert isinstance(outcome, Rejection), "it picks the fuller GPU, and no other"
    assert outcome.reason is Reason.FRAGMENTED


def test_an_excluded_node_with_room_is_named() -> None:
    cluster = cluster_with([])
    found = Offers(Scheduler(cluster, "least-lost"))
    before = [cluster.state_of[gpu] for gpu in range(cluster.gpus)]
    for count, model in product((1, 2), ("3g.40gb",)):
        got = found.place([Request(model)] * count, lambda node: False)
        assert got == Unfit(("n0", "n1", "n2"))
        assert [cluster.state_of[gpu] for gpu in range(cluster.gpus)] == before


def test_rejections_state_what_is_missing() -> None:
    cluster = cluster_with([("7g.80gb", gpu) for gpu in range(6)])
    found = Offers(Scheduler(cluster, "least-lost"))

    def refused(*names: str) -> Rejection:
        got = found.place([Request(name) for name in names], lambda node: True)
        assert isinstance(got, Rejection)
        return got

    assert refused("1g.10gb").reason is Reason.CAPACITY
    assert refused("1g.6gb", "1g.10gb").reason is Reason.CAPACITY
    assert "1g.10gb" in refused("1g.6gb", "1g.10gb").detail
    assert refused("4g.24gb", "4g.24gb", "1g.6gb").detail == (
        "no node has room for 4g.24gb and 4g.24gb and 1g.6gb together"
    )
    assert refused("9g").reason is Reason.UNKNOWN_PROFILE
    with pytest.raises(SlicewiseError, match="nothing to place"):
        found.place([], lambda node: True)


def test_a_node_with_too_many_search_steps_counts_as_full(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = cluster_with([("4g.40gb", 0), ("1g.10gb", 1)], nodes=1)
    monkeypatch.setattr(module, "MOST_STEPS", 1)
    got = Offers(Scheduler(cluster, "least-lost")).place(
        [Request("3g.40gb"), Request("2g.20gb")], lambda node: True
    )
    assert isinstance(got, Rejection)
    assert cluster.instance_count == 2


def test_drained_nodes_offer_nothing() -> None:
    cluster = cluster_with([], nodes=1)
    cluster.hold(0)
    found = Offers(Scheduler(cluster, "least-lost"))
    got = found.place([Request("3g.40gb"), Request("3g.40gb")], lambda node: True)
    assert isinstance(got, tuple)
    assert {one.gpu for one in got} == {1}


def test_a_scan_policy_is_refused() -> None:
    class Scans(ScanPolicy):
        name = "scans"
        summary = "Looks at every GPU."

        def choose(self, cluster: Cluster, request: Request) -> Spot | None:
            return None

    with pytest.raises(SlicewiseError, match="'scans' looks at GPUs one by one"):
        Offers(Scheduler(cluster_with([]), Scans()))
