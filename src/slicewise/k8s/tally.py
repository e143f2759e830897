"""What a controller has done so far, in numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Tally:
    """Counts since the start of the process."""

    decided: int = 0
    """Pods for which devices were chosen."""
    allocated: int = 0
    """Claims whose allocation was written."""
    failed: int = 0
    """Decisions that could not be written: something had changed."""
    returned: int = 0
    """Allocations that the stock scheduler gave back: the pod did not fit the node after all."""
    taken_back: int = 0
    """Allocations taken back: their pod had gone, or they could not be kept."""
    conflicts: int = 0
    """Allocations given up because another claim was given the same slices."""
    elections: int = 0
    """How often this replica began to lead."""
    watches: int = 0
    """How often a watch did not get through."""
    untold: int = 0
    """Messages to pods that were not delivered."""
    deciding_seconds: float = 0.0
    """Time spent choosing."""
