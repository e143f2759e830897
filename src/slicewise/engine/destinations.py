"""Destinations: the placements that an instance could move to, the policy's choice first.

GPUs in the same state offer the same placements, so one GPU represents each state. Only GPUs on
which a plan frees slices are considered one by one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from slicewise.core.cluster import Cluster, Instance
from slicewise.core.geometry import Placement
from slicewise.core.idset import NONE
from slicewise.core.request import Request
from slicewise.engine.room import KeepRoom
from slicewise.policies.base import AdaptivePolicy, TablePolicy
from slicewise.policies.ranking import Ranking

Destination = tuple[int, Placement]
"""A GPU and a placement that is legal there."""


class Destinations:
    """Finds destinations in one cluster by a policy, or by the least room lost."""

    def __init__(
        self, cluster: Cluster, policy: TablePolicy | AdaptivePolicy | None = None
    ) -> None:
        self._cluster = cluster
        self._ranking = Ranking(policy or KeepRoom(), cluster)

    def request(self, instance: Instance) -> Request:
        """A request for the same profile on the same GPU model."""
        return Request(instance.profile, (self._cluster.state(instance.gpu).geometry.model,))

    def best(self, instance: Instance, busy: Collection[int]) -> Destination | None:
        """The policy's choice outside the busy GPUs, or None."""
        return next(self._ranked(instance, busy), None)

    def of(
        self,
        instance: Instance,
        kept: Sequence[tuple[int, int]],
        after: Collection[Instance],
    ) -> Iterator[Destination]:
        """Yield the policy's choice, then the placements on GPUs that the plan frees.

        ``kept`` lists these GPUs, all of the instance's model, with the windows that must stay
        free. If one of the instances that move ``after`` this one currently has a destination,
        all other placements follow, since this instance might take it.
        """
        busy = {gpu for gpu, _ in kept}
        elsewhere = self._ranked(instance, busy)
        first = next(elsewhere, None)
        if first is not None:
            yield first
        for gpu in sorted(busy):
            for placement in self._open(gpu, instance):
                if not any(gpu == at and placement.window & w for at, w in kept):
                    yield gpu, placement
        if any(self.best(other, busy) for other in after):
            yield from elsewhere

    def _ranked(self, instance: Instance, busy: Collection[int]) -> Iterator[Destination]:
        """One GPU of each state with its open placements, in the order of the policy."""
        cluster = self._cluster
        row = self._ranking.row(self.request(instance))
        lowest = cluster.first.take(row.states)
        for state in {cluster.state_of[gpu] for gpu in busy}:
            free = (gpu for gpu in cluster.members[state] if gpu not in busy)
            lowest[row.states == state] = next(free, NONE)
        keys = lowest + row.ranks
        while len(keys) and keys[best := int(keys.argmin())] < NONE:
            gpu = int(lowest[best])
            keys[best] = NONE
            chosen = row.placement[cluster.state_of[gpu]]
            # A strict policy may pick a GPU without an open placement.
            for placement in sorted(self._open(gpu, instance), key=lambda p: p.number != chosen):
                yield gpu, placement

    def _open(self, gpu: int, instance: Instance) -> list[Placement]:
        """The placements of an instance's profile that are open on a GPU."""
        state = self._cluster.state(gpu)
        profile = state.geometry.profile(instance.profile)
        found = (state.geometry.placement(profile.name, s) for s in state.feasible_starts(profile))
        return [placement for placement in found if placement is not None]
