"""Moving instances: create at the new place, end the old one, and take it all back on failure.

A move never leaves a tenant without an instance: the new one exists before the old one ends. So
the new window must be free, and within the GPU's budgets, while the old one is still taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from slicewise.core.cluster import Cluster, Instance
from slicewise.core.errors import PlacementError
from slicewise.engine.room import room_of


class Move(NamedTuple):
    """An instance as it is now, and the place it goes to; its profile stays the same."""

    instance: Instance
    gpu: int
    start: int


class Moved(NamedTuple):
    """An instance was moved: as it was, and as it is now, with an id of its own."""

    old: Instance
    new: Instance


class Trail:
    """Moves made on a cluster, all of which can be taken back, the latest first."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.moves: list[Move] = []
        self.made: list[Instance] = []
        """By move: the instance at its new place, which has an id of its own."""
        self._won: list[int] = []

    @property
    def won(self) -> int:
        """By how much the moves made the cluster's room grow."""
        return sum(self._won)

    def make(self, instance: Instance, gpu: int, placement: int) -> None:
        """Create the instance at its new place, then end the old one."""
        before = self._room_of({instance.gpu, gpu})
        made = self._cluster.put(gpu, placement, self._cluster.end_of(instance))
        self._cluster.release(instance)
        self.moves.append(Move(instance, gpu, made.start))
        self.made.append(made)
        self._won.append(self._room_of({instance.gpu, gpu}) - before)

    def back_to(self, count: int) -> None:
        """Take back all but the first ``count`` moves, as if they had never been made."""
        while len(self.moves) > count:
            self._won.pop()
            self._cluster.undo_release(self.moves.pop().instance)
            self._cluster.undo_place(self.made.pop())

    def _room_of(self, gpus: set[int]) -> int:
        cluster = self._cluster
        return sum(room_of(cluster.state(gpu)) for gpu in gpus if gpu in cluster.schedulable)


Step = Callable[[Move, Instance], None]
"""Told of a move that was made and of the instance at its new place."""


def carry_out(
    cluster: Cluster, moves: Sequence[Move], step: Step | None = None
) -> tuple[Instance, ...]:
    """Make planned moves in order; returns the instances at their new places, move by move.

    ``step`` is called after every move, with it and the new instance. When a move is refused, or
    ``step`` raises, the cluster is as it was before the first move, and the error goes on to the
    caller.
    """
    trail = Trail(cluster)
    try:
        for move in moves:
            trail.make(move.instance, move.gpu, _checked(cluster, move))
            if step is not None:
                step(move, trail.made[-1])
    except BaseException:
        trail.back_to(0)
        raise
    return tuple(trail.made)


def _checked(cluster: Cluster, move: Move) -> int:
    """The number of the placement a move leads to; refused when the plan is out of date."""
    instance, gpu, start = move
    if cluster.instance(instance.id) != instance:
        raise PlacementError(f"instance {instance.id} is not where the plan found it")
    target = cluster.node_of(gpu)
    if not target.schedulable:
        raise PlacementError(f"GPU {gpu} is on node {target.name!r}, which is drained")
    if cluster.is_held(gpu):
        raise PlacementError(f"GPU {gpu} of node {target.name!r} is held: it takes nothing new")
    placement = target.geometry.placement(instance.profile, start)
    if target.geometry is not cluster.node_of(instance.gpu).geometry or placement is None:
        raise PlacementError(
            f"instance {instance.id} ({instance.profile}) cannot move to slice {start} of GPU "
            f"{gpu}: another model, or not a legal start"
        )
    return placement.number
