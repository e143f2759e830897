"""Helpers: the fake driver library, called through pynvml or directly."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pynvml as nvml  # type: ignore[import-untyped]
import pytest
from tests.conftest import SCHEDULABLE

from slicewise.core.errors import SlicewiseError
from slicewise.core.geometry import Geometry
from slicewise.fakedriver import Machine, build

INVALID_ARGUMENT = nvml.NVML_ERROR_INVALID_ARGUMENT
NOT_SUPPORTED = nvml.NVML_ERROR_NOT_SUPPORTED
IN_USE = nvml.NVML_ERROR_IN_USE
FULL = nvml.NVML_ERROR_INSUFFICIENT_RESOURCES


def built(folder: Path) -> Path:
    """Build the library; skip the test without a C compiler, except in CI."""
    try:
        return build(folder)
    except SlicewiseError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))


@contextmanager
def attached(machine: Machine, library: Path) -> Iterator[Any]:
    """pynvml in this process, attached to a machine."""
    ctypes.CDLL(str(library))  # pynvml loads the same SONAME and gets this library
    before = {name: os.environ.get(name) for name in machine.environment(library)}
    os.environ.update(machine.environment(library))
    try:
        nvml.nvmlInit()
        try:
            assert nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(0)) in {
                gpu.uuid for gpu in machine.gpus
            }, "another machine is attached already"
            yield nvml
        finally:
            nvml.nvmlShutdown()
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def run(machine: Machine, library: Path, program: str, *arguments: str) -> int:
    """Run a program with ``nvml`` initialized in a new process, and return its exit status."""
    return start(machine, library, program, *arguments).wait()


def start(
    machine: Machine, library: Path, program: str, *arguments: str, **options: Any
) -> subprocess.Popen[str]:
    """Start a program with ``nvml`` initialized in a new process."""
    text = f"import sys, os\nimport pynvml as nvml\nnvml.nvmlInit()\n{program}"
    return subprocess.Popen(
        [sys.executable, "-c", text, *arguments],
        env=os.environ | machine.environment(library),
        text=True,
        **options,
    )


def code(call: Any, *arguments: Any) -> int:
    """The code of the NVML error that a call raises; 0 without an error."""
    try:
        call(*arguments)
    except nvml.NVMLError as error:
        return int(error.value)
    return 0


def create(device: Any, profile_id: int, start: int, size: int) -> Any:
    """Create a GPU instance at a placement."""
    place = nvml.c_nvmlGpuInstancePlacement_t(start, size)
    return nvml.nvmlDeviceCreateGpuInstanceWithPlacement(device, profile_id, ctypes.byref(place))


def profiles(device: Any) -> dict[str, Any]:
    """The profiles of a GPU by name, queried by NVML's constants."""
    found = {}
    for number in range(nvml.NVML_GPU_INSTANCE_PROFILE_COUNT):
        try:
            info = nvml.nvmlDeviceGetGpuInstanceProfileInfo(device, number)
        except (nvml.NVMLError_NotSupported, nvml.NVMLError_InvalidArgument):
            continue  # a constant of another GPU, or newer than the driver
        found[str(info.name).removeprefix("MIG ")] = info
    return found


def placements(device: Any, profile_id: int) -> list[tuple[int, int]]:
    """The possible placements of a profile as (start, size)."""
    count = ctypes.c_uint()
    nvml.nvmlDeviceGetGpuInstancePossiblePlacements(device, profile_id, None, ctypes.byref(count))
    room = (nvml.c_nvmlGpuInstancePlacement_t * count.value)()
    nvml.nvmlDeviceGetGpuInstancePossiblePlacements(device, profile_id, room, ctypes.byref(count))
    return [(place.start, place.size) for place in room]


def instances(device: Any, profile_id: int) -> list[Any]:
    """The GPU instances of a profile."""
    count = ctypes.c_uint()
    room = (nvml.c_nvmlGpuInstance_t * 16)()
    nvml.nvmlDeviceGetGpuInstances(device, profile_id, room, ctypes.byref(count))
    return list(room[: count.value])


def found_on(device: Any, offered: dict[str, Any] | None = None) -> set[tuple[str, int, int]]:
    """All GPU instances as (profile, start, size), read through pynvml."""
    there = set()
    for name, info in (offered or profiles(device)).items():
        for instance in instances(device, info.id):
            placed = nvml.nvmlGpuInstanceGetInfo(instance)
            assert placed.profileId == info.id
            there.add((name, placed.placement.start, placed.placement.size))
    return there


def shapes() -> list[Geometry]:
    """One model per kind of geometry; geometries that differ only in names are one kind."""
    kinds: dict[object, Geometry] = {}
    for geometry in SCHEDULABLE:
        shape = (
            geometry.slices,
            tuple(b.total for b in geometry.all_budgets),
            tuple((p.size, p.starts, p.start_order, geometry.needs(p)) for p in geometry.profiles),
        )
        kinds.setdefault(shape, geometry)
    return list(kinds.values())


class Direct:
    """Calls the library without pynvml, for walks of many steps."""

    def __init__(self, machine: Machine, library: Path) -> None:
        self.machine = machine
        self.c = ctypes.CDLL(str(library))
        self._environment = machine.environment(library)

    def __enter__(self) -> Direct:
        os.environ.update(self._environment)
        assert self.c.nvmlInit_v2() == 0
        self.devices = []
        for index in range(len(self.machine.gpus)):
            device = ctypes.c_void_p()
            assert self.c.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) == 0
            self.devices.append(device)
        return self

    def __exit__(self, *_: object) -> None:
        assert self.c.nvmlShutdown() == 0
        for name in self._environment:
            os.environ.pop(name)

    def create(self, gpu: int, profile_id: int, start: int, size: int) -> tuple[int, Any]:
        """Create a GPU instance at a placement; return the code and the handle."""
        place, handle = (ctypes.c_uint * 2)(start, size), ctypes.c_void_p()
        code = self.c.nvmlDeviceCreateGpuInstanceWithPlacement(
            self.devices[gpu], profile_id, place, ctypes.byref(handle)
        )
        return code, handle

    def create_anywhere(self, gpu: int, profile_id: int) -> tuple[int, Any]:
        """Create a GPU instance where the driver chooses; return the code and the handle."""
        handle = ctypes.c_void_p()
        code = self.c.nvmlDeviceCreateGpuInstance(
            self.devices[gpu], profile_id, ctypes.byref(handle)
        )
        return code, handle

    def start_of(self, handle: Any) -> int:
        """The start of a GPU instance."""
        info = nvml.c_nvmlGpuInstanceInfo_t()
        assert self.c.nvmlGpuInstanceGetInfo(handle, ctypes.byref(info)) == 0
        return int(info.placement.start)

    def destroy(self, handle: Any) -> int:
        """Destroy a GPU instance and return the code."""
        return int(self.c.nvmlGpuInstanceDestroy(handle))
