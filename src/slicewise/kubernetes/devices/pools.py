"""Published pools as nodes with GPUs in the cluster of the engine.

A pool with GPUs of several models becomes several nodes. A pool that is withdrawn or incomplete
takes nothing new; it stays while claims have devices of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from slicewise.control.geometries import record_of
from slicewise.control.state import State
from slicewise.core.geometry import Geometry
from slicewise.journal.entries import (
    AnyEntry,
    ModelEntered,
    NodeAdded,
    NodePhase,
    NodeRemoved,
    NodeTurned,
)
from slicewise.kubernetes.api import DeviceTaint, DeviceTaintRule
from slicewise.kubernetes.devices.device_taints import Tolerations, selects, tolerated
from slicewise.kubernetes.devices.pool_reading import Gpu, Place, PoolReading

_TAINTED = "tainted"
PoolKey = tuple[str, str]
"""Driver and pool."""


@dataclass(slots=True)
class _Group:
    """The GPUs of one model in a pool: a node of the engine."""

    node: str
    model: str
    sets: tuple[str, ...]
    """The counter sets of the GPUs, in order."""


@dataclass(slots=True)
class _Pool:
    reading: PoolReading
    home: str
    """The Kubernetes node."""
    published: bool = True
    groups: list[_Group] = field(default_factory=list)


class Pools:
    """The known pools and their nodes."""

    def __init__(
        self,
        state: State,
        enter: Callable[[AnyEntry], None],
        clear: Callable[[set[int]], None],
    ) -> None:
        """``enter`` changes the state; ``clear`` removes all claims from GPUs."""
        self._state = state
        self._enter = enter
        self._clear = clear
        self._pools: dict[PoolKey, _Pool] = {}
        self._open: set[str] = set()
        """The schedulable Kubernetes nodes."""
        self._holds: defaultdict[int, set[str]] = defaultdict(set)
        """By GPU: the reasons for which it takes nothing new."""
        self._gpus: dict[int, Gpu] = {}
        self._rules: dict[str, DeviceTaintRule] = {}
        self._tainted: dict[int, frozenset[DeviceTaint]] = {}
        """By GPU: the taints of its devices. A tainted GPU is held."""
        self.freed = 0
        """Grows whenever devices become available."""

    @property
    def drivers(self) -> set[str]:
        """The drivers of the known pools."""
        return {driver for driver, _ in self._pools}

    def gpu(self, number: int) -> Gpu:
        """The published GPU with a number of the cluster."""
        return self._gpus[number]

    def knows(self, driver: str, pool: str) -> bool:
        """Whether a pool is known: published, or withdrawn and still in use."""
        return (driver, pool) in self._pools

    def home(self, key: PoolKey) -> str:
        """The Kubernetes node of a pool; empty if the pool is not known."""
        pool = self._pools.get(key)
        return "" if pool is None else pool.home

    def publish(self, key: PoolKey, reading: PoolReading, home: str) -> bool:
        """Add or update a pool; returns whether its nodes are new."""
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
        """Withdraw a pool; it is removed when no claim has devices of it."""
        pool = self._pools.get(key)
        if pool is not None:
            pool.published = False
            self._turn(pool)
            self.sweep()

    def set_open(self, home: str, opened: bool) -> None:
        """Set whether a Kubernetes node is schedulable."""
        if opened == (home in self._open):
            return
        (self._open.add if opened else self._open.discard)(home)
        for pool in self._pools.values():
            if pool.home == home:
                self._turn(pool)

    def hold(self, gpu: int, why: str, held: bool) -> None:
        """Add or remove a reason for which a GPU takes nothing new."""
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
        """The GPU and the place of a device."""
        for gpu in self._numbers(self._pools[key]):
            place = self._gpus[gpu].places.get(device)
            if place is not None:
                return gpu, place
        return None

    def touched(self, key: PoolKey, device: str) -> list[int]:
        """The GPUs of which a device without a place may take slices."""
        pool = self._pools[key]
        odd = pool.reading.odd.get(device)
        sets = () if odd is None else odd.counter_sets
        return [gpu for gpu in self._numbers(pool) if self._gpus[gpu].counter_set in sets]

    def sweep(self) -> None:
        """Remove withdrawn pools without allocations."""
        for key, pool in list(self._pools.items()):
            if not pool.published and not any(
                self._state.nodes[group.node].instances for group in pool.groups
            ):
                self._remove(key)

    def _numbers(self, pool: _Pool) -> list[int]:
        return [gpu for group in pool.groups for gpu in self._state.nodes[group.node].gpus]

    def _add(self, home: str, geometry: Geometry, gpus: int) -> str:
        name, number = home, 1
        while name in self._state.nodes:  # taken by another driver or another model
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
        """Assign the published GPUs to those of the cluster, and hold tainted ones."""
        by_set = {gpu.counter_set: gpu for gpu in pool.reading.gpus}
        for group in pool.groups:
            for gpu, name in zip(self._state.nodes[group.node].gpus, group.sets, strict=True):
                self._gpus[gpu] = by_set[name]
                self._taint(gpu)

    # Taints

    def set_rule(self, rule: DeviceTaintRule) -> None:
        """Add or update a rule that taints devices."""
        self._rules[rule.metadata.name] = rule
        self._rules_changed()

    def drop_rule(self, name: str) -> None:
        """Remove a deleted rule."""
        if self._rules.pop(name, None) is not None:
            self._rules_changed()

    @property
    def rules(self) -> tuple[str, ...]:
        """The names of the rules."""
        return tuple(self._rules)

    def _rules_changed(self) -> None:
        for gpu in list(self._gpus):
            self._taint(gpu)
        self.freed += 1  # for claims that tolerate other taints

    def _taint(self, number: int) -> None:
        gpu = self._gpus[number]
        taints = gpu.taints.union(
            rule.spec.taint
            for rule in self._rules.values()
            if selects(rule, gpu.driver, gpu.pool, gpu.places)
        )
        if taints:
            self._tainted[number] = taints
        else:
            self._tainted.pop(number, None)
        self.hold(number, _TAINTED, bool(taints))

    @contextmanager
    def tolerating(self, requests: Collection[Tolerations]) -> Iterator[None]:
        """Open the tainted GPUs for requests that all tolerate their taints."""
        if not self._tainted or not all(requests):
            yield
            return
        cluster = self._state.cluster
        opened = [
            gpu
            for gpu, taints in self._tainted.items()
            if self._holds[gpu] == {_TAINTED} and tolerated(taints, requests)
        ]
        for gpu in opened:
            cluster.unhold(gpu)
        try:
            yield
        finally:
            for gpu in opened:
                cluster.hold(gpu)

    def _remove(self, key: PoolKey) -> None:
        """Remove a pool with its nodes and claims."""
        pool = self._pools[key]
        gone = self._numbers(pool)
        self._clear(set(gone))
        del self._pools[key]
        for gpu in gone:
            self._holds.pop(gpu, None)
            self._tainted.pop(gpu, None)
            del self._gpus[gpu]
        for group in pool.groups:
            self._enter(NodeRemoved(group.node))


def home_of(node: str) -> str:
    """The Kubernetes node of a node of the engine."""
    return node.partition("~")[0]


def _grouped(gpus: Iterable[Gpu]) -> list[tuple[Geometry, tuple[str, ...]]]:
    """Group GPUs by model, in order."""
    by_model: dict[Geometry, list[str]] = {}
    for gpu in gpus:
        by_model.setdefault(gpu.geometry, []).append(gpu.counter_set)
    return [(geometry, tuple(names)) for geometry, names in by_model.items()]
