"""Executors: run jobs in this process or in worker processes; `ray_executor` adds a Ray cluster.

An executor takes experiments and jobs and yields finished jobs in any order. The samples of a run
depend only on the experiment and the run's number, never on the worker.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from multiprocessing import resource_tracker
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Event as EventType
from typing import Any, NamedTuple, Protocol

from slicewise.core.errors import SlicewiseError
from slicewise.lab.experiment import Experiment, Tick
from slicewise.lab.workload import Ints

Samples = dict[int, Ints]
"""Results by run number."""

_QUEUED_PER_WORKER = 2
"""Jobs submitted per worker: the next one is queued while the current one runs."""
_PROGRESS_INTERVAL_S = 0.1


class Job(NamedTuple):
    """Some runs of one entrant, one mix and one experiment, all given by index."""

    experiment: int
    mix: int
    entrant: int
    runs: tuple[int, ...]


class Done(NamedTuple):
    """A finished job, its samples and the worker that ran it."""

    job: Job
    samples: Samples
    worker: str


class Executor(Protocol):
    """Runs jobs."""

    def work(
        self, experiments: Sequence[Experiment], jobs: Sequence[Job], tick: Tick
    ) -> Generator[Done]:
        """Run all jobs, in any order; closing the generator stops the work."""


def local_executor(workers: int | None) -> Executor:
    """Return an executor for this machine, by default with one worker per core."""
    workers = workers or os.cpu_count() or 1
    return InProcess() if workers == 1 else WorkerProcesses(workers)


def run_job(experiments: Sequence[Experiment], job: Job, tick: Tick) -> Samples:
    """Run one job in this process."""
    experiment = experiments[job.experiment]
    return {run: experiment.simulate(job.mix, job.entrant, run, tick) for run in job.runs}


def share_tables(experiments: Sequence[Experiment]) -> list[Experiment]:
    """Return copies of the experiments that share compiled tables where mixes and policies match.

    Tables do not depend on load, size or seed. Without sharing, a sweep would compile them for
    every point, which takes longer than a short run.
    """
    shared: dict[tuple[int, int], dict[tuple[int, int], Any]] = {}
    return [
        replace(e, _compiled=shared.setdefault((id(e.mixes), id(e.policies)), {}))
        for e in experiments
    ]


class InProcess:
    """Runs jobs in this process; yields run by run, so an interruption loses one run at most."""

    def work(
        self, experiments: Sequence[Experiment], jobs: Sequence[Job], tick: Tick
    ) -> Generator[Done]:
        """Run all jobs in order."""
        experiments = share_tables(experiments)
        for job in jobs:
            for run in job.runs:
                single = job._replace(runs=(run,))
                yield Done(single, run_job(experiments, single, tick), "this process")


class WorkerProcesses:
    """Runs jobs in worker processes on this machine."""

    def __init__(self, workers: int) -> None:
        self.workers = workers

    def work(
        self, experiments: Sequence[Experiment], jobs: Sequence[Job], tick: Tick
    ) -> Generator[Done]:
        """Run all jobs; a single job runs in this process."""
        if len(jobs) < 2:
            yield from InProcess().work(experiments, jobs, tick)
            return
        if find_spec("numba") is None:  # or every worker would report it, some after the first
            raise ModuleNotFoundError("No module named 'numba'", name="numba")
        context = multiprocessing.get_context("spawn")
        progress: SimpleQueue[int] = context.SimpleQueue()
        stop = context.Event()
        pool = ProcessPoolExecutor(
            min(self.workers, len(jobs)),
            context,
            _start_worker,
            (list(experiments), progress, stop),
        )
        remaining = iter(jobs)
        pending: set[Future[Done]] = set()
        try:
            while True:
                while len(pending) < _QUEUED_PER_WORKER * self.workers and (
                    (job := next(remaining, None)) is not None
                ):
                    pending.add(_submit(pool, job))
                if not pending:
                    break
                finished, pending = wait(pending, _PROGRESS_INTERVAL_S, FIRST_COMPLETED)
                while not progress.empty():
                    tick(progress.get())
                for future in finished:
                    yield _result(future)
        finally:
            # Workers stop by themselves at their next step: a worker that is killed while it sends
            # a result would leave the pool waiting for the rest of it.
            stop.set()
            while pending:
                _, pending = wait(pending, _PROGRESS_INTERVAL_S)
                while not progress.empty():  # a full pipe would block the workers
                    progress.get()
            pool.shutdown()


def _submit(pool: ProcessPoolExecutor, job: Job) -> Future[Done]:
    try:
        with _sigint_blocked():  # submitting starts workers
            return pool.submit(_run_in_worker, job)
    except BrokenProcessPool:
        raise _worker_lost() from None
    except OSError as error:
        why = error.strerror or str(error)
        raise SlicewiseError(
            f"a worker process cannot be started: {why}; try fewer --workers"
        ) from None


def _result(future: Future[Done]) -> Done:
    try:
        return future.result()
    except BrokenProcessPool:
        raise _worker_lost() from None


def _worker_lost() -> SlicewiseError:
    return SlicewiseError(
        "a worker process ended unexpectedly (out of memory?); try fewer --workers"
    )


@contextmanager
def _sigint_blocked() -> Iterator[None]:
    """Start processes that never receive Ctrl-C: the parent decides when to stop.

    A worker could ignore the signal itself only after it has started and imported everything.
    """
    resource_tracker.ensure_running()  # starting it later would unblock the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_experiments: list[Experiment] = []
"""In a worker: the experiments, which keep their compiled tables between jobs."""
_tick: Tick
"""In a worker: reports progress to the parent, and stops the job when the parent asks for it."""


class _StoppedError(Exception):
    """Raised in a worker to leave a job whose result is no longer wanted."""


def _start_worker(
    experiments: list[Experiment], progress: SimpleQueue[int], stop: EventType
) -> None:
    global _experiments, _tick

    def tick(steps: int) -> None:
        if stop.is_set():
            raise _StoppedError
        progress.put(steps)

    _experiments, _tick = share_tables(experiments), tick
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    """Exit when the parent is gone: a killed parent does not end its pool."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _run_in_worker(job: Job) -> Done:
    return Done(job, run_job(_experiments, job, _tick), f"process {os.getpid()}")
