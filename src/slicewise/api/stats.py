"""Recent statistics: time series and the latest rejections."""

from __future__ import annotations

from slicewise.api.base import Moment, View


class PointView(View, frozen=True):
    """One point of the time series: counts of an interval, and the cluster at its end."""

    at: Moment
    accepted: int
    """Requests placed, at once or after waiting; for a tenant's token, its own."""
    queued: int
    """Requests put in the queue."""
    ended: int
    """Placed allocations that ended."""
    rejected: dict[str, int]
    """By reason: requests rejected at once or after waiting too long."""
    waited: int
    """Accepted requests that had waited."""
    mean_wait: float | None
    """Their mean wait in seconds."""
    longest_wait: float | None
    waiting: int
    """The length of the queue; for a tenant's token, the number of its own entries."""
    instances: int
    """This and all fields below are of the whole cluster."""
    slices: int
    free_slices: int
    fragmentation: float
    """Mean F of a GPU, windows blocked in part."""
    placements: dict[str, int]
    """By profile: the windows open to it on schedulable GPUs."""


class RejectionView(View, frozen=True):
    """A rejected request and the reason."""

    seq: int
    at: Moment
    tenant: str
    wanted: str
    count: int
    reason: str
    detail: str


class StatsView(View, frozen=True):
    """Recent statistics of this process."""

    seq: int
    since: Moment
    """When this process started to collect."""
    step: float
    """Length of an interval in seconds."""
    points: tuple[PointView, ...]
    """Oldest first; the last interval is not complete."""
    rejections: tuple[RejectionView, ...]
    """Newest first."""
