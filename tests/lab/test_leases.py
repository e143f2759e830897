"""The compiled form of lease-aware, compared with the engine and with the definition."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slicewise import Catalog, Cluster, Instance, Need, Rejection, Request, Scheduler
from slicewise.lab import kernel, lease_loops
from slicewise.lab.engine_loop import EngineRun
from slicewise.lab.experiment import TRACE, Published, Steady
from slicewise.lab.lease_run import LeaseRun
from slicewise.lab.mix import parse_mix
from slicewise.lab.packed_tables import Models, compile_tables
from slicewise.lab.workload import Arrivals
from slicewise.policies.lease_aware import LeaseAware
from slicewise.policies.least_lost import LeastLost
from slicewise.policies.least_lost_time import LeastLostTime
from slicewise.policies.reference import Held
from slicewise.policies.reference_leases import Leased, LeasedGpu, choose

GEOMETRIES = [Catalog.builtin().find(name).require() for name in ("A100-80GB", "A30-24GB")]
WANTS = [
    Request("1g.10gb"),
    Request("2g.20gb"),
    Request("4g.40gb"),
    Request("7g.80gb"),
    Request("1g.10gb+me"),
    Request("2g.12gb"),
    Request("no.such"),
    Request(Need(1, 6)),
]
LONGEST = 40


@cache
def compiled(policy: LeaseAware) -> tuple[Models, kernel.Tables, lease_loops.LeaseTables]:
    models = Models(GEOMETRIES, WANTS)
    leases = lease_loops.with_times(lease_loops.compile_leases(models, policy), 8, LONGEST)
    return models, compile_tables(models, policy), leases


@pytest.mark.unmeasured
@pytest.mark.parametrize(
    "policy",
    [
        LeaseAware(mean_lifetime=8),
        LeaseAware(mean_lifetime=8, per_state=1, most=3),
        LeaseAware(LeastLostTime(frozenset({"1g.10gb", "2g.20gb"}), 8), 8),
        LeaseAware(mean_lifetime=8, per_state=100, most=100),
    ],
    ids=["default", "few", "asked-for", "full"],
)
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 1 << 32), known=st.sampled_from([0.0, 0.5, 1.0]))
def test_three_forms_decide_alike(policy: LeaseAware, seed: int, known: float) -> None:
    rng = random.Random(seed)
    models, tables, leases = compiled(policy)
    cluster, twins, empty = Cluster(), list[LeasedGpu](), list[int]()
    for number, model in enumerate((0, 1, 0)):
        count = rng.randint(1, 4)
        cluster.add_node(f"n{number}", GEOMETRIES[model], count)
        twins += [LeasedGpu(GEOMETRIES[model]) for _ in range(count)]
        empty += [models.empty_state[model]] * count
    scheduler = Scheduler(cluster, policy)
    gpus = kernel.new_gpus(np.array(empty, np.int64), len(models.states))
    ends = lease_loops.new_ends(len(empty))
    placed: list[tuple[Instance, int, Leased]] = []
    for now in range(50):
        while placed and rng.random() < 0.3:
            instance, placement, lease = placed.pop(rng.randrange(len(placed)))
            scheduler.release(instance)
            lease_loops.release(tables, gpus, leases, ends, instance.gpu, placement)
            twins[instance.gpu].leases.remove(lease)
        if rng.random() < 0.1:
            node, schedulable = f"n{rng.randrange(3)}", rng.random() < 0.6
            (cluster.resume if schedulable else cluster.drain)(node)
            for gpu in cluster.node(node).gpus:
                twins[gpu].schedulable = schedulable
                kernel.set_schedulable(gpus, gpu, schedulable)
        kind = rng.randrange(len(WANTS))
        end = now + rng.randint(1, LONGEST) if rng.random() < known else -1
        until = end if end > now else math.inf
        full = policy.most >= 100
        expected = choose(policy, twins, WANTS[kind], now, until, bounded=not full)
        ours = scheduler.submit(WANTS[kind], now=now, ends=until)
        gpu, placement, compared = lease_loops.submit(tables, gpus, leases, ends, kind, now, end)
        assert compared <= policy.most
        if isinstance(ours, Rejection):
            assert expected is None
            assert gpu == kernel.NONE
            continue
        made = twins[gpu].geometry.placements[placement]
        assert expected == (ours.gpu, ours.profile, ours.start)
        assert expected == (gpu, made.profile.name, made.start)
        lease = Leased(Held(made.profile, made.start), until)
        twins[gpu].leases.append(lease)
        placed.append((ours, placement, lease))
    assert gpus.totals[kernel.OCCUPIED] == cluster.occupied_slices


@pytest.mark.parametrize("stated", ["exact", "half", "wrong", "none"])
def test_a_run_is_that_of_the_engine(stated: str) -> None:
    """Also where what was said is wrong: instances leave earlier, or are there past their end."""
    a100, gpus, slots, longest = GEOMETRIES[0], 12, 1500, 60
    mix = parse_mix("uniform", a100)
    rng = np.random.default_rng(5)
    kinds = rng.integers(0, len(mix.profiles), slots)
    lifetimes = rng.integers(1, longest, slots, endpoint=True)
    said = {
        "exact": lifetimes,
        "half": np.where(rng.random(slots) < 0.5, lifetimes, 0),
        "wrong": rng.permutation(lifetimes),
        "none": None,
    }[stated]
    policy = LeaseAware(mean_lifetime=30)
    models = Models([a100], [Request(profile.name) for profile in mix.profiles])
    leases = lease_loops.compile_leases(models, policy)
    compiled = LeaseRun(compile_tables(models, policy), leases, gpus, 30, longest)
    engine = EngineRun(Scheduler(Cluster.of(a100, gpus), policy), mix)
    traces = [np.zeros((slots, len(TRACE)), np.int32) for _ in range(2)]
    for run, trace in ((compiled, traces[0]), (engine, traces[1])):
        for begin in (0, 700):
            part = slice(begin, 700 if begin == 0 else slots)
            here = None if said is None else said[part]
            run.advance(Arrivals(kinds[part], lifetimes[part], here), begin, trace[part])
    for trace in traces:
        trace[:, 1] = 0
    assert (traces[0] == traces[1]).all()
    assert 0 < traces[0][:, 0].mean() < 1


def test_experiments_state_every_lease() -> None:
    """With all ends known fewer requests are rejected; compiled and engine count the same."""
    mix = parse_mix("uniform", GEOMETRIES[0])
    policies = LeastLost(), LeaseAware()
    steady = Steady((mix,), policies, gpus=20, runs=6, lifetimes=12, oracle=False, load=0.9)
    rejected = [
        sum(int(steady.simulate(0, policy, run, lambda _: None)[1]) for run in range(6))
        for policy in (0, 1)
    ]
    assert rejected[1] < rejected[0]
    published = Published((mix,), policies, gpus=10, runs=1)
    for experiment in (steady, published):
        on_engine = replace(experiment, on_engine=True)
        results = [e.simulate(0, 1, 0, lambda _: None) for e in (experiment, on_engine)]
        if experiment is steady:
            for result in results:
                result[4] = 0  # the engine does not count what it examines
        assert (results[0] == results[1]).all()


def test_the_published_experiment_and_the_steady_one_know_the_mean() -> None:
    mix = parse_mix("uniform", GEOMETRIES[0])
    steady = Steady((mix,), (LeaseAware(mean_lifetime=1e9),), gpus=20, lifetimes=8, oracle=False)
    same = replace(steady, policies=(LeaseAware(),))
    assert (steady.simulate(0, 0, 0, print) == same.simulate(0, 0, 0, print)).all()
