"""The limit on a trace: a host that may rearrange every instance whenever a job arrives.

It takes a job in if and only if all its instances and all that are there could be arranged anew,
together, on the cluster. Nothing has a place of its own, so all it keeps is how many instances of
each kind there are; `repacking` says when counts decide, and `oracle` what kind of limit this is.

A need can be met by several profiles, and who may rearrange everything may also choose the
profile anew each time. That is no reason to try them all: where one of the profiles fits wherever
the others do, counting every such need as that one loses nothing. So the answer is exact for
needs too, and where there is no such profile there is no oracle.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from slicewise.core.geometry import Geometry, Profile
from slicewise.core.request import Reason, Request
from slicewise.sim.repacking import Repacking, repacking_of, smallest
from slicewise.sim.trace import Job


@dataclass(frozen=True)
class Limit:
    """By which rule requests are counted, and in which column each of them."""

    repacking: Repacking
    columns: Mapping[Request, int]
    """Requests that no profile serves are not among them."""


def limit_of(jobs: Iterable[Job], geometry: Geometry) -> Limit | str:
    """The rule for what these jobs ask for; where none is exact, the reason in one sentence."""
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
class Counted:
    """What can be said of a cluster whose instances are nowhere in particular."""

    gpus: int
    slices: int
    occupied_slices: int = 0
    active_gpus: None = None

    def fragmentation(self) -> None:
        """There is none to speak of."""


class OracleHost:
    """A cluster in which everything may be moved at no cost."""

    def __init__(self, geometry: Geometry, gpus: int, limit: Limit) -> None:
        self.totals = Counted(gpus, gpus * geometry.slices)
        self._limit = limit
        self._running = [0] * len(limit.repacking.sizes)
        self._held: dict[int, Job] = {}

    def enter(self, number: int, job: Job) -> Reason | None:
        """Take in a whole job if all there is can be arranged together with it."""
        if job.request not in self._limit.columns:
            return Reason.UNKNOWN_PROFILE
        self._change(job, job.count)
        if self._limit.repacking.fits(self._running, self.totals.gpus):
            self._held[number] = job
            return None
        self._change(job, -job.count)
        # Whatever cannot be arranged at all is too much, wherever the free slices are.
        return Reason.CAPACITY

    def leave(self, number: int) -> None:
        """Forget its instances."""
        job = self._held.pop(number)
        self._change(job, -job.count)

    def _change(self, job: Job, instances: int) -> None:
        column = self._limit.columns[job.request]
        self._running[column] += instances
        self.totals.occupied_slices += instances * self._limit.repacking.sizes[column]
