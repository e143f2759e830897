"""Calls NVML functions through NVIDIA's package ``pynvml``, with any version of the driver.

Drivers and versions of pynvml differ in which variants of a function they have, and in the error
for a missing one. This module hides the differences: it knows ctypes, variants and error codes,
while `nvml` knows what to ask for. Every failure is a DriverError with NVML's code.
"""

from __future__ import annotations

import ctypes
import importlib
from typing import Any

from slicewise.agent.driver import (
    FUNCTION_NOT_FOUND,
    GPU_IS_LOST,
    GPU_NOT_FOUND,
    NOT_FOUND,
    NOT_SUPPORTED,
    DriverError,
)
from slicewise.core.errors import SlicewiseError

_INVALID_ARGUMENT = 2
_VERSION_MISMATCH = 25
_VARIANT_MISSING = {FUNCTION_NOT_FOUND, _VERSION_MISMATCH}
"""Errors of older drivers that lack the newer variant of a function."""
_NOT_OFFERED = {_INVALID_ARGUMENT, NOT_SUPPORTED, NOT_FOUND}
"""Errors for a profile or device that does not exist on a GPU."""
_MAX_LISTED = 64
"""Capacity of the arrays that list instances and placements."""


class Binding:
    """The functions of NVML. Handles and info structures are pynvml's own objects."""

    def __init__(self) -> None:
        """Import pynvml, which loads the driver library on its first call."""
        try:
            self._lib: Any = importlib.import_module("pynvml")
        except ImportError:
            raise SlicewiseError(
                "the agent needs NVIDIA's package nvidia-ml-py: install slicewise[agent]"
            ) from None
        self._mismatch_error: Any = getattr(self._lib, "NVMLLibraryMismatchError", ())
        """Raised by newer versions of pynvml if the driver is older."""

    def call(self, function: str, *arguments: Any, **options: Any) -> Any:
        """Call a function and return its result."""
        found = getattr(self._lib, function, None)
        if found is None:
            raise DriverError(FUNCTION_NOT_FOUND, function)
        try:
            return found(*arguments, **options)
        except self._lib.NVMLError as error:
            raise DriverError(int(error.value), function) from None
        except self._mismatch_error:
            raise DriverError(FUNCTION_NOT_FOUND, function) from None

    def call_optional(self, function: str, *arguments: Any) -> Any:
        """Call a function; return None if it fails, but raise if the GPU is lost."""
        try:
            return self.call(function, *arguments)
        except DriverError as error:
            if error.code in (GPU_IS_LOST, GPU_NOT_FOUND):
                raise
            return None

    # Profiles and placements

    def gpu_instance_profiles(self, gpu: Any) -> list[tuple[int, Any]]:
        """The profiles of a GPU, each with NVML's number for its kind."""
        count = getattr(self._lib, "NVML_GPU_INSTANCE_PROFILE_COUNT", 10)
        function = "nvmlDeviceGetGpuInstanceProfileInfo"
        infos = ((number, self._profile_info(function, gpu, number)) for number in range(count))
        return [(number, info) for number, info in infos if info is not None]

    def compute_instance_profiles(self, instance: Any) -> list[Any]:
        """The compute instance profiles that a GPU instance offers."""
        count = getattr(self._lib, "NVML_COMPUTE_INSTANCE_PROFILE_COUNT", 8)
        function = "nvmlGpuInstanceGetComputeInstanceProfileInfo"
        infos = (self._profile_info(function, instance, number, 0) for number in range(count))
        return [info for info in infos if info is not None]

    def _profile_info(self, function: str, *arguments: Any) -> Any:
        """Information on a profile, with its name if the driver reports it; None if not offered."""
        try:
            try:
                return self.call(function, *arguments)
            except DriverError as error:
                # Driver 580 rejects a newer structure as an invalid argument.
                if error.code not in {*_VARIANT_MISSING, _INVALID_ARGUMENT}:
                    raise
            return self.call(function, *arguments, version=1)
        except DriverError as error:
            if error.code in _NOT_OFFERED:
                return None
            raise

    def placements(self, gpu: Any, profile_id: int) -> list[tuple[int, int]]:
        """The start and size of each possible placement of a profile."""
        array = (self._lib.c_nvmlGpuInstancePlacement_t * _MAX_LISTED)()
        count = ctypes.c_uint(_MAX_LISTED)
        function = "nvmlDeviceGetGpuInstancePossiblePlacements"
        arguments = (gpu, profile_id, array, ctypes.byref(count))
        try:
            self.call(function, *arguments)
        except DriverError as error:
            if error.code not in _VARIANT_MISSING:
                raise
            # pynvml has only the newer variant; older drivers accept the same arguments.
            self._call_library(function, *arguments)
        return [(int(array[i].start), int(array[i].size)) for i in range(count.value)]

    def _call_library(self, symbol: str, *arguments: Any) -> None:
        """Call a function of the driver library that pynvml does not wrap."""
        try:
            code = int(self._lib._nvmlGetFunctionPointer(symbol)(*arguments))
        except self._lib.NVMLError as error:
            code = int(error.value)
        if code:
            raise DriverError(code, symbol)

    # Instances and MIG devices

    def gpu_instances(self, gpu: Any, profile_id: int) -> list[Any]:
        """The GPU instances of a profile."""
        return self._list("nvmlDeviceGetGpuInstances", "c_nvmlGpuInstance_t", gpu, profile_id)

    def compute_instances(self, instance: Any, profile_id: int) -> list[Any]:
        """The compute instances of a profile in a GPU instance."""
        function = "nvmlGpuInstanceGetComputeInstances"
        return self._list(function, "c_nvmlComputeInstance_t", instance, profile_id)

    def _list(self, function: str, handle_type: str, parent: Any, profile_id: int) -> list[Any]:
        array = (getattr(self._lib, handle_type) * _MAX_LISTED)()
        count = ctypes.c_uint(_MAX_LISTED)
        self.call(function, parent, profile_id, array, ctypes.byref(count))
        return [array[index] for index in range(count.value)]

    def mig_devices(self, gpu: Any) -> list[Any]:
        """The MIG devices of a GPU: one per compute instance."""
        try:
            count = int(self.call("nvmlDeviceGetMaxMigDeviceCount", gpu))
        except DriverError as error:
            if error.code in (NOT_SUPPORTED, FUNCTION_NOT_FOUND):
                return []
            raise
        devices: list[Any] = []
        for index in range(count):
            try:
                devices.append(self.call("nvmlDeviceGetMigDeviceHandleByIndex", gpu, index))
            except DriverError as error:
                if error.code not in _NOT_OFFERED:
                    raise
        return devices

    def create_gpu_instance(self, gpu: Any, profile_id: int, start: int, size: int) -> None:
        """Create a GPU instance at a placement."""
        placement = self._lib.c_nvmlGpuInstancePlacement_t(start, size)
        # pynvml passes the placement on unchanged; the C function expects its address.
        function = "nvmlDeviceCreateGpuInstanceWithPlacement"
        self.call(function, gpu, profile_id, ctypes.byref(placement))

    # Usage

    def memory_used(self, device: Any) -> int | None:
        """Bytes in use, without the driver's own memory if the driver reports it separately."""
        newer = getattr(self._lib, "nvmlMemory_v2", None)
        info = self.call_optional("nvmlDeviceGetMemoryInfo", device, newer)
        if info is None:
            info = self.call_optional("nvmlDeviceGetMemoryInfo", device)
        return None if info is None else int(info.used)

    def temperature(self, gpu: Any) -> int | None:
        """The temperature of a GPU in degrees Celsius."""
        found: int | None = self.call_optional("nvmlDeviceGetTemperature", gpu, 0)
        if found is None:
            found = self.call_optional("nvmlDeviceGetTemperatureV", gpu, 0)
        return found

    def processes(self, gpu: Any) -> set[int]:
        """The ids of the processes that use a GPU for compute or graphics."""
        found: set[int] = set()
        for kind in ("Compute", "Graphics"):
            for variant in ("_v3", "_v2"):
                try:
                    function = f"nvmlDeviceGet{kind}RunningProcesses{variant}"
                    found |= {int(process.pid) for process in self.call(function, gpu)}
                    break
                except DriverError as error:
                    # Graphics processes are optional: the driver itself refuses to change the
                    # MIG mode under them.
                    missing = error.code in _VARIANT_MISSING and variant != "_v2"
                    if kind == "Compute" and not missing:
                        raise
        return found


def handle_address(handle: Any) -> int:
    """The address behind a handle, which identifies its GPU."""
    return ctypes.cast(handle, ctypes.c_void_p).value or 0
