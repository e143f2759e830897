"""A snapshot of the cluster, on which a thread plans moves while the service continues."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from slicewise.control.state import NodeStatus, State
from slicewise.core.cluster import Cluster
from slicewise.core.geometry import Geometry
from slicewise.journal.agent_entries import Foreign, Phase
from slicewise.journal.entries import AllocationRecord, NodePhase


class _Node(NamedTuple):
    """A node in a snapshot."""

    name: str
    geometry: Geometry
    gpus: int
    phase: NodePhase
    held: Sequence[int]
    """Indices of GPUs that accept no new instances. A plan leaves GPUs with a reserved window as
    they are."""
    foreign: Sequence[Foreign]
    """Foreign instances that occupy slices."""

    @classmethod
    def of(cls, node: NodeStatus, cluster: Cluster) -> _Node:
        held = [
            index
            for index, gpu in enumerate(node.gpus)
            if cluster.is_held(gpu) or cluster.reserved(gpu) is not None
        ]
        found = node.agent.foreign.values() if node.agent is not None else ()
        foreign = [one for one in found if one.blocks]
        return cls(node.name, node.geometry, len(node.gpus), node.phase, held, foreign)


@dataclass(frozen=True, slots=True)
class ClusterSnapshot:
    """The cluster at one journal entry. A thread plans on it while the service continues."""

    seq: int
    nodes: Sequence[_Node]
    records: Sequence[AllocationRecord]

    @classmethod
    def of(cls, state: State) -> ClusterSnapshot:
        """Take a snapshot. Nodes keep the order of their GPUs, which decides ties."""
        nodes = sorted(state.nodes.values(), key=lambda node: node.gpus.start)
        return cls(
            state.seq,
            [_Node.of(node, state.cluster) for node in nodes],
            [*state.allocations.values(), *state.leaving.values()],
        )

    def build(self) -> tuple[Cluster, dict[int, tuple[str, int]], set[int]]:
        """Build the cluster, the owners of its instances, and the instances that must not move.

        An owner is an allocation and the index of one of its instances. Instances on nodes with
        an agent never move, since their jobs are running.
        """
        cluster = Cluster()
        owner: dict[int, tuple[str, int]] = {}
        pinned: set[int] = set()
        for node in self.nodes:
            made = cluster.add_node(node.name, node.geometry, node.gpus)
            for found in node.foreign:
                pinned.add(cluster.place(made.gpus[found.gpu], found.profile, found.start).id)
        for record in self.records:
            for index, part in enumerate(record.parts):
                if part.phase is Phase.GONE or (part.phase is None and record.ended is not None):
                    continue
                gpu = cluster.node(part.node).gpus[part.gpu]
                instance = cluster.place(gpu, part.profile, part.start).id
                owner[instance] = record.id, index
                if part.phase is not None:
                    pinned.add(instance)
        for node in self.nodes:
            for index in node.held:
                cluster.hold(cluster.node(node.name).gpus[index])
            if node.phase is not NodePhase.READY:
                cluster.drain(node.name)
        return cluster, owner, pinned
