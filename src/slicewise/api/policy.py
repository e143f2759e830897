"""The policy in force: which table places requests, the demand it is chosen for, and rehearsals."""

from __future__ import annotations

from typing import Literal

from slicewise.api.allocations import WantView
from slicewise.api.base import Moment, View


class RequestShare(View, frozen=True):
    """One kind of request, and its share of all that are asked for."""

    wanted: WantView
    share: float


class DemandView(View, frozen=True):
    """The estimate of the demand, from the requests of all tenants."""

    requests: int
    """Instances asked for since the service began, as far as they count."""
    steady_for: int
    """Of these, since the demand last changed."""
    changes: int
    """How often it has changed."""
    requests_per_hour: float
    mean_lifetime: float | None
    """In seconds, of instances that were released; None until there were any."""
    stated: float
    """Share of the latest lifetimes that were announced, by a lease or an expected duration."""
    shares: tuple[RequestShare, ...]
    """The largest first."""


class SeenView(View, frozen=True):
    """What became of requests since this table decides."""

    requests: int
    rejected: int
    """Those that no GPU had room for, or that waited too long."""


class Estimate(View, frozen=True):
    """A figure with its 95% interval."""

    value: float
    low: float
    high: float


class CandidateView(View, frozen=True):
    """What the last rehearsal expects of a table."""

    table: str
    words: str
    """What it does."""
    leases: bool
    """Whether it uses the known ends of instances."""
    in_use: bool
    runs: int
    rejected: Estimate
    """Share of requests that would be rejected."""
    rejected_slices: Estimate
    """Share of requested slices that would be rejected."""
    fewer: Estimate
    """By how much fewer requests it rejects than `least-lost`, on the same arrivals."""


class RehearsalView(View, frozen=True):
    """The last rehearsal."""

    at: Moment
    load: float
    """Offered slices, as a share of the cluster."""
    candidates: tuple[CandidateView, ...]
    """`least-lost` first."""


class RehearsalsView(View, frozen=True):
    """What the rehearsals of this process are doing."""

    activity: Literal["off", "elsewhere", "learning", "running", "waiting"]
    detail: str
    """Why they are off, or why the last one had no effect; empty otherwise."""
    share: float
    """The largest share of one processor core that they take."""
    finished: int
    """Rehearsals of this process that came to a result."""
    failed: int
    seconds: float
    """The time that they took together."""


class PolicyStatus(View, frozen=True):
    """The policy in force."""

    seq: int
    policy: str
    table: str | None
    """The table that places requests; None under a policy that is not chosen by rehearsals."""
    words: str
    """What it does."""
    since: Moment | None
    """When it began to decide; None if it has from the beginning."""
    switches: int | None = None
    """How often the table has changed. This and all fields below are for tokens that see all
    tenants."""
    rehearsals: RehearsalsView | None = None
    why: str | None = None
    """Why this table was chosen."""
    asked_for: tuple[str, ...] | None = None
    """The profiles that the table keeps places open for; empty if for all."""
    demand: DemandView | None = None
    seen: SeenView | None = None
    rehearsal: RehearsalView | None = None
    """None before the first."""
