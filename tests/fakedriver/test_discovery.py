"""GPU properties: the fake driver reports what the catalog has for the model."""

from __future__ import annotations

import ctypes
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.fakedriver.driver import NOT_SUPPORTED, attached, code, placements, profiles

from slicewise.catalog import Catalog, load_file
from slicewise.core.errors import SlicewiseError
from slicewise.core.geometry import Geometry
from slicewise.fakedriver import Machine

H200 = {
    "1g.18gb": (19, [(start, 1) for start in range(7)], 7),
    "1g.18gb+me": (20, [(start, 1) for start in range(7)], 1),
    "1g.35gb": (15, [(0, 2), (2, 2), (4, 2), (6, 2)], 4),
    "2g.35gb": (14, [(0, 2), (2, 2), (4, 2)], 3),
    "3g.71gb": (9, [(0, 4), (4, 4)], 2),
    "4g.71gb": (5, [(0, 4)], 1),
    "7g.141gb": (0, [(0, 8)], 1),
}
"""Read from a real H200 with driver 580: id, placements, maximum number of instances."""


@pytest.mark.parametrize("mig", [True, False])
def test_h200_reports_what_a_real_one_does(
    mig: bool, make: Callable[..., Machine], library: Path
) -> None:
    machine = make("H200", 2, mig=mig)
    with attached(machine, library) as nvml:
        for index in range(2):
            device = nvml.nvmlDeviceGetHandleByIndex(index)
            found = {
                name: (info.id, placements(device, info.id), info.instanceCount)
                for name, info in profiles(device).items()
            }
            assert found == H200
            assert nvml.nvmlDeviceGetMigMode(device) == [mig, mig]
            assert nvml.nvmlDeviceGetMaxMigDeviceCount(device) == (7 if mig else 0)


def test_every_model_matches_the_catalog(
    geometry: Geometry, make: Callable[..., Machine], library: Path
) -> None:
    entry = Catalog.builtin().find(geometry.model)
    facts = {fact.name: fact for fact in entry.facts}
    with attached(make(geometry.model), library) as nvml:
        device = nvml.nvmlDeviceGetHandleByIndex(0)
        assert Catalog.builtin().find(nvml.nvmlDeviceGetName(device)) is entry
        found = profiles(device)
        assert set(found) == {profile.name for profile in geometry.profiles}
        for profile in geometry.profiles:
            info, fact = found[profile.name], facts[profile.name]
            assert placements(device, info.id) == [(s, profile.size) for s in profile.starts]
            assert info.sliceCount == profile.compute
            assert info.instanceCount == fact.max_instances
            assert nvml.nvmlDeviceGetGpuInstanceRemainingCapacity(device, info.id) == (
                fact.max_instances
            )
            if fact.id is not None:
                assert info.id == fact.id
            if fact.nvml_enum is not None:
                number = fact.nvml_enum
                assert nvml.nvmlDeviceGetGpuInstanceProfileInfo(device, number).id == info.id
                assert nvml.nvmlDeviceGetGpuInstanceProfileInfo(device, number, 1).id == info.id
            if fact.sm_count is not None:
                assert info.multiprocessorCount == fact.sm_count
            if fact.memory_mib is not None:
                assert info.memorySizeMB == fact.memory_mib
            if fact.engines is not None:
                assert (info.copyEngineCount, info.decoderCount, info.ofaCount) == (
                    fact.engines.copy,
                    fact.engines.decoder,
                    fact.engines.ofa,
                )
            by_id = nvml.nvmlDeviceGetGpuInstanceProfileInfoById(device, info.id)
            assert bytes(by_id) == bytes(info)


def gigabytes_in_name(total: int, memory_mib: int) -> int:
    """What NVIDIA's tools for Kubernetes (go-nvlib) write in a profile's name.

    They round the instance's memory up to eighths of the GPU's, which they round up to GiB.
    """
    eighths = math.ceil(8 * (memory_mib << 20) / total)
    return math.floor(eighths / 8 * math.ceil(total / 2**30) + 0.5)


def test_names_of_profiles_follow_from_the_memory(
    geometry: Geometry, make: Callable[..., Machine], library: Path
) -> None:
    with attached(make(geometry.model), library) as nvml:
        device = nvml.nvmlDeviceGetHandleByIndex(0)
        total = nvml.nvmlDeviceGetMemoryInfo(device).total
        found = profiles(device)
    if geometry.model == "Thor-iGPU":  # its memory is the machine's
        assert total == 0
        return
    for profile in geometry.profiles:
        memory = found[profile.name].memorySizeMB
        assert gigabytes_in_name(total, memory) == profile.memory_gb, profile.name
        assert memory << 20 <= total


def test_memory_of_a_known_model_is_the_real_one(
    make: Callable[..., Machine], library: Path
) -> None:
    for model, listed in (("A100-80GB", 81920), ("H100-80GB-PCIe", 81559), ("B200", 183359)):
        with attached(make(model), library) as nvml:
            info = nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByIndex(0))
            assert info.total == listed << 20


def test_gpus_are_on_bare_metal(machine: Machine, gpu: Any, nvml: Any) -> None:
    mode = ctypes.c_uint(99)
    ask = nvml._nvmlGetFunctionPointer("nvmlDeviceGetVirtualizationMode")
    assert ask(gpu, ctypes.byref(mode)) == 0
    assert mode.value == nvml.NVML_GPU_VIRTUALIZATION_MODE_NONE
    assert nvml.nvmlDeviceGetVirtualizationMode(gpu) == 0
    assert ask(gpu, None) == 2
    machine.create_instance(0, "1g.18gb", 0)
    mig = nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, 0)
    assert code(nvml.nvmlDeviceGetVirtualizationMode, mig) == 2
    machine.lose(0)
    assert code(nvml.nvmlDeviceGetVirtualizationMode, gpu) == 15


def test_profiles_of_other_models_are_not_supported(gpu: Any, nvml: Any) -> None:
    assert code(nvml.nvmlDeviceGetGpuInstanceProfileInfo, gpu, 0x5) == NOT_SUPPORTED
    assert code(nvml.nvmlDeviceGetGpuInstanceProfileInfo, gpu, 0x12) == 2
    assert code(nvml.nvmlDeviceGetGpuInstanceProfileInfo, gpu, 0x11) == 2
    assert code(placements, gpu, 21) == NOT_SUPPORTED
    assert placements(gpu, 47) == []
    assert code(placements, gpu, 1) == 2
    assert code(nvml.nvmlDeviceCreateGpuInstance, gpu, 21) == 2


def test_profile_ids_differ_from_nvml_constants(gpu: Any, nvml: Any) -> None:
    found = {}
    for number in range(nvml.NVML_GPU_INSTANCE_PROFILE_COUNT):
        if not code(nvml.nvmlDeviceGetGpuInstanceProfileInfo, gpu, number):
            found[number] = nvml.nvmlDeviceGetGpuInstanceProfileInfo(gpu, number).id
    assert found == {0: 19, 1: 14, 2: 9, 3: 5, 4: 0, 7: 20, 9: 15}


def test_gpus_are_found_by_index_uuid_and_bus_id(machine: Machine, nvml: Any) -> None:
    assert nvml.nvmlDeviceGetCount() == 2
    for index, gpu in enumerate(machine.gpus):
        device = nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
        assert nvml.nvmlDeviceGetUUID(device) == gpu.uuid
        assert nvml.nvmlDeviceGetIndex(device) == index
        assert nvml.nvmlDeviceGetMinorNumber(device) == index
        pci = nvml.nvmlDeviceGetPciInfo(device)
        assert pci.pciDeviceId == 0x233510DE
        assert nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByPciBusId(pci.busId)) == gpu.uuid
        assert nvml.nvmlDeviceGetName(device) == "NVIDIA H200"
        assert not nvml.nvmlDeviceIsMigDeviceHandle(device).value
    assert len({gpu.uuid for gpu in machine.gpus}) == 2
    assert nvml.nvmlSystemGetDriverVersion() == "580.65.06"
    assert nvml.nvmlErrorString(19) == "In use by another client"


def test_machines_with_different_seeds_share_no_uuid(
    make: Callable[..., Machine], library: Path
) -> None:
    uuids = set()
    for seed in range(5):
        machine = make("A30", 3, seed=seed)
        uuids |= {gpu.uuid for gpu in machine.gpus} | {machine.boot_id}
        uuids |= {machine.create_instance(0, "1g.6gb", 0).computes[0].uuid}
        with attached(machine, library) as nvml:
            device = nvml.nvmlDeviceGetHandleByIndex(1)
            instance = nvml.nvmlDeviceCreateGpuInstance(device, 0)
            nvml.nvmlGpuInstanceCreateComputeInstance(instance, 3)
        uuids |= {machine.instances(1)[0].computes[0].uuid}
    assert len(uuids) == 5 * (3 + 1 + 1 + 1)


def test_custom_geometry(tmp_path: Path, make: Callable[..., Machine], library: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text(
        'model = "Own"\nmemory_gb = 8\nmemory_slices = 2\ncompute_slices = 2\n'
        '[[profile]]\nname = "1g.4gb"\nsize = 1\ncompute = 1\nmemory_gb = 4\nstarts = [0, 1]\n'
        '[[profile]]\nname = "2g.8gb"\nsize = 2\ncompute = 2\nmemory_gb = 8\nstarts = [0]\n'
    )
    with attached(make(load_file(file)), library) as nvml:
        found = profiles(nvml.nvmlDeviceGetHandleByIndex(0))
    assert {name: info.instanceCount for name, info in found.items()} == {"1g.4gb": 2, "2g.8gb": 1}


def test_unsupported_models_are_refused_with_a_reason(tmp_path: Path) -> None:
    file = tmp_path / "odd.toml"
    file.write_text(
        'model = "Odd"\nmemory_gb = 8\nmemory_slices = 2\ncompute_slices = 5\n'
        '[[profile]]\nname = "5g.4gb"\nsize = 1\ncompute = 5\nmemory_gb = 4\nstarts = [0]\n'
    )
    with pytest.raises(SlicewiseError, match=r"5g\.4gb has 5 compute slices"):
        Machine.create(tmp_path / "m", file, 1)
    for gpus in (0, 17):
        with pytest.raises(SlicewiseError, match="1 to 16 GPUs"):
            Machine.create(tmp_path / "m", "H200", gpus)
    with pytest.raises(SlicewiseError, match="the seed -1 is not in"):
        Machine.create(tmp_path / "m", "H200", 1, seed=-1)
    with pytest.raises(SlicewiseError, match="cannot be opened"):
        Machine(tmp_path / "none")


def test_reading_changes_nothing(machine: Machine, library: Path) -> None:
    before = machine.path.read_bytes()
    found = json.loads(
        subprocess.check_output(
            [sys.executable, str(Path(__file__).with_name("reading.py"))],
            env=os.environ | machine.environment(library),
        )
    )
    assert (found["before init"], found["count"], found["after shutdown"]) == (
        "error 1",
        2,
        "error 1",
    )
    device = found["devices"][0]
    first, second, third = device["profiles"]["9"]
    assert (first["id"], second["name"], third["name"]) == (15, "MIG 1g.35gb", "")
    assert device["profiles"]["18"] == ["error 2"] * 3
    assert [len(device["ids"][str(i)]["placements"]) for i in (19, 15, 0)] == [7, 4, 1]
    assert device["waiting"] == "error 10"
    assert device["profile v3, no version"] == "error 2"
    # Only the call counters differ.
    after = machine.path.read_bytes()
    differs = [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
    counters = type(machine._file).calls
    assert differs
    assert all(counters.offset <= at < counters.offset + counters.size for at in differs)
