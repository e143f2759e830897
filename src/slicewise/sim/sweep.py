"""A sweep: many experiments that differ in model, size, load and seed, and their rows together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slicewise.sim.experiment import Experiment, Steady
from slicewise.sim.results import Row, published_rows, steady_rows
from slicewise.sim.runner import Outcome


@dataclass(frozen=True)
class Sweep:
    """The points of an experiment file, each an experiment of its own."""

    name: str
    """What the file is called."""
    title: str
    """What the sweep is about, in the words of its author; may be empty."""
    text: str
    """The file, word for word."""
    kind: str
    """Steady or published."""
    experiments: tuple[Experiment, ...]
    """By model, then size, then load, then seed, each in the order of the file."""

    def outcomes(self) -> list[Outcome]:
        """The points, with nothing run yet."""
        return [Outcome(experiment) for experiment in self.experiments]


def total_runs(outcomes: Sequence[Outcome]) -> int:
    """How many runs there are in all, finished or not."""
    return sum(len(outcome.cells()) * outcome.experiment.runs for outcome in outcomes)


def point(experiment: Experiment) -> Row:
    """The columns that tell one point of a sweep from another."""
    columns: Row = {"model": experiment.mixes[0].geometry.model, "gpus": experiment.gpus}
    if isinstance(experiment, Steady):
        columns["load"] = experiment.load
    return {**columns, "seed": experiment.seed}


def summary_rows(outcomes: Sequence[Outcome]) -> list[Row]:
    """The rows that `simulate` would give for each point, with the point in front.

    A distribution of which no run is complete yet has no rows.
    """
    rows: list[Row] = []
    for outcome in outcomes:
        experiment = outcome.experiment
        paired = {mix.name: len(outcome.paired_runs(m)) for m, mix in enumerate(experiment.mixes)}
        if not any(paired.values()):
            continue
        of_point = (
            steady_rows(outcome) if isinstance(experiment, Steady) else published_rows(outcome)
        )
        for row in of_point:
            who = {"distribution": row["distribution"], "policy": row["policy"]}
            runs = {"runs": paired[str(row["distribution"])]}
            rows.append({**point(experiment), **who, **runs, **row})
    return rows
