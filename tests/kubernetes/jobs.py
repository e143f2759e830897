"""Background jobs that stop before each API call until the simulation resumes them.

Each job has a thread, so blocking code can be stopped in the middle. Only one thread runs at a
time: `Job.go_on` waits until the job stops again or ends. So the outcome depends only on the
choices of the simulation.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from slicewise.core.errors import SlicewiseError

WRITERS = 8


class Ended(BaseException):
    """Raised in a job when its process is killed."""


class Job:
    """A background job."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self._on, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._thread: threading.Thread | None = None
        self._killed = False
        self.fault: SlicewiseError | None = None
        """The error that the next call raises."""
        self.lands = False
        """Whether the next call takes effect although it raises."""
        self.over = False
        self.mistake: BaseException | None = None

    def go_on(self) -> None:
        """Run until the next API call or the end."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        else:
            self._on.release()
        self._back.acquire()
        if self.over:
            self._thread.join()

    def kill(self) -> None:
        """End the job at its current call."""
        self._killed = True
        if self._thread is not None:
            while not self.over:
                self.go_on()

    def stop_here(self) -> None:
        """Called by the job: wait to be resumed."""
        self._back.release()
        self._on.acquire()
        if self._killed:
            raise Ended

    def _run(self) -> None:
        _here.job = self
        try:
            self._work()
        except Ended:
            pass
        except BaseException as mistake:
            self.mistake = mistake
        self.over = True
        self._back.release()


_here = threading.local()


def current() -> Job | None:
    """The job of the current thread; None outside a job."""
    return getattr(_here, "job", None)


def gate(method: str) -> SlicewiseError | None:
    """Stop before a call; raises its error, or returns the error to raise afterwards."""
    job = current()
    if job is None:
        return None
    job.stop_here()
    fault, job.fault = job.fault, None
    if fault is not None and not (job.lands and method != "GET"):
        raise fault
    return fault


class FakeExecutor:
    """An executor with a limited number of jobs at a time, oldest first."""

    def __init__(self, many: int = WRITERS) -> None:
        self.jobs: list[Job] = []
        self._many = many

    def submit(self, work: Callable[..., Any], *arguments: Any) -> None:
        """Queue a job."""
        self.jobs.append(Job(lambda: work(*arguments)))

    def go_on(
        self, which: int, fault: SlicewiseError | None = None, lands: bool = False
    ) -> BaseException | None:
        """Resume a job until its next call; returns the exception that ended it, if any."""
        begun = self.jobs[: self._many]
        if not begun:
            return None
        job = begun[which % len(begun)]
        job.fault, job.lands = fault, lands
        job.go_on()
        if job.over:
            self.jobs.remove(job)
        return job.mistake

    def kill(self) -> None:
        """Kill all jobs."""
        for job in self.jobs:
            job.kill()
        self.jobs.clear()

    def shutdown(self, **_: object) -> None:
        """Do nothing."""
