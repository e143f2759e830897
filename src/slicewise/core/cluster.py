"""The cluster: GPUs and the instances on them, indexed by state.

Per state, the cluster keeps the ordered set of GPUs in it (`members`) and the lowest of them
(`first`). A decision looks at states, of which there are some hundred, never at GPUs. Totals
(occupied slices, active GPUs, fragmentation) are updated as GPUs change state.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from operator import gt
from typing import NamedTuple

from slicewise.core.errors import PlacementError, SlicewiseError, UnknownNameError
from slicewise.core.geometry import Geometry
from slicewise.core.idset import IdSet
from slicewise.core.residents import Residents
from slicewise.core.state_index import StateIndex
from slicewise.core.states import ILLEGAL, GpuState
from slicewise.core.totals import ClusterTotals
from slicewise.core.window_ends import WindowEnds

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


class Cluster(StateIndex, ClusterTotals):
    """GPUs, their states and the instances on them.

    Overlapping and illegal placements cannot be made, and nothing is released twice: both raise
    PlacementError and change nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.schedulable = IdSet()
        """All schedulable GPUs: those of schedulable nodes that are not held."""
        self.state_of: list[int] = []
        """The state of each GPU as requests see it: a reserved window counts as occupied."""
        self._actual: dict[int, int] = {}
        """By GPU with a reserved window: its state without the reservation."""
        self._reserved: dict[int, int] = {}
        """By GPU: the placement whose window is reserved."""
        self._node_of = array("l")
        self._nodes: dict[str, Node] = {}
        self._node_names: list[str] = []
        self._spare_ids: dict[int, list[range]] = {}
        self._held: set[int] = set()

        self._where = array("Q")
        self._generation = array("I")
        self._ends = array("d")
        self._free_slots: list[int] = []
        self._residents = Residents()
        self.window_ends = WindowEnds()
        """When the windows of a GPU will be free, as far as the ends of instances are known."""

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
            self.window_ends.add_gpus(gpus)
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
        for gpu in node.gpus:
            self._take_from_index(gpu)
        return self._set_node(node, False)

    def resume(self, name: str) -> Node:
        """Make a node's GPUs schedulable again, except GPUs that are held."""
        node = self._set_node(self.node(name), True)
        for gpu in node.gpus:
            self._put_into_index(gpu)
        return node

    def hold(self, gpu: int) -> None:
        """Take one GPU out of scheduling, whatever the state of its node; running instances stay.

        Holding a GPU twice has no further effect.
        """
        self._check_gpu(gpu)
        self._held.add(gpu)
        self._take_from_index(gpu)

    def unhold(self, gpu: int) -> None:
        """Make a held GPU schedulable again, if its node is."""
        self._check_gpu(gpu)
        self._held.discard(gpu)
        self._put_into_index(gpu)

    def is_held(self, gpu: int) -> bool:
        """Whether a GPU is held."""
        self._check_gpu(gpu)
        return gpu in self._held

    def remove_node(self, name: str) -> None:
        """Remove a node; refused while an instance is on it."""
        node = self.node(name)
        busy = sum(self.state(gpu).mask > 0 for gpu in node.gpus)
        if busy:
            raise PlacementError(
                f"node {name!r} still has instances on {busy} of its GPUs; release them first"
            )
        self.drain(name)
        for gpu in node.gpus:
            self.unreserve(gpu)
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

    def _set_node(self, node: Node, schedulable: bool) -> Node:
        node = Node(node.name, node.geometry, node.gpus, schedulable)
        self._nodes[node.name] = node
        return node

    def forget(self, geometry: Geometry) -> None:
        """Remove a GPU model that no node has; later models' states are renumbered."""
        if geometry not in self._empty_state or any(
            node.geometry == geometry for node in self._nodes.values()
        ):
            raise SlicewiseError(f"{geometry.model!r} is in use, or not known")
        gone = self._drop(geometry)
        self.state_of[:] = [
            state - len(gone) if state >= gone.stop else state for state in self.state_of
        ]
        for gpu, state in self._actual.items():
            self._actual[gpu] = state - len(gone) if state >= gone.stop else state

    # Reservations

    def reserve(self, gpu: int, placement: int) -> None:
        """Keep the window of a placement from requests, whatever occupies it now.

        Requests see the GPU as it will be: without the instances in the window, and with the
        placement made. `put` itself still accepts every legal placement.
        """
        self._check_gpu(gpu)
        if gpu in self._reserved:
            raise PlacementError(f"GPU {gpu} has a reserved window already")
        self._reserved[gpu] = placement
        self._actual[gpu] = self.state_of[gpu]
        self._show(gpu)

    def unreserve(self, gpu: int) -> None:
        """End the reservation on a GPU, if it has one."""
        if gpu in self._reserved:
            self._take_from_index(gpu)
            del self._reserved[gpu]
            self.state_of[gpu] = self._actual.pop(gpu)
            self.window_ends.forget(gpu)
            self._put_into_index(gpu)

    def reserved(self, gpu: int) -> int | None:
        """The placement reserved on a GPU, or None."""
        return self._reserved.get(gpu)

    def is_open(self, gpu: int, placement: int) -> bool:
        """Whether a placement could be made now, reserved or not."""
        return self.after_place[self.actual_state(gpu)][placement] != ILLEGAL

    def once_cleared(self, gpu: int, placement: int) -> int:
        """The state after a placement for which all instances in its window made way.

        ILLEGAL if the instances that stay leave too little of a budget for it.
        """
        geometry = self._geometry(gpu)
        window = geometry.placements[placement].window
        state = self._empty_state[geometry]
        for slot in self._residents.on(gpu):
            number = self._where[slot] & (1 << _PLACEMENT_BITS) - 1
            if not geometry.placements[number].window & window:
                state = self.after_place[state][number]
        return self.after_place[state][placement]

    def takes_instances(self, gpu: int) -> bool:
        """Whether a GPU takes new instances: its node is schedulable, and it is not held."""
        return gpu not in self._held and self.node_of(gpu).schedulable

    def actual_state(self, gpu: int) -> int:
        """The number of a GPU's state, without regard to reservations."""
        return self._actual[gpu] if gpu in self._actual else self.state_of[gpu]

    def _show(self, gpu: int) -> None:
        """Let requests see a GPU with its window occupied; not at all if that is no state."""
        self._take_from_index(gpu)
        shown = self._with_reservation(gpu)
        self.state_of[gpu] = self._actual[gpu] if shown == ILLEGAL else shown
        self.window_ends.forget(gpu)
        self._put_into_index(gpu)

    def _with_reservation(self, gpu: int) -> int:
        """The state once a reserved placement is made and the instances in its way are gone.

        ILLEGAL if the other instances leave too little of a budget for it, or if those in its way
        use other slices or more of a budget than it will: what fits that state might not fit today.
        """
        number = self.once_cleared(gpu, self._reserved[gpu])
        if number == ILLEGAL:
            return ILLEGAL
        actual, shown = self.state(gpu), self.states[number]
        if actual.mask & ~shown.mask or any(map(gt, actual.used, shown.used)):
            return ILLEGAL
        return number

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

    def put(self, gpu: int, placement: int, ends: float = math.inf) -> Instance:
        """Create an instance by the number of its placement in the GPU's geometry.

        ``ends`` is when it will leave, on the clock of the decisions, if that is known.
        """
        old = self._actual[gpu] if gpu in self._actual else self.state_of[gpu]
        new = self.after_place[old][placement]
        if new == ILLEGAL:
            raise PlacementError(self.state(gpu).refusal(placement, f"GPU {gpu}"))
        self._move(gpu, old, new)
        where = gpu << _PLACEMENT_BITS | placement
        if self._free_slots:
            slot = self._free_slots.pop()
            self._where[slot] = where
            self._ends[slot] = ends
            identity = self._generation[slot] << _SLOT_BITS | slot
        else:
            identity = slot = len(self._where)
            self._where.append(where)
            self._ends.append(ends)
            self._generation.append(0)
        self._residents.enter(gpu, slot)
        self.window_ends.forget(gpu)
        if gpu in self._reserved:
            self._show(gpu)
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
        self._slot(instance)
        self._take_out(instance.id)

    def undo_release(self, instance: Instance) -> None:
        """Undo the latest release: the instance exists again, with the same id."""
        slot = instance.id & (1 << _SLOT_BITS) - 1
        if not self._free_slots or self._free_slots[-1] != slot:
            raise PlacementError(f"releasing instance {instance.id} was not the latest change")
        self._generation[slot] -= 1
        placement = self._geometry(instance.gpu).placement(instance.profile, instance.start)
        assert placement is not None  # it was legal when it was placed
        self.put(instance.gpu, placement.number, self._ends[slot])

    def instance(self, identity: int) -> Instance:
        """The existing instance with that id."""
        return self._instance_in(self._slot(identity), identity)

    def end_of(self, instance: Instance | int) -> float:
        """When an instance will leave; infinity if that is not known."""
        return self._ends[self._slot(instance)]

    def set_end(self, instance: Instance | int, ends: float) -> None:
        """Change when an instance will leave: its lease was extended, or a hint was given."""
        slot = self._slot(instance)
        self._ends[slot] = ends
        self.window_ends.forget(self._where[slot] >> _PLACEMENT_BITS)

    def _slot(self, instance: Instance | int) -> int:
        """The place of an existing instance in the arrays."""
        identity = instance if isinstance(instance, int) else instance.id
        slot = identity & (1 << _SLOT_BITS) - 1
        if (
            not identity >= 0
            or slot >= len(self._where)
            or self._generation[slot] != identity >> _SLOT_BITS
            or self._where[slot] == _FREE_SLOT
        ):
            raise PlacementError(f"no instance {identity}: it was released already, or never was")
        return slot

    def ends_on(self, gpu: int) -> list[tuple[int, float]]:
        """The placements on a GPU, and when each ends; as requests see it, like its state.

        A reserved window counts as an instance whose end is not known, in place of those in it.
        """
        low = (1 << _PLACEMENT_BITS) - 1
        found = [(self._where[slot] & low, self._ends[slot]) for slot in self._residents.on(gpu)]
        reserved = self._reserved.get(gpu)
        if reserved is None:
            return found
        placements = self._geometry(gpu).placements
        window = placements[reserved].window
        stay = [one for one in found if not placements[one[0]].window & window]
        return [*stay, (reserved, math.inf)]

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
        old = self._actual[gpu] if gpu in self._actual else self.state_of[gpu]
        self._move(gpu, old, self.after_release[old][where & (1 << _PLACEMENT_BITS) - 1])
        self._residents.leave(gpu, slot)
        self.window_ends.forget(gpu)
        self._where[slot] = _FREE_SLOT
        self._free_slots.append(slot)
        if gpu in self._reserved:
            self._show(gpu)

    def _move(self, gpu: int, old: int, new: int) -> None:
        """Change the state of a GPU and update every index and total."""
        if gpu in self._actual:
            self._actual[gpu] = new  # `_show` updates the index, once the instance is entered
        else:
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
        if gpu in self.schedulable:
            self.schedulable.remove(gpu)
            self._leave(gpu, self.state_of[gpu])

    def _put_into_index(self, gpu: int) -> None:
        """Offer a GPU to requests, unless its node or the GPU itself takes none."""
        if gpu in self.schedulable or not self.takes_instances(gpu):
            return
        if gpu in self._reserved and self._with_reservation(gpu) == ILLEGAL:
            return
        self.schedulable.add(gpu)
        self._join(gpu, self.state_of[gpu])

    # Reading

    def state(self, gpu: int) -> GpuState:
        """The state of a GPU, without regard to reservations."""
        self._check_gpu(gpu)
        return self.states[self.actual_state(gpu)]

    def _geometry(self, gpu: int) -> Geometry:
        return self.states[self.state_of[gpu]].geometry

    def _check_gpu(self, gpu: int) -> None:
        if not 0 <= gpu < len(self.state_of) or self.state_of[gpu] == _GONE:
            raise PlacementError(f"no GPU {gpu} in the cluster ({self._gpus} GPUs)")

    @property
    def instance_count(self) -> int:
        """The number of instances."""
        return len(self._where) - len(self._free_slots)
