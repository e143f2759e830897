"""The devices that NVIDIA's driver publishes, for every model: those of the stand-in in nvidia.py.

What most tests here and the simulations take for the driver's devices is computed. Here the driver
itself looks at the fake GPUs, and publishes.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.conftest import SCHEDULABLE
from tests.kubernetes_e2e.api import CORE, Json
from tests.kubernetes_e2e.cluster import node, withdraw
from tests.kubernetes_e2e.nvidia import resource_slices
from tests.kubernetes_e2e.nvidia_driver import NvidiaDriver
from tests.kubernetes_e2e.plane import Plane

from slicewise.core.geometry import Geometry
from slicewise.fakedriver import Machine

_AT_ONCE = 5
MODELS = [geometry.model for geometry in SCHEDULABLE]
THOR = "Thor-iGPU"


@pytest.fixture(scope="module")
def published(
    plane: Plane, real_library: Path, real_folder: Path
) -> Iterator[dict[str, tuple[Machine, list[Json]]]]:
    """For every model, a machine with two GPUs and what the driver published for it."""

    def publish(model: str) -> tuple[Machine, list[Json]]:
        name = _node(model)
        machine = Machine.create(real_folder / name / "machine", model, 2)
        plane.api.create(f"{CORE}/nodes", node(name))
        with NvidiaDriver(plane, name, machine, real_library, real_folder / name) as driver:
            return machine, driver.slices()

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        yield dict(zip(MODELS, pool.map(publish, MODELS), strict=True))
    withdraw(plane.api, map(_node, MODELS))


def _node(model: str) -> str:
    return f"real-{model.lower()}"


def _without_identity(slices: list[Json], uuids: list[str]) -> list[Json]:
    """Slices without what differs between two GPUs of a model, or two runs."""
    specs: list[Json] = []
    for number, one in enumerate(slices):
        # Five hexadecimal digits for the order, the driver, the node, and an end by chance.
        assert one["metadata"]["name"].startswith(f"{number:05x}-gpu.nvidia.com-")
        pool = one["spec"]["pool"]
        assert pool["resourceSliceCount"] == len(slices)
        spec = {key: value for key, value in one["spec"].items() if key != "pool"}
        for device in spec.get("devices", []):
            for key in {"uuid", "parentUUID"} & set(device["attributes"]):
                place = uuids.index(device["attributes"][key]["string"])
                device["attributes"][key] = place
        specs.append(spec)
    return specs


@pytest.mark.parametrize("model", [model for model in MODELS if model != THOR])
def test_the_stand_in_publishes_what_the_driver_does(
    model: str, published: dict[str, tuple[Machine, list[Json]]]
) -> None:
    machine, real = published[model]
    computed = resource_slices(_node(model), model, 2)
    ours = _uuids(computed)
    assert _without_identity(real, [gpu.uuid for gpu in machine.gpus]) == _without_identity(
        computed, ours
    )


def _uuids(slices: list[Json]) -> list[str]:
    """The UUIDs of the GPUs of the devices, in the order of the slices."""
    found = [
        device["attributes"].get("parentUUID", device["attributes"].get("uuid"))["string"]
        for one in slices
        for device in one["spec"].get("devices", [])
    ]
    return list(dict.fromkeys(found))


def test_thor_differs_by_its_unknown_memory_and_a_profile_that_the_driver_does_not_know(
    published: dict[str, tuple[Machine, list[Json]]],
) -> None:
    """The one model that differs: 14 devices of two GPUs instead of 16.

    A Thor has the memory of its machine, and the fake reports none. The driver divides by it, so
    the gigabytes in the names are those of "not a number". And 3g+gfx has a constant of NVML
    (0x11) that came with driver 590: the fake, which is 580, does not answer for it, and the
    driver does not know it.
    """
    _, real = published[THOR]
    names = [one["name"] for part in real[1:] for one in part["spec"]["devices"]]
    computed = resource_slices(_node(THOR), THOR, 2)
    expected = [one["name"] for part in computed[1:] for one in part["spec"]["devices"]]
    assert (len(names), len(expected)) == (14, 16)
    assert all("mig" not in name or f"g-{1 << 63}gb" in name for name in names)
    told = {name.replace(f"g-{1 << 63}gb", "g0gb") for name in names}
    assert told == {name for name in expected if "-3g0gb-gfx-" not in name}


def test_every_model_is_compared(geometry: Geometry) -> None:
    assert geometry.model in MODELS
