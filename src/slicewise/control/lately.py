"""What has happened lately, as it is told: points over time, and the latest rejections."""

from __future__ import annotations

from slicewise.control.wire import Moment, View


class PointView(View, frozen=True):
    """A stretch of time: what happened in it, and how the cluster stood at its end."""

    at: Moment
    accepted: int
    """Requests that were placed, at once or after waiting; one's own, for a tenant."""
    queued: int
    """Requests that had to wait."""
    ended: int
    """Allocations that ended after they had been placed."""
    rejected: dict[str, int]
    """By reason: requests that were refused, or waited too long."""
    waited: int
    """How many of those accepted had waited."""
    mean_wait: float | None
    """Of those, in seconds."""
    longest_wait: float | None
    waiting: int
    """Who waits at its end, in the whole cluster like everything below."""
    instances: int
    slices: int
    free_slices: int
    fragmentation: float
    """Mean F of a GPU, windows blocked in part."""
    placements: dict[str, int]
    """By profile: the windows open to it on schedulable GPUs."""


class RejectionView(View, frozen=True):
    """A request that was refused, and why."""

    seq: int
    at: Moment
    tenant: str
    wanted: str
    count: int
    reason: str
    detail: str


class LatelyView(View, frozen=True):
    """What this process has seen lately."""

    seq: int
    since: Moment
    """Since when this process has watched."""
    step: float
    """Seconds of one point."""
    points: tuple[PointView, ...]
    """The oldest first; the last one is not over yet."""
    rejections: tuple[RejectionView, ...]
    """The latest first."""
