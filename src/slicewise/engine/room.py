"""Room: a measure of what could still be placed, one number for each state.

The *room* of a GPU is the sum, over its plain profiles and the starts at which the hardware would
accept an instance now, of the profile's size. An empty A100-80GB has a room of 41; a full GPU has
none. F asks what is blocked; room asks what is open, and counts budgets as well as slices.
"""

from __future__ import annotations

from slicewise.core.cluster import Cluster
from slicewise.core.geometry import Profile
from slicewise.core.states import GpuState
from slicewise.core.tables import cached
from slicewise.policies.base import Preference, TablePolicy


@cached(1 << 16)
def room_of(gpu: GpuState) -> int:
    """The sizes of all instances that could be placed on such a GPU, one at a time."""
    return sum(
        profile.size * len(gpu.feasible_starts(profile)) for profile in gpu.geometry.plain_profiles
    )


def room(cluster: Cluster) -> int:
    """The room of all schedulable GPUs together."""
    return sum(
        room_of(cluster.states[number]) * len(members)
        for number, members in enumerate(cluster.members)
        if len(members)
    )


class KeepRoom(TablePolicy):
    """Prefers the least loss of room; used by the planner only, and not registered by name."""

    name = "keep-room"
    summary = "Least room lost."

    def prefer(self, gpu: GpuState, profile: Profile) -> Preference | None:
        """The feasible start that leaves the most room; the lowest if several do."""
        before = room_of(gpu)
        choices = []
        for start in gpu.feasible_starts(profile):
            placement = gpu.geometry.placement(profile.name, start)
            assert placement is not None  # a feasible start is a legal one
            choices.append((before - room_of(gpu.after(placement)), start))
        return Preference(*min(choices)) if choices else None
