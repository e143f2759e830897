"""Openings: placements that would be open if certain instances, the blockers, were moved.

A table lists the states that can serve a request after some instances are gone. Only GPUs in these
states are examined: one for each distinct set of instances, up to a fixed number per state. The
work therefore does not grow with the cluster.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from itertools import combinations, islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from slicewise.core.cluster import Cluster, Instance
from slicewise.core.geometry import Placement
from slicewise.core.idset import NONE
from slicewise.core.request import Request
from slicewise.core.states import ILLEGAL

LOOK_AT = 64
"""The number of GPUs examined per state, lowest ids first."""

_NEVER = 127
"""More instances than any GPU has: the request does not fit even on an empty GPU."""


class Opening(NamedTuple):
    """A placement on a GPU that is open after the blockers are gone."""

    gpu: int
    placement: Placement
    blockers: tuple[Instance, ...]


class Openings:
    """Finds openings in one cluster."""

    def __init__(self, cluster: Cluster, look_at: int = LOOK_AT, keep: int = 256) -> None:
        self._cluster = cluster
        self._look_at = look_at
        self._keep = keep
        self._distances: OrderedDict[Request, npt.NDArray[np.int8]] = OrderedDict()
        self._models_seen = 0

    def of(
        self, request: Request, limit: int, fixed: Collection[int], apart: Collection[int] = ()
    ) -> list[Opening]:
        """Openings with at most ``limit`` blockers, the fewest and smallest first.

        Instances with their id in ``fixed`` stay. Of GPUs with equal instances only the lowest id
        is considered, except GPUs in ``apart``.
        """
        cluster = self._cluster
        near = (self._distance(request) <= limit) & (cluster.first < NONE)
        found: list[tuple[tuple[object, ...], Opening]] = []
        for state in np.flatnonzero(near).tolist():
            candidates = request.candidates(cluster.states[state].geometry)
            for gpu, instances in self._representatives(state, fixed, apart):
                movable = [i for i in instances if i.id not in fixed]
                for waste, profile in candidates:
                    for start in profile.starts:
                        placement = cluster.states[state].geometry.placement(profile.name, start)
                        assert placement is not None  # it is one of the profile's own starts
                        for blockers in self._in_the_way(
                            state, placement, instances, movable, limit
                        ):
                            slices = sum(i.size for i in blockers)
                            order = (len(blockers), waste, slices, gpu, start, blockers)
                            found.append((order, Opening(gpu, placement, blockers)))
        found.sort(key=lambda item: item[0])
        return [opening for _, opening in found]

    def movable(self, fixed: Collection[int]) -> Iterator[Instance]:
        """The instances on schedulable GPUs that may move, one GPU of each kind, by state."""
        for state in np.flatnonzero(self._cluster.first < NONE).tolist():
            for _, instances in list(self._representatives(state, fixed, ())):
                yield from (i for i in instances if i.id not in fixed)

    def _representatives(
        self, state: int, fixed: Collection[int], apart: Collection[int]
    ) -> Iterator[tuple[int, list[Instance]]]:
        """GPUs in a state, one of each kind, with their instances."""
        seen: set[tuple[tuple[str, int, bool], ...]] = set()
        for gpu in islice(self._cluster.members[state], self._look_at):
            instances = self._cluster.instances_on(gpu)
            if gpu not in apart:
                kind = tuple(sorted((i.profile, i.start, i.id in fixed) for i in instances))
                if kind in seen:
                    continue
                seen.add(kind)
            yield gpu, instances

    def _in_the_way(
        self,
        state: int,
        placement: Placement,
        instances: Sequence[Instance],
        movable: Sequence[Instance],
        limit: int,
    ) -> Iterator[tuple[Instance, ...]]:
        """The smallest sets of movable instances without which the placement is legal."""
        geometry = self._cluster.states[state].geometry
        over = [
            i for i in instances if geometry.profile(i.profile).window(i.start) & placement.window
        ]
        if any(i not in movable for i in over):
            return
        # Instances in the window must move; if a budget is short, others must as well.
        rest = [i for i in movable if i not in over]
        smaller: list[set[Instance]] = []
        for more in range(min(limit - len(over), len(rest)) + 1):
            for others in combinations(rest, more):
                if any(known <= set(others) for known in smaller):
                    continue
                if self._legal_without(state, (*over, *others), placement):
                    smaller.append(set(others))
                    yield tuple(sorted((*over, *others)))

    def _legal_without(self, state: int, gone: Sequence[Instance], placement: Placement) -> bool:
        cluster = self._cluster
        geometry = cluster.states[state].geometry
        for instance in gone:
            at = geometry.placement(instance.profile, instance.start)
            assert at is not None  # it is there
            state = cluster.after_release[state][at.number]
        return cluster.after_place[state][placement.number] != ILLEGAL

    def _distance(self, request: Request) -> npt.NDArray[np.int8]:
        """By state: the fewest instances that must move before the request fits."""
        if self._cluster.models_seen != self._models_seen:
            self._distances.clear()  # a model joined or left: states have other numbers
            self._models_seen = self._cluster.models_seen
        known = self._distances.get(request)
        if known is None:
            known = self._distances[request] = self._measure(request)
            if len(self._distances) > self._keep:
                self._distances.popitem(last=False)
        return known

    def _measure(self, request: Request) -> npt.NDArray[np.int8]:
        cluster = self._cluster
        distance = np.full(len(cluster.states), _NEVER, np.int8)
        # States of a model are sorted by occupied slices, so the state after a release comes first.
        for number, state in enumerate(cluster.states):
            if any(state.feasible_starts(p) for _, p in request.candidates(state.geometry)):
                distance[number] = 0
                continue
            for before in cluster.after_release[number]:
                if before != ILLEGAL and distance[before] < distance[number] - 1:
                    distance[number] = distance[before] + 1
        return distance
