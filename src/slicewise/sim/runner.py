"""Runs an experiment on all cores, shows how far it is, and survives being interrupted."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from slicewise.core.errors import SlicewiseError
from slicewise.sim.experiment import Experiment, Tick
from slicewise.sim.workload import Ints

Cell = tuple[int, int]
"""A mix by its place in the experiment, and one of its entrants."""
Job = tuple[int, int, range]
"""A mix, an entrant and some runs."""

_ROUNDS = 10
_LARGEST_JOB = 25
"""All cells advance together, a few of their runs at a time, so that an interruption leaves
something to compare and no worker idles long at the end."""


@dataclass
class Outcome:
    """The runs that were finished, and whether all were."""

    experiment: Experiment
    interrupted: bool = False
    samples: dict[Cell, dict[int, Ints]] = field(default_factory=dict)

    def paired_runs(self, mix: int) -> list[int]:
        """The runs of a mix that every entrant has finished, in order."""
        cells = [self.samples.get((mix, e), {}) for e in self.experiment.entrants(mix)]
        return sorted(set.intersection(*(set(cell) for cell in cells)))


def run_experiment(experiment: Experiment, workers: int | None, tick: Tick) -> Outcome:
    """Run everything; Ctrl-C stops it and keeps what is finished.

    The result does not depend on ``workers`` (all cores unless given): every run draws from a
    random stream of its own.
    """
    workers = workers or os.cpu_count() or 1
    jobs = _jobs(experiment)
    workers = min(workers, len(jobs))
    outcome = Outcome(experiment)
    finished = (
        _in_this_process(experiment, jobs, tick)
        if workers == 1
        else _in_processes(experiment, jobs, workers, tick)
    )
    try:
        for (mix, policy, _), samples in finished:
            outcome.samples.setdefault((mix, policy), {}).update(samples)
    except KeyboardInterrupt:
        outcome.interrupted = True
    return outcome


def total_units(experiment: Experiment) -> int:
    """Units of work in the whole experiment."""
    mixes = range(len(experiment.mixes))
    each = sum(experiment.units(mix) * len(experiment.entrants(mix)) for mix in mixes)
    return each * experiment.runs


def _jobs(experiment: Experiment) -> list[Job]:
    size = min(-(-experiment.runs // _ROUNDS), _LARGEST_JOB)
    return [
        (mix, entrant, range(begin, min(begin + size, experiment.runs)))
        for begin in range(0, experiment.runs, size)
        for mix in range(len(experiment.mixes))
        for entrant in experiment.entrants(mix)
    ]


def _in_this_process(
    experiment: Experiment, jobs: list[Job], tick: Tick
) -> Iterator[tuple[Job, dict[int, Ints]]]:
    for mix, policy, runs in jobs:
        for run in runs:
            sample = experiment.simulate(mix, policy, run, tick)
            yield (mix, policy, range(run, run + 1)), {run: sample}


def _in_processes(
    experiment: Experiment, jobs: list[Job], workers: int, tick: Tick
) -> Iterator[tuple[Job, dict[int, Ints]]]:
    context = multiprocessing.get_context("spawn")
    waiting = iter(jobs)
    crew: dict[Connection, BaseProcess] = {}
    try:
        for _ in range(workers):
            ours, theirs = context.Pipe()
            process: BaseProcess = context.Process(
                target=_work, args=(theirs, experiment), daemon=True
            )
            process.start()
            theirs.close()  # so that a worker's death is seen as the end of its messages
            crew[ours] = process
            ours.send(next(waiting))
        while crew:
            for connection in wait(list(crew)):
                assert isinstance(connection, Connection)
                report = _receive(connection)
                if isinstance(report, int):
                    tick(report)
                    continue
                yield report
                job = next(waiting, None)
                connection.send(job)
                if job is None:
                    crew.pop(connection).join()
    finally:
        for process in crew.values():
            process.terminate()
            process.join()


def _receive(connection: Connection) -> int | tuple[Job, dict[int, Ints]]:
    try:
        report: int | tuple[Job, dict[int, Ints]] | Exception = connection.recv()
    except (EOFError, ConnectionResetError):
        raise SlicewiseError(
            "a worker process ended unexpectedly (out of memory?); try fewer --workers"
        ) from None
    if isinstance(report, Exception):
        raise report
    return report


def _work(connection: Connection, experiment: Experiment) -> None:
    """A worker's life: take a job, report ticks and then the samples, until there is none."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    while (job := connection.recv()) is not None:
        mix, policy, runs = job
        try:
            samples = {run: experiment.simulate(mix, policy, run, connection.send) for run in runs}
        except Exception as error:
            connection.send(error)
            return
        connection.send((job, samples))
