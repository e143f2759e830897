"""The policy comparison equals the experiment of the lab, in pages too."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from slicewise import Cluster, Scheduler, load_geometry
from slicewise.core.cluster import Instance
from slicewise.dashboard.comparison import MAX_STEPS, ComparisonTerms, PolicyComparison, stranded
from slicewise.lab.engine_loop import EngineRun
from slicewise.lab.mix import parse_mix
from slicewise.lab.workload import Arrivals, draw_kinds, longest_lifetime, run_generator

A100 = load_geometry("A100-80GB")
TERMS = ComparisonTerms(("worst-fit", "least-lost"), A100, "uniform", 6, 0.9, 3)


def test_a_run_equals_the_experiment_of_the_lab() -> None:
    mix = parse_mix("uniform", A100)
    rng = run_generator(3, 0)
    kinds = draw_kinds(rng, mix, MAX_STEPS)
    lifetimes = rng.integers(1, longest_lifetime(mix, 6, 0.9), size=MAX_STEPS, endpoint=True)
    steps = PolicyComparison(TERMS).steps(0, 400)
    for side, policy in enumerate(TERMS.policies):
        run = EngineRun(Scheduler(Cluster.of(A100, 6), policy), mix)
        trace = np.zeros((400, 6), np.int32)
        run.advance(Arrivals(kinds[:400], lifetimes[:400]), 0, trace)
        outcomes = [step.sides[side] for step in steps]
        assert [o.accepted for o in outcomes] == np.cumsum(trace[:, 0]).tolist()
        assert [o.gpu is not None for o in outcomes] == (trace[:, 0] == 1).tolist()
        assert [o.occupied for o in outcomes] == trace[:, 2].tolist()
        assert [o.fragmentation for o in outcomes] == trace[:, 4].tolist()


def test_placements_and_stranded_slices_can_be_replayed() -> None:
    comparison = PolicyComparison(TERMS)
    for side in (0, 1):
        cluster = Cluster.of(A100, 6)
        living: list[tuple[int, Instance]] = []
        for slot, step in enumerate(comparison.steps(0, 300)):
            for ends, instance in [one for one in living if one[0] == slot]:
                cluster.release(instance)
                living.remove((ends, instance))
            outcome, profile = step.sides[side], comparison.mix.profiles[step.profile]
            if outcome.gpu is None:
                assert outcome.reason in ("capacity", "fragmented")
                assert outcome.detail
            else:
                assert outcome.start is not None
                made = cluster.place(outcome.gpu, profile.name, outcome.start)
                living.append((slot + step.lifetime, made))
            lost = sum(stranded(cluster.state(gpu)).bit_count() for gpu in range(6))
            assert outcome.stranded == lost
            assert outcome.occupied == cluster.occupied_slices


def test_pages_belong_to_one_run() -> None:
    whole = list(PolicyComparison(TERMS).steps(0, 200))
    paged = PolicyComparison(TERMS)
    assert list(paged.steps(120, 200)) == whole[120:]
    assert list(paged.steps(0, 120)) == whole[:120]
    assert list(paged.steps(50, 60)) == whole[50:60]


def test_a_run_ends() -> None:
    comparison = PolicyComparison(ComparisonTerms(("first-fit", "mfi"), A100, "bimodal", 1, 0.5, 1))
    assert len(comparison.steps(MAX_STEPS - 10, MAX_STEPS + 10)) == 10
    assert list(comparison.steps(MAX_STEPS, MAX_STEPS + 10)) == []


@pytest.mark.parametrize("seed", [1, 2])
def test_seeds_differ(seed: int) -> None:
    def kinds(number: int) -> list[int]:
        terms = ComparisonTerms(("mfi", "mfi"), A100, "uniform", 2, 0.9, number)
        return [step.profile for step in PolicyComparison(terms).steps(0, 50)]

    assert kinds(seed) == kinds(seed)
    assert kinds(seed) != kinds(seed + 1)


def clusters() -> int:
    """The clusters in memory, those of other tests among them."""
    return sum(isinstance(one, Cluster) for one in gc.get_objects())


def test_a_comparison_that_is_dropped_leaves_memory_at_once() -> None:
    """The service collects garbage rarely, and a tenant may ask for many comparisons."""
    gc.collect()
    gc.disable()
    try:
        before = clusters()
        kept = PolicyComparison(TERMS)
        kept.steps(0, 50)
        assert clusters() == before + 2
        del kept
        assert clusters() == before
    finally:
        gc.enable()
