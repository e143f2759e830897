"""Counters of a controller, without the metrics library: `metrics` exports them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Stats:
    """Counts since the start of the process."""

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
    conflicts: int = 0
    """Allocations given up because another claim had the same slices."""
    elections: int = 0
    """Terms of this replica as the leader."""
    watches: int = 0
    """Failures of watches."""
    messages_lost: int = 0
    """Messages to pods that could not be written."""
    deciding_seconds: float = 0.0
    """Time spent choosing devices."""
