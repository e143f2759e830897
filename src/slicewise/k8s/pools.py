"""Pools of devices as nodes with GPUs: what drivers publish, on the board of the engine.

A pool whose GPUs are of several models becomes several nodes of the board. A pool that is not
published any more, or not completely, takes nothing new; it stays while claims have devices of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from slicewise.control.entries import (
    AnyEntry,
    ModelEntered,
    NodeAdded,
    NodePhase,
    NodeRemoved,
    NodeTurned,
)
from slicewise.control.geometries import record_of
from slicewise.control.state import State
from slicewise.core.geometry import Geometry
from slicewise.k8s.devices import Gpu, Place, PoolReading

PoolKey = tuple[str, str]
"""Driver and pool."""


@dataclass(slots=True)
class _Group:
    """The GPUs of one model in a pool: a node, as far as the engine is concerned."""

    node: str
    model: str
    sets: tuple[str, ...]
    """The counter sets of its GPUs, in order."""


@dataclass(slots=True)
class _Pool:
    reading: PoolReading
    home: str
    """The Kubernetes node."""
    published: bool = True
    groups: list[_Group] = field(default_factory=list)


class Pools:
    """The pools that are or were published, and their nodes."""

    def __init__(
        self,
        state: State,
        enter: Callable[[AnyEntry], None],
        clear: Callable[[set[int]], None],
    ) -> None:
        """``enter`` changes the state; ``clear`` takes everything off GPUs that are to go."""
        self._state = state
        self._enter = enter
        self._clear = clear
        self._pools: dict[PoolKey, _Pool] = {}
        self._open: set[str] = set()
        """The Kubernetes nodes that take new pods."""
        self._holds: defaultdict[int, set[str]] = defaultdict(set)
        """By GPU: why it takes nothing new."""
        self._gpus: dict[int, Gpu] = {}
        self.freed = 0
        """Grows whenever room appears."""

    @property
    def drivers(self) -> set[str]:
        """Whose devices are known."""
        return {driver for driver, _ in self._pools}

    def gpu(self, number: int) -> Gpu:
        """A GPU of the cluster, as it was published."""
        return self._gpus[number]

    def knows(self, driver: str, pool: str) -> bool:
        """Whether a pool is or was published."""
        return (driver, pool) in self._pools

    def publish(self, key: PoolKey, reading: PoolReading, home: str) -> bool:
        """A pool is published like this now; returns whether its nodes are new ones."""
        pool = self._pools.get(key)
        wanted = _grouped(reading.gpus)
        if (
            pool is not None
            and pool.home == home
            and [(group.model, group.sets) for group in pool.groups]
            == [(geometry.model, sets) for geometry, sets in wanted]
        ):
            pool.reading, pool.published = reading, True
            self._name_gpus(pool)
            self._turn(pool)
            return False
        if pool is not None:
            self._remove(key)
        pool = self._pools[key] = _Pool(reading, home)
        for geometry, sets in wanted:
            pool.groups.append(_Group(self._add(home, geometry, len(sets)), geometry.model, sets))
        self._name_gpus(pool)
        self._turn(pool)
        self.freed += 1
        return True

    def withdraw(self, key: PoolKey) -> None:
        """A pool is no longer published; it is forgotten once no claim has devices of it."""
        pool = self._pools.get(key)
        if pool is not None:
            pool.published = False
            self._turn(pool)
            self.sweep()

    def set_open(self, home: str, opened: bool) -> None:
        """Whether a Kubernetes node takes new pods."""
        if opened == (home in self._open):
            return
        (self._open.add if opened else self._open.discard)(home)
        for pool in self._pools.values():
            if pool.home == home:
                self._turn(pool)

    def hold(self, gpu: int, why: str, held: bool) -> None:
        """Let a GPU take nothing new for some reason, or not for that reason any more."""
        reasons = self._holds[gpu]
        (reasons.add if held else reasons.discard)(why)
        if reasons:
            self._state.cluster.hold(gpu)
            return
        del self._holds[gpu]
        if self._state.cluster.is_held(gpu):
            self._state.cluster.unhold(gpu)
            self.freed += 1

    def find(self, key: PoolKey, device: str) -> tuple[int, Place] | None:
        """The GPU that a device is of, and its place there."""
        for gpu in self._numbers(self._pools[key]):
            place = self._gpus[gpu].places.get(device)
            if place is not None:
                return gpu, place
        return None

    def touched(self, key: PoolKey, device: str) -> list[int]:
        """The GPUs that a device without a place may be part of."""
        pool = self._pools[key]
        odd = pool.reading.odd.get(device)
        sets = () if odd is None else odd.counter_sets
        return [gpu for gpu in self._numbers(pool) if self._gpus[gpu].counter_set in sets]

    def sweep(self) -> None:
        """Forget pools that are published no more and have nothing on them."""
        for key, pool in list(self._pools.items()):
            if not pool.published and not any(
                self._state.nodes[group.node].instances for group in pool.groups
            ):
                self._remove(key)

    def _numbers(self, pool: _Pool) -> list[int]:
        return [gpu for group in pool.groups for gpu in self._state.nodes[group.node].gpus]

    def _add(self, home: str, geometry: Geometry, gpus: int) -> str:
        name, number = home, 1
        while name in self._state.nodes:  # of another driver, or of another model
            number += 1
            name = f"{home}~{number}"
        if geometry.model not in self._state.geometries:
            self._enter(ModelEntered(record_of(geometry)))
        first = self._state.cluster.next_gpus(gpus)
        self._enter(NodeAdded(name, geometry.model, gpus, first))
        return name

    def _turn(self, pool: _Pool) -> None:
        opened = pool.published and pool.home in self._open
        phase = NodePhase.READY if opened else NodePhase.CORDONED
        for group in pool.groups:
            if self._state.nodes[group.node].phase is not phase:
                self._enter(NodeTurned(group.node, phase))
                self.freed += opened

    def _name_gpus(self, pool: _Pool) -> None:
        """Note which device is where on the GPUs of a pool, and hold those that are tainted."""
        by_set = {gpu.counter_set: gpu for gpu in pool.reading.gpus}
        for group in pool.groups:
            for gpu, name in zip(self._state.nodes[group.node].gpus, group.sets, strict=True):
                self._gpus[gpu] = by_set[name]
                self.hold(gpu, "tainted", bool(by_set[name].tainted))

    def _remove(self, key: PoolKey) -> None:
        """Take a pool off the board, with what is on it."""
        pool = self._pools[key]
        gone = self._numbers(pool)
        self._clear(set(gone))
        del self._pools[key]
        for gpu in gone:
            self._holds.pop(gpu, None)
            del self._gpus[gpu]
        for group in pool.groups:
            self._enter(NodeRemoved(group.node))


def home_of(node: str) -> str:
    """The Kubernetes node of a node of the board."""
    return node.partition("~")[0]


def _grouped(gpus: Iterable[Gpu]) -> list[tuple[Geometry, tuple[str, ...]]]:
    """GPUs by model, in the order in which they were read."""
    by_model: dict[Geometry, list[str]] = {}
    for gpu in gpus:
        by_model.setdefault(gpu.geometry, []).append(gpu.counter_set)
    return [(geometry, tuple(names)) for geometry, names in by_model.items()]
