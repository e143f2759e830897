"""Reads everything a driver reports without changing anything, and prints it as JSON.

Run on a machine with an NVIDIA driver or on the fake one: what they answer can then be compared
call by call. Needs nothing but Python and nvidia-ml-py.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from typing import Any

import pynvml as nvml  # type: ignore[import-untyped]

BEYOND = 3
"""How many profile constants are tried beyond those of pynvml."""

PROFILES = range(nvml.NVML_GPU_INSTANCE_PROFILE_COUNT + BEYOND)
IDS = range(72)


class ProfileV3(ctypes.Structure):
    """nvmlGpuInstanceProfileInfo_v3_t, which pynvml lacks."""

    _fields_ = (
        ("version", ctypes.c_uint),
        *((name, ctypes.c_uint) for name in ("id", "sliceCount", "instanceCount")),
        *((name, ctypes.c_uint) for name in ("multiprocessorCount", "copyEngineCount")),
        *((name, ctypes.c_uint) for name in ("decoderCount", "encoderCount")),
        *((name, ctypes.c_uint) for name in ("jpegCount", "ofaCount")),
        ("memorySizeMB", ctypes.c_ulonglong),
        ("name", ctypes.c_char * 96),
        ("capabilities", ctypes.c_uint),
    )


def answer(call: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a call, or its error code."""
    try:
        return plain(call(*arguments))
    except nvml.NVMLError as error:
        return f"error {error.value}"


def plain(value: Any) -> Any:
    """Convert a value to JSON types: structures become objects, bytes become text."""
    if isinstance(value, ctypes.Structure):
        return {field[0]: plain(_held(value, *field)) for field in value._fields_}
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, ctypes._SimpleCData):
        return value.value
    return value


def _held(value: ctypes.Structure, name: str, kind: Any) -> Any:
    """The value of a field; text includes what follows a zero byte."""
    if getattr(kind, "_type_", None) is not ctypes.c_char:
        return getattr(value, name)
    place = getattr(type(value), name)
    return bytes(value)[place.offset : place.offset + place.size].rstrip(b"\0")


def raw(name: str, *arguments: Any) -> Any:
    """Call a library function directly and return its error code, if any."""
    code = nvml._nvmlGetFunctionPointer(name)(*arguments)
    if code:
        raise nvml.NVMLError(code)
    return None


def profile_v3(device: Any, profile: int, version: int) -> Any:
    """A profile in version 3 of the structure."""
    info = ProfileV3(version=version)
    raw("nvmlDeviceGetGpuInstanceProfileInfoV", device, profile, ctypes.byref(info))
    return info


def placements(device: Any, profile_id: int) -> Any:
    """The number of placements, and the placements."""
    count = ctypes.c_uint(0)
    raw(
        "nvmlDeviceGetGpuInstancePossiblePlacements_v2",
        *(device, profile_id, None, ctypes.byref(count)),
    )
    room = (nvml.c_nvmlGpuInstancePlacement_t * max(count.value, 1))()
    raw(
        "nvmlDeviceGetGpuInstancePossiblePlacements_v2",
        *(device, profile_id, room, ctypes.byref(count)),
    )
    return [[place.start, place.size] for place in room[: count.value]]


def instances(device: Any, profile_id: int) -> Any:
    """The number of GPU instances of a profile."""
    count = ctypes.c_uint(0)
    room = (nvml.c_nvmlGpuInstance_t * 64)()
    nvml.nvmlDeviceGetGpuInstances(device, profile_id, room, ctypes.byref(count))
    return count.value


def empty_event_set(device: Any) -> Any:
    """The result of waiting on an event set without events."""
    events = nvml.nvmlEventSetCreate()
    try:
        nvml.nvmlDeviceRegisterEvents(device, nvml.nvmlEventTypeXidCriticalError, events)
        return nvml.nvmlEventSetWait_v2(events, 1)
    finally:
        nvml.nvmlEventSetFree(events)


def of_device(device: Any) -> dict[str, Any]:
    """Everything the driver reports about a GPU."""
    third = ctypes.sizeof(ProfileV3) | 3 << 24
    calls: dict[str, Callable[[], Any]] = {
        "name": lambda: nvml.nvmlDeviceGetName(device),
        "uuid": lambda: nvml.nvmlDeviceGetUUID(device),
        "minor": lambda: nvml.nvmlDeviceGetMinorNumber(device),
        "index": lambda: nvml.nvmlDeviceGetIndex(device),
        "pci": lambda: nvml.nvmlDeviceGetPciInfo(device),
        "mig mode": lambda: nvml.nvmlDeviceGetMigMode(device),
        "is mig": lambda: nvml.nvmlDeviceIsMigDeviceHandle(device),
        "mig devices": lambda: nvml.nvmlDeviceGetMaxMigDeviceCount(device),
        "mig device 0": lambda: nvml.nvmlDeviceGetMigDeviceHandleByIndex(device, 0),
        "mig device 99": lambda: nvml.nvmlDeviceGetMigDeviceHandleByIndex(device, 99),
        "gpu instance id": lambda: nvml.nvmlDeviceGetGpuInstanceId(device),
        "compute instance id": lambda: nvml.nvmlDeviceGetComputeInstanceId(device),
        "parent": lambda: nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(device),
        "attributes": lambda: nvml.nvmlDeviceGetAttributes_v2(device),
        "gpu instance 0": lambda: nvml.nvmlDeviceGetGpuInstanceById(device, 0),
        "gpu instance 99": lambda: nvml.nvmlDeviceGetGpuInstanceById(device, 99),
        "memory": lambda: nvml.nvmlDeviceGetMemoryInfo(device),
        "memory v2": lambda: nvml.nvmlDeviceGetMemoryInfo(device, nvml.nvmlMemory_v2),
        "memory v9": lambda: nvml.nvmlDeviceGetMemoryInfo(device, 9),
        "temperature": lambda: nvml.nvmlDeviceGetTemperature(device, 0),
        "temperature 9": lambda: nvml.nvmlDeviceGetTemperature(device, 9),
        "temperature v": lambda: nvml.nvmlDeviceGetTemperatureV(device, 0),
        "ecc mode": lambda: nvml.nvmlDeviceGetEccMode(device),
        "ecc uncorrected": lambda: nvml.nvmlDeviceGetTotalEccErrors(device, 1, 0),
        "ecc corrected": lambda: nvml.nvmlDeviceGetTotalEccErrors(device, 0, 1),
        "ecc 9": lambda: nvml.nvmlDeviceGetTotalEccErrors(device, 9, 0),
        "architecture": lambda: nvml.nvmlDeviceGetArchitecture(device),
        "capability": lambda: nvml.nvmlDeviceGetCudaComputeCapability(device),
        "brand": lambda: nvml.nvmlDeviceGetBrand(device),
        "serial": lambda: nvml.nvmlDeviceGetSerial(device),
        "processes": lambda: nvml.nvmlDeviceGetComputeRunningProcesses(device),
        "events": lambda: nvml.nvmlDeviceGetSupportedEventTypes(device),
        "waiting": lambda: empty_event_set(device),
        "profile v3, wrong version": lambda: profile_v3(device, 0, third | 7 << 24),
        "profile v3, no version": lambda: profile_v3(device, 0, 0),
        "uuid, too short": lambda: raw(
            "nvmlDeviceGetUUID", device, ctypes.create_string_buffer(8), 8
        ),
        "uuid, nowhere": lambda: raw("nvmlDeviceGetUUID", device, None, 96),
        "placements, nowhere": lambda: raw(
            "nvmlDeviceGetGpuInstancePossiblePlacements_v2", device, 19, None, None
        ),
    }
    result: dict[str, Any] = {name: answer(call) for name, call in calls.items()}
    result["profiles"] = {
        str(number): [
            answer(nvml.nvmlDeviceGetGpuInstanceProfileInfo, device, number, 1),
            answer(nvml.nvmlDeviceGetGpuInstanceProfileInfo, device, number),
            answer(profile_v3, device, number, third),
        ]
        for number in PROFILES
    }
    result["ids"] = {
        str(number): {
            "info": answer(nvml.nvmlDeviceGetGpuInstanceProfileInfoById, device, number),
            "placements": answer(placements, device, number),
            "remaining": answer(nvml.nvmlDeviceGetGpuInstanceRemainingCapacity, device, number),
            "instances": answer(instances, device, number),
        }
        for number in IDS
    }
    return result


def everything() -> dict[str, Any]:
    """Everything the driver reports."""
    result: dict[str, Any] = {"before init": answer(nvml.nvmlDeviceGetCount)}
    nvml.nvmlInit()
    count = nvml.nvmlDeviceGetCount()
    known = nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(0)) if count else ""
    result |= {
        "driver": answer(nvml.nvmlSystemGetDriverVersion),
        "nvml": answer(nvml.nvmlSystemGetNVMLVersion),
        "cuda": answer(nvml.nvmlSystemGetCudaDriverVersion),
        "count": count,
        "index beyond": answer(lambda: nvml.nvmlDeviceGetHandleByIndex(count)),
        "uuid unknown": answer(
            lambda: nvml.nvmlDeviceGetHandleByUUID("GPU-00000000-0000-0000-0000-000000000000")
        ),
        "uuid of MIG unknown": answer(
            lambda: nvml.nvmlDeviceGetHandleByUUID("MIG-00000000-0000-0000-0000-000000000000")
        ),
        "uuid nonsense": answer(lambda: nvml.nvmlDeviceGetHandleByUUID("nonsense")),
        "uuid empty": answer(lambda: nvml.nvmlDeviceGetHandleByUUID("")),
        "uuid begun": answer(lambda: nvml.nvmlDeviceGetHandleByUUID(known[:12])),
        "uuid known": known != "" and bool(nvml.nvmlDeviceGetHandleByUUID(known)),
        "bus unknown": answer(lambda: nvml.nvmlDeviceGetHandleByPciBusId("00000000:FE:00.0")),
        "no device": answer(lambda: nvml.nvmlDeviceGetName(None)),
        "no GPU instance": answer(lambda: nvml.nvmlGpuInstanceGetInfo(None)),
        "no compute instance": answer(lambda: nvml.nvmlComputeInstanceGetInfo(None)),
        "errors": {str(n): nvml.nvmlErrorString(n) for n in (*range(33), 999, 1000)},
        "devices": [of_device(nvml.nvmlDeviceGetHandleByIndex(index)) for index in range(count)],
    }
    nvml.nvmlShutdown()
    result["after shutdown"] = answer(nvml.nvmlDeviceGetCount)
    result["shutdown twice"] = answer(nvml.nvmlShutdown)
    return result


if __name__ == "__main__":
    json.dump(everything(), sys.stdout, indent=1, default=lambda value: f"<{type(value).__name__}>")
