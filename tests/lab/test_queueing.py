"""The queue in the steady experiment: the same arrivals, waits that add up, orders that hold."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest

from slicewise import Cluster, Discipline, Geometry, Scheduler, SlicewiseError, WaitingRoom, policy
from slicewise.lab import experiment as experiment_module
from slicewise.lab.experiment import STEADY_COLUMNS, Steady
from slicewise.lab.mix import parse_mix
from slicewise.lab.queueing import (
    CLASS_COLUMNS,
    QUEUE_COLUMNS,
    Queued,
    QueuedRun,
    percentile,
    queue_rows,
)
from slicewise.lab.runner import run_experiment
from slicewise.lab.workload import Ints
from slicewise.policies.base import Policy


def ignore(units: int) -> None:
    """No progress is shown."""


def policies(*names: str) -> tuple[Policy, ...]:
    return tuple(policy(name) for name in names)


def column(sums: Ints, name: str) -> int:
    return int(sums[QUEUE_COLUMNS.index(name)])


def classes(sums: Ints) -> Ints:
    """By profile, priority and `CLASS_COLUMNS`."""
    return sums[len(QUEUE_COLUMNS) :].reshape(-1, 2, len(CLASS_COLUMNS))


def test_without_patience_it_is_the_steady_experiment(
    a100: Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experiment_module, "_CHUNK", 333)  # drawn in several pieces
    mixes = (parse_mix("uniform", a100),)
    for name in ("best-fit", "best-fit-strict", "round-robin"):
        settings: dict[str, Any] = {"load": 0.95, "lifetimes": 6}
        queued = Queued(mixes, policies(name), 12, 1, 1, patience=0, **settings)
        steady = Steady(mixes, policies(name), 12, 1, 1, True, **settings)
        ours, theirs = queued.simulate(0, 0, 0, ignore), steady.simulate(0, 0, 0, ignore)
        assert ours[: len(STEADY_COLUMNS)].tolist() == theirs.tolist()
        assert theirs[1] > 0, "a run without a rejection would show little"
        assert column(ours, "queue") == column(ours, "wait_p99") == 0
        assert classes(ours)[..., CLASS_COLUMNS.index("waited")].sum() == 0
    assert queued.runs_on_engine(queued.policies[0])


@pytest.mark.parametrize("discipline", [Discipline(), Discipline(4), Discipline(100, 3)])
@pytest.mark.parametrize("patience", [0.5, math.inf])
def test_every_request_is_counted(discipline: Discipline, patience: float, a100: Geometry) -> None:
    """Every arrival was placed, gave up or still waits, and the slots waited add up."""
    queued = Queued(
        (parse_mix("skew-big", a100),), policies("mfi"), 10, 1, 3, load=0.98, lifetimes=20,
        warmup=0, patience=patience, discipline=discipline, priority_share=0.2,
    )  # fmt: skip
    sums = queued.simulate(0, 0, 0, ignore)
    placed, waited, wait, gave_up = classes(sums).sum(axis=(0, 1)).tolist()
    arrivals, still = column(sums, "arrivals"), column(sums, "still_waiting")
    assert arrivals == queued.units(0) == placed + gave_up + still
    assert gave_up == column(sums, "rejected")
    sizes = np.array([profile.size for profile in queued.mixes[0].profiles])
    assert column(sums, "rejected_slices") == classes(sums)[..., 3].sum(axis=1) @ sizes
    assert 0 < waited <= placed + gave_up
    urgent = classes(sums)[:, 1].sum(axis=0)
    assert 0.1 * arrivals < urgent[0] < 0.3 * arrivals
    slots = round(patience * queued.mean_lifetime(0)) if math.isfinite(patience) else None
    # Little's law, to the slot: the lengths of the queue add up to the waits.
    if slots is None:
        assert gave_up == 0
        assert column(sums, "queue") >= wait
        assert column(sums, "wait_p50") <= column(sums, "wait_p95") <= column(sums, "wait_p99")
    else:
        assert gave_up > 0
        assert column(sums, "wait_p99") <= slots
        rest = column(sums, "queue") - wait - gave_up * slots
        assert 0 <= rest <= still * slots
        assert (rest > 0) == (still > 0)
    assert column(sums, "longest_queue") >= column(sums, "queue") / arrivals


def test_the_queue_by_hand(a100: Geometry) -> None:
    mix = parse_mix("1g.10gb=0.5,7g.80gb=0.5", a100)
    small, big = 0, 1

    def run(discipline: Discipline, patience: int | None = None) -> QueuedRun:
        cluster = Cluster.of(a100, 1)
        return QueuedRun(Scheduler(cluster, "mfi"), mix, WaitingRoom(discipline), patience)

    fifo = run(Discipline())
    for slot, (kind, lifetime) in enumerate([(small, 3), (big, 2), (small, 9), (small, 1)]):
        fifo.slot(slot, kind, lifetime)
    # The big one was placed as soon as the first small one had left, and two wait behind it.
    assert [ticket.number for ticket in fifo.room] == [2, 3]
    assert fifo.scheduler.cluster.occupied_slices == 8
    fifo.slot(4, small, 1)
    fifo.slot(5, small, 1)
    assert len(fifo.room) == 0, "a lifetime begins when its request is placed"
    sums = fifo.stats.sums(np.zeros(len(STEADY_COLUMNS), np.int64))
    assert classes(sums)[small, 0].tolist() == [5, 3, 3 + 2 + 1, 0]
    assert classes(sums)[big, 0].tolist() == [1, 1, 2, 0]
    assert column(sums, "longest_queue") == 3
    assert [column(sums, f"wait_p{percent}") for percent in (50, 95, 99)] == [1, 3, 3]

    filled = run(Discipline(1))
    for slot, (kind, lifetime) in enumerate([(small, 3), (big, 2), (small, 9), (small, 1)]):
        filled.slot(slot, kind, lifetime)
    assert [ticket.number for ticket in filled.room] == [1], "the small ones passed"

    hasty = run(Discipline(), patience=1)
    for slot, (kind, lifetime) in enumerate([(small, 3), (big, 2), (small, 9)]):
        hasty.slot(slot, kind, lifetime)
    assert [ticket.number for ticket in hasty.room] == [2], "the big one gave up after slot 2"
    sums = hasty.stats.sums(np.zeros(len(STEADY_COLUMNS), np.int64))
    assert classes(sums)[big, 0].tolist() == [0, 1, 0, 1]
    hasty.slot(3, small, 1)
    assert len(hasty.room) == 0


def test_rows_hold_the_waits(a100: Geometry) -> None:
    mixes = (parse_mix("uniform", a100), parse_mix("1g.10gb=0.9,7g.80gb=0.1", a100))
    settings: dict[str, Any] = {"load": 0.92, "lifetimes": 10, "priority_share": 0.3}
    fifo = Queued(mixes, policies("mfi", "least-lost"), 20, 3, 1, **settings)
    rows = queue_rows(run_experiment(fifo, 1, ignore))
    assert [row["policy"] for row in rows] == ["mfi", "least-lost"] * 2
    for row in rows:
        for figure in ("waited_share", "mean_wait_lifetimes", "wait_p95_lifetimes", "mean_queue"):
            interval: Any = row[f"{figure}_ci95"]
            assert interval[0] <= row[figure] <= interval[1]
        assert row["backfill"] == 0
        assert row["patience_lifetimes"] == 1.0
        by_priority: dict[str, Any] = row["by_priority"]  # type: ignore[assignment]
        means = [by_priority[number]["mean_wait_lifetimes"] for number in "10"]
        assert means[0] < means[1], "priority is worth something"
        assert means[0] == pytest.approx(row["priority_mean_wait_lifetimes"])
        by_profile: dict[str, Any] = row["by_profile"]  # type: ignore[assignment]
        assert sum(each["placed"] for each in by_profile.values()) == sum(
            each["placed"] for each in by_priority.values()
        )
    assert list(rows[2]["by_profile"]) == ["1g.10gb", "7g.80gb"]  # type: ignore[call-overload]
    assert queue_rows(run_experiment(fifo, 2, ignore)) == rows, "whoever computes it"


def test_backfill_waits_less_and_infinite_patience_never_gives_up(a100: Geometry) -> None:
    mixes = (parse_mix("uniform", a100),)
    settings: dict[str, Any] = {"load": 0.9, "lifetimes": 15, "patience": math.inf}
    waits = []
    for discipline in (Discipline(), Discipline(16)):
        queued = Queued(mixes, policies("mfi"), 30, 2, 1, discipline=discipline, **settings)
        (row,) = queue_rows(run_experiment(queued, 1, ignore))
        assert row["rejected_share"] == 0
        assert row["patience_lifetimes"] is None
        assert row["priority_mean_wait_lifetimes"] is None
        waits.append(row["mean_wait_lifetimes"])
    assert waits[1] < waits[0]  # type: ignore[operator]


def test_invalid_settings_are_rejected(a100: Geometry) -> None:
    mixes = (parse_mix("uniform", a100),)

    def queued(**settings: Any) -> Queued:
        return Queued(mixes, policies("mfi"), **settings)

    with pytest.raises(SlicewiseError, match="the oracle does not queue"):
        queued(oracle=True)
    for patience in (-1, math.nan, 2e6):
        with pytest.raises(SlicewiseError, match=r"patience .* is not in 0\.\.1000000"):
            queued(patience=patience)
    with pytest.raises(SlicewiseError, match="at load 1 a queue grows forever"):
        queued(patience=math.inf, load=1.0)
    for share in (-0.1, 1.1, math.nan):
        with pytest.raises(SlicewiseError, match=r"priority share .* is not in 0\.\.1"):
            queued(priority_share=share)


def test_percentiles_are_values_that_occur() -> None:
    assert percentile(Counter(), 50) == 0
    assert percentile(Counter({3: 1}), 99) == 3
    counts = Counter({0: 95, 7: 4, 20: 1})
    assert [percentile(counts, percent) for percent in (50, 95, 96, 99, 100)] == [0, 0, 7, 7, 20]
