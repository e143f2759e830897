"""Counters of a controller, without the metrics library: `metrics` exports them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Stats:
    """Counts since the start of the process, and a few of now."""

    decided: int = 0
    """Pods for which devices were chosen."""
    allocated: int = 0
    """Claims whose allocation was written."""
    failed: int = 0
    """Decisions that could not be written, mostly because a claim had changed."""
    returned: int = 0
    """Allocations that kube-scheduler could not use: the pod did not fit the node."""
    revoked: int = 0
    """Allocations revoked: their pod was deleted, or they conflicted."""
    evicted: int = 0
    """Pods evicted for others of a higher priority."""
    conflicts: int = 0
    """Allocations given up because another claim had the same slices."""
    elections: int = 0
    """Terms of this replica as the leader."""
    watches: int = 0
    """Failures of watches."""
    messages_lost: int = 0
    """Messages to pods that could not be written."""
    prepare_failures: int = 0
    """Bound pods whose devices the driver could not prepare."""
    prepares_failing: int = 0
    """Such pods now."""
    unreadable: int = 0
    """Namespaces now with an annotation that cannot be read."""
    lines: int = 0
    """Lines of waiting pods now: those of a namespace that ask for the same."""
    reservations: int = 0
    """Windows that are reserved for waiting pods now."""
    quarantined: int = 0
    """Claims now that are not allocated, because the API refuses to change them."""
    cooling: int = 0
    """Claims now with freed slices that are not given out again yet."""
    deciding_seconds: float = 0.0
    """Time spent choosing devices."""
