"""The timeline of a trace: its arrivals and departures in order, and resampled traces.

The order of events does not depend on a policy, so it is computed once. Times are compared as
whole numbers of a common unit, which is exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from slicewise.core.errors import SlicewiseError
from slicewise.lab.trace import Job

QUIET = 4 * 3600
"""Seconds without arrivals that separate early requests from the rest."""
EARLY_SHARE = 100
"""Only the first of this many requests can be early: later gaps are quiet nights."""


class Event(NamedTuple):
    """The arrival or departure of a job."""

    seconds: float
    """Time since the beginning of the measurement."""
    job: int
    arrives: bool


@dataclass(frozen=True)
class Timeline:
    """The events from the beginning of the measurement to the last arrival."""

    jobs: tuple[Job, ...]
    """Jobs placed beforehand first, then the others, each by arrival and line."""
    preplaced: int
    """The number of jobs that run when the measurement begins."""
    over_before: int
    """The number of requests that ended before the measurement; they are not among the jobs."""
    events: tuple[Event, ...]
    """By time; at equal times departures come first, then jobs placed beforehand."""
    begin: Fraction
    """The beginning of the measurement, in the trace's time."""
    compress: Fraction
    """The divisor of arrival times; lifetimes are as recorded."""
    seconds: float
    """The length of the measurement."""
    offered_slices: float
    """Memory slices that all jobs together would occupy, averaged over time."""

    @property
    def arrivals(self) -> tuple[Job, ...]:
        """The jobs that arrive during the measurement."""
        return self.jobs[self.preplaced :]

    @property
    def peak_instances(self) -> int:
        """The maximum number of instances at a time if none were rejected.

        On this many GPUs each instance could have its own, so a policy that accepts any GPU with
        room rejects nothing.
        """
        there = peak = 0
        for _, number, arrives in self.events:
            count = self.jobs[number].count
            there += count if arrives else -count
            peak = max(peak, there)
        return peak


def busy_begin(jobs: Sequence[Job]) -> Fraction:
    """Return the beginning of the dense part of a recording, skipping a sparse head.

    It begins after the last gap of more than `QUIET` seconds among the first hundredth of the
    requests, or with the first request if there is no such gap.
    """
    for index in range(len(jobs) // EARLY_SHARE, 0, -1):
        if jobs[index].arrival - jobs[index - 1].arrival > QUIET:
            return jobs[index].arrival
    return jobs[0].arrival


def lay_out(jobs: Sequence[Job], begin: Fraction, compress: Fraction = Fraction(1)) -> Timeline:
    """Return the timeline from ``begin``, with the times between arrivals divided by ``compress``.

    Jobs that run at ``begin`` are placed beforehand, for the rest of their lifetime. The
    measurement ends with the last arrival: afterwards a cluster only empties.
    """
    early = [job for job in jobs if job.arrival < begin]
    there = [job for job in early if job.lifetime is None or job.arrival + job.lifetime > begin]
    later = [job for job in jobs if job.arrival >= begin]
    if not later:
        raise SlicewiseError("no request for a GPU arrives after the beginning of the measurement")
    chosen = (*there, *later)
    arrive = [max(Fraction(0), job.arrival - begin) / compress for job in chosen]
    end = arrive[-1]
    moments: list[tuple[Fraction, bool, int, int]] = []
    offered = Fraction(0)
    for index, (job, at) in enumerate(zip(chosen, arrive, strict=True)):
        moments.append((at, True, index, index))
        leave = _leave(job, at, begin)
        if leave is not None and leave <= end:
            moments.append((leave, False, job.line, index))
        offered += job.slices * ((end if leave is None else min(leave, end)) - at)
    # Recorded times have at most nine decimals, so in this unit all moments are whole numbers.
    unit = math.lcm(10**9, begin.denominator) * compress.numerator
    moments.sort(key=lambda moment: (int(moment[0] * unit), *moment[1:]))
    return Timeline(
        jobs=chosen,
        preplaced=len(there),
        over_before=len(early) - len(there),
        events=tuple(Event(float(at), index, arrives) for at, arrives, _, index in moments),
        begin=begin,
        compress=compress,
        seconds=float(end),
        offered_slices=float(offered / end) if end else float(sum(job.slices for job in chosen)),
    )


def _leave(job: Job, at: Fraction, begin: Fraction) -> Fraction | None:
    """Return when a job ends, given when it is placed; None if it outlasts the recording."""
    if job.lifetime is None:
        return None
    return at + job.lifetime - max(Fraction(0), begin - job.arrival)


DAY = 24 * 3600
WEEK = 7
"""Consecutive days that stay together when a trace is resampled."""


def resample_weeks(
    jobs: Sequence[Job], begin: Fraction, end: Fraction, rng: np.random.Generator
) -> list[Job]:
    """Return another trace of the same length, made of weeks that start on random days.

    A trace is one sample: a comparison that holds on nearly all resampled traces does not depend
    on which weeks were recorded. Days stay in weeks because busy days follow each other.

    Days are counted from ``begin``; after the last whole day comes the first again. Jobs before
    ``begin`` stay unchanged, and jobs after the last whole day are dropped. A job that outlasts
    the recording, which ended at ``end``, lives as long as it was observed.
    """
    days = int((max(job.arrival for job in jobs) - begin) // DAY)
    if days < 2:
        raise SlicewiseError("a trace of less than two whole days cannot be resampled")
    by_day: list[list[Job]] = [[] for _ in range(days)]
    for job in jobs:
        day = int((job.arrival - begin) // DAY)
        if 0 <= day < days:
            stayed = end - job.arrival if job.lifetime is None else job.lifetime
            by_day[day].append(replace(job, lifetime=stayed))
    firsts = rng.integers(days, size=-(-days // WEEK)).tolist()
    order = [(first + later) % days for first in firsts for later in range(WEEK)][:days]
    drawn = [job for job in jobs if job.arrival < begin]
    for place, day in enumerate(order):
        moved = DAY * (place - day)
        drawn += [replace(job, arrival=job.arrival + moved) for job in by_day[day]]
    return sorted(drawn, key=lambda job: (job.arrival, job.line))
