"""The cluster: GPUs and the instances on them, indexed by state.

Per state, the cluster keeps the ordered set of GPUs in it (`members`) and the lowest of them
(`first`). A decision looks at states, of which there are a few hundred, never at GPUs. Totals
(occupied slices, active GPUs, fragmentation) are updated as GPUs change state.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from slicewise.core.errors import PlacementError, SlicewiseError, UnknownNameError
from slicewise.core.fragmentation import Reading, score_table
from slicewise.core.geometry import Geometry
from slicewise.core.idset import NONE, IdSet
from slicewise.core.residents import Residents
from slicewise.core.states import ILLEGAL, GpuState, state_space

_GONE = -1
_SLOT_BITS = 32
_PLACEMENT_BITS = 16
_FREE_SLOT = (1 << 64) - 1


class Instance(NamedTuple):
    """A MIG instance that exists in the cluster."""

    id: int
    gpu: int
    profile: str
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class Node:
    """A machine with GPUs of one model; their ids are consecutive."""

    name: str
    geometry: Geometry
    gpus: range
    schedulable: bool


class Cluster:
    """GPUs, their states and the instances on them.

    Overlapping and illegal placements cannot be made, and nothing is released twice: both raise
    PlacementError and change nothing.
    """

    def __init__(self) -> None:
        self.states: list[GpuState] = []
        """Every state of every model in the cluster; all tables below are indexed by it."""
        self.members: list[IdSet] = []
        """The schedulable GPUs in each state."""
        self.first: npt.NDArray[np.int64] = np.empty(0, np.int64)
        """The lowest schedulable GPU in each state, or NONE."""
        self.schedulable = IdSet()
        """All schedulable GPUs: those of schedulable nodes that are not held."""
        self.after_place: list[tuple[int, ...]] = []
        """State by placement: the state that follows, or ILLEGAL."""
        self.after_release: list[tuple[int, ...]] = []
        """State by placement: the state left when that instance ends, or ILLEGAL."""
        self._taken: list[int] = []
        self._f_partial: list[int] = []
        self._f_overlap: list[int] = []
        self._empty_state: dict[Geometry, int] = {}
        self.models_seen = 0
        """Counts the models added and forgotten; each renumbers states."""

        self.state_of: list[int] = []
        """The state of each GPU, by GPU id."""
        self._node_of = array("l")
        self._nodes: dict[str, Node] = {}
        self._node_names: list[str] = []
        self._spare_ids: dict[int, list[range]] = {}
        self._held: set[int] = set()

        self._where = array("Q")
        self._generation = array("I")
        self._free_slots: list[int] = []
        self._residents = Residents()

        self._gpus = self._slices = self._occupied = self._active = 0
        self._sum_partial = self._sum_overlap = 0

    @classmethod
    def of(cls, geometry: Geometry, gpus: int, gpus_per_node: int | None = None) -> Cluster:
        """A cluster of empty GPUs, on one node or on nodes of ``gpus_per_node``.

        The last node has the remainder.
        """
        each = gpus if gpus_per_node is None else gpus_per_node
        if gpus < 1 or each < 1:
            raise SlicewiseError(f"cluster and node need at least one GPU, not {min(gpus, each)}")
        cluster = cls()
        for number, first in enumerate(range(0, gpus, each)):
            cluster.add_node(f"node-{number}", geometry, min(each, gpus - first))
        return cluster

    # Nodes

    def add_node(self, name: str, geometry: Geometry, gpus: int) -> Node:
        """Add a node with empty GPUs and make them schedulable."""
        if name in self._nodes:
            raise SlicewiseError(f"node {name!r} already exists")
        if gpus < 1:
            raise SlicewiseError(f"node {name!r} needs at least one GPU, not {gpus}")
        empty = self.know(geometry)
        spare = self._spare_ids.get(gpus)
        if spare:
            ids = spare.pop()
        else:
            ids = range(len(self.state_of), len(self.state_of) + gpus)
            self.state_of.extend([_GONE] * gpus)
            self._node_of.extend([_GONE] * gpus)
            self._residents.add_gpus(gpus)
        number = len(self._node_names)
        self._node_names.append(name)
        for gpu in ids:
            self.state_of[gpu] = empty
            self._node_of[gpu] = number
        self._gpus += gpus
        self._slices += gpus * geometry.slices
        self._nodes[name] = Node(name, geometry, ids, False)
        return self.resume(name)

    def next_gpus(self, gpus: int) -> int:
        """The id of the first GPU that a node of this size would get if it were added now."""
        spare = self._spare_ids.get(gpus)
        return spare[-1].start if spare else len(self.state_of)

    @property
    def spare_gpus(self) -> tuple[range, ...]:
        """Unused ids of removed nodes, by size; of one size, the last is reused first."""
        return tuple(ids for size in sorted(self._spare_ids) for ids in self._spare_ids[size])

    def drain(self, name: str) -> Node:
        """Take a node's GPUs out of scheduling; running instances stay."""
        node = self.node(name)
        if node.schedulable:
            for gpu in node.gpus:
                if gpu not in self._held:
                    self._take_from_index(gpu)
        return self._set_node(node, False)

    def resume(self, name: str) -> Node:
        """Make a node's GPUs schedulable again, except GPUs that are held."""
        node = self.node(name)
        if not node.schedulable:
            for gpu in node.gpus:
                if gpu not in self._held:
                    self._put_into_index(gpu)
        return self._set_node(node, True)

    def hold(self, gpu: int) -> None:
        """Take one GPU out of scheduling, whatever the state of its node; running instances stay.

        Holding a GPU twice has no further effect.
        """
        node = self.node_of(gpu)
        if gpu not in self._held:
            self._held.add(gpu)
            if node.schedulable:
                self._take_from_index(gpu)

    def unhold(self, gpu: int) -> None:
        """Make a held GPU schedulable again, if its node is."""
        node = self.node_of(gpu)
        if gpu in self._held:
            self._held.remove(gpu)
            if node.schedulable:
                self._put_into_index(gpu)

    def is_held(self, gpu: int) -> bool:
        """Whether a GPU is held."""
        self._check_gpu(gpu)
        return gpu in self._held

    def remove_node(self, name: str) -> None:
        """Remove a node; refused while an instance is on it."""
        node = self.node(name)
        busy = sum(self._taken[self.state_of[gpu]] > 0 for gpu in node.gpus)
        if busy:
            raise PlacementError(
                f"node {name!r} still has instances on {busy} of its GPUs; release them first"
            )
        self.drain(name)
        for gpu in node.gpus:
            self.state_of[gpu] = _GONE
        self._held.difference_update(node.gpus)
        self._gpus -= len(node.gpus)
        self._slices -= len(node.gpus) * node.geometry.slices
        self._spare_ids.setdefault(len(node.gpus), []).append(node.gpus)
        del self._nodes[name]

    def node(self, name: str) -> Node:
        """The node of that name."""
        try:
            return self._nodes[name]
        except KeyError:
            raise UnknownNameError("node", name, self._nodes) from None

    def node_of(self, gpu: int) -> Node:
        """The node a GPU belongs to."""
        self._check_gpu(gpu)
        return self._nodes[self._node_names[self._node_of[gpu]]]

    @property
    def nodes(self) -> tuple[Node, ...]:
        """All nodes, in the order they were added."""
        return tuple(self._nodes.values())

    @property
    def models(self) -> tuple[Geometry, ...]:
        """The GPU models the cluster knows, whether or not a node has them."""
        return tuple(self._empty_state)

    def _set_node(self, node: Node, schedulable: bool) -> Node:
        node = Node(node.name, node.geometry, node.gpus, schedulable)
        self._nodes[node.name] = node
        return node

    def know(self, geometry: Geometry) -> int:
        """Add a GPU model, with or without a node of it; returns the number of its empty state."""
        known = self._empty_state.get(geometry)
        if known is not None:
            return known
        if any(other.model == geometry.model for other in self._empty_state):
            raise SlicewiseError(
                f"another geometry named {geometry.model!r} is in the cluster already"
            )
        base = len(self.states)
        space = state_space(geometry)
        self.states.extend(space.states)
        self.members.extend(IdSet() for _ in space.states)
        self.first = np.concatenate([self.first, np.full(len(space), NONE, np.int64)])
        for table, rows in (
            (self.after_place, space.after_place),
            (self.after_release, space.after_release),
        ):
            table.extend(tuple(t if t == ILLEGAL else t + base for t in row) for row in rows)
        masks = [state.mask for state in space.states]
        self._taken.extend(mask.bit_count() for mask in masks)
        partial = score_table(geometry, Reading.PARTIAL)
        overlap = score_table(geometry, Reading.OVERLAP)
        self._f_partial.extend(partial[mask] for mask in masks)
        self._f_overlap.extend(overlap[mask] for mask in masks)
        self._empty_state[geometry] = base
        self.models_seen += 1
        return base

    def forget(self, geometry: Geometry) -> None:
        """Remove a GPU model that no node has; later models' states are renumbered."""
        base = self._empty_state.get(geometry)
        if base is None or any(node.geometry == geometry for node in self._nodes.values()):
            raise SlicewiseError(f"{geometry.model!r} is in use, or not known")
        later = [other for other in self._empty_state.values() if other > base]
        end = min(later, default=len(self.states))
        gone = end - base
        for table in (self.states, self.members, self._taken, self._f_partial, self._f_overlap):
            del table[base:end]
        self.first = np.delete(self.first, slice(base, end))
        for rows in (self.after_place, self.after_release):
            rows[base:] = [
                tuple(t if t == ILLEGAL else t - gone for t in row) for row in rows[end:]
            ]
        self.state_of[:] = [state - gone if state >= end else state for state in self.state_of]
        del self._empty_state[geometry]
        for other, empty in self._empty_state.items():
            if empty > base:
                self._empty_state[other] = empty - gone
        self.models_seen += 1

    # Instances

    def place(self, gpu: int, profile: str, start: int) -> Instance:
        """Create an instance at an exact placement."""
        node = self.node_of(gpu)
        geometry = node.geometry
        placement = geometry.placement(profile, start)
        if placement is None:
            legal = ", ".join(map(str, geometry.profile(profile).starts))
            raise PlacementError(
                f"{profile} cannot start at slice {start} on {geometry.model}; legal: {legal}"
            )
        if not node.schedulable:
            raise PlacementError(f"GPU {gpu} is on node {node.name!r}, which is drained")
        if gpu in self._held:
            raise PlacementError(f"GPU {gpu} of node {node.name!r} is held: it takes nothing new")
        return self.put(gpu, placement.number)

    def put(self, gpu: int, placement: int) -> Instance:
        """Create an instance by the number of its placement in the GPU's geometry."""
        old = self.state_of[gpu]
        new = self.after_place[old][placement]
        if new == ILLEGAL:
            raise self._refusal(gpu, placement)
        self._move(gpu, old, new)
        where = gpu << _PLACEMENT_BITS | placement
        if self._free_slots:
            slot = self._free_slots.pop()
            self._where[slot] = where
            identity = self._generation[slot] << _SLOT_BITS | slot
        else:
            identity = slot = len(self._where)
            self._where.append(where)
            self._generation.append(0)
        self._residents.enter(gpu, slot)
        _, profile, start, _ = self.states[new].geometry.placements[placement]
        return Instance(identity, gpu, profile.name, start, profile.size)

    def release(self, instance: Instance | int) -> Instance:
        """End an instance, given as object or id; a second release is refused."""
        identity = instance if isinstance(instance, int) else instance.id
        gone = self.instance(identity)
        self._take_out(identity)
        self._generation[identity & (1 << _SLOT_BITS) - 1] += 1
        return gone

    def undo_place(self, instance: Instance) -> None:
        """Undo the latest placement."""
        self.instance(instance.id)
        self._take_out(instance.id)

    def undo_release(self, instance: Instance) -> None:
        """Undo the latest release: the instance exists again, with the same id."""
        slot = instance.id & (1 << _SLOT_BITS) - 1
        if not self._free_slots or self._free_slots[-1] != slot:
            raise PlacementError(f"releasing instance {instance.id} was not the latest change")
        self._generation[slot] -= 1
        placement = self._geometry(instance.gpu).placement(instance.profile, instance.start)
        assert placement is not None  # it was legal when it was placed
        self.put(instance.gpu, placement.number)

    def instance(self, identity: int) -> Instance:
        """The existing instance with that id."""
        slot = identity & (1 << _SLOT_BITS) - 1
        if (
            not identity >= 0
            or slot >= len(self._where)
            or self._generation[slot] != identity >> _SLOT_BITS
            or self._where[slot] == _FREE_SLOT
        ):
            raise PlacementError(f"no instance {identity}: it was released already, or never was")
        return self._instance_in(slot, identity)

    def instances(self) -> Iterator[Instance]:
        """All instances."""
        for slot, where in enumerate(self._where):
            if where != _FREE_SLOT:
                yield self._instance_in(slot, self._generation[slot] << _SLOT_BITS | slot)

    def instances_on(self, gpu: int) -> list[Instance]:
        """The instances on one GPU, by id."""
        self._check_gpu(gpu)
        generation = self._generation
        ids = sorted(generation[slot] << _SLOT_BITS | slot for slot in self._residents.on(gpu))
        return [self._instance_in(i & (1 << _SLOT_BITS) - 1, i) for i in ids]

    def _instance_in(self, slot: int, identity: int) -> Instance:
        where = self._where[slot]
        gpu = where >> _PLACEMENT_BITS
        placement = self._geometry(gpu).placements[where & (1 << _PLACEMENT_BITS) - 1]
        return Instance(
            identity, gpu, placement.profile.name, placement.start, placement.profile.size
        )

    def _take_out(self, identity: int) -> None:
        slot = identity & (1 << _SLOT_BITS) - 1
        where = self._where[slot]
        gpu = where >> _PLACEMENT_BITS
        old = self.state_of[gpu]
        self._move(gpu, old, self.after_release[old][where & (1 << _PLACEMENT_BITS) - 1])
        self._residents.leave(gpu, slot)
        self._where[slot] = _FREE_SLOT
        self._free_slots.append(slot)

    def _move(self, gpu: int, old: int, new: int) -> None:
        """Change the state of a GPU and update every index and total."""
        if gpu in self.schedulable:
            self._leave(gpu, old)
            self._join(gpu, new)
        self.state_of[gpu] = new
        before, after = self._taken[old], self._taken[new]
        self._occupied += after - before
        if not before:
            self._active += 1
        elif not after:
            self._active -= 1
        self._sum_partial += self._f_partial[new] - self._f_partial[old]
        self._sum_overlap += self._f_overlap[new] - self._f_overlap[old]

    def _take_from_index(self, gpu: int) -> None:
        self.schedulable.remove(gpu)
        self._leave(gpu, self.state_of[gpu])

    def _put_into_index(self, gpu: int) -> None:
        self.schedulable.add(gpu)
        self._join(gpu, self.state_of[gpu])

    def _leave(self, gpu: int, state: int) -> None:
        members = self.members[state]
        members.remove(gpu)
        self.first[state] = members.first

    def _join(self, gpu: int, state: int) -> None:
        members = self.members[state]
        members.add(gpu)
        self.first[state] = members.first

    def _refusal(self, gpu: int, number: int) -> PlacementError:
        state = self.state(gpu)
        placement = state.geometry.placements[number]
        what = f"{placement.profile.name} at slice {placement.start} of GPU {gpu}"
        if placement.window & state.mask:
            taken = state.geometry.mask_text(state.mask)
            return PlacementError(f"{what} overlaps occupied slices ({taken}, slice 0 first)")
        return PlacementError(f"{what} would exceed {state.overdrawn(placement.profile)}")

    # Reading

    def state(self, gpu: int) -> GpuState:
        """The state of a GPU."""
        self._check_gpu(gpu)
        return self.states[self.state_of[gpu]]

    def _geometry(self, gpu: int) -> Geometry:
        return self.states[self.state_of[gpu]].geometry

    def _check_gpu(self, gpu: int) -> None:
        if not 0 <= gpu < len(self.state_of) or self.state_of[gpu] == _GONE:
            raise PlacementError(f"no GPU {gpu} in the cluster ({self._gpus} GPUs)")

    @property
    def gpus(self) -> int:
        """The number of GPUs."""
        return self._gpus

    @property
    def slices(self) -> int:
        """Memory slices of all GPUs together."""
        return self._slices

    @property
    def occupied_slices(self) -> int:
        """Memory slices taken by instances."""
        return self._occupied

    @property
    def free_slices(self) -> int:
        """Memory slices not taken."""
        return self._slices - self._occupied

    @property
    def active_gpus(self) -> int:
        """GPUs with at least one instance."""
        return self._active

    @property
    def instance_count(self) -> int:
        """The number of instances."""
        return len(self._where) - len(self._free_slots)

    def fragmentation(self, reading: Reading = Reading.PARTIAL) -> float:
        """Mean F over all GPUs."""
        total = self._sum_partial if reading is Reading.PARTIAL else self._sum_overlap
        return total / self._gpus if self._gpus else 0.0
