"""Runs experiments on an executor; an interruption keeps the finished runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field

from slicewise.lab.executors import Done, Executor, Job, Samples, local_executor
from slicewise.lab.experiment import Experiment, Tick

Cell = tuple[int, int]
"""A mix and an entrant of an experiment, by index."""

_ROUNDS = 10
_LARGEST_JOB = 25
"""Jobs are small and go round all cells: an interruption leaves results to compare, and no worker
is idle for long at the end."""


@dataclass
class Outcome:
    """The finished runs of an experiment, and whether it was interrupted."""

    experiment: Experiment
    interrupted: bool = False
    samples: dict[Cell, Samples] = field(default_factory=dict)

    def paired_runs(self, mix: int) -> list[int]:
        """Return the runs of a mix that every entrant has finished, in order."""
        cells = [self.samples.get((mix, e), {}) for e in self.experiment.entrants(mix)]
        return sorted(set.intersection(*(set(cell) for cell in cells)))

    def cells(self) -> list[Cell]:
        """Return every entrant of every mix, with or without finished runs."""
        mixes = range(len(self.experiment.mixes))
        return [(mix, entrant) for mix in mixes for entrant in self.experiment.entrants(mix)]


def run_experiment(experiment: Experiment, workers: int | None, tick: Tick) -> Outcome:
    """Run an experiment; Ctrl-C stops it and keeps the finished runs.

    The result does not depend on ``workers`` (default: one per core), because every run has its
    own random stream.
    """
    outcome = Outcome(experiment)
    run_missing([outcome], local_executor(workers), tick)
    return outcome


def run_missing(
    outcomes: Sequence[Outcome],
    executor: Executor,
    tick: Tick,
    keep: Callable[[Done], object] = lambda done: None,
) -> None:
    """Run the missing runs and add them to the outcomes; call ``keep`` for every finished job.

    Ctrl-C stops it and marks incomplete outcomes as interrupted.
    """
    experiments = [outcome.experiment for outcome in outcomes]
    try:
        with closing(executor.work(experiments, missing_jobs(outcomes), tick)) as finished:
            for done in finished:
                cell = (done.job.mix, done.job.entrant)
                outcomes[done.job.experiment].samples.setdefault(cell, {}).update(done.samples)
                keep(done)
    except KeyboardInterrupt:
        for outcome in outcomes:
            outcome.interrupted = missing_runs([outcome]) > 0


def missing_jobs(outcomes: Sequence[Outcome]) -> list[Job]:
    """Return the jobs for all missing runs, in the order to run them."""
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
    """Return the number of missing runs."""
    return sum(len(job.runs) for job in missing_jobs(outcomes))


def missing_units(outcomes: Sequence[Outcome]) -> int:
    """Return the units of work of the missing runs."""
    return sum(
        len(job.runs) * outcomes[job.experiment].experiment.units(job.mix)
        for job in missing_jobs(outcomes)
    )


def total_units(experiment: Experiment) -> int:
    """Return the units of work of an experiment."""
    return missing_units([Outcome(experiment)])
