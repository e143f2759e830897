"""The limit on a trace: a host that may rearrange every instance whenever a job arrives.

It accepts a job if and only if all its instances and all running ones fit on the cluster in some
arrangement. It keeps only the number of instances of each kind; `repacking` has the models for
which counts decide, and `oracle` explains this kind of limit.

Several profiles can meet a need, and the oracle may choose another one each time. If one of the
profiles fits wherever the others do, the need is counted as that one, which is exact. Otherwise
there is no oracle.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from slicewise.core.geometry import Geometry, Profile
from slicewise.core.request import Reason, Request
from slicewise.lab.repacking import Repacking, repacking_of, smallest
from slicewise.lab.trace import Job


@dataclass(frozen=True)
class Limit:
    """The rule for the requests of a trace."""

    repacking: Repacking
    columns: Mapping[Request, int]
    """By request: its column. Requests without a profile have none."""


def limit_of(jobs: Iterable[Job], geometry: Geometry) -> Limit | str:
    """Return the exact rule for the requests of jobs, or a sentence that says why there is none."""
    counted: dict[Request, Profile] = {}
    for request in dict.fromkeys(job.request for job in jobs):
        offered = [profile for _, profile in request.candidates(geometry)]
        if not offered:
            continue
        profile = smallest(offered)
        if profile is None:
            names = " or ".join(each.name for each in offered)
            return (
                f"no exact rule says what {geometry.model} could hold: {request} may be "
                f"{names}, and none of them fits wherever the others do"
            )
        counted[request] = profile
    used = set(counted.values())
    profiles = tuple(profile for profile in geometry.profiles if profile in used)
    rule = repacking_of(geometry, profiles)
    if isinstance(rule, str):
        return rule
    column = dict(zip(profiles, rule.columns, strict=True))
    return Limit(rule, {request: column[profile] for request, profile in counted.items()})


@dataclass
class Totals:
    """The totals of a cluster with instances on no particular GPU."""

    gpus: int
    slices: int
    occupied_slices: int = 0
    active_gpus: None = None

    def fragmentation(self) -> None:
        """Return None: it is undefined here."""


class OracleHost:
    """A cluster in which everything may be moved at no cost."""

    def __init__(self, geometry: Geometry, gpus: int, limit: Limit) -> None:
        self.totals = Totals(gpus, gpus * geometry.slices)
        self._limit = limit
        self._running = [0] * len(limit.repacking.sizes)
        self._held: dict[int, Job] = {}

    def enter(self, number: int, job: Job) -> Reason | None:
        """Accept a whole job if all instances fit together with it."""
        if job.request not in self._limit.columns:
            return Reason.UNKNOWN_PROFILE
        self._change(job, job.count)
        if self._limit.repacking.fits(self._running, self.totals.gpus):
            self._held[number] = job
            return None
        self._change(job, -job.count)
        # No arrangement exists, so the reason is never fragmentation.
        return Reason.CAPACITY

    def leave(self, number: int) -> None:
        """Release the instances of a job."""
        job = self._held.pop(number)
        self._change(job, -job.count)

    def _change(self, job: Job, instances: int) -> None:
        column = self._limit.columns[job.request]
        self._running[column] += instances
        self.totals.occupied_slices += instances * self._limit.repacking.sizes[column]
