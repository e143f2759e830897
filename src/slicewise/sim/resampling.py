"""Other recordings that might have been: weeks of a trace, drawn anew.

A trace is one sample, and how two policies compare on it may be an accident. Putting weeks of it
together anew gives others of the same length. Days stay in runs, as they were: busy days follow
each other, and a cluster that is full on one is not empty on the next. What holds on nearly all
of these recordings is not an accident of which weeks were recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np

from slicewise.core.errors import SlicewiseError
from slicewise.sim.trace import Job

DAY = 24 * 3600
WEEK = 7
"""Days in a row that stay together."""


def resample_weeks(
    jobs: Sequence[Job], begin: Fraction, end: Fraction, rng: np.random.Generator
) -> list[Job]:
    """The jobs of as many days, in weeks that each begin with a day drawn at random; by arrival.

    Days are counted from ``begin``, and after the last whole one comes the first again; the last
    week ends when there are enough. Those who came before stay as they are, and what came after
    the last whole day is left out. Whoever was still there when the recording ended, at ``end``,
    leaves after the time it is known to have stayed: its day may come earlier than it did.
    """
    days = int((max(job.arrival for job in jobs) - begin) // DAY)
    if days < 2:
        raise SlicewiseError("a trace of less than two whole days cannot be drawn anew")
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
