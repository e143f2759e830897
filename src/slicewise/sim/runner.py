"""Runs experiments with a crew, and survives being interrupted: what is finished is kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field

from slicewise.sim.crew import Crew, Done, Job, Samples, local_crew
from slicewise.sim.experiment import Experiment, Tick

Cell = tuple[int, int]
"""A mix by its place in the experiment, and one of its entrants."""

_ROUNDS = 10
_LARGEST_JOB = 25
"""All cells advance together, a few of their runs at a time, so that an interruption leaves
something to compare and no worker idles long at the end."""


@dataclass
class Outcome:
    """The runs that were finished, and whether it was an interruption that left some out."""

    experiment: Experiment
    interrupted: bool = False
    samples: dict[Cell, Samples] = field(default_factory=dict)

    def paired_runs(self, mix: int) -> list[int]:
        """The runs of a mix that every entrant has finished, in order."""
        cells = [self.samples.get((mix, e), {}) for e in self.experiment.entrants(mix)]
        return sorted(set.intersection(*(set(cell) for cell in cells)))

    def cells(self) -> list[Cell]:
        """Every entrant of every mix, whether it has begun or not."""
        mixes = range(len(self.experiment.mixes))
        return [(mix, entrant) for mix in mixes for entrant in self.experiment.entrants(mix)]


def run_experiment(experiment: Experiment, workers: int | None, tick: Tick) -> Outcome:
    """Run everything; Ctrl-C stops it and keeps what is finished.

    The result does not depend on ``workers`` (all cores unless given): every run draws from a
    random stream of its own.
    """
    outcome = Outcome(experiment)
    run_missing([outcome], local_crew(workers), tick)
    return outcome


def run_missing(
    outcomes: Sequence[Outcome],
    crew: Crew,
    tick: Tick,
    keep: Callable[[Done], object] = lambda done: None,
) -> None:
    """Run what the outcomes lack and fill it in; ``keep`` is told of every job that is finished.

    Ctrl-C stops it and marks the outcomes that still lack something as interrupted.
    """
    experiments = [outcome.experiment for outcome in outcomes]
    try:
        with closing(crew.work(experiments, missing_jobs(outcomes), tick)) as finished:
            for done in finished:
                cell = (done.job.mix, done.job.entrant)
                outcomes[done.job.experiment].samples.setdefault(cell, {}).update(done.samples)
                keep(done)
    except KeyboardInterrupt:
        for outcome in outcomes:
            outcome.interrupted = missing_runs([outcome]) > 0


def missing_jobs(outcomes: Sequence[Outcome]) -> list[Job]:
    """What is left to do, in the order in which it is best done."""
    rounds: dict[int, list[Job]] = {}
    for place, outcome in enumerate(outcomes):
        total = outcome.experiment.runs
        size = min(-(-total // _ROUNDS), _LARGEST_JOB)
        for mix, entrant in outcome.cells():
            known = outcome.samples.get((mix, entrant), {})
            for number, begin in enumerate(range(0, total, size)):
                block = range(begin, min(begin + size, total))
                runs = tuple(run for run in block if run not in known)
                if runs:
                    rounds.setdefault(number, []).append(Job(place, mix, entrant, runs))
    return [job for number in sorted(rounds) for job in rounds[number]]


def missing_runs(outcomes: Sequence[Outcome]) -> int:
    """How many runs are left to do."""
    return sum(len(job.runs) for job in missing_jobs(outcomes))


def missing_units(outcomes: Sequence[Outcome]) -> int:
    """Units of work that are left to do."""
    return sum(
        len(job.runs) * outcomes[job.experiment].experiment.units(job.mix)
        for job in missing_jobs(outcomes)
    )


def total_units(experiment: Experiment) -> int:
    """Units of work in the whole experiment."""
    return missing_units([Outcome(experiment)])
