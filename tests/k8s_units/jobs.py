"""Writers whose work stops before each call of the API, until a simulation lets it go on.

Each piece of work has a thread, so that code which blocks can be stopped in the middle. Only one
thread runs at a time: whoever lets another go on waits until that one stops or has ended. So what
happens depends on the simulation's choices alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from slicewise.core.errors import SlicewiseError

WRITERS = 8


class Ended(BaseException):
    """The process that this work belonged to is no more."""


class Job:
    """One piece of work."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self._on, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._thread: threading.Thread | None = None
        self._killed = False
        self.fault: SlicewiseError | None = None
        """What comes of the call before which it has stopped."""
        self.lands = False
        """Whether that call is carried out all the same."""
        self.over = False
        self.mistake: BaseException | None = None

    def go_on(self) -> None:
        """Run until the next call, or to the end."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        else:
            self._on.release()
        self._back.acquire()
        if self.over:
            self._thread.join()

    def kill(self) -> None:
        """End it where it is."""
        self._killed = True
        if self._thread is not None:
            while not self.over:
                self.go_on()

    def stop_here(self) -> None:
        """Called by the work itself: wait until it may go on."""
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
    """The job of this thread, if it has one."""
    return getattr(_here, "job", None)


def gate(method: str) -> SlicewiseError | None:
    """Stop before a call; raises, or returns, what comes of it."""
    job = current()
    if job is None:
        return None
    job.stop_here()
    fault, job.fault = job.fault, None
    if fault is not None and not (job.lands and method != "GET"):
        raise fault
    return fault


class Crew:
    """In place of an executor: so many jobs at a time, the oldest first."""

    def __init__(self, many: int = WRITERS) -> None:
        self.jobs: list[Job] = []
        self._many = many

    def submit(self, work: Callable[..., Any], *arguments: Any) -> None:
        """Have something done later."""
        self.jobs.append(Job(lambda: work(*arguments)))

    def go_on(
        self, which: int, fault: SlicewiseError | None = None, lands: bool = False
    ) -> BaseException | None:
        """Let one of the jobs go on to its next call; returns a mistake that ended it."""
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
        """End all of them."""
        for job in self.jobs:
            job.kill()
        self.jobs.clear()

    def shutdown(self, **_: object) -> None:
        """Nothing more is done."""
