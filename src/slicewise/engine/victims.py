"""Victims: which instances would have to end for a window on a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import NamedTuple

from slicewise.core.cluster import Cluster, Instance
from slicewise.core.geometry import Placement
from slicewise.core.request import Request


class Victim(NamedTuple):
    """A preemptible allocation that may be ended."""

    id: str
    tenant: str
    priority: int
    since: float
    """When it was placed."""
    instances: tuple[Instance, ...]

    @property
    def slices(self) -> int:
        """Its memory slices."""
        return sum(one.size for one in self.instances)


class ClearedWindow(NamedTuple):
    """A window that is free once these victims have ended, and all of each."""

    gpu: int
    placement: Placement
    waste: Fraction
    victims: tuple[Victim, ...]
    """At least one."""


def cleared_windows(
    cluster: Cluster, request: Request, gpus: Iterable[int], victims: Iterable[Victim]
) -> Iterator[ClearedWindow]:
    """Every window for a request on these GPUs that has only victims in it.

    Whether a budget of the GPU allows it, `Cluster.once_cleared` tells.
    """
    owner = {one.id: victim for victim in victims for one in victim.instances}
    for gpu in gpus:
        geometry = cluster.state(gpu).geometry
        wastes = {profile: waste for waste, profile in request.candidates(geometry)}
        residents = [
            ((1 << one.size) - 1 << one.start, owner.get(one.id))
            for one in cluster.instances_on(gpu)
        ]
        for placement in geometry.placements:
            waste = wastes.get(placement.profile)
            if waste is None:
                continue
            ended = _all_of(victim for mask, victim in residents if mask & placement.window)
            if ended:
                yield ClearedWindow(gpu, placement, waste, ended)


def _all_of(residents: Iterable[Victim | None]) -> tuple[Victim, ...]:
    """The allocations that end if these do; none if one of them must stay."""
    ended: dict[str, Victim] = {}
    for victim in residents:
        if victim is None:
            return ()
        ended[victim.id] = victim
    return tuple(sorted(ended.values()))
