"""Turns finished runs into rows: a column per figure, with 95% intervals and differences."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from slicewise.core.errors import SlicewiseError
from slicewise.lab.experiment import ORACLE, STEADY_COLUMNS, Published, Steady
from slicewise.lab.measure import PARTS, Measure
from slicewise.lab.mix import Mix
from slicewise.lab.runner import Outcome
from slicewise.lab.statistics import Estimate, Floats, Ratio
from slicewise.lab.workload import BINS

Row = dict[str, object]
"""A row of results, with the interval of a figure as ``..._ci95``."""

Labels = Mapping[str, str]
"""Names of policies in the rows, if not their own."""


def published_rows(
    outcome: Outcome, reference: str = "mfi", labels: Labels | None = None
) -> list[Row]:
    """Return a row per distribution, policy and demand bin.

    ``scheduled_ratio_to_mfi`` compares with the policy named ``reference``; it is None if that
    policy did not run.
    """
    experiment = outcome.experiment
    assert isinstance(experiment, Published)
    names = [policy.name for policy in experiment.policies]
    rows: list[Row] = []
    for m, mix, runs in _finished(outcome):
        samples = [_stack(outcome, (m, p), runs) for p in range(len(names))]
        capacity = float(experiment.gpus * experiment.measure.units(mix.geometry))
        gpus = float(experiment.gpus)
        compared = samples[names.index(reference)] if reference in names else None
        for p, name in enumerate(names):
            for b in range(BINS):
                arrivals, accepted, scheduled, occupied, active, fragmentation = samples[p][:, b].T
                one = np.ones(len(runs))
                row: Row = {
                    "distribution": mix.name,
                    "policy": (labels or {}).get(name, name),
                    "demand": round(b / BINS, 2),
                }
                put_estimate(row, "acceptance_rate", Ratio(accepted, arrivals).estimate())
                if compared is None:
                    row["scheduled_ratio_to_mfi"] = row["scheduled_ratio_to_mfi_ci95"] = None
                else:
                    ratio = Ratio(scheduled, compared[:, b, 2])
                    put_estimate(row, "scheduled_ratio_to_mfi", ratio.estimate())
                put_estimate(
                    row, "utilization_percent", Ratio(100 * occupied, capacity * one).estimate()
                )
                put_estimate(row, "active_gpus_percent", Ratio(100 * active, gpus * one).estimate())
                if experiment.measure is Measure.COMPUTE:  # over slots, not at the bin's end
                    severity = Ratio(fragmentation / PARTS, arrivals)
                else:
                    severity = Ratio(fragmentation, gpus * one)
                put_estimate(row, "fragmentation", severity.estimate())
                rows.append(row)
    return rows


def mean_fragmentation(outcome: Outcome, labels: Labels | None = None) -> list[Row]:
    """Return the mean F of a run per distribution and policy, over all GPUs and demand bins.

    In compute slices it is the mean over active GPUs and slots.
    """
    experiment = outcome.experiment
    assert isinstance(experiment, Published)
    rows: list[Row] = []
    for m, mix, runs in _finished(outcome):
        for p, policy in enumerate(experiment.policies):
            sums = _stack(outcome, (m, p), runs)
            if experiment.measure is Measure.COMPUTE:
                severity = sums[:, :, 5].sum(axis=1) / sums[:, :, 0].sum(axis=1) / PARTS
            else:
                severity = sums[:, :, 5].mean(axis=1) / experiment.gpus
            row: Row = {
                "distribution": mix.name,
                "policy": (labels or {}).get(policy.name, policy.name),
            }
            put_estimate(row, "fragmentation", Ratio(severity, np.ones(len(runs))).estimate())
            rows.append(row)
    return rows


_STEADY: dict[str, Callable[[Floats, float, float], Ratio]] = {
    "rejected_share": lambda s, slices, gpus: Ratio(s[:, 1], s[:, 0]),
    "rejected_slices_share": lambda s, slices, gpus: Ratio(s[:, 3], s[:, 2]),
    "utilization_percent": lambda s, slices, gpus: Ratio(100 * s[:, 5], s[:, 0] * slices),
    "active_gpus_percent": lambda s, slices, gpus: Ratio(100 * s[:, 6], s[:, 0] * gpus),
    "fragmentation": lambda s, slices, gpus: Ratio(s[:, 7], s[:, 0] * gpus),
}
"""The figures of the steady experiment, from its sums by run."""

WHOLES: Mapping[str, float] = {
    "acceptance_rate": 1,
    "rejected_share": 1,
    "rejected_slices_share": 1,
    "oracle_rejected_share": 1,
    "gave_up_share": 1,
    "waited_share": 1,
    "false_wait_share": 1,
    "fairness": 1,
    "utilization_percent": 100,
    "active_gpus_percent": 100,
    "lost_percent": 100,
}
"""The figures that are parts of a whole, in any experiment."""

_POSITIONAL = ("active_gpus_percent", "fragmentation")
"""Figures that need the positions of instances, which an oracle does not have."""

_UNKNOWN = Estimate(math.nan, math.nan, math.nan)


def steady_rows(outcome: Outcome) -> list[Row]:
    """Return a row per distribution and policy, each compared with the first policy, paired.

    The last row of a distribution is the oracle's, if requested. Every row has the oracle's share
    of rejections, or None and the reason in ``oracle_missing``. With windows, ``windows`` has the
    share of rejections in each of them.
    """
    experiment = outcome.experiment
    assert isinstance(experiment, Steady)
    policies = len(experiment.policies)
    names = [policy.name for policy in experiment.policies] + [ORACLE] * experiment.oracle
    rows: list[Row] = []
    for m, mix, runs in _finished(outcome):
        missing = experiment.limit(m)
        slices = float(experiment.gpus * mix.geometry.slices)
        samples = [_stack(outcome, (m, e), runs) for e in experiment.entrants(m)]
        ratios = [
            {
                figure: ratio(sums, slices, experiment.gpus)
                for figure, ratio in _STEADY.items()
                if e < policies or figure not in _POSITIONAL
            }
            for e, sums in enumerate(samples)
        ]
        ratios += [{}] * (policies + 1 - len(ratios))  # an oracle that did not run
        for name, known in zip(names, ratios, strict=False):
            row: Row = {
                "policy": name,
                "distribution": mix.name,
                "load": experiment.load,
                "gpus": experiment.gpus,
                "model": mix.geometry.model,
                "runs": len(runs),
            }
            for figure in _STEADY:
                put_estimate(row, figure, _estimate(known.get(figure)))
            here, first = known.get("rejected_share"), ratios[0]["rejected_share"]
            row["compared_with"] = names[0]
            put_estimate(row, "rejected_share_difference", here.minus(first) if here else _UNKNOWN)
            put_estimate(
                row, "oracle_rejected_share", _estimate(ratios[policies].get("rejected_share"))
            )
            row["oracle_missing"] = missing if isinstance(missing, str) else None
            if experiment.windows:
                at = names.index(name)
                row["windows"] = _windows(samples[0], samples[at]) if at < len(samples) else []
            rows.append(row)
    return rows


def _windows(first: Floats, sums: Floats) -> list[Row]:
    """Return the share of rejections in each part of the measured time, and the difference."""
    windows = (first.shape[1] - len(STEADY_COLUMNS)) // 2
    rows: list[Row] = []
    for column in range(len(STEADY_COLUMNS), len(STEADY_COLUMNS) + windows):
        here, there = (Ratio(s[:, column + windows], s[:, column]) for s in (sums, first))
        row: Row = {}
        put_estimate(row, "rejected_share", here.estimate())
        put_estimate(row, "rejected_share_difference", here.minus(there))
        rows.append(row)
    return rows


def _estimate(ratio: Ratio | None) -> Estimate:
    return _UNKNOWN if ratio is None else ratio.estimate()


def _finished(outcome: Outcome) -> list[tuple[int, Mix, list[int]]]:
    """Return the mixes that have runs finished by every policy, with these runs."""
    mixes = [(m, mix, outcome.paired_runs(m)) for m, mix in enumerate(outcome.experiment.mixes)]
    finished = [entry for entry in mixes if entry[2]]
    if not finished:
        raise SlicewiseError("interrupted before every policy had finished a run: no results")
    return finished


def _stack(outcome: Outcome, cell: tuple[int, int], runs: list[int]) -> Floats:
    return np.array([outcome.samples[cell][run] for run in runs], np.float64)


def put_estimate(row: Row, figure: str, estimate: Estimate) -> None:
    """Add a figure and its interval to a row; NaN becomes None, because JSON has no NaN.

    The interval of a part of a whole ends at 0 and at the whole.
    """
    row[figure] = None if math.isnan(estimate.value) else estimate.value
    low, high = estimate.low, estimate.high
    if figure in WHOLES:
        low, high = max(0.0, low), min(WHOLES[figure], high)
    row[f"{figure}_ci95"] = None if math.isnan(estimate.low) else [low, high]
