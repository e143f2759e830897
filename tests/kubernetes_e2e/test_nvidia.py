"""The simulated publications of NVIDIA's driver: their format, and the catalog's geometry."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from tests.kubernetes_e2e.api import RESOURCE, Json
from tests.kubernetes_e2e.conftest import Nodes
from tests.kubernetes_e2e.nvidia import devices_at, gpu_uuid, resource_slices
from tests.kubernetes_e2e.plane import Plane

from slicewise.catalog import Catalog
from slicewise.core.geometry import Geometry

_SUFFIXES = {"": 0, "Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40}


def amount(quantity: str) -> int:
    """A quantity as a number."""
    digits = quantity.rstrip("KMGTi")
    return int(digits) << _SUFFIXES[quantity[len(digits) :]]


def amounts(counters: Json) -> Counter[str]:
    """Counters as numbers."""
    return Counter({name: amount(one["value"]) for name, one in counters.items()})


def states(geometry: Geometry) -> Iterator[list[tuple[str, int]]]:
    """Every set of instances that fits on one GPU, in the order of their starts."""
    order = sorted(geometry.placements, key=lambda p: (p.start, p.number))
    totals = [budget.total for budget in geometry.all_budgets]

    def extend(
        chosen: list[tuple[str, int]], mask: int, left: list[int], after: int
    ) -> Iterator[list[tuple[str, int]]]:
        yield chosen
        for place in range(after, len(order)):
            placement = order[place]
            needs = geometry.needs(placement.profile)
            rest = [have - need for have, need in zip(left, needs, strict=True)]
            if not mask & placement.window and min(rest) >= 0:
                one = (placement.profile.name, placement.start)
                yield from extend([*chosen, one], mask | placement.window, rest, place + 1)

    yield from extend([], 0, totals, 0)


def test_the_counters_allow_exactly_what_the_geometry_allows(geometry: Geometry) -> None:
    counters, devices = (one["spec"] for one in resource_slices("n", geometry.model, 1))
    [total] = counters["sharedCounters"]
    has = amounts(total["counters"])
    consumed = {
        device["name"]: amounts(device["consumesCounters"][0]["counters"])
        for device in devices["devices"]
    }
    names = {
        (profile.name, start): name
        for profile in geometry.profiles
        for start, name in devices_at(geometry.model, 0, profile.name).items()
    }
    whole = {"gpu-0"} & set(consumed)
    assert set(consumed) == {*names.values(), *whole}
    assert all(consumed[one] == has for one in whole)

    def fits(state: frozenset[tuple[str, int]]) -> bool:
        taken: Counter[str] = Counter()
        for one in state:
            taken.update(consumed[names[one]])
        return taken <= has

    allowed = {frozenset(state) for state in states(geometry)}
    assert len(allowed) > len(geometry.placements)
    refused = [state for state in allowed if not fits(state)]
    # All profiles of a Thor have its one copy engine, which would count as used up by the first.
    assert bool(refused) == (geometry.model == "Thor-iGPU"), refused[:1]
    more = {state | {one} for state in allowed for one in names} - allowed
    assert not any(map(fits, more))


def test_windows_exclude_each_other_through_the_memory_slices(geometry: Geometry) -> None:
    _, devices = (one["spec"] for one in resource_slices("n", geometry.model, 1))
    consumed = {
        device["name"]: set(device["consumesCounters"][0]["counters"])
        for device in devices["devices"]
    }
    for placement in geometry.placements:
        name = devices_at(geometry.model, 0, placement.profile.name)[placement.start]
        slices = {one for one in consumed[name] if one.startswith("memory-slice-")}
        assert slices == {
            f"memory-slice-{number}"
            for number in range(geometry.slices)
            if placement.window >> number & 1
        }


def test_a_device_as_the_driver_writes_it() -> None:
    counters, first, second = resource_slices("node-a", "H200-141GB", 2)
    assert counters["metadata"]["name"].startswith("00000-gpu.nvidia.com-node-a-")
    assert first["spec"]["pool"] == {"name": "node-a", "generation": 1, "resourceSliceCount": 3}
    assert [one["name"] for one in counters["spec"]["sharedCounters"]] == [
        "gpu-0-counter-set",
        "gpu-1-counter-set",
    ]
    names = [device["name"] for device in second["spec"]["devices"]]
    assert names[:2] == ["gpu-1", "gpu-1-mig-1g18gb-19-0"]
    assert "gpu-1-mig-1g18gb-me-20-6" in names
    assert names == sorted(names)
    [half] = [one for one in second["spec"]["devices"] if one["name"] == "gpu-1-mig-3g71gb-9-4"]
    assert half == {
        "name": "gpu-1-mig-3g71gb-9-4",
        "attributes": {
            "type": {"string": "mig"},
            "profile": {"string": "3g.71gb"},
            "parentUUID": {"string": gpu_uuid("node-a", 1)},
            "productName": {"string": "NVIDIA H200"},
            "brand": {"string": "Nvidia"},
            "architecture": {"string": "Hopper"},
            "cudaComputeCapability": {"version": "9.0.0"},
            "driverVersion": {"version": "580.65.6"},
            "cudaDriverVersion": {"version": "13.0.0"},
            "resource.kubernetes.io/pciBusID": {"string": "0000:18:00.0"},
        },
        "capacity": {
            "multiprocessors": {"value": "60"},
            "copyEngines": {"value": "3"},
            "decoders": {"value": "3"},
            "encoders": {"value": "0"},
            "jpegEngines": {"value": "3"},
            "ofaEngines": {"value": "0"},
            "memory": {"value": "71424Mi"},
        },
        "consumesCounters": [
            {
                "counterSet": "gpu-1-counter-set",
                "counters": {
                    "multiprocessors": {"value": "60"},
                    "copy-engines": {"value": "3"},
                    "decoders": {"value": "3"},
                    "encoders": {"value": "0"},
                    "jpeg-engines": {"value": "3"},
                    "ofa-engines": {"value": "0"},
                    "memory": {"value": "71424Mi"},
                    **{f"memory-slice-{number}": {"value": "1"} for number in range(4, 8)},
                },
            }
        ],
    }


def test_an_ampere_gpu_is_not_offered_whole() -> None:
    _, devices = resource_slices("node-a", "A100-40GB", 1)
    assert "gpu-0" not in {device["name"] for device in devices["spec"]["devices"]}


def test_the_api_server_stores_every_model_unchanged(plane: Plane, nodes: Nodes) -> None:
    for entry in Catalog.builtin().entries():
        if entry.geometry is None:
            continue
        [node] = nodes(1, entry.model, gpus=8)
        found = [
            one["spec"]
            for one in plane.api.items(f"{RESOURCE}/resourceslices")
            if one["spec"]["nodeName"] == node
        ]
        assert found == [one["spec"] for one in resource_slices(node, entry.model, 8)]
