"""Structures: Python and C agree on the state file, the driver and pynvml on NVML."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

import pynvml as nvml  # type: ignore[import-untyped]
import pytest

from slicewise.fakedriver import layout, library

STATE = (
    *(layout.ComputeProfile, layout.GpuProfile, layout.GpuFacts, layout.GpuInstance),
    *(layout.ComputeInstance, layout.Gpu, layout.Event, layout.Image, layout.Fault, layout.File),
)
ABI = {
    "nvmlPciInfo_t": nvml.nvmlPciInfo_t,
    "nvmlMemory_t": nvml.c_nvmlMemory_t,
    "nvmlMemory_v2_t": nvml.c_nvmlMemory_v2_t,
    "nvmlTemperature_v1_t": nvml.c_nvmlTemperature_v1_t,
    "nvmlProcessInfo_t": nvml.c_nvmlProcessInfo_v3_t,
    "nvmlDeviceAttributes_t": nvml.c_nvmlDeviceAttributes,
    "nvmlPlacement_t": nvml.c_nvmlGpuInstancePlacement_t,
    "nvmlGpuInstanceProfileInfo_t": nvml.c_nvmlGpuInstanceProfileInfo_t,
    "nvmlGpuInstanceProfileInfo_v2_t": nvml.c_nvmlGpuInstanceProfileInfo_v2_t,
    "nvmlGpuInstanceInfo_t": nvml.c_nvmlGpuInstanceInfo_t,
    "nvmlComputeInstanceProfileInfo_t": nvml.c_nvmlComputeInstanceProfileInfo_t,
    "nvmlComputeInstanceProfileInfo_v2_t": nvml.c_nvmlComputeInstanceProfileInfo_v2_t,
    "nvmlComputeInstanceInfo_t": nvml.c_nvmlComputeInstanceInfo_t,
    "nvmlEventData_t": nvml.c_nvmlEventData_t,
}


def _shape(structure: type[ctypes.Structure]) -> list[tuple[str, int, int]]:
    """The name, offset and size of each field."""
    return [
        (field[0], getattr(structure, field[0]).offset, getattr(structure, field[0]).size)
        for field in structure._fields_
    ]


@pytest.mark.usefixtures("library")
def test_fields_have_the_same_offsets_as_in_c(tmp_path: Path) -> None:
    structures = {s.__name__: s for s in STATE} | ABI
    for name, text in library.sources().items():
        if name.endswith(".h"):
            (tmp_path / name).write_text(text)
    lines = ['#include "state.h"', "#include <stddef.h>", "#include <stdio.h>", "int main(void) {"]
    for name, structure in structures.items():
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        lines += [
            f'printf("{name} {field} %zu %zu\\n", offsetof({name}, {field}), '
            f"sizeof((({name} *)0)->{field}));"
            for field, _, _ in _shape(structure)
        ]
    lines.append("}")
    (tmp_path / "shapes.c").write_text("\n".join(lines))
    compiler = os.environ.get("CC", "cc").split()[0]
    subprocess.run([compiler, "-o", "shapes", "shapes.c"], cwd=tmp_path, check=True)
    output = subprocess.check_output(tmp_path / "shapes", text=True).splitlines()
    expected = []
    for name, structure in structures.items():
        expected.append(f"{name} {ctypes.sizeof(structure)}")
        expected += [f"{name} {field} {at} {size}" for field, at, size in _shape(structure)]
    assert output == expected


def test_limits_are_the_same_as_in_c() -> None:
    header = library.sources()["state.h"]
    for name in (
        *("MAX_GPUS", "MAX_SLICES", "MAX_PROFILES", "MAX_BUDGETS", "MAX_COMPUTE_PROFILES"),
        *("MAX_FAULTS", "MAX_FUNCTIONS", "MAX_EVENTS", "UUID_SIZE"),
    ):
        assert f"{name} = {getattr(layout, name)}" in header
    assert f"{layout.MAGIC:#x}" in header


def test_function_names_are_those_of_pynvml() -> None:
    source = Path(nvml.__file__).read_text()
    unknown = {name for name in library.functions() if f'"{name}"' not in source}
    assert unknown == {"nvmlInit_v2"}  # pynvml calls nvmlInitWithFlags instead
