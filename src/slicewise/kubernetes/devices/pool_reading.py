"""Reads the pools that drivers publish: ResourceSlices become GPUs with places for devices.

A pool is what a driver publishes for a node. Only its newest generation counts, and only if it is
complete. A contradictory pool is refused as a whole, as kube-scheduler does. Devices that are not a
window of slices are not offered; the reason is kept.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from slicewise.core.errors import SlicewiseError
from slicewise.core.geometry import Geometry
from slicewise.kubernetes.api import CounterSet, Device, DeviceTaint, Meta, Pool, ResourceSlice
from slicewise.kubernetes.devices.device_taints import keeps_away
from slicewise.kubernetes.devices.geometry import DeviceProperties, Library, Place, encode

__all__ = [
    "Gpu",
    "Library",
    "Odd",
    "Place",
    "PoolReading",
    "SliceCache",
    "SliceObject",
    "read_pool",
    "read_slice",
]

_COMPRESSION = 1


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU that can be partitioned, with the names and places of its devices."""

    driver: str
    pool: str
    node_name: str
    counter_set: str
    """The counter set that its devices share: identifies the GPU within the pool."""
    uuid: str
    """Empty if the driver does not publish it."""
    geometry: Geometry
    devices: Mapping[Place, str]
    """By profile and start: the device to allocate, if possible one without a taint."""
    places: Mapping[str, Place]
    """The places of all devices that have one, including tainted devices."""
    taints: frozenset[DeviceTaint]
    """The taints of its devices that keep claims away."""


@dataclass(frozen=True, slots=True)
class Odd:
    """A device without a place, which is not offered."""

    reason: str
    counter_sets: tuple[str, ...]
    """The GPUs with unknown free slices while this device is allocated."""


@dataclass(frozen=True, slots=True)
class PoolReading:
    """The GPUs of a pool, or why it cannot be used."""

    driver: str
    pool: str
    generation: int
    trouble: str | None
    """Why the pool cannot be used; None if it can."""
    gpus: tuple[Gpu, ...] = ()
    odd: Mapping[str, Odd] = field(default_factory=dict)


def read_pool(slices: Iterable[ResourceSlice], library: Library) -> PoolReading:
    """Read a pool from all of its slices."""
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
    """Why the slices of one generation cannot be used; None if they can."""
    wanted = slices[0].spec.pool.resource_slice_count
    if len(slices) != wanted:
        generation = slices[0].spec.pool.generation
        return f"{len(slices)} of {wanted} slices of generation {generation} exist"
    sets: dict[str, CounterSet] = {}
    for one in slices:
        for counters in one.spec.shared_counters:
            if counters.name in sets:
                return f"counter set {counters.name} exists twice"
            sets[counters.name] = counters
    names: set[str] = set()
    for one in slices:
        for device in one.spec.devices:
            if device.name in names:
                return f"device {device.name} exists twice"
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
    """Why a device cannot be part of a GPU; None if it can."""
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
    """The GPU of these devices; devices without a place are added to ``odd``."""
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
    taints: set[DeviceTaint] = set()
    marked: dict[Place, str] = {}
    for device, place in zip(devices, shape.places, strict=True):
        name = device.name
        if isinstance(place, str):
            odd[name] = Odd(place, (counters.name,))
            continue
        places[name] = place
        found = [taint for taint in device.taints if keeps_away(taint)]
        taints.update(found)
        (marked if found else offered).setdefault(place, name)
    offered = marked | offered
    if shape.geometry is None:
        return None
    uuid = _uuid(devices, driver)
    return Gpu(
        driver, pool, node, counters.name, uuid, shape.geometry, offered, places, frozenset(taints)
    )


def _part(device: Device, driver: str) -> DeviceProperties:
    capacity = device.capacity
    memory = capacity.get("memory") or capacity.get(f"{driver}/memory")
    return DeviceProperties(
        _text(device, driver, "profile"),
        _text(device, driver, "type"),
        memory.value if memory else None,
        encode(device.consumes_counters[0].counters),
    )


def _text(device: Device, driver: str, name: str) -> str | None:
    """An attribute by its plain name, in the domain of the driver, or in any other domain."""
    attributes = device.attributes
    found = attributes.get(name) or attributes.get(f"{driver}/{name}")
    if found is None:
        for other in sorted(attributes):
            if other.endswith(f"/{name}"):
                found = attributes[other]
                break
    return found.string if found is not None else None


def _uuid(devices: Iterable[Device], driver: str) -> str:
    """The UUID of a GPU: that of its whole device, or the parent of a part."""
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


# Slices, until their pool is read


class _HeadSpec(msgspec.Struct, frozen=True):
    driver: str
    pool: Pool


class _Head(msgspec.Struct, frozen=True):
    metadata: Meta
    spec: _HeadSpec


class SliceObject(NamedTuple):
    """A ResourceSlice: its pool, and its text in compressed form.

    The slice of one GPU is tens of kilobytes of text, and a change of one slice needs all slices
    of the pool again. So all are kept, compressed.
    """

    metadata: Meta
    driver: str
    pool: str
    packed: bytes

    @property
    def key(self) -> tuple[str, str]:
        """The pool of the slice."""
        return self.driver, self.pool

    def unpack(self) -> ResourceSlice:
        """Decode the slice."""
        return _decode(zlib.decompress(self.packed))


_decode = msgspec.json.Decoder(ResourceSlice).decode
_decode_head = msgspec.json.Decoder(_Head).decode


def read_slice(data: bytes | msgspec.Raw) -> SliceObject:
    """Compress a slice as it came from the API."""
    head = _decode_head(data)
    spec = head.spec
    return SliceObject(
        Meta(
            name=head.metadata.name,
            uid=head.metadata.uid,
            resource_version=head.metadata.resource_version,
        ),
        spec.driver,
        spec.pool.name,
        zlib.compress(bytes(data), _COMPRESSION),
    )


class SliceCache:
    """The slices by pool, and the pools that have changed."""

    def __init__(self) -> None:
        self._pools: dict[tuple[str, str], dict[str, SliceObject]] = {}
        self._where: dict[str, tuple[str, str]] = {}
        self.changed: dict[tuple[str, str], None] = {}
        """The pools that have changed and are not read again yet, in order."""

    def put(self, slice_object: SliceObject) -> None:
        """Add or update a slice."""
        name = slice_object.metadata.name
        if self._where.get(name, slice_object.key) != slice_object.key:
            self.drop(name)
        self._where[name] = slice_object.key
        self._pools.setdefault(slice_object.key, {})[name] = slice_object
        self.changed[slice_object.key] = None

    def drop(self, name: str) -> None:
        """Remove a deleted slice."""
        key = self._where.pop(name, None)
        if key is not None:
            del self._pools[key][name]
            if not self._pools[key]:
                del self._pools[key]
            self.changed[key] = None

    def pool(self, key: tuple[str, str]) -> list[ResourceSlice]:
        """Decode the slices of a pool; raises SlicewiseError if one is invalid."""
        try:
            return [slice_object.unpack() for slice_object in self._pools.get(key, {}).values()]
        except msgspec.MsgspecError as error:
            raise SlicewiseError(f"a slice of pool {key[1]!r} is invalid: {error}") from None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all slices."""
        return tuple(self._where)
