"""Plans have the promised length, every step is legal, and planning has no side effects."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slicewise import (
    Budget,
    Catalog,
    Cluster,
    Geometry,
    Instance,
    Need,
    PlacementError,
    Profile,
    Request,
    policy,
)
from slicewise.engine import defrag
from slicewise.engine.defrag import Plan, Planner
from slicewise.engine.destinations import Destinations
from slicewise.engine.moves import Move, carry_out
from slicewise.engine.openings import Openings
from slicewise.engine.room import KeepRoom, room, room_of
from slicewise.policies.base import TablePolicy

TINY = Geometry(
    "tiny",
    4,
    3,
    (
        Profile("1g", 1, 1, 1, (0, 1, 2, 3)),
        Profile("1g+x", 1, 1, 1, (0, 1, 2), uses={"x": 1}, variant_of="1g"),
        Profile("2g", 2, 1, 2, (0, 2)),
        Profile("3g", 3, 2, 3, (0,)),
        Profile("4g", 4, 3, 4, (0,)),
    ),
    budgets=(Budget("x", 1),),
)

Layout = frozenset[tuple[int, int, str, int]]
"""Instances as (name, GPU, profile, start); the name survives a move."""


def free_for(
    geometries: dict[int, Geometry], layout: Layout, gpu: int, profile: Profile
) -> list[int]:
    """Return the legal starts of a profile on a GPU, from the definition."""
    geometry = geometries[gpu]
    there = [(geometry.profile(p), start) for _, g, p, start in layout if g == gpu]
    for budget in geometry.all_budgets:
        need = {p.name: (p.compute if budget.name == "compute" else p.uses.get(budget.name, 0))
                for p in geometry.profiles}  # fmt: skip
        if sum(need[p.name] for p, _ in there) + need[profile.name] > budget.total:
            return []
    return [
        start
        for start in profile.starts
        if not any(profile.window(start) & p.window(s) for p, s in there)
    ]


class ExhaustiveSearch:
    """The slow twin: a cluster as a set, and an exhaustive search over moves."""

    def __init__(self, cluster: Cluster, pinned: Collection[int]) -> None:
        self.geometries = {g: node.geometry for node in cluster.nodes for g in node.gpus}
        self.open = [g for node in cluster.nodes if node.schedulable for g in node.gpus]
        self.pinned = pinned
        self.start: Layout = frozenset(
            (i.id, i.gpu, i.profile, i.start) for i in cluster.instances()
        )

    def fits(self, layout: Layout, request: Request) -> bool:
        return any(
            free_for(self.geometries, layout, gpu, profile)
            for gpu in self.open
            for _, profile in request.candidates(self.geometries[gpu])
        )

    def after_one_move(self, layout: Layout) -> Iterator[Layout]:
        """Yield the layouts after every single move."""
        for (name, at, kind, start), gpu in product(layout, self.open):
            geometry = self.geometries[at]
            if name in self.pinned or self.geometries[gpu] is not geometry:
                continue
            for to in free_for(self.geometries, layout, gpu, geometry.profile(kind)):
                yield layout - {(name, at, kind, start)} | {(name, gpu, kind, to)}

    def fewest(self, request: Request, limit: int) -> int | None:
        layouts = {self.start}
        for count in range(limit + 1):
            if any(self.fits(layout, request) for layout in layouts):
                return count
            layouts = {after for layout in layouts for after in self.after_one_move(layout)}
        return None

    def room(self, layout: Layout) -> int:
        return sum(
            profile.size * len(free_for(self.geometries, layout, gpu, profile))
            for gpu in self.open
            for profile in self.geometries[gpu].plain_profiles
        )


def crowded(rng: random.Random, models: list[Geometry], gpus: int) -> Cluster:
    """Return a randomly filled and slightly thinned cluster, sometimes with a drained node."""
    cluster = Cluster()
    for number in range(gpus):
        cluster.add_node(f"n{number}", rng.choice(models), 1)
    living: list[Instance] = []
    for _ in range(6 * gpus):
        gpu = rng.randrange(gpus)
        state = cluster.state(gpu)
        profile = rng.choice(state.geometry.profiles)
        starts = state.feasible_starts(profile)
        if starts:
            living.append(cluster.place(gpu, profile.name, rng.choice(starts)))
    for instance in rng.sample(living, len(living) // 4):
        cluster.release(instance)
    if rng.random() < 0.3:
        cluster.drain(f"n{rng.randrange(gpus)}")
    return cluster


def snapshot(cluster: Cluster) -> tuple[object, ...]:
    return (
        list(cluster.instances()),
        cluster.state_of[:],
        cluster.first.tolist(),
        cluster.fragmentation(),
        [list(cluster.instances_on(g)) for node in cluster.nodes for g in node.gpus],
    )


def check(cluster: Cluster, plan: Plan, pinned: Collection[int]) -> None:
    """Carry out a plan and check it: legal steps, no instance moved twice, the stated gain."""
    assert plan.room_before == room(cluster)
    assert not {move.instance.id for move in plan.moves} & set(pinned)
    assert len({move.instance.id for move in plan.moves}) == len(plan.moves)
    steps: list[Move] = []
    made = carry_out(cluster, plan.moves, lambda move, _: steps.append(move))
    assert tuple(steps) == plan.moves
    for move, new in zip(plan.moves, made, strict=True):
        old = move.instance
        assert (new.profile, new.size, new.gpu, new.start) == (
            old.profile,
            old.size,
            move.gpu,
            move.start,
        )
    assert plan.room_after == room(cluster)
    assert plan.moved_slices == sum(new.size for new in made)
    if plan.gpu is not None:
        assert plan.placement is not None
        cluster.place(plan.gpu, plan.placement.profile.name, plan.placement.start)


POLICIES = ["mfi-overlap", "best-fit", "best-fit-strict", "round-robin", None]


def ranked_by(name: str | None) -> TablePolicy | None:
    if name is None:
        return None
    chosen = policy(name)
    assert isinstance(chosen, TablePolicy)
    return chosen


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(POLICIES))
def test_plans_of_up_to_two_moves_are_shortest(seed: int, name: str | None) -> None:
    rng = random.Random(seed)
    models = rng.choice([[TINY], [TINY, Catalog.builtin().find("A30").require()]])
    cluster = crowded(rng, models, rng.randint(2, 4))
    ids = [i.id for i in cluster.instances()]
    pinned = set(rng.sample(ids, rng.randint(0, len(ids) // 3)))
    planner = Planner(cluster, ranked_by(name), pinned)
    by_hand = ExhaustiveSearch(cluster, pinned)
    before = snapshot(cluster)
    for profile in models[0].profiles:
        request = Request(profile.name)
        plan = planner.to_fit(request, 2)
        assert snapshot(cluster) == before, "planning leaves no trace"
        fewest = by_hand.fewest(request, 2)
        assert (None if plan is None else len(plan.moves)) == fewest
        if plan is not None and fewest:
            assert Planner(cluster, ranked_by(name), pinned).to_fit(request, 2) == plan
            check(cluster, plan, pinned)
            return


@pytest.mark.unmeasured
@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32))
def test_plans_of_up_to_two_moves_are_shortest_on_a100(seed: int) -> None:
    rng = random.Random(seed)
    a100 = Catalog.builtin().find("A100-80GB").require()
    cluster = crowded(rng, [a100], 2)
    planner, by_hand = Planner(cluster), ExhaustiveSearch(cluster, ())
    for profile in a100.profiles:
        plan = planner.to_fit(Request(profile.name), 2)
        fewest = by_hand.fewest(Request(profile.name), 2)
        assert (None if plan is None else len(plan.moves)) == fewest


@pytest.mark.unmeasured
@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_longer_plans_and_gained_room_are_as_stated(seed: int) -> None:
    rng = random.Random(seed)
    a30 = Catalog.builtin().find("A30").require()
    cluster = crowded(rng, [TINY, a30], 5)
    pinned = {i.id for i in cluster.instances() if rng.random() < 0.1}
    planner = Planner(cluster, pinned=pinned)
    before = snapshot(cluster)
    plan = planner.to_fit(Request("4g"), 6)
    won = planner.to_win_room(4)
    assert snapshot(cluster) == before
    by_hand = ExhaustiveSearch(cluster, pinned)
    assert won.room_before == by_hand.room(by_hand.start)
    single = max(map(by_hand.room, by_hand.after_one_move(by_hand.start)), default=0)
    assert planner.to_win_room(1).room_after == max(won.room_before, single)
    if plan is not None and len(plan.moves) > 2:
        assert by_hand.fewest(Request("4g"), 2) is None
        check(cluster, plan, pinned)
    else:
        check(cluster, won, pinned)
        assert len(won.moves) <= 4
        assert won.room_after > won.room_before or not won.moves


def test_a_hand_worked_plan(a100: Geometry) -> None:
    cluster = Cluster.of(a100, 2)
    small = cluster.place(0, "1g.10gb", 0)
    cluster.place(0, "3g.40gb", 4)
    cluster.place(1, "2g.20gb", 0)
    cluster.place(1, "1g.20gb", 4)
    plan = Planner(cluster).to_fit(Request("4g.40gb"), 3)
    assert plan is not None
    # On GPU 1 only a small instance can use the last pair of slices.
    assert plan.moves == (Move(small, 1, 6),)
    assert (plan.gpu, plan.placement) == (0, a100.placement("4g.40gb", 0))
    assert plan.moved_slices == 1
    assert Planner(cluster).to_fit(Request("4g.40gb"), 0) is None
    already = Planner(cluster).to_fit(Request("1g.10gb"), 3)
    assert already is not None
    assert already.moves == ()
    pinned = Planner(cluster, pinned=[small.id]).to_fit(Request("4g.40gb"), 3)
    assert pinned is not None
    assert [move.instance.gpu for move in pinned.moves] == [1]


def test_a_request_that_fits_can_get_another_placement(a100: Geometry) -> None:
    cluster = Cluster.of(a100, 3)
    small = cluster.place(0, "1g.10gb", 0)
    cluster.place(0, "3g.40gb", 4)
    cluster.place(1, "4g.40gb", 0)
    cluster.place(1, "2g.20gb", 4)
    planner = Planner(cluster)
    at_once = planner.to_fit(Request("4g.40gb"), 1)
    assert at_once is not None
    assert (at_once.moves, at_once.gpu) == ((), 2)
    plan = planner.to_fit(Request("4g.40gb"), 1, elsewhere=True)
    assert plan is not None
    assert (plan.moves, plan.gpu) == ((Move(small, 1, 6),), 0)
    assert planner.to_fit(Request("4g.40gb"), 0, elsewhere=True) is None
    check(cluster, plan, ())


def test_a_move_that_makes_room_for_another_move(a100: Geometry) -> None:
    """A 3g must make way for a 4g, and a half becomes free for it only after a 1g has moved."""
    cluster = Cluster.of(a100, 3)
    half = cluster.place(0, "3g.40gb", 0)
    cluster.place(0, "3g.40gb", 4)
    cluster.place(1, "4g.40gb", 0)
    small = cluster.place(1, "1g.10gb", 6)
    cluster.place(2, "4g.40gb", 0)
    cluster.place(2, "2g.20gb", 4)
    pinned = [i.id for i in cluster.instances() if i not in (half, small)]
    plan = Planner(cluster, pinned=pinned).to_fit(Request("4g.40gb"), 2)
    assert plan is not None
    assert plan.moves == (Move(small, 2, 6), Move(half, 1, 4))


def test_a_need_and_an_unknown_profile(a100: Geometry) -> None:
    cluster = Cluster.of(a100, 1)
    cluster.place(0, "2g.20gb", 2)
    plan = Planner(cluster).to_fit(Request(Need(4, 30)), 1)
    assert plan is not None
    assert [move.start for move in plan.moves] == [4]
    assert Planner(cluster).to_fit(Request("9g.90gb"), 3) is None
    assert Planner(Cluster()).to_win_room(3) == Plan((), 0, 0)


def emptied(a100: Geometry, smalls: int) -> Cluster:
    """GPUs with holes of one slice, and one with only small instances."""
    cluster = Cluster.of(a100, smalls + 1)
    for gpu in range(smalls):
        cluster.place(gpu, "4g.40gb", 0)
        cluster.place(gpu, "2g.20gb", 4)
    for start in range(smalls):
        cluster.place(smalls, "1g.10gb", start)
    return cluster


def test_a_longer_plan_empties_a_gpu(a100: Geometry) -> None:
    cluster = emptied(a100, 6)
    planner = Planner(cluster)
    plan = planner.to_fit(Request("7g.80gb"), 6)
    assert plan is not None
    assert [move.instance.start for move in plan.moves] == [0, 1, 2, 3, 4, 5]
    assert planner.to_fit(Request("7g.80gb"), 5) is None
    won = planner.to_win_room(8)
    assert won.room_after >= plan.room_after
    assert Planner(cluster, effort=3).to_fit(Request("7g.80gb"), 6) is None, "it gave up"


def test_the_number_of_compared_plans_is_bounded(
    a100: Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster.of(a100, 3)
    for gpu, start in enumerate((0, 1, 2)):
        cluster.place(gpu, "1g.10gb", start)
        cluster.place(gpu, "3g.40gb", 4)
    compared = Planner(cluster).to_fit(Request("4g.40gb"), 1)
    monkeypatch.setattr(defrag, "COMPARED", 1)
    first = Planner(cluster).to_fit(Request("4g.40gb"), 1)
    assert compared is not None
    assert first is not None
    assert first.moves[0].instance.gpu == 0
    assert compared.room_after >= first.room_after


def test_a_budget_of_one_makes_one_move(a100: Geometry) -> None:
    cluster = Cluster.of(a100, 2)
    for gpu, start in enumerate((2, 4)):
        cluster.place(gpu, "1g.10gb", start)
    won = Planner(cluster).to_win_room(1)
    assert len(won.moves) == 1
    assert won.room_after > won.room_before


def test_equal_gpus_are_examined_once(a100: Geometry) -> None:
    cluster = Cluster.of(a100, 200)
    for gpu in range(200):
        cluster.place(gpu, "2g.20gb", 2)
        cluster.place(gpu, "3g.40gb", 4)
    openings = Openings(cluster)
    request = Request("4g.40gb")
    assert [(o.gpu, len(o.blockers)) for o in openings.of(request, 2, ())] == [(0, 1)]
    assert [o.gpu for o in openings.of(request, 2, (), apart=[0, 3])] == [0, 1, 3]
    mine = {i.id for i in cluster.instances_on(0)}
    assert [o.gpu for o in openings.of(request, 2, mine)] == [1]
    # Only the first 64 GPUs of a state are examined.
    fixed = {i.id for gpu in range(64) for i in cluster.instances_on(gpu)}
    assert openings.of(request, 2, fixed) == []


def test_budgets_restrict_moves() -> None:
    cluster = Cluster.of(TINY, 2)
    holder = cluster.place(0, "1g+x", 0)
    cluster.place(1, "3g", 0)
    other = cluster.place(1, "1g", 3)
    blocked = Openings(cluster).of(Request("1g+x"), 2, ())
    assert [(o.gpu, o.placement.start, o.blockers) for o in blocked][:3] == [
        (0, 0, (holder,)),
        (0, 1, (holder,)),
        (0, 2, (holder,)),
    ]
    # The 2g's window on GPU 1 is never free, and with 3 of 3 compute slices used nothing else fits.
    assert {o.gpu for o in Openings(cluster).of(Request("1g"), 1, {other.id})} == {0, 1}


def test_caches_are_bounded(a100: Geometry) -> None:
    cluster = Cluster.of(a100, 1)
    openings = Openings(cluster, keep=2)
    for memory in range(4):
        openings.of(Request(Need(1, memory)), 1, ())
    assert len(openings._distances) == 2
    cluster.add_node("late", TINY, 1)
    assert [o.gpu for o in openings.of(Request("3g"), 1, ())] == [1]


def test_no_homes_if_the_policy_offers_none(a100: Geometry) -> None:
    cluster = Cluster.of(a100, 1)
    instance = cluster.place(0, "7g.80gb", 0)
    assert Destinations(cluster, ranked_by("best-fit")).best(instance, ()) is None
    assert Destinations(cluster).best(instance, {0}) is None
    cluster.add_node("more", a100, 1)
    assert Destinations(cluster).best(instance, {0}) == (1, a100.placement("7g.80gb", 0))


def test_room_counts_what_could_be_placed(a100: Geometry) -> None:
    cluster = Cluster.of(a100, 2)
    each = sum(p.size * len(p.starts) for p in a100.plain_profiles)
    assert room_of(cluster.state(0)) == each == 41
    cluster.place(0, "7g.80gb", 0)
    assert room(cluster) == each
    cluster.drain("node-0")
    assert room(cluster) == 0, "a drained GPU offers nothing"
    full = KeepRoom().prefer(cluster.state(0), a100.profile("1g.10gb"))
    assert full is None


def test_a_plan_is_carried_out_completely_or_not_at_all(a100: Geometry) -> None:
    cluster = emptied(a100, 3)
    plan = Planner(cluster).to_fit(Request("7g.80gb"), 3)
    assert plan is not None
    before = snapshot(cluster)

    def fail_at_the_second(move: Move, instance: Instance) -> None:
        assert cluster.instance(instance.id) == instance
        if move == plan.moves[1]:
            raise RuntimeError("the node did not answer")

    with pytest.raises(RuntimeError, match="did not answer"):
        carry_out(cluster, plan.moves, fail_at_the_second)
    assert snapshot(cluster) == before
    taken = cluster.place(plan.moves[-1].gpu, "1g.10gb", 6)
    with pytest.raises(PlacementError, match="overlaps occupied slices"):
        carry_out(cluster, plan.moves)
    cluster.undo_place(taken)
    assert snapshot(cluster) == before
    check(cluster, plan, ())


def test_stale_plans_are_refused(a100: Geometry) -> None:
    cluster = Cluster.of(a100, 2)
    cluster.add_node("other", Catalog.builtin().find("A100-40GB").require(), 1)
    instance = cluster.place(0, "1g.10gb", 0)
    for move, problem in (
        (Move(instance._replace(start=1), 1, 0), "is not where the plan found it"),
        (Move(instance, 1, 7), "not a legal start"),
        (Move(instance, 2, 0), "another model"),
        (Move(instance, 9, 0), "no GPU 9"),
    ):
        with pytest.raises(PlacementError, match=problem):
            carry_out(cluster, [move])
    cluster.hold(1)
    with pytest.raises(PlacementError, match="is held"):
        carry_out(cluster, [Move(instance, 1, 0)])
    cluster.unhold(1)
    cluster.drain("node-0")
    with pytest.raises(PlacementError, match="drained"):
        carry_out(cluster, [Move(instance, 1, 0)])
    gone = cluster.release(instance)
    with pytest.raises(PlacementError, match="no instance"):
        carry_out(cluster, [Move(gone, 1, 0)])
