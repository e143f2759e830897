"""Plans: the same requests for every cluster size, and the sizes that a full search finds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slicewise import Catalog, Geometry, SlicewiseError, policy
from slicewise.core.cluster import Cluster
from slicewise.core.request import Request
from slicewise.lab import planning
from slicewise.lab.demand import Demand, SameDemand
from slicewise.lab.experiment import ORACLE, Steady, Tick
from slicewise.lab.mix import PUBLISHED, Mix, parse_mix
from slicewise.lab.planning import (
    ENOUGH,
    RUNS,
    Count,
    Plan,
    Question,
    curve_rows,
    make_plans,
    percent,
    plan_rows,
    runs_for,
    saved_percent,
)
from slicewise.lab.results import Row, steady_rows
from slicewise.lab.runner import Outcome, run_experiment
from slicewise.lab.workload import draw_kinds, longest_lifetime, run_generator
from slicewise.policies.base import Policy, ScanPolicy, Spot
from slicewise.policies.mfi import Mfi

A100 = Catalog.builtin().find("A100-80GB").require()


def ignore(units: int) -> None:
    """Ignore progress."""


@contextmanager
def unwatched(clusters: int, units: int) -> Iterator[Tick]:
    yield ignore


def question(
    *names: str,
    mixes: tuple[str, ...] = ("uniform",),
    demand: float = 6,
    target: float = 0.02,
    count: Count = Count.REQUESTS,
    runs: int = 6,
    step: int = 1,
    oracle: bool = True,
) -> Question:
    return Question(
        tuple(parse_mix(mix, A100) for mix in mixes),
        tuple(policy(name) for name in names or ("least-lost", "first-fit")),
        demand,
        target,
        count,
        runs=runs,
        step=step,
        oracle=oracle,
    )


def only(plans: list[Plan]) -> Plan:
    (plan,) = plans
    return plan


@given(
    st.lists(st.integers(1, 100), min_size=6, max_size=6),
    st.floats(1, 3000),
    st.lists(st.integers(1, 20_000), min_size=1, max_size=20),
)
def test_lifetimes_are_the_same_for_every_size(
    weights: list[int], gpus: float, sizes: list[int]
) -> None:
    shares = tuple(weight / sum(weights) for weight in weights)
    demand = Demand.of_gpus(Mix("any", A100, A100.plain_profiles, shares), gpus)
    for size in sizes:
        load = demand.load_on(size)
        assert longest_lifetime(demand.mix, size, load) == demand.longest
    granularity = demand.mix.mean_size / A100.slices
    assert demand.offered_gpus == pytest.approx(gpus, abs=granularity / 4 + 1e-9)


def test_half_a_slot_is_where_rounding_would_differ() -> None:
    """With demand / size as the load, clusters of some sizes would get longer lifetimes."""
    mix, gpus, sizes = parse_mix("2g.20gb=1", A100), 85.0625, range(50, 200)
    assert {longest_lifetime(mix, size, gpus / size) for size in sizes} == {680, 681}
    demand = Demand.of_gpus(mix, gpus)
    same = {longest_lifetime(mix, size, demand.load_on(size)) for size in sizes}
    assert same == {demand.longest}


def test_every_cluster_gets_the_same_requests() -> None:
    """Arrivals, the slices they ask for and, on clusters so large that all fit, all totals."""
    asked = question("least-lost", "first-fit", "worst-fit")
    trials = tuple((entrant, gpus) for entrant in range(4) for gpus in (3, 7, 40, 90))
    experiment = replace(asked.experiment(), trials=(trials,))
    for run in range(3):
        sums = [experiment.simulate(0, trial, run, ignore) for trial in experiment.entrants(0)]
        came = {(int(each[0]), int(each[2])) for each in sums}
        assert len(came) == 1
        roomy = {
            tuple(each[[0, 1, 2, 3, 5]].tolist())
            for each, (_, gpus) in zip(sums, trials, strict=True)
            if gpus == 90
        }
        assert len(roomy) == 1
    assert len(came | {tuple(map(int, experiment.simulate(0, 0, 9, ignore)[[0, 2]]))}) == 2


def test_a_point_is_what_the_steady_experiment_gives() -> None:
    asked = question("first-fit", "best-fit", runs=4)
    plans = make_plans(asked, 1, unwatched)
    for row in curve_rows(plans)[::5]:
        gpus, load = row["gpus"], row["simulate_load"]
        assert isinstance(gpus, int)
        assert isinstance(load, float)
        steady = Steady(asked.mixes, asked.policies, gpus, 4, 1, load=load)
        rows = {each["policy"]: each for each in steady_rows(run_experiment(steady, 1, ignore))}
        same = rows[row["policy"]]
        assert row["rejected_share"] == same["rejected_share"]
        assert row["rejected_slices_share"] == same["rejected_slices_share"]


@pytest.mark.parametrize("mix", PUBLISHED)
def test_the_demand_is_the_mean_of_occupied_slices(mix: str) -> None:
    """Occupied slices of a cluster that rejects nothing: their mean and standard deviation."""
    demand = Demand.of_gpus(parse_mix(mix, A100), 85)
    assert demand.offered_gpus == pytest.approx(85, rel=0.003)
    rng = run_generator(1, 0)
    slots = 400 * demand.longest
    sizes = np.array([profile.size for profile in demand.mix.profiles])
    asked = sizes[draw_kinds(rng, demand.mix, slots)]
    ends = np.arange(slots) + rng.integers(1, demand.longest, size=slots, endpoint=True)
    left = np.bincount(ends, asked, minlength=slots + demand.longest + 1)[:slots]
    occupied = np.cumsum(asked - left)[demand.longest :] / A100.slices
    assert float(occupied.mean()) == pytest.approx(demand.offered_gpus, rel=0.005)
    assert float(occupied.std()) == pytest.approx(demand.spread_gpus, rel=0.1)


def test_a_demand_of_whole_gpus_is_met_exactly() -> None:
    whole = Demand.of_gpus(parse_mix("7g.80gb=1", A100), 5)
    assert whole.longest == 9
    assert whole.offered_gpus == 5
    shortest = Demand.of_gpus(parse_mix("7g.80gb=1", A100), 1)
    assert (shortest.longest, shortest.offered_gpus, shortest.spread_gpus) == (1, 1, 0)


@pytest.mark.parametrize("gpus", [0.85, 0, -3, math.nan, 1e9])
def test_a_demand_is_in_gpus(gpus: float) -> None:
    with pytest.raises(SlicewiseError, match="not its share of a cluster"):
        Demand.of_gpus(parse_mix("uniform", A100), gpus)


@pytest.mark.parametrize("count", Count)
def test_answers_equal_an_exhaustive_search(count: Count) -> None:
    """The slow twin: every cluster of 1 to 24 GPUs, and the definition word for word."""
    asked = question("least-lost", "first-fit", "worst-fit", mixes=("bimodal",), count=count)
    plan = only(make_plans(asked, 1, unwatched))
    sizes = range(1, 25)
    trials = tuple((entrant, gpus) for entrant in range(4) for gpus in sizes)
    everything = replace(asked.experiment(), trials=(trials,))
    outcome = run_experiment(everything, 1, ignore)
    name = "rejected_share" if count is Count.REQUESTS else "rejected_slices_share"
    for row, (entrant, found) in zip(
        plan_rows(asked, [plan]), enumerate(plan.found.values()), strict=True
    ):
        shares = {}
        for cell, (who, gpus) in enumerate(trials):
            if who == entrant:
                sums = sum(outcome.samples[0, cell].values())
                arrivals, rejected, slices, rejected_slices = np.asarray(sums)[:4].tolist()
                requests = count is Count.REQUESTS
                shares[gpus] = rejected / arrivals if requests else rejected_slices / slices
        needed = min(g for g in sizes if all(shares[larger] <= 0.02 for larger in range(g, 25)))
        assert row["needed_gpus"] == found.search.needed == needed
        assert row[name] == shares[needed]
        low, high = found.search.interval
        assert low is not None
        assert high is not None
        assert low <= needed <= high


def test_rows_have_the_gpus_saved_and_the_gpus_above_the_limit() -> None:
    asked = question("least-lost", "first-fit", mixes=("uniform", "skew-small"))
    plans = make_plans(asked, 1, unwatched)
    rows = plan_rows(asked, plans)
    assert [(row["distribution"], row["policy"]) for row in rows] == [
        (mix, name)
        for mix in ("uniform", "skew-small")
        for name in ("least-lost", "first-fit", ORACLE)
    ]
    for mix in range(2):
        ours, reference, limit = rows[3 * mix : 3 * mix + 3]
        needs = [row["needed_gpus"] for row in (ours, reference, limit)]
        assert all(isinstance(gpus, int) for gpus in needs)
        our, their, least = (int(str(gpus)) for gpus in needs)
        assert least <= our <= their
        assert ours["saved_gpus"] == their - our
        assert ours["saved_percent"] == pytest.approx(100 * (their - our) / their)
        assert ours["above_limit_gpus"] == our - least
        low, high = _ends(ours, "saved_gpus_ci95")
        assert low <= their - our <= high
        assert reference["saved_gpus"] == 0
        assert reference["saved_gpus_ci95"] == [0, 0]
        assert limit["above_limit_gpus"] == 0
        assert limit["saved_gpus"] == their - least
        demand = asked.demands[mix]
        assert ours["load"] == pytest.approx(demand.offered_gpus / our)
        assert ours["target_rejected_share"] == 0.02
        share = ours["rejected_share"]
        assert isinstance(share, float)
        assert share <= 0.02
        low, high = _ends(ours, "rejected_share_ci95")
        assert low < share < high
    curve = curve_rows(plans)
    for drawn in PUBLISHED:
        for name in ("least-lost", "first-fit", ORACLE):
            mine = [r for r in curve if (r["distribution"], r["policy"]) == (drawn, name)]
            gpus = [int(str(row["gpus"])) for row in mine]
            assert gpus == sorted(set(gpus))
            assert (len(gpus) >= 5) == (drawn in ("uniform", "skew-small"))


def _ends(row: Row, name: str) -> tuple[float, float]:
    ends = row[name]
    assert isinstance(ends, list)
    low, high = ends
    return low, high


def test_one_run_gives_an_answer_without_intervals() -> None:
    asked = question(runs=1, target=0.1)
    ours, *_ = plan_rows(asked, make_plans(asked, 1, unwatched))
    assert isinstance(ours["needed_gpus"], int)
    for name in ("needed_gpus", "saved_gpus", "above_limit_gpus", "rejected_share"):
        assert ours[f"{name}_ci95"] is None


def test_sizes_are_multiples_of_the_step() -> None:
    fine, coarse = question(), question(step=4)
    plan = only(make_plans(coarse, 1, unwatched))
    for found in plan.found.values():
        assert all(gpus % 4 == 0 for gpus in found.sums)
        exact = only(make_plans(fine, 1, unwatched)).found[found.policy].search.needed
        assert exact is not None
        assert found.search.needed == -(-exact // 4) * 4


def test_the_limit_can_be_left_out_or_missing() -> None:
    without = question(oracle=False)
    plan = only(make_plans(without, 1, unwatched))
    assert list(plan.found) == ["least-lost", "first-fit"]
    for row in plan_rows(without, [plan]):
        assert row["oracle_missing"] == "it was not requested"
        assert row["above_limit_gpus"] is None
        assert row["above_limit_gpus_ci95"] is None
    media = replace(question(), mixes=(parse_mix("1g.10gb+me=0.5,3g.40gb=0.5", A100),))
    plan = only(make_plans(media, 1, unwatched))
    assert list(plan.found) == ["least-lost", "first-fit"]
    assert "may run out" in str(plan.missing)


class Never(ScanPolicy):
    """Rejects every request."""

    name: ClassVar[str] = "never"
    summary: ClassVar[str] = "Rejects all."

    def choose(self, cluster: Cluster, request: Request) -> Spot | None:
        return None


def test_a_policy_that_never_meets_the_target() -> None:
    policies: tuple[Policy, ...] = (Never(), policy("first-fit"))
    asked = replace(question(demand=1, runs=2, target=0.3), policies=policies, lifetimes=8)
    plan = only(make_plans(asked, 1, unwatched))
    lost, reference, _ = plan_rows(asked, [plan])
    assert max(plan.found["never"].sums) == asked.demands[0].longest
    for name in ("needed_gpus", "needed_gpus_ci95", "load", "rejected_share", "saved_gpus"):
        assert lost[name] is None
    assert lost["saved_percent"] is None
    assert reference["saved_gpus"] == 0
    assert plan_rows(replace(asked, reference="never"), [plan])[1]["saved_percent"] is None


def test_an_interruption_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(experiment: SameDemand, workers: int | None, tick: Tick) -> Outcome:
        return Outcome(experiment, interrupted=True)

    monkeypatch.setattr(planning, "run_experiment", stopped)
    with pytest.raises(KeyboardInterrupt):
        make_plans(question(), 1, unwatched)


def test_short_rounds_start_no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int | None] = []

    def watched(experiment: SameDemand, workers: int | None, tick: Tick) -> Outcome:
        seen.append(workers)
        return run_experiment(experiment, 1, tick)

    monkeypatch.setattr(planning, "run_experiment", watched)
    make_plans(question(), 7, unwatched)
    assert set(seen) == {1}
    seen.clear()
    slow: tuple[Policy, ...] = (policy("first-fit"), Never())
    make_plans(replace(question(demand=1, runs=2), policies=slow, lifetimes=5), 7, unwatched)
    assert set(seen) >= {7}


def test_the_target_determines_the_number_of_runs() -> None:
    asked = question("first-fit", demand=85, target=0.001)
    assert runs_for(asked, None) == RUNS
    assert runs_for(asked, 7) == 7
    seldom = replace(asked, target=0.00001)
    wanted = runs_for(seldom, None)
    measured = 37 * asked.demands[0].longest
    assert (wanted - 1) * measured * 0.00001 < ENOUGH <= wanted * measured * 0.00001
    with pytest.raises(SlicewiseError, match=rf"2\.9 rejections.*needs 100: use --runs {wanted}"):
        runs_for(seldom, 20)
    with pytest.raises(SlicewiseError, match="or --runs 69658"):
        runs_for(replace(asked, target=1e-7), None)
    # A slice rejected is less than a request rejected, since the largest are rejected first.
    slices = runs_for(replace(seldom, count=Count.SLICES), None)
    assert slices == pytest.approx(wanted * 8 / 3.5, abs=2)
    mixed = question("first-fit", demand=85, target=0.00001, mixes=tuple(PUBLISHED))
    assert runs_for(mixed, None) > wanted


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"target": 0.0}, "the target must be 0.00001% to 50%, not 0%"),
        ({"target": 0.7}, "not 70%"),
        ({"target": math.nan}, "the target must be"),
        ({"step": 0}, "step must be 1 to"),
        ({"reference": "mfi"}, "the reference 'mfi' is not among the policies"),
        ({"warmup": 40}, "duration must be 41 to"),
        ({"runs": 0}, "runs must be"),
        ({"gpus_per_node": 0}, "gpus per node must be"),
        ({"mixes": ()}, "at least one distribution"),
        ({"demand": 0.5}, "load must be 1 to"),
        ({"policies": (policy("first-fit"), policy("first-fit"))}, "named twice"),
    ],
)
def test_invalid_questions_are_rejected(changes: dict[str, object], problem: str) -> None:
    fields = {**question().__dict__, **changes}
    with pytest.raises(SlicewiseError) as refused:
        Question(**fields)
    assert problem in str(refused.value)


def test_no_policy_may_have_the_name_of_the_limit() -> None:
    class Named(Mfi):
        name = ORACLE

    with pytest.raises(SlicewiseError, match="name of the limit"):
        replace(question(), policies=(Named(), policy("first-fit")))
    replace(question(oracle=False), policies=(Named(), policy("first-fit")))


def test_shares_are_formatted_in_percent() -> None:
    assert percent(0.001) == "0.1%"
    assert percent(1e-7) == "0.00001%"
    assert saved_percent(90, 100) == 10
    assert saved_percent(None, 100) is None
    assert saved_percent(90, None) is None


def test_other_gpu_models(geometry: Geometry) -> None:
    """Every model of the catalog can be planned for."""
    asked = Question(
        (parse_mix("uniform", geometry),),
        (policy("first-fit"),),
        demand=2,
        target=0.2,
        runs=2,
        lifetimes=6,
    )
    plan = only(make_plans(asked, 1, unwatched))
    assert plan.found["first-fit"].search.needed is not None
