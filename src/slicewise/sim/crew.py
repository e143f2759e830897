"""Who does the work: this process, several processes, or (in `on_ray`) a cluster.

A crew is given experiments and jobs, and hands back finished jobs in any order. The samples of a
run depend on nothing but the experiment and the run's number, so who did what does not matter.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple, Protocol

from slicewise.core.errors import SlicewiseError
from slicewise.sim.experiment import Experiment, Tick
from slicewise.sim.workload import Ints

Samples = dict[int, Ints]
"""Results by the number of their run."""


class Job(NamedTuple):
    """Some runs of one entrant with one mix of one experiment, each known by its place."""

    experiment: int
    mix: int
    entrant: int
    runs: tuple[int, ...]


class Done(NamedTuple):
    """A finished job, and who did it."""

    job: Job
    samples: Samples
    by: str


class Crew(Protocol):
    """Does jobs."""

    def work(
        self, experiments: Sequence[Experiment], jobs: Sequence[Job], tick: Tick
    ) -> Generator[Done]:
        """Do all jobs, in any order; closing the generator ends the work."""


def local_crew(workers: int | None) -> Crew:
    """Worker processes on this machine, one a core unless told how many."""
    workers = workers or os.cpu_count() or 1
    return Here() if workers == 1 else Processes(workers)


def perform(experiments: Sequence[Experiment], job: Job, tick: Tick) -> Samples:
    """Do one job."""
    experiment = experiments[job.experiment]
    return {run: experiment.simulate(job.mix, job.entrant, run, tick) for run in job.runs}


def sharing_tables(experiments: Sequence[Experiment]) -> list[Experiment]:
    """The same experiments; those with the same mixes and policies compile their tables once.

    Tables do not depend on load, size or seed. Without this a sweep would make them anew for
    every point, which takes longer than a short run.
    """
    shared: dict[tuple[int, int], dict[tuple[int, int], Any]] = {}
    return [
        replace(e, _compiled=shared.setdefault((id(e.mixes), id(e.policies)), {}))
        for e in experiments
    ]


class Here:
    """This process alone; a job is handed back run by run, so that an interruption costs one."""

    def work(
        self, experiments: Sequence[Experiment], jobs: Sequence[Job], tick: Tick
    ) -> Generator[Done]:
        """Do all jobs in their order."""
        experiments = sharing_tables(experiments)
        for job in jobs:
            for run in job.runs:
                one = job._replace(runs=(run,))
                yield Done(one, perform(experiments, one, tick), "this process")


class Processes:
    """Worker processes on this machine."""

    def __init__(self, workers: int) -> None:
        self.workers = workers

    def work(
        self, experiments: Sequence[Experiment], jobs: Sequence[Job], tick: Tick
    ) -> Generator[Done]:
        """Do all jobs, each worker one at a time."""
        if len(jobs) < 2:
            yield from Here().work(experiments, jobs, tick)
            return
        waiting = iter(jobs)
        crew: dict[Connection, BaseProcess] = {}
        try:
            for _ in range(min(self.workers, len(jobs))):
                ours, process = _start(experiments)
                crew[ours] = process
                _send(ours, next(waiting))
            while crew:
                for connection in wait(list(crew)):
                    assert isinstance(connection, Connection)
                    report = _receive(connection)
                    if isinstance(report, int):
                        tick(report)
                        continue
                    yield Done(*report, f"process {crew[connection].pid}")
                    job = next(waiting, None)
                    _send(connection, job)
                    if job is None:
                        crew.pop(connection).join()
        finally:
            for process in crew.values():
                process.terminate()
                process.join()


def _start(experiments: Sequence[Experiment]) -> tuple[Connection, BaseProcess]:
    """A worker process, and the way to talk to it."""
    context = multiprocessing.get_context("spawn")
    try:
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs, list(experiments)), daemon=True)
        with _deaf_to_interrupts():
            process.start()
    except OSError as error:
        why = error.strerror or str(error)
        raise SlicewiseError(
            f"a worker process cannot be started: {why}; try fewer --workers"
        ) from None
    theirs.close()  # so that a worker's death is seen as the end of its messages
    return ours, process


@contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """What is started meanwhile never hears of Ctrl-C: the parent decides when to stop.

    The worker itself could only see to that once it has started, and has imported everything.
    """
    resource_tracker.ensure_running()  # the first process would start it, and undo the blocking
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _send(connection: Connection, job: Job | None) -> None:
    try:
        connection.send(job)
    except OSError:
        raise _lost() from None


def _receive(connection: Connection) -> int | tuple[Job, Samples]:
    try:
        report: int | tuple[Job, Samples] | Exception = connection.recv()
    except (EOFError, OSError):
        raise _lost() from None
    if isinstance(report, Exception):
        raise report
    return report


def _lost() -> SlicewiseError:
    return SlicewiseError(
        "a worker process ended unexpectedly (out of memory?); try fewer --workers"
    )


def _work(connection: Connection, experiments: list[Experiment]) -> None:
    """A worker's life: take a job, report ticks and then the samples, until there is none."""
    experiments = sharing_tables(experiments)
    with suppress(EOFError, OSError):  # nobody is there any more to tell: the parent was killed
        while (job := connection.recv()) is not None:
            try:
                samples = perform(experiments, job, connection.send)
            except Exception as error:
                connection.send(error)
                return
            connection.send((job, samples))
