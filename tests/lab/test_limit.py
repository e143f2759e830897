"""The limit beside the policies: same arrivals, paired, interrupted or not, or missing."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from slicewise import Catalog, Geometry, Policy, SlicewiseError, policy
from slicewise.lab.experiment import STEADY_COLUMNS, Steady
from slicewise.lab.mix import PUBLISHED, parse_mix
from slicewise.lab.results import Row, steady_rows
from slicewise.lab.runner import Outcome, run_experiment, total_units
from slicewise.policies.mfi import Mfi

FAIR = ("mfi", "mfi-overlap", "first-fit", "best-fit", "worst-fit", "round-robin")


def ignore(units: int) -> None:
    """Ignore progress."""


def steady(*mixes: str, names: tuple[str, ...] = ("mfi", "best-fit"), runs: int = 3) -> Steady:
    a100 = Catalog.builtin().find("A100-80GB").require()
    chosen: tuple[Policy, ...] = tuple(policy(name) for name in names)
    drawn = tuple(parse_mix(mix, a100) for mix in mixes or ("uniform",))
    return Steady(drawn, chosen, 10, runs, 1, load=0.95, lifetimes=12)


def number(row: Row, figure: str) -> float:
    value = row[figure]
    assert isinstance(value, float)
    return value


@pytest.mark.parametrize("mix", PUBLISHED)
def test_no_policy_rejects_less(a100: Geometry, mix: str) -> None:
    """This holds below overload, but is not guaranteed: see docs/experiments.md."""
    policies = tuple(policy(name) for name in FAIR)
    experiment = Steady((parse_mix(mix, a100),), policies, 100, 1, 1, load=0.9, lifetimes=10)
    *others, limit = steady_rows(run_experiment(experiment, 1, ignore))
    assert limit["policy"] == "oracle"
    for row in others:
        assert number(limit, "rejected_share") < number(row, "rejected_share")
        assert number(limit, "rejected_slices_share") < number(row, "rejected_slices_share")
        assert number(limit, "utilization_percent") > number(row, "utilization_percent")


def test_every_row_carries_the_limit() -> None:
    rows = steady_rows(run_experiment(steady("uniform", "bimodal"), 1, ignore))
    assert [row["policy"] for row in rows] == ["mfi", "best-fit", "oracle"] * 2
    for row in rows:
        last = rows[2] if row["distribution"] == "uniform" else rows[5]
        assert row["oracle_rejected_share"] == last["rejected_share"]
        assert row["oracle_rejected_share_ci95"] == last["rejected_share_ci95"]
        assert row["oracle_missing"] is None
        assert list(row) == list(rows[0])
    for limit in (rows[2], rows[5]):
        first = rows[rows.index(limit) - 2]
        gap = number(limit, "rejected_share") - number(first, "rejected_share")
        assert limit["rejected_share_difference"] == pytest.approx(gap)
        assert limit["rejected_share_difference_ci95"] is not None
        for figure in ("active_gpus_percent", "fragmentation"):
            assert limit[figure] is None
            assert limit[f"{figure}_ci95"] is None
    assert rows[2]["rejected_share"] != rows[5]["rejected_share"]
    json.dumps(rows, allow_nan=False)


def test_the_limit_sees_the_same_arrivals() -> None:
    experiment = steady()
    samples = [experiment.simulate(0, entrant, 2, ignore) for entrant in experiment.entrants(0)]
    asked = [STEADY_COLUMNS.index(name) for name in ("arrivals", "slices")]
    assert len(samples) == 3
    assert len({tuple(sums[asked].tolist()) for sums in samples}) == 1


def test_workers_do_not_change_the_limit() -> None:
    experiment = steady(runs=4)
    ticks: list[int] = []
    alone = run_experiment(experiment, 1, ticks.append)
    together = run_experiment(experiment, 2, ticks.append)
    assert sum(ticks) == 2 * total_units(experiment) == 2 * 3 * 4 * experiment.units(0)
    assert steady_rows(alone) == steady_rows(together)


def test_without_the_limit_the_policies_are_the_same() -> None:
    experiment = steady()
    alone = replace(experiment, oracle=False)
    rows = steady_rows(run_experiment(alone, 1, ignore))
    beside = steady_rows(run_experiment(experiment, 1, ignore))
    about_it = {"oracle_rejected_share", "oracle_rejected_share_ci95", "oracle_missing"}
    assert [row["policy"] for row in rows] == ["mfi", "best-fit"]
    for row, other in zip(rows, beside, strict=False):
        assert {k for k in row if row[k] != other[k]} == about_it
        assert row["oracle_rejected_share"] is row["oracle_rejected_share_ci95"] is None
        assert row["oracle_missing"] == "it was not requested"


def test_without_an_exact_rule_there_is_a_reason_and_no_figure() -> None:
    """In one experiment, one mix may have a limit and another not."""
    experiment = steady("uniform", "1g.10gb=0.5,1g.10gb+me=0.5")
    assert [len(experiment.entrants(mix)) for mix in range(2)] == [3, 2]
    rows = steady_rows(run_experiment(experiment, 1, ignore))
    assert [row["policy"] for row in rows] == ["mfi", "best-fit", "oracle"] * 2
    assert all(row["oracle_missing"] is None for row in rows[:3])
    assert all(list(row) == list(rows[0]) for row in rows)
    for row in rows[3:]:
        assert row["oracle_rejected_share"] is row["oracle_rejected_share_ci95"] is None
        assert "media-extension may run out" in str(row["oracle_missing"])
    assert rows[5]["rejected_share"] is rows[5]["rejected_share_difference"] is None
    assert rows[5]["utilization_percent"] is None
    assert rows[3]["rejected_share"] is not None


def test_an_interruption_keeps_the_runs_that_the_limit_finished() -> None:
    experiment = steady(runs=5)

    def stop_after(runs: int) -> Outcome:
        done = 0

        def tick(units: int) -> None:
            nonlocal done
            done += 1
            if done > runs:
                raise KeyboardInterrupt

        return run_experiment(experiment, 1, tick)

    outcome = stop_after(8)  # three entrants in turn: the third run of the limit is missing
    assert outcome.interrupted
    assert outcome.paired_runs(0) == [0, 1]
    assert steady_rows(outcome) == steady_rows(run_experiment(steady(runs=2), 1, ignore))
    with pytest.raises(SlicewiseError, match="interrupted before every policy"):
        steady_rows(stop_after(2))


class Impostor(Mfi):
    """A policy that calls itself the limit."""

    name = "oracle"


def test_no_policy_may_have_the_name_of_the_limit(a100: Geometry) -> None:
    mixes = (parse_mix("uniform", a100),)
    with pytest.raises(SlicewiseError, match="'oracle' is the name of the limit"):
        Steady(mixes, (Impostor(),))
    allowed = Steady(mixes, (Impostor(),), 5, 1, load=0.95, lifetimes=6, oracle=False)
    (row,) = steady_rows(run_experiment(allowed, 1, ignore))
    assert row["fragmentation"] is not None
    assert row["oracle_rejected_share"] is None
