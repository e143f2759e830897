"""A trace laid out in time: who is there at the beginning, then who comes and goes, in order.

The order of events does not depend on any policy, so it is settled once and every policy sees
the same. Times are compared as whole numbers of a common unit: equal times are equal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from slicewise.core.errors import SlicewiseError
from slicewise.sim.trace import Job

QUIET = 4 * 3600
"""A gap between arrivals longer than these seconds separates early requests from the rest."""
EARLY_SHARE = 100
"""Only the first one of so many requests can be early ones: later gaps are quiet nights."""


class Event(NamedTuple):
    """A job arrives or leaves."""

    seconds: float
    """Since the beginning."""
    job: int
    arrives: bool


@dataclass(frozen=True)
class Timeline:
    """What happens to a cluster from the beginning to the last arrival."""

    jobs: tuple[Job, ...]
    """Those placed beforehand first, then the others, each by arrival and line."""
    preplaced: int
    """How many of the jobs are there when measuring begins."""
    over_before: int
    """Requests that had come and gone before the beginning; they are not among the jobs."""
    events: tuple[Event, ...]
    """By time; at equal times those who leave come first, then those placed beforehand."""
    begin: Fraction
    """When measuring begins, in the trace's own time."""
    compress: Fraction
    """What arrival times were divided by; lifetimes are as recorded."""
    seconds: float
    """How long is measured."""
    offered_slices: float
    """Memory slices that all jobs together would hold, averaged over time."""

    @property
    def arrivals(self) -> tuple[Job, ...]:
        """The jobs that arrive while it is measured."""
        return self.jobs[self.preplaced :]

    @property
    def peak_instances(self) -> int:
        """How many instances there would be at most, if none were rejected.

        On as many GPUs each could have one to itself, so whoever takes any GPU with room
        rejects nothing there, nor on more.
        """
        there = peak = 0
        for _, number, arrives in self.events:
            count = self.jobs[number].count
            there += count if arrives else -count
            peak = max(peak, there)
        return peak


def busy_begin(jobs: Sequence[Job]) -> Fraction:
    """When the dense part of a recording begins, for recordings with a long thin head.

    It begins after the last gap of more than `QUIET` seconds among the first hundredth of the
    requests, or with the first request when there is no such gap.
    """
    for index in range(len(jobs) // EARLY_SHARE, 0, -1):
        if jobs[index].arrival - jobs[index - 1].arrival > QUIET:
            return jobs[index].arrival
    return jobs[0].arrival


def lay_out(jobs: Sequence[Job], begin: Fraction, compress: Fraction = Fraction(1)) -> Timeline:
    """Arrivals from ``begin`` on, their distances divided by ``compress``.

    Who came before and is still there then is placed beforehand, for the rest of its lifetime.
    Measuring ends with the last arrival: afterwards a cluster only empties.
    """
    early = [job for job in jobs if job.arrival < begin]
    there = [job for job in early if job.lifetime is None or job.arrival + job.lifetime > begin]
    later = [job for job in jobs if job.arrival >= begin]
    if not later:
        raise SlicewiseError("no request for a GPU is left to arrive in this trace")
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
    """When a job leaves, given when it is placed; None when it outlasts the recording."""
    if job.lifetime is None:
        return None
    return at + job.lifetime - max(Fraction(0), begin - job.arrival)
