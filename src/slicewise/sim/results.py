"""From finished runs to rows: one figure a column, with 95% intervals and paired differences."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from slicewise.core.errors import SlicewiseError
from slicewise.sim.experiment import Published, Steady
from slicewise.sim.mix import Mix
from slicewise.sim.runner import Outcome
from slicewise.sim.statistics import Estimate, Floats, Ratio
from slicewise.sim.workload import BINS

Row = dict[str, object]
"""A line of results; intervals stand beside their figure as ``..._ci95``."""

Labels = Mapping[str, str]
"""What to call policies in the rows, where not by their own names."""


def published_rows(
    outcome: Outcome, reference: str = "mfi", labels: Labels | None = None
) -> list[Row]:
    """A row per distribution, policy and demand bin.

    ``scheduled_ratio_to_mfi`` compares with the policy named ``reference``; it is None when
    that one did not run.
    """
    experiment = outcome.experiment
    assert isinstance(experiment, Published)
    names = [policy.name for policy in experiment.policies]
    rows: list[Row] = []
    for m, mix, runs in _finished(outcome):
        samples = [_stack(outcome, (m, p), runs) for p in range(len(names))]
        capacity = float(experiment.gpus * mix.geometry.slices)
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
                _put(row, "acceptance_rate", Ratio(accepted, arrivals).estimate())
                if compared is None:
                    row["scheduled_ratio_to_mfi"] = row["scheduled_ratio_to_mfi_ci95"] = None
                else:
                    ratio = Ratio(scheduled, compared[:, b, 2])
                    _put(row, "scheduled_ratio_to_mfi", ratio.estimate())
                _put(row, "utilization_percent", Ratio(100 * occupied, capacity * one).estimate())
                _put(row, "active_gpus_percent", Ratio(100 * active, gpus * one).estimate())
                _put(row, "fragmentation", Ratio(fragmentation, gpus * one).estimate())
                rows.append(row)
    return rows


def mean_fragmentation(outcome: Outcome, labels: Labels | None = None) -> list[Row]:
    """Mean F over GPUs, averaged over the demand bins, per distribution and policy."""
    experiment = outcome.experiment
    rows: list[Row] = []
    for m, mix, runs in _finished(outcome):
        for p, policy in enumerate(experiment.policies):
            severity = _stack(outcome, (m, p), runs)[:, :, 5].mean(axis=1) / experiment.gpus
            row: Row = {
                "distribution": mix.name,
                "policy": (labels or {}).get(policy.name, policy.name),
            }
            _put(row, "fragmentation", Ratio(severity, np.ones(len(runs))).estimate())
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


def steady_rows(outcome: Outcome) -> list[Row]:
    """A row per distribution and policy, each compared with the first policy, paired."""
    experiment = outcome.experiment
    assert isinstance(experiment, Steady)
    rows: list[Row] = []
    for m, mix, runs in _finished(outcome):
        slices = float(experiment.gpus * mix.geometry.slices)
        samples = [_stack(outcome, (m, p), runs) for p in range(len(experiment.policies))]
        for policy, sums in zip(experiment.policies, samples, strict=True):
            row: Row = {
                "policy": policy.name,
                "distribution": mix.name,
                "load": experiment.load,
                "gpus": experiment.gpus,
                "model": mix.geometry.model,
                "runs": len(runs),
            }
            for figure, ratio in _STEADY.items():
                _put(row, figure, ratio(sums, slices, experiment.gpus).estimate())
            first = _STEADY["rejected_share"](samples[0], slices, experiment.gpus)
            here = _STEADY["rejected_share"](sums, slices, experiment.gpus)
            row["compared_with"] = experiment.policies[0].name
            _put(row, "rejected_share_difference", here.minus(first))
            rows.append(row)
    return rows


def _finished(outcome: Outcome) -> list[tuple[int, Mix, list[int]]]:
    """The mixes with the runs that every policy has finished; those with none are left out."""
    mixes = [(m, mix, outcome.paired_runs(m)) for m, mix in enumerate(outcome.experiment.mixes)]
    finished = [entry for entry in mixes if entry[2]]
    if not finished:
        raise SlicewiseError("interrupted before every policy had finished a run: no results")
    return finished


def _stack(outcome: Outcome, cell: tuple[int, int], runs: list[int]) -> Floats:
    return np.array([outcome.samples[cell][run] for run in runs], np.float64)


def _put(row: Row, figure: str, estimate: Estimate) -> None:
    row[figure] = _number(estimate.value)
    known = not math.isnan(estimate.low)
    row[f"{figure}_ci95"] = [estimate.low, estimate.high] if known else None


def _number(value: float) -> float | None:
    """JSON has no NaN: what is not known is null."""
    return None if math.isnan(value) else value
