"""Round-robin: one GPU after the other, whatever is on it."""

from __future__ import annotations

from slicewise.core.geometry import Profile
from slicewise.core.states import GpuState
from slicewise.policies.base import Preference, TablePolicy, Ties
from slicewise.policies.fits import first_feasible


class RoundRobin(TablePolicy):
    """The next GPU in turn that has an open window."""

    name = "round-robin"
    summary = "Next GPU in turn that has an open window, lowest start."
    ties = Ties.ROTATE

    def prefer(self, gpu: GpuState, profile: Profile) -> Preference | None:
        """All GPUs with an open window are alike."""
        start = first_feasible(gpu, profile, best_index=False)
        return None if start is None else Preference(0, start)


class RoundRobinStrict(RoundRobin):
    """Round-robin as published (RR)."""

    name = "round-robin-strict"
    summary = "RR as published: the next GPU in turn and only that one."

    def prefer(self, gpu: GpuState, profile: Profile) -> Preference:
        """All GPUs are alike, even those with no open window."""
        return Preference(0, first_feasible(gpu, profile, best_index=False))
