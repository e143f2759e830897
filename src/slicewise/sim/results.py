"""From finished runs to rows: one figure a column, with 95% intervals and paired differences."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from slicewise.core.errors import SlicewiseError
from slicewise.sim.experiment import ORACLE, Published, Steady
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

_OF_PLACES = ("active_gpus_percent", "fragmentation")
"""Figures about where instances are; the oracle's are nowhere in particular."""

_UNKNOWN = Estimate(math.nan, math.nan, math.nan)


def steady_rows(outcome: Outcome) -> list[Row]:
    """A row per distribution and policy, each compared with the first policy, paired.

    The last row of a distribution is the oracle's, if it was asked for, and every row holds its
    share of rejections; None, with the reason in ``oracle_missing``, where there is no oracle.
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
                if e < policies or figure not in _OF_PLACES
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
                _put(row, figure, _estimate(known.get(figure)))
            here, first = known.get("rejected_share"), ratios[0]["rejected_share"]
            row["compared_with"] = names[0]
            _put(row, "rejected_share_difference", here.minus(first) if here else _UNKNOWN)
            _put(row, "oracle_rejected_share", _estimate(ratios[policies].get("rejected_share")))
            row["oracle_missing"] = missing if isinstance(missing, str) else None
            rows.append(row)
    return rows


def _estimate(ratio: Ratio | None) -> Estimate:
    return _UNKNOWN if ratio is None else ratio.estimate()


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
