"""From the ResourceSlices of a pool to its GPUs and where their devices are.

A pool is what a driver publishes for a node. Its newest generation counts, and only when it is
complete; a publication that contradicts itself is refused as a whole, as kube-scheduler does.
Devices that are no windows of a GPU's slices are not offered, and it is said why.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from slicewise.core.errors import SlicewiseError
from slicewise.core.geometry import Geometry
from slicewise.k8s.api import CounterSet, Device, ResourceSlice
from slicewise.k8s.shapes import Library, Part, Place, encode

__all__ = ["Gpu", "Library", "Odd", "Place", "PoolReading", "read_pool"]


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU that can be partitioned: what its devices are called, and where they are."""

    driver: str
    pool: str
    node_name: str
    counter_set: str
    """What its devices share; its name within the pool."""
    uuid: str
    """As its driver says; empty where it does not."""
    geometry: Geometry
    devices: Mapping[Place, str]
    """The devices that may be given out, by profile and start."""
    places: Mapping[str, Place]
    """Where every device is that has a place, tainted ones included."""
    tainted: Mapping[str, str]
    """The devices that must not be given out, each with the reason."""


@dataclass(frozen=True, slots=True)
class Odd:
    """A device that has no place, so it is not offered."""

    reason: str
    counter_sets: tuple[str, ...]
    """The GPUs that nothing can be said about while somebody has this device."""


@dataclass(frozen=True, slots=True)
class PoolReading:
    """What a pool comes to."""

    driver: str
    pool: str
    generation: int
    trouble: str | None
    """Why nothing of it can be used, in words; None when it can."""
    gpus: tuple[Gpu, ...] = ()
    odd: Mapping[str, Odd] = field(default_factory=dict)


def read_pool(slices: Iterable[ResourceSlice], library: Library) -> PoolReading:
    """The GPUs of a pool, from all of its slices."""
    everything = list(slices)
    if not everything:
        raise SlicewiseError("a pool without slices cannot be read")
    generation = max(one.spec.pool.generation for one in everything)
    newest = sorted(
        (one for one in everything if one.spec.pool.generation == generation),
        key=lambda one: one.metadata.name,
    )
    spec = newest[0].spec
    trouble = _trouble(newest)
    if trouble is not None:
        trouble = f"pool {spec.pool.name} of {spec.driver}: {trouble}"
        return PoolReading(spec.driver, spec.pool.name, generation, trouble)
    odd: dict[str, Odd] = {}
    sharing: dict[str, list[tuple[Device, str]]] = {}
    for one in newest:
        for device in one.spec.devices:
            reason = _unusable(device)
            if reason is not None:
                odd[device.name] = Odd(
                    reason, tuple(c.counter_set for c in device.consumes_counters)
                )
                continue
            there = sharing.setdefault(device.consumes_counters[0].counter_set, [])
            there.append((device, one.spec.node_name or device.node_name))
    sets = {counters.name: counters for one in newest for counters in one.spec.shared_counters}
    gpus = [
        gpu
        for name in sorted(sharing, key=_natural)
        if (gpu := _gpu(spec.driver, spec.pool.name, sets[name], sharing[name], library, odd))
    ]
    return PoolReading(spec.driver, spec.pool.name, generation, None, tuple(gpus), odd)


def _trouble(slices: list[ResourceSlice]) -> str | None:
    """Why the slices of one generation cannot be used, if they cannot."""
    wanted = slices[0].spec.pool.resource_slice_count
    if len(slices) != wanted:
        generation = slices[0].spec.pool.generation
        return f"{len(slices)} of {wanted} slices of generation {generation} are there"
    sets: dict[str, CounterSet] = {}
    for one in slices:
        for counters in one.spec.shared_counters:
            if counters.name in sets:
                return f"counter set {counters.name} is there twice"
            sets[counters.name] = counters
    names: set[str] = set()
    for one in slices:
        for device in one.spec.devices:
            if device.name in names:
                return f"device {device.name} is there twice"
            names.add(device.name)
            for consumption in device.consumes_counters:
                found = sets.get(consumption.counter_set)
                if found is None:
                    return f"device {device.name}: no counter set {consumption.counter_set}"
                if not consumption.counters.keys() <= found.counters.keys():
                    missing = min(consumption.counters.keys() - found.counters.keys())
                    return f"device {device.name}: no counter {missing} in {found.name}"
    return None


def _unusable(device: Device) -> str | None:
    """Why a device cannot be a part of a GPU, whatever it takes."""
    if not device.consumes_counters:
        return "it takes nothing from a counter set"
    if len(device.consumes_counters) > 1:
        return "it takes from several counter sets"
    if device.allow_multiple_allocations:
        return "it can be allocated several times at once"
    if device.binding_conditions:
        return "it has binding conditions of its driver's own"
    return None


def _gpu(
    driver: str,
    pool: str,
    counters: CounterSet,
    members: list[tuple[Device, str]],
    library: Library,
    odd: dict[str, Odd],
) -> Gpu | None:
    """The GPU that these devices share; those without a place are added to ``odd``."""
    devices = [device for device, _ in members]
    nodes = {node for _, node in members}
    node = nodes.pop()
    if nodes or not node:
        reason = "the devices of its GPU are not on one node that is named"
        odd.update((device.name, Odd(reason, (counters.name,))) for device in devices)
        return None
    product = next(filter(None, (_text(device, driver, "productName") for device in devices)), None)
    shape = library.shape(
        product, encode(counters.counters), tuple(_part(device, driver) for device in devices)
    )
    offered: dict[Place, str] = {}
    places: dict[str, Place] = {}
    tainted: dict[str, str] = {}
    for device, place in zip(devices, shape.places, strict=True):
        name = device.name
        if isinstance(place, str):
            odd[name] = Odd(place, (counters.name,))
            continue
        places[name] = place
        if device.taints and (taint := _taint(device)) is not None:
            tainted[name] = taint
        else:
            offered.setdefault(place, name)
    if shape.geometry is None:
        return None
    uuid = _uuid(devices, driver)
    return Gpu(driver, pool, node, counters.name, uuid, shape.geometry, offered, places, tainted)


def _part(device: Device, driver: str) -> Part:
    capacity = device.capacity
    memory = capacity.get("memory") or capacity.get(f"{driver}/memory")
    return Part(
        _text(device, driver, "profile"),
        _text(device, driver, "type"),
        memory.value if memory else None,
        encode(device.consumes_counters[0].counters),
    )


def _text(device: Device, driver: str, name: str) -> str | None:
    """An attribute: by its bare name, which is the driver's own, or in whatever domain it is."""
    attributes = device.attributes
    found = attributes.get(name) or attributes.get(f"{driver}/{name}")
    if found is None:
        for other in sorted(attributes):
            if other.endswith(f"/{name}"):
                found = attributes[other]
                break
    return found.string if found is not None else None


def _taint(device: Device) -> str | None:
    """The taint that keeps claims away from a device, in words."""
    for taint in device.taints:
        if taint.effect in ("NoSchedule", "NoExecute"):
            value = f"={taint.value}" if taint.value else ""
            return f"taint {taint.key}{value}:{taint.effect}"
    return None


def _uuid(devices: Iterable[Device], driver: str) -> str:
    """The GPU's own id: that of the device that is all of it, or the parent's of a part."""
    for device in devices:
        uuid = _text(device, driver, "parentUUID")
        if uuid is None and _text(device, driver, "profile") is None:
            uuid = _text(device, driver, "uuid")
        if uuid:
            return uuid
    return ""


def _natural(name: str) -> list[tuple[int, str]]:
    """A sort key by which gpu-2 comes before gpu-10."""
    parts = re.findall(r"(\d+)|(\D+)", name)
    return [(int(digits), "") if digits else (-1, word) for digits, word in parts]
