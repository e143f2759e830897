"""What the digits of published means say about how they were made.

A mean over R runs of a share of M GPUs is a multiple of 1/(M R). A figure that is not such a
multiple was not made with M GPUs and R runs, if it was printed without rounding.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from slicewise.lab.paper.published import PublishedFigures, Values, published

MOST_GPUS = 200
MOST_RUNS = 2000
ROUNDED = 2
"""Utilization fits runs whose percentages were rounded to so many decimals before the mean."""


@dataclass(frozen=True)
class Impossible:
    """A published share of GPUs that no whole number of GPUs, added up over the runs, gives."""

    distribution: str
    policy: str
    percent: float
    sum: Fraction
    """What the active GPUs of all runs would add up to."""


def impossible(gpus: int, paper: PublishedFigures | None = None) -> list[Impossible]:
    """Return the published shares of active GPUs that so many GPUs cannot give."""
    paper = paper or published()
    return [
        Impossible(distribution, policy, percent, total)
        for distribution, policy, percent in _each(paper.figures["active_gpus_percent"])
        if (total := _exact(percent) * gpus * paper.runs / 100).denominator != 1
    ]


def possible_gpus(paper: PublishedFigures | None = None) -> list[int]:
    """Return the numbers of GPUs that can give every published share, up to `MOST_GPUS`."""
    return [gpus for gpus in range(1, MOST_GPUS + 1) if not impossible(gpus, paper)]


def possible_runs(paper: PublishedFigures | None = None) -> list[int]:
    """Return the numbers of runs, up to `MOST_RUNS`, that can give every published utilization.

    Each run's percentage is taken as rounded to `ROUNDED` decimals.
    """
    paper = paper or published()
    utilization = [
        _exact(percent) * 10**ROUNDED
        for _, _, percent in _each(paper.figures["utilization_percent"])
    ]
    return [
        runs
        for runs in range(1, MOST_RUNS + 1)
        if all((value * runs).denominator == 1 for value in utilization)
    ]


def _each(values: Values) -> Iterable[tuple[str, str, float]]:
    for distribution, by_policy in values.items():
        for policy, value in by_policy.items():
            yield distribution, policy, value


def _exact(value: float) -> Fraction:
    """Return the number as it is printed, not as a binary fraction."""
    return Fraction(repr(value))
