"""Policies that pick a node by what runs on it, and only then a GPU of that node.

How full a node is, the state of one GPU cannot tell, so these look at the whole cluster for every
request. What they want on a node is a table policy: its ranks are looked up and not worked out
again, and a decision costs one look at every GPU.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from slicewise.core.cluster import Cluster
from slicewise.core.geometry import Placement
from slicewise.core.idset import NONE
from slicewise.core.request import Request
from slicewise.core.states import GpuState
from slicewise.policies.base import Key, ScanPolicy, Spot, TablePolicy
from slicewise.policies.ranking import Ranking


class NodeFirst(ScanPolicy):
    """The best node with an open window, then the best GPU on it."""

    on_node: ClassVar[type[TablePolicy]]
    """Picks the GPU of a node, and the start on it."""

    def __init__(self) -> None:
        self._on_node = self.on_node()
        self._known: tuple[Cluster, Ranking] | None = None

    @abstractmethod
    def node_key(self, gpus: Sequence[GpuState], placement: Placement) -> Key:
        """How a node with these GPUs, on which ``placement`` would be made, ranks; lower first."""

    def choose(self, cluster: Cluster, request: Request) -> Spot | None:
        """Among equal nodes the one that was added first."""
        row = self._ranking(cluster).row(request)
        by_state = np.full(len(cluster.states), NONE)
        by_state[row.states] = row.ranks
        ranks: list[int] = by_state.tolist()
        best: tuple[Key, Spot] | None = None
        for node in cluster.nodes:
            if not node.schedulable:
                continue
            states = [cluster.state_of[gpu] for gpu in node.gpus]
            rank, gpu = min(
                (ranks[state] if gpu in cluster.schedulable else NONE, gpu)
                for state, gpu in zip(states, node.gpus, strict=True)
            )
            if rank == NONE:
                continue
            number = row.placement[cluster.state_of[gpu]]
            spot = Spot(gpu, node.geometry.placements[number])
            key = self.node_key([cluster.states[state] for state in states], spot.placement)
            if best is None or key < best[0]:
                best = key, spot
        return None if best is None else best[1]

    def _ranking(self, cluster: Cluster) -> Ranking:
        if self._known is None or self._known[0] is not cluster:
            self._known = cluster, Ranking(self._on_node, cluster)
        return self._known[1]
