"""Why a request cannot be placed: no such profile, no capacity, or room that is fragmented.

For one named node, `offers.Offers.why_not` decides in the same way.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from slicewise.core.cluster import Cluster
from slicewise.core.fragmentation import is_fragmented
from slicewise.core.geometry import Profile
from slicewise.core.idset import NONE
from slicewise.core.request import Reason, Rejection, Request
from slicewise.core.states import GpuState


@dataclass(frozen=True, slots=True)
class _Obstacles:
    """The states of a cluster in which a kind of request is blocked by fragmentation."""

    offered: bool
    """Whether any model in the cluster offers what is asked for."""
    fragmented: npt.NDArray[np.int64]
    """The states with enough free slices for it and no open window."""


class Reasons:
    """Explains rejections on one cluster, in work that does not grow with its GPUs."""

    def __init__(self, cluster: Cluster, keep: int = 256) -> None:
        self._cluster = cluster
        self._keep = keep
        self._obstacles: OrderedDict[Request, _Obstacles] = OrderedDict()
        self._models_seen = 0

    def for_cluster(self, request: Request) -> Rejection:
        """No GPU was found for the request."""
        obstacles = self._of(request)
        if not obstacles.offered:
            models = ", ".join(geometry.model for geometry in self._cluster.models) or "none"
            return Rejection(
                request,
                Reason.UNKNOWN_PROFILE,
                f"no GPU model of this cluster offers {request} (models here: {models})",
            )
        free = self._cluster.free_slices
        if (self._cluster.first.take(obstacles.fragmented) < NONE).any():
            return Rejection(
                request,
                Reason.FRAGMENTED,
                f"no window for {request} is open on any GPU, although {free} slices are free "
                "and some GPU has enough of them",
            )
        are = "1 slice is" if free == 1 else f"{free} slices are"
        return Rejection(
            request, Reason.CAPACITY, f"no GPU has enough free for {request} ({are} free in all)"
        )

    def for_gpu(self, request: Request, gpu: int) -> Rejection:
        """The policy picked this GPU and tries no other, but there is no window on it."""
        state = self._cluster.state(gpu)
        if fragmented_for(state, request.candidates(state.geometry)):
            return Rejection(
                request,
                Reason.FRAGMENTED,
                f"no window for {request} is open on {gpu_name(self._cluster, gpu)}, which the "
                f"policy picked for its {state.free_slices} free slices",
            )
        return Rejection(
            request,
            Reason.CAPACITY,
            f"{gpu_name(self._cluster, gpu)}, which the policy picked, does not have enough free "
            f"for {request}",
        )

    def _of(self, request: Request) -> _Obstacles:
        if self._cluster.models_seen != self._models_seen:
            self._obstacles.clear()  # a model joined or left: states have other numbers
            self._models_seen = self._cluster.models_seen
        obstacles = self._obstacles.get(request)
        if obstacles is None:
            obstacles = self._obstacles[request] = _Obstacles(
                any(request.candidates(geometry) for geometry in self._cluster.models),
                np.array(self._fragmented_states(request), np.int64),
            )
            if len(self._obstacles) > self._keep:
                self._obstacles.popitem(last=False)
        return obstacles

    def _fragmented_states(self, request: Request) -> list[int]:
        candidates = {g: request.candidates(g) for g in self._cluster.models}
        return [
            number
            for number, state in enumerate(self._cluster.states)
            if fragmented_for(state, candidates[state.geometry])
        ]


def gpu_name(cluster: Cluster, gpu: int) -> str:
    """The name of a GPU in messages: its index on its node, if there are several nodes."""
    node = cluster.node_of(gpu)
    if len(node.gpus) == cluster.gpus:
        return f"GPU {gpu}"
    return f"GPU {gpu - node.gpus.start} of {node.name!r}"


def fragmented_for(state: GpuState, candidates: Iterable[tuple[Fraction, Profile]]) -> bool:
    """Whether one of the profiles finds no window on a GPU although enough slices are free."""
    return any(is_fragmented(state.geometry, profile, state.mask) for _, profile in candidates)
