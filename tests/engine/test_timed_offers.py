"""Offers under a lease-aware table: the scheduler's own decision, with the ends of instances."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slicewise import Catalog, Cluster, Need, Rejection, Request, Scheduler, load_geometry
from slicewise.core.cluster import Instance
from slicewise.core.geometry import Profile
from slicewise.engine.offers import Offers
from slicewise.policies.lease_aware import LeaseAware
from slicewise.policies.least_lost_time import LeastLostTime
from slicewise.policies.rehearsed import Choice, Rehearsed

A100 = load_geometry("A100-80GB")
MODELS = tuple(Catalog.builtin().find(name).require() for name in ("A100-80GB", "A30-24GB"))
WANTS = [
    *(Request(profile.name) for model in MODELS for profile in model.plain_profiles),
    Request(Need(1, 6)),
    Request(Need(2, 20)),
    Request(Need(1, 15), ("A100-80GB",)),
]
POLICIES = [
    LeaseAware(mean_lifetime=10),
    LeaseAware(mean_lifetime=7, per_state=2, most=5),
    LeaseAware(mean_lifetime=20, per_state=1, most=1),
    LeaseAware(LeastLostTime(frozenset({"1g.10gb", "4g.40gb", "2g.12gb"}), 1), mean_lifetime=10),
]
NOW = 50.0
seeds = st.integers(0, 1 << 32)
policies = st.sampled_from(POLICIES)


def end(rng: random.Random) -> float:
    """When an instance leaves: unknown for a third, sometimes in the past, sometimes shared."""
    choices = [math.inf, NOW + rng.uniform(-2, 30), NOW + rng.randint(0, 20)]
    return rng.choice(choices)


def busy(seed: int, *nodes: tuple[int, int]) -> Cluster:
    """Nodes (model, GPUs) with instances at random; the same seed gives the same cluster."""
    rng = random.Random(seed)
    cluster = Cluster()
    for number, (model, gpus) in enumerate(nodes):
        cluster.add_node(f"n{number}", MODELS[model], gpus)
    for _ in range(rng.randrange(3 * cluster.gpus)):
        gpu = rng.randrange(cluster.gpus)
        state = cluster.state(gpu)
        profile = rng.choice(state.geometry.plain_profiles)
        starts = state.feasible_starts(profile)
        if starts:
            cluster.set_end(cluster.place(gpu, profile.name, rng.choice(starts)), end(rng))
    return cluster


def seat(instance: Instance) -> tuple[int, str, int]:
    return instance.gpu, instance.profile, instance.start


@settings(max_examples=50, deadline=None)
@given(seeds, policies, st.sampled_from(WANTS))
def test_the_first_offer_is_the_schedulers_decision(
    seed: int, policy: LeaseAware, want: Request
) -> None:
    cluster = busy(seed, (0, 4), (1, 2), (0, 1), (0, 3))
    leaves = end(random.Random(seed))
    scheduler = Scheduler(cluster, policy)
    offers = list(Offers(scheduler)(want, now=NOW, ends=leaves))
    outcome = scheduler.submit(want, now=NOW, ends=leaves)
    if isinstance(outcome, Rejection):
        assert offers == []
        return
    placement = cluster.node_of(offers[0].gpu).geometry.placements[offers[0].placement]
    assert (offers[0].gpu, placement.profile.name, placement.start) == seat(outcome)
    cluster.undo_place(outcome)
    room = [
        gpu
        for gpu in range(cluster.gpus)
        for profile in [p for _, p in want.candidates(cluster.state(gpu).geometry)]
        if cluster.state(gpu).feasible_starts(profile)
    ]
    assert sorted(offer.gpu for offer in offers) == sorted(set(room)), "each GPU with room, once"


@settings(max_examples=50, deadline=None)
@given(seeds, policies, st.sampled_from(WANTS), st.sets(st.integers(0, 5)))
def test_a_pod_goes_where_the_scheduler_would_place_it_among_its_nodes(
    seed: int, policy: LeaseAware, want: Request, out: set[int]
) -> None:
    nodes = [(0, 2), (0, 1), (1, 2), (0, 3), (0, 2), (1, 1)]
    ours, theirs = busy(seed, *nodes), busy(seed, *nodes)
    leaves = end(random.Random(seed))
    for number in out:
        theirs.drain(f"n{number}")
    excluded = {f"n{number}" for number in out}
    placed = Offers(Scheduler(ours, policy)).place(
        [want], lambda node: node not in excluded, now=NOW, ends=leaves
    )
    outcome = Scheduler(theirs, policy).submit(want, now=NOW, ends=leaves)
    if isinstance(outcome, Rejection):
        assert not isinstance(placed, tuple)
        return
    assert isinstance(placed, tuple)
    assert seat(placed[0]) == seat(outcome)
    assert ours.end_of(placed[0]) == leaves


@settings(max_examples=50, deadline=None)
@given(seeds, policies, st.lists(st.sampled_from(A100.plain_profiles), min_size=1, max_size=5))
def test_several_on_one_node_go_where_the_scheduler_would_place_them_in_turn(
    seed: int, policy: LeaseAware, profiles: list[Profile]
) -> None:
    ours, theirs = busy(seed, (0, 3)), busy(seed, (0, 3))
    wanted = [Request(profile.name) for profile in profiles]
    leaves = end(random.Random(seed))
    # Bounds on how many GPUs are compared are for clusters: on a node all are.
    policy = LeaseAware(policy.base, policy.mean_lifetime)
    scheduler = Scheduler(theirs, policy)
    sizes = {request: A100.profile(str(request.want)).size for request in wanted}
    first = {request: wanted.index(request) for request in wanted}
    in_turn = []
    for request in sorted(wanted, key=lambda one: (-sizes[one], first[one])):
        outcome = scheduler.submit(request, now=NOW, ends=leaves)
        if isinstance(outcome, Rejection):
            return  # the plan may find places for all by other choices
        in_turn.append(seat(outcome))
    for on_node in (True, False):
        found = Offers(Scheduler(ours, policy))
        placed = (
            found.place_on("n0", wanted, now=NOW, ends=leaves)
            if on_node
            else found.place(wanted, lambda node: True, now=NOW, ends=leaves)
        )
        assert isinstance(placed, tuple)
        assert [one.profile for one in placed] == [str(request.want) for request in wanted]
        assert sorted(map(seat, placed)) == sorted(in_turn)
        assert {ours.end_of(one) for one in placed} == {leaves}
        for one in reversed(placed):
            ours.undo_place(one)


def test_the_best_offer_looks_at_a_bounded_number_of_gpus() -> None:
    looked_at = []
    for gpus in (64, 1600):
        cluster = Cluster.of(A100, gpus, 8)
        for gpu in range(gpus):
            for slices in range(gpu % 5):
                cluster.set_end(cluster.place(gpu, "1g.10gb", slices), NOW + gpu)
        seen: list[int] = []

        def takes(gpu: int, seen: list[int] = seen) -> bool:
            seen.append(gpu)
            return True

        offers = Offers(Scheduler(cluster, LeaseAware(mean_lifetime=10)))
        assert next(offers(Request("2g.20gb"), takes, now=NOW, ends=NOW + 20), None) is not None
        looked_at.append(len(seen))
    assert looked_at[0] == looked_at[1] <= 32


def test_a_plan_that_has_to_go_back_forgets_what_it_had_planned() -> None:
    """The cheapest place for the first takes the only place of the second, so it moves on."""
    cluster = Cluster()
    cluster.add_node("n0", A100, 2)
    for gpu, start, leaves in ((0, 4, NOW + 50), (1, 0, NOW + 0.1)):
        cluster.set_end(cluster.place(gpu, "3g.40gb", start), leaves)
    found = Offers(Scheduler(cluster, LeaseAware(mean_lifetime=10)))
    alone = found.place_on("n0", [Request("3g.40gb")], now=NOW, ends=NOW + 50)
    assert isinstance(alone, tuple)
    assert seat(alone[0]) == (0, "3g.40gb", 0)
    found.take_back(alone, [Request("3g.40gb")])
    wanted = [Request("3g.40gb"), Request("4g.40gb")]
    for leaves in (NOW + 50, math.inf):
        placed = found.place_on("n0", wanted, now=NOW, ends=leaves)
        assert isinstance(placed, tuple)
        assert [seat(one) for one in placed] == [(1, "3g.40gb", 4), (0, "4g.40gb", 0)]
        found.take_back(placed, wanted)


@pytest.mark.parametrize("known", [True, False])
def test_knowing_the_ends_changes_where_a_pod_goes(known: bool) -> None:
    """Next to an instance that leaves at the same time, no window is shut for longer."""
    cluster = Cluster()
    for name in ("n0", "n1"):
        cluster.add_node(name, A100, 1)
    for gpu, leaves in ((0, NOW + 1), (1, NOW + 100)):
        cluster.set_end(cluster.place(gpu, "3g.40gb", 4), leaves if known else math.inf)
    policy = Rehearsed(Choice("time", ("3g.40gb", "7g.80gb"), leases=True, mean_lifetime=60))
    found = Offers(Scheduler(cluster, policy))
    ends = NOW + 100 if known else math.inf
    placed = found.place([Request("3g.40gb")], lambda node: True, now=NOW, ends=ends)
    assert isinstance(placed, tuple)
    assert cluster.node_of(placed[0].gpu).name == ("n1" if known else "n0")
    found.take_back(placed, [Request("3g.40gb")])
    order = found.nodes([Request("3g.40gb")], {"n0", "n1"}, now=NOW, ends=ends)
    assert order == (["n1", "n0"] if known else ["n0", "n1"])
