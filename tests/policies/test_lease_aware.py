"""The policy that knows when instances end, compared with its definition."""

from __future__ import annotations

import math
import random
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slicewise import (
    Catalog,
    Cluster,
    Geometry,
    Instance,
    Need,
    PlacementError,
    Rejection,
    Request,
    Scheduler,
    SlicewiseError,
    load_geometry,
)
from slicewise.core.states import empty_state
from slicewise.engine.moves import Move
from slicewise.policies.lease_aware import LeaseAware
from slicewise.policies.lease_times import TIMES, lost_times
from slicewise.policies.least_lost_time import LeastLostTime
from slicewise.policies.reference import Held
from slicewise.policies.reference_leases import Leased, LeasedGpu, choose, lost_time

MODELS = tuple(Catalog.builtin().find(name).require() for name in ("A100-80GB", "A30-24GB"))
WANTS = [
    *(Request(profile.name) for model in MODELS for profile in model.profiles),
    Request(Need(1, 6)),
    Request(Need(2, 20)),
    Request(Need(1, 15), ("A100-80GB",)),
]
POLICIES = [
    LeaseAware(mean_lifetime=10),
    LeaseAware(mean_lifetime=7, per_state=2, most=5),
    LeaseAware(mean_lifetime=20, per_state=1, most=1),
    LeaseAware(mean_lifetime=10, per_state=1000, most=1000),
    LeaseAware(
        LeastLostTime(frozenset({"1g.10gb", "4g.40gb", "2g.12gb"}), 1, (("4g.40gb", 8.0),)),
        mean_lifetime=10,
    ),
    LeaseAware(
        LeastLostTime(frozenset({"1g.10gb", "2g.20gb", "2g.12gb"}), spares=True),
        mean_lifetime=10,
    ),
]


class Placing(NamedTuple):
    instance: Instance
    lease: Leased


class Pair:
    """A cluster and its readable twin under the same policy."""

    def __init__(self, policy: LeaseAware, nodes: list[tuple[int, int]]) -> None:
        self.policy = policy
        self.cluster = Cluster()
        self.gpus: list[LeasedGpu] = []
        for number, (model, count) in enumerate(nodes):
            self.cluster.add_node(f"n{number}", MODELS[model], count)
            self.gpus += [LeasedGpu(MODELS[model]) for _ in range(count)]
        self.scheduler = Scheduler(self.cluster, policy)
        self.placed: list[Placing] = []

    def submit(self, request: Request, now: float, ends: float) -> None:
        full_scan = self.policy.most >= len(self.gpus) <= self.policy.per_state
        theirs = choose(self.policy, self.gpus, request, now, ends, bounded=not full_scan)
        ours = self.scheduler.submit(request, now=now, ends=ends)
        if isinstance(ours, Rejection):
            assert theirs is None
            return
        assert theirs == (ours.gpu, ours.profile, ours.start)
        profile = self.gpus[ours.gpu].geometry.profile(ours.profile)
        lease = Leased(Held(profile, ours.start), ends)
        self.gpus[ours.gpu].leases.append(lease)
        self.placed.append(Placing(ours, lease))

    def release(self, which: int) -> None:
        instance, lease = self.placed.pop(which)
        self.scheduler.release(instance)
        self.gpus[instance.gpu].leases.remove(lease)

    def set_end(self, which: int, ends: float) -> None:
        instance, lease = self.placed[which]
        self.cluster.set_end(instance, ends)
        assert self.cluster.end_of(instance.id) == ends
        leases = self.gpus[instance.gpu].leases
        changed = lease._replace(ends=ends)
        leases[leases.index(lease)] = changed
        self.placed[which] = Placing(instance, changed)


@pytest.mark.parametrize("policy", POLICIES, ids=range(len(POLICIES)))
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1 << 32), known=st.sampled_from([0.0, 0.5, 1.0]))
def test_decisions_are_those_of_the_definition(policy: LeaseAware, seed: int, known: float) -> None:
    rng = random.Random(seed)
    wants = rng.sample(WANTS, 5)
    pair = Pair(policy, [(0, rng.randint(1, 5)), (1, rng.randint(1, 3)), (0, 2)])

    def end(now: float) -> float:
        # Now and then one that has passed, or that others share.
        return now + rng.choice([rng.uniform(-2, 30), rng.randint(0, 20)])

    for now in range(60):
        action = rng.random()
        if pair.placed and action < 0.3:
            pair.release(rng.randrange(len(pair.placed)))
        elif pair.placed and action < 0.4:
            pair.set_end(rng.randrange(len(pair.placed)), end(now))
        elif action < 0.45:
            node = f"n{rng.randrange(3)}"
            schedulable = rng.random() < 0.7
            (pair.cluster.resume if schedulable else pair.cluster.drain)(node)
            for gpu in pair.cluster.node(node).gpus:
                pair.gpus[gpu].schedulable = schedulable
        ends = end(now) if rng.random() < known else math.inf
        pair.submit(rng.choice(wants), now, ends)


@pytest.mark.unmeasured
@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_with_no_end_known_it_is_least_lost_time(seed: int) -> None:
    rng = random.Random(seed)
    wants = rng.sample(WANTS, 6)
    schedulers = []
    for policy in (LeastLostTime(), LeaseAware(LeastLostTime())):
        cluster = Cluster()
        for number, model in enumerate((0, 1, 0)):
            cluster.add_node(f"n{number}", MODELS[model], 4)
        schedulers.append(Scheduler(cluster, policy))
    placed: list[Instance] = []
    for now in range(120):
        request = rng.choice(wants)
        plain, timed = (scheduler.submit(request, now=now) for scheduler in schedulers)
        assert plain == timed
        if isinstance(plain, Instance):
            placed.append(plain)
        if placed and rng.random() < 0.4:
            gone = placed.pop(rng.randrange(len(placed)))
            for scheduler in schedulers:
                scheduler.release(gone)


@pytest.mark.parametrize("ends", [5.0, 12.0, math.inf])
def test_the_formula(a100: Geometry, ends: float) -> None:
    """Against the integral: the extra time that the window is shut, weighed by exp(-t/E)."""
    gpu = LeasedGpu(a100)
    one = a100.profile("1g.10gb")
    mean, last, steps = 8.0, 9.0, 200_000
    # The chance that the window would be free at t, and is not because of the new instance.
    t = np.linspace(0, 200, steps)
    here = np.ones(steps) if ends == math.inf else (t < ends).astype(float)
    for unknown in range(4):
        gpu.leases = [Leased(Held(one, 0), last)]
        gpu.leases += [Leased(Held(one, 1 + n), math.inf) for n in range(unknown)]
        gone = np.where(t >= last, (1 - np.exp(-t / mean)) ** unknown, 0.0)
        integral = np.trapezoid(here * gone * np.exp(-t / mean) / mean, t)
        assert lost_time(gpu, {0, 1, 2, 3}, 0, ends, mean) == pytest.approx(integral, abs=1e-3)
        (ours,) = lost_times(np.array([last]), np.array([unknown], np.int8), ends, mean)
        assert ours / TIMES == pytest.approx(integral, abs=1e-3)


def test_an_instance_goes_where_it_is_the_last_to_leave_no_window(a100: Geometry) -> None:
    """Both GPUs are in the same state: only the times tell them apart."""
    cluster = Cluster.of(a100, 2)
    for gpu, ends in ((0, 2.0), (1, 50.0)):
        cluster.put(gpu, a100.placements[0].number, ends)
    scheduler = Scheduler(cluster, LeaseAware(mean_lifetime=10))
    long = scheduler.submit("1g.10gb", now=1, ends=40)
    assert isinstance(long, Instance)
    assert long.gpu == 1
    assert cluster.end_of(long) == 40
    # With nothing known of its own end the window would be shut as long either way: the one that
    # is free later loses less time.
    unknown = scheduler.submit("1g.10gb", now=1)
    assert isinstance(unknown, Instance)
    assert (unknown.gpu, cluster.end_of(unknown)) == (1, math.inf)


def test_an_end_that_has_passed_says_nothing(a100: Geometry) -> None:
    gpus = [LeasedGpu(a100, [Leased(Held(a100.profile("1g.10gb"), 0), 5.0)])]
    window = {0, 1, 2, 3}
    assert lost_time(gpus[0], window, 4, math.inf, 10) < 1
    assert lost_time(gpus[0], window, 5, math.inf, 10) == 1 / 2
    cluster = Cluster.of(a100, 1)
    cluster.put(0, a100.placements[0].number, 5.0)
    ids = np.array([0])
    column = a100.windows.index(0b1111)
    for now, expected in (
        (0, (5.0, 0)),
        (4.9, (5.0, 0)),
        (5.0, (-math.inf, 1)),
        (6, (-math.inf, 1)),
    ):
        last, unknown = cluster.window_ends.rows(cluster, ids, now)
        assert (last[0, column], unknown[0, column]) == expected


def test_ends_follow_instances_that_move_and_come_back(a100: Geometry) -> None:
    cluster = Cluster.of(a100, 2)
    scheduler = Scheduler(cluster, "lease-aware")
    placed = scheduler.submit("1g.10gb", ends=7)
    assert isinstance(placed, Instance)
    (moved,) = scheduler.move([Move(placed, 1, 0)])
    assert cluster.end_of(moved) == 7
    cluster.release(moved)
    cluster.undo_release(moved)
    assert cluster.end_of(moved.id) == 7
    cluster.release(moved)
    for change in (cluster.end_of, lambda gone: cluster.set_end(gone, 9)):
        with pytest.raises(PlacementError, match="no instance"):
            change(moved)
    again = scheduler.submit_all("1g.10gb", 2, ends=11)
    assert not isinstance(again, Rejection)
    assert [cluster.end_of(one) for one in again] == [11, 11]


def test_a_reserved_window_has_no_known_end(a100: Geometry) -> None:
    cluster = Cluster.of(a100, 1)
    inside, beside = (a100.placement("1g.10gb", start) for start in (0, 5))
    wanted = a100.placement("2g.20gb", 0)
    assert inside is not None
    assert beside is not None
    assert wanted is not None
    cluster.put(0, inside.number, 5.0)
    cluster.put(0, beside.number, 9.0)
    ids = np.array([0])
    first, whole = a100.windows.index(0b11), a100.windows.index(a100.full)

    def seen() -> list[tuple[float, int]]:
        last, unknown = cluster.window_ends.rows(cluster, ids, 0)
        return [(float(last[0, at]), int(unknown[0, at])) for at in (first, whole)]

    assert seen() == [(5.0, 0), (9.0, 0)]
    cluster.reserve(0, wanted.number)
    assert seen() == [(-math.inf, 1), (9.0, 1)]
    cluster.unreserve(0)
    assert seen() == [(5.0, 0), (9.0, 0)]


def test_rows_follow_nodes_and_models_that_come_and_go() -> None:
    a100, a30 = MODELS
    cluster = Cluster.of(a30, 1)
    scheduler = Scheduler(cluster, LeaseAware(mean_lifetime=5))
    assert scheduler.submit("1g.6gb", ends=3)
    cluster.add_node("big", a100, 2)
    assert scheduler.submit("3g.40gb", ends=4)
    cluster.add_node("more", a100, 5)
    for profile in ("7g.80gb",) * 6:
        assert scheduler.submit(profile, ends=4)
    assert not scheduler.submit("7g.80gb", ends=4)
    assert scheduler.submit("1g.6gb", ends=4)


def test_the_parameters_must_be_positive() -> None:
    for wrong in (
        {"mean_lifetime": 0},
        {"mean_lifetime": math.nan},
        {"mean_lifetime": math.inf},
        {"per_state": 0},
        {"most": 0},
    ):
        with pytest.raises(SlicewiseError, match="is not positive"):
            LeaseAware(**wrong)


def test_words_are_those_without_times(a100: Geometry) -> None:
    policy, base = LeaseAware(), LeastLostTime()
    state, one = empty_state(a100), a100.profile("1g.10gb")
    assert policy.prefer(state, one) == base.prefer(state, one)
    assert policy.in_words((False, 2.5), a100) == base.in_words((False, 2.5), a100)


def test_a_model_of_its_own(a100: Geometry) -> None:
    assert load_geometry("A100-80GB").windows == a100.windows
    assert len(a100.windows) == 14
    assert list(a100.windows) == sorted(set(a100.windows))
