"""What NVIDIA's DRA driver publishes for a node with DynamicMIG, computed from the catalog.

The form is that of its sources (cmd/gpu-kubelet-plugin: partitions.go, mig.go, deviceinfo.go,
driver.go; slices split as for Kubernetes 1.35 and later): one ResourceSlice with a counter set for
each GPU, then one for each GPU with its devices in the order of their names, the whole GPU among
them unless it is an Ampere one. A device says its start only in its name and in the memory slices
that it consumes.

Read from the catalog: profiles, starts, sizes, engines, and ids, multiprocessors and memory where
they are known. Derived otherwise, as by the fake driver: multiprocessors, memory as the share of
the GPU, ids from 100 on. Made up: UUIDs, bus ids, versions, the brand. Left out, as
by the driver where the machine has none: addressingMode and pcieRoot. ``test_real_devices.py``
compares all of it with what the driver publishes.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

from tests.kubernetes_e2e.api import Json

from slicewise.catalog import Catalog, CatalogEntry
from slicewise.catalog.entry import Engines, ProfileFacts
from slicewise.core.geometry import Geometry, Profile
from slicewise.fakedriver.model_data import profile_memory_mib, profile_multiprocessors

DRIVER = "gpu.nvidia.com"
MIG_CLASS = "mig.nvidia.com"
GPU_CLASS = "gpu.nvidia.com"
DRIVER_VERSION = "580.65.6"
"""Of the fake driver, without the zeros that versions of Kubernetes cannot have."""
CUDA_VERSION = "13.0.0"

CLASSES: tuple[Json, ...] = (
    {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "DeviceClass",
        "metadata": {"name": GPU_CLASS},
        "spec": {
            "selectors": [
                {
                    "cel": {
                        "expression": "device.driver == 'gpu.nvidia.com' && "
                        "device.attributes['gpu.nvidia.com'].type == 'gpu'"
                    }
                }
            ],
            "extendedResourceName": "nvidia.com/gpu",
        },
    },
    {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "DeviceClass",
        "metadata": {"name": MIG_CLASS},
        "spec": {
            "selectors": [
                {
                    "cel": {
                        "expression": "device.driver == 'gpu.nvidia.com' && "
                        "device.attributes['gpu.nvidia.com'].type == 'mig'"
                    }
                }
            ],
        },
    },
)
"""The classes of NVIDIA's chart."""

_MIB = 1 << 20
_FIRST_MADE_UP_ID = 100
_CAPABILITIES = (
    ("Ampere", "8.0.0"),
    ("Hopper", "9.0.0"),
    ("GB10B", "11.0.0"),
    ("GB202", "12.0.0"),
    ("GB203", "12.0.0"),
    ("Blackwell Ultra", "10.3.0"),
    ("Blackwell", "10.0.0"),
)
"""The name of the architecture and the compute capability."""


class _Part(NamedTuple):
    """A profile, with the figures that the driver would read from NVML."""

    name: str
    id: int
    size: int
    starts: tuple[int, ...]
    capacities: dict[str, int]
    """By the names of a device's capacities."""


def profile_selector(profile: str) -> str:
    """The CEL expression with which users of the stock driver ask for a profile."""
    return f"device.attributes['{DRIVER}'].profile == '{profile}'"


def device_name(gpu: int, profile: str, identity: int, start: int) -> str:
    """A device's name, as the driver makes it."""
    plain = re.sub("[^a-z0-9-]", "-", profile.lower().replace(".", "")).strip("-")
    return f"gpu-{gpu}-mig-{plain}-{identity}-{start}"


def devices_at(model: str, gpu: int, profile: str) -> dict[int, str]:
    """The names of the devices for a profile, by start."""
    part = next(part for part in _parts(model) if part.name == profile)
    return {start: device_name(gpu, profile, part.id, start) for start in part.starts}


def resource_slices(
    node: str, model: str, gpus: int, node_uid: str | None = None, generation: int = 1
) -> list[Json]:
    """All slices of a node; with the node's uid they go when the node goes."""
    specs: list[Json] = [{"sharedCounters": [_counter_set(model, gpu) for gpu in range(gpus)]}]
    specs += [{"devices": list(_devices(node, model, gpu))} for gpu in range(gpus)]
    pool = {"name": node, "generation": generation, "resourceSliceCount": len(specs)}
    slices: list[Json] = []
    for index, spec in enumerate(specs):
        # The driver's helper puts the index first, so that the order by name is this order; the
        # end is by chance there, and here it is not.
        end = uuid.uuid5(uuid.NAMESPACE_DNS, f"{node}/{index}").hex[:5]
        metadata: Json = {"name": f"{index:05x}-{DRIVER}-{node}-{end}"}
        if node_uid is not None:
            owner = {"apiVersion": "v1", "kind": "Node", "name": node, "uid": node_uid}
            metadata["ownerReferences"] = [{**owner, "controller": True}]
        slices.append(
            {
                "apiVersion": "resource.k8s.io/v1",
                "kind": "ResourceSlice",
                "metadata": metadata,
                "spec": {"driver": DRIVER, "nodeName": node, "pool": pool, **spec},
            }
        )
    return slices


def gpu_uuid(node: str, gpu: int) -> str:
    """The UUID of a GPU: the same each time."""
    return f"GPU-{uuid.uuid5(uuid.NAMESPACE_DNS, f'{node}/gpu-{gpu}')}"


@cache
def _entry(model: str) -> CatalogEntry:
    return Catalog.builtin().find(model)


@cache
def _parts(model: str) -> tuple[_Part, ...]:
    entry = _entry(model)
    facts = {fact.name: fact for fact in entry.facts}
    geometry = entry.require()
    return tuple(
        _Part(
            profile.name,
            _FIRST_MADE_UP_ID + number if fact.id is None else fact.id,
            profile.size,
            profile.starts,
            _capacities(geometry, profile, facts),
        )
        for number, profile in enumerate(geometry.profiles)
        for fact in [facts[profile.name]]
    )


def _capacities(
    geometry: Geometry, profile: Profile, facts: dict[str, ProfileFacts]
) -> dict[str, int]:
    fact = facts[profile.name]
    engines = fact.engines or Engines(0, 0, 0, 0, 0)
    return {
        "multiprocessors": profile_multiprocessors(profile, facts),
        "copyEngines": engines.copy,
        "decoders": engines.decoder,
        "encoders": engines.encoder,
        "jpegEngines": engines.jpeg,
        "ofaEngines": engines.ofa,
        "memory": profile_memory_mib(geometry, profile, fact) * _MIB,
    }


def _most(model: str) -> dict[str, int]:
    """What a whole GPU has: of everything the most that a profile has, as the driver takes it."""
    parts = _parts(model)
    return {name: max(p.capacities[name] for p in parts) for name in parts[0].capacities}


def _quantity(amount: int) -> str:
    """A quantity as Kubernetes writes it back."""
    for unit in ("", "Ki", "Mi", "Gi", "Ti"):
        if amount % 1024 or not amount:
            return f"{amount}{unit}"
        amount //= 1024
    return f"{amount}Pi"


def _counters(capacities: dict[str, int], start: int, size: int) -> Json:
    """Capacities under the names of counters, and the memory slices."""
    counters = {
        re.sub("([A-Z])", lambda found: f"-{found[1].lower()}", name): amount
        for name, amount in capacities.items()
    }
    counters |= {f"memory-slice-{number}": 1 for number in range(start, start + size)}
    return {name: {"value": _quantity(amount)} for name, amount in counters.items()}


def _counter_set(model: str, gpu: int) -> Json:
    slices = max(part.size for part in _parts(model))
    return {"name": f"gpu-{gpu}-counter-set", "counters": _counters(_most(model), 0, slices)}


def _devices(node: str, model: str, gpu: int) -> Iterator[Json]:
    """The devices of one GPU in the order of their names."""
    entry = _entry(model)
    word = entry.architecture.split()[0]
    common: dict[str, Any] = {
        "productName": {"string": f"NVIDIA {entry.aliases[0] if entry.aliases else model}"},
        "brand": {"string": "Nvidia"},
        "architecture": {"string": word},
        "cudaComputeCapability": {
            "version": next(v for w, v in _CAPABILITIES if w in entry.architecture)
        },
        "driverVersion": {"version": DRIVER_VERSION},
        "cudaDriverVersion": {"version": CUDA_VERSION},
        "resource.kubernetes.io/pciBusID": {"string": f"0000:{0x10 + 8 * gpu:02x}:00.0"},
    }
    identity = gpu_uuid(node, gpu)
    counter_set = f"gpu-{gpu}-counter-set"
    found: dict[str, Json] = {}
    if word != "Ampere":
        found[f"gpu-{gpu}"] = {
            "attributes": {"type": {"string": "gpu"}, "uuid": {"string": identity}, **common},
            **_taken(counter_set, _most(model), 0, max(part.size for part in _parts(model))),
        }
    for part in _parts(model):
        for start in part.starts:
            found[device_name(gpu, part.name, part.id, start)] = {
                "attributes": {
                    "type": {"string": "mig"},
                    "profile": {"string": part.name},
                    "parentUUID": {"string": identity},
                    **common,
                },
                **_taken(counter_set, part.capacities, start, part.size),
            }
    for name in sorted(found):
        yield {"name": name, **found[name]}


def _taken(counter_set: str, capacities: dict[str, int], start: int, size: int) -> Json:
    consumed = {"counterSet": counter_set, "counters": _counters(capacities, start, size)}
    return {
        "capacity": {name: {"value": _quantity(n)} for name, n in capacities.items()},
        "consumesCounters": [consumed],
    }
