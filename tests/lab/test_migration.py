"""Migration pairs with the steady experiment, keeps to its budget, and rejects less."""

from __future__ import annotations

import pytest

from slicewise import Cluster, Geometry, Request, Scheduler, SlicewiseError, policy
from slicewise.core.request import Rejection
from slicewise.lab import experiment as experiment_module
from slicewise.lab.experiment import STEADY_COLUMNS, Steady
from slicewise.lab.migration import (
    MIGRATION_COLUMNS,
    MigratingRun,
    Migration,
    migration_rows,
)
from slicewise.lab.mix import parse_mix
from slicewise.lab.results import steady_rows
from slicewise.lab.runner import run_experiment
from slicewise.lab.workload import draw_kinds, run_generator
from slicewise.policies.base import Policy


def ignore(units: int) -> None:
    """No progress is shown."""


def policies(*names: str) -> tuple[Policy, ...]:
    return tuple(policy(name) for name in names)


def test_without_a_budget_it_is_the_steady_experiment(
    a100: Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experiment_module, "_CHUNK", 333)  # drawn in several pieces
    mixes = (parse_mix("uniform", a100),)
    for name in ("best-fit", "best-fit-strict", "round-robin"):
        still = Migration(mixes, policies(name), 12, 1, 1, load=0.95, lifetimes=6, share=0)
        steady = Steady(mixes, policies(name), 12, 1, 1, True, load=0.95, lifetimes=6)
        ours, theirs = still.simulate(0, 0, 0, ignore), steady.simulate(0, 0, 0, ignore)
        assert ours[: len(STEADY_COLUMNS)].tolist() == theirs.tolist()
        assert ours[len(STEADY_COLUMNS) :].tolist() == [0, 0]
        assert theirs[1] > 0, "a run without a rejection would show little"
    assert still.runs_on_engine(still.policies[0])


def test_it_rejects_less_within_its_budget_and_never_beats_the_oracle(a100: Geometry) -> None:
    mixes = (parse_mix("uniform", a100), parse_mix("bimodal", a100))
    names = ("mfi-overlap", "best-fit")
    settings = {"load": 0.9, "lifetimes": 12}
    moving = Migration(mixes, policies(*names), 30, 2, 1, share=0.05, **settings)  # type: ignore[arg-type]
    still = Migration(mixes, policies(*names), 30, 2, 1, share=0, **settings)  # type: ignore[arg-type]
    outcome = run_experiment(moving, 1, ignore)
    rows = migration_rows(outcome)
    for row, before in zip(rows, steady_rows(run_experiment(still, 1, ignore)), strict=True):
        assert row["share"] == 0.05
        if row["policy"] == "oracle":
            assert row["migrated_share"] is row["moved_slices_share_ci95"] is None
            continue
        shares = [row["oracle_rejected_share"], row["rejected_share"], before["rejected_share"]]
        assert shares == sorted(shares)  # type: ignore[type-var]
        assert shares[1] < shares[2]  # type: ignore[operator]
        assert 0 < row["migrated_share"] <= 0.05  # type: ignore[operator]
        assert row["moved_slices_share"] > 0  # type: ignore[operator]
        assert isinstance(row["migrated_share_ci95"], list)
    assert len(MIGRATION_COLUMNS) == len(outcome.samples[0, 0][0]) == len(outcome.samples[0, 2][0])
    again = run_experiment(moving, 2, ignore)
    assert migration_rows(again) == rows, "for any number of workers"


def test_one_run_has_no_interval(a100: Geometry) -> None:
    experiment = Migration(
        (parse_mix("uniform", a100),), policies("best-fit"), 5, 1, 1, lifetimes=4, oracle=False
    )
    (row,) = migration_rows(run_experiment(experiment, 1, ignore))
    assert row["migrated_share_ci95"] is None


def test_moved_instances_keep_their_end(a100: Geometry) -> None:
    mix = parse_mix("1g.10gb=0.5,4g.40gb=0.5", a100)
    cluster = Cluster.of(a100, 2)
    run = MigratingRun(Scheduler(cluster, "worst-fit"), mix, share=1, settled=3, measured=20)
    small, big = 0, 1
    # Spread out, two small ones keep both GPUs from serving a 4g.
    assert [run.slot(0, small, 9), run.slot(1, small, 9)] == [True, True]
    for instance in list(cluster.instances()):
        run._until.pop(instance.id)
        run._ending[9 + instance.gpu].remove(instance.id)
        cluster.release(instance)
    for gpu in range(2):
        run._schedule_end(cluster.place(gpu, "1g.10gb", gpu), 9 + gpu)
    assert isinstance(Scheduler(cluster, "mfi").submit(Request("4g.40gb")), Rejection)
    assert run.slot(2, big, 100)
    assert (run.moves, run.moved_slices) == (1, 1)
    assert cluster.instance_count == 3
    run.slot(3, small, 1)
    assert (run.moves, run.moved_slices) == (0, 0), "counted from where measuring begins"
    for slot in range(4, 12):
        run.slot(slot, small, 1)
    assert cluster.instance_count == 2, "the 4g and the latest small one"


@pytest.mark.parametrize("name", ["least-lost", "worst-fit", "round-robin"])
def test_no_more_moves_than_the_share_at_any_time(a100: Geometry, name: str) -> None:
    mix = parse_mix("skew-big", a100)
    settled, measured, share = 200, 1800, 0.05
    cluster = Cluster.of(a100, 20)
    run = MigratingRun(Scheduler(cluster, name), mix, share, settled, measured)
    rng = run_generator(7, 0)
    kinds = draw_kinds(rng, mix, settled + measured).tolist()
    lifetimes = rng.integers(1, 60, size=settled + measured).tolist()
    before = total = 0
    for slot, (kind, lifetime) in enumerate(zip(kinds, lifetimes, strict=True)):
        run.slot(slot, kind, lifetime)
        if slot == settled:
            before = 0
        total += run.moves - before
        before = run.moves
        assert total <= share * (slot + 1)
    assert 0 < run.moves <= share * measured
    assert {i.id for i in cluster.instances()} == set(run._until)


def last_empty(a100: Geometry, share: float, upper: str) -> tuple[MigratingRun, Cluster]:
    """A GPU where a 1g blocks the lower half for a 4g, one with a hole or none, one empty."""
    cluster = Cluster.of(a100, 3)
    mix = parse_mix("4g.40gb=0.5,7g.80gb=0.5", a100)
    run = MigratingRun(Scheduler(cluster, "least-lost"), mix, share, settled=0, measured=100)
    for gpu, profile, start in (
        (0, "1g.10gb", 0),
        (0, "3g.40gb", 4),
        (1, "4g.40gb", 0),
        (1, "2g.20gb", 4),
        *(((1, upper, 6),) if upper else ()),
    ):
        run._schedule_end(cluster.place(gpu, profile, start), 50)
    return run, cluster


def test_the_last_empty_gpu_is_worth_a_move(a100: Geometry) -> None:
    four, seven = 0, 1
    run, cluster = last_empty(a100, 3, "")
    assert run.slot(0, four, 9)
    assert run.moves == 1
    assert [(i.profile, i.start) for i in cluster.instances_on(0)] == [
        ("3g.40gb", 4),
        ("4g.40gb", 0),
    ]
    assert run.slot(1, seven, 9), "it was kept for this one"
    # If the 1g could only go to the empty GPU itself, the 4g stays where it was placed.
    run, cluster = last_empty(a100, 3, "1g.10gb")
    assert run.slot(0, four, 9)
    assert (run.moves, cluster.active_gpus) == (0, 3)
    assert [i.profile for i in cluster.instances_on(2)] == ["4g.40gb"]
    # Too little is saved.
    run, cluster = last_empty(a100, 1, "")
    assert run.slot(0, four, 9)
    assert (run.moves, cluster.active_gpus) == (0, 3)


def test_invalid_shares_are_rejected(a100: Geometry) -> None:
    for share in (-0.1, float("nan"), 101):
        with pytest.raises(SlicewiseError, match=r"is not in 0\.\.100"):
            Migration((parse_mix("uniform", a100),), policies("mfi"), share=share)
