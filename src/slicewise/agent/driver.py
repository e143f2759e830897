"""The driver interface of the agent: readings, requests and errors.

`nvml.Nvml` implements it. A GPU is identified by its UUID. A GPU instance is identified by id,
profile and start together (`InstanceRef`), because the driver reuses ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from slicewise.core.errors import SlicewiseError

NOT_SUPPORTED = 3
NOT_FOUND = 6
TIMEOUT = 10
FUNCTION_NOT_FOUND = 13
GPU_IS_LOST = 15
LIBRARY_MISMATCH = 18
RESET_REQUIRED = 16
IN_USE = 19
GPU_NOT_FOUND = 28
INVALID_STATE = 29
UNKNOWN = 999

_CODE_NAMES = {
    1: "UNINITIALIZED",
    2: "INVALID_ARGUMENT",
    3: "NOT_SUPPORTED",
    4: "NO_PERMISSION",
    5: "ALREADY_INITIALIZED",
    6: "NOT_FOUND",
    7: "INSUFFICIENT_SIZE",
    8: "INSUFFICIENT_POWER",
    9: "DRIVER_NOT_LOADED",
    10: "TIMEOUT",
    11: "IRQ_ISSUE",
    12: "LIBRARY_NOT_FOUND",
    13: "FUNCTION_NOT_FOUND",
    14: "CORRUPTED_INFOROM",
    15: "GPU_IS_LOST",
    16: "RESET_REQUIRED",
    17: "OPERATING_SYSTEM",
    18: "LIB_RM_VERSION_MISMATCH",
    19: "IN_USE",
    20: "MEMORY",
    21: "NO_DATA",
    22: "VGPU_ECC_NOT_SUPPORTED",
    23: "INSUFFICIENT_RESOURCES",
    24: "FREQ_NOT_SUPPORTED",
    25: "ARGUMENT_VERSION_MISMATCH",
    26: "DEPRECATED",
    27: "NOT_READY",
    28: "GPU_NOT_FOUND",
    29: "INVALID_STATE",
    30: "RESET_TYPE_NOT_SUPPORTED",
    999: "UNKNOWN",
}

_MESSAGES = {
    2: "the driver rejected an argument",
    3: "the driver does not support this operation here",
    4: "it is not permitted: run the agent as root",
    6: "not found",
    9: "the NVIDIA driver is not loaded",
    10: "the driver did not answer in time",
    12: "libnvidia-ml.so.1 is not installed: there is no NVIDIA driver here",
    13: "this version of the driver does not have this function",
    15: "the GPU is lost: it fell off the bus or is inaccessible",
    16: "the GPU needs a reset before it can be used again",
    17: "the operating system refused the call",
    18: "the driver and its library have different versions, as after an upgrade",
    19: "it is in use",
    20: "the driver is out of memory",
    23: "the GPU has not enough free resources",
    28: "GPU not found",
    29: "the GPU is in the wrong state for this operation",
    999: "the driver reports an unknown error",
}


class DriverError(SlicewiseError):
    """Raised when a driver call fails; carries the NVML code, its name and a readable message."""

    def __init__(self, code: int, call: str, message: str = "") -> None:
        self.code = code
        self.name = _CODE_NAMES.get(code, f"code {code}")
        self.call = call
        self.message = message or _MESSAGES.get(code, "the driver refused the call")
        super().__init__(f"{self.message} (NVML {self.name}, {call})")


@dataclass(frozen=True)
class ProfileReading:
    """A GPU instance profile that the driver offers."""

    id: int
    """The profile id, as printed by nvidia-smi."""
    name: str
    size: int
    """Memory slices of an instance."""
    compute: int
    """Compute slices of an instance."""
    memory_mib: int
    maximum: int
    """How many instances fit on an empty GPU."""
    starts: tuple[int, ...]
    free: int | None = None
    """How many more instances fit now; None if unknown, as with MIG mode off."""


@dataclass(frozen=True)
class ComputeReading:
    """A compute instance. Programs see it as a MIG device with this UUID."""

    id: int
    uuid: str


@dataclass(frozen=True)
class InstanceReading:
    """An existing GPU instance."""

    id: int
    profile_id: int
    profile: str
    """Name of the profile; empty if the driver does not list it."""
    start: int
    size: int
    compute: tuple[ComputeReading, ...] = ()

    @property
    def uuid(self) -> str:
        """UUID of the first compute instance; empty without one."""
        return self.compute[0].uuid if self.compute else ""

    def overlaps(self, start: int, size: int) -> bool:
        """Whether the instance occupies any of these slices."""
        return self.start < start + size and start < self.start + self.size


@dataclass(frozen=True)
class GpuReading:
    """The current state of a GPU."""

    uuid: str
    index: int
    name: str
    memory_mib: int
    minor: int | None = None
    """Number of the device file ``/dev/nvidiaN``."""
    pci_device: str = ""
    """PCI device id, such as 0x2335; empty if unknown."""
    mig: bool | None = None
    """Whether MIG mode is on; None if the GPU does not support MIG."""
    pending: bool | None = None
    """MIG mode after the next reset of the GPU."""
    profiles: tuple[ProfileReading, ...] = ()
    instances: tuple[InstanceReading, ...] = ()

    def profile(self, name: str) -> ProfileReading | None:
        """The offered profile with this name."""
        return next((p for p in self.profiles if p.name == name), None)

    def at(self, profile: str, start: int) -> InstanceReading | None:
        """The instance of this profile at this start."""
        return next((i for i in self.instances if (i.profile, i.start) == (profile, start)), None)


@dataclass(frozen=True)
class GpuUsage:
    """Temperature, errors and memory use of a GPU; None if the driver does not report a value."""

    temperature: int | None = None
    uncorrected: int | None = None
    """Uncorrected ECC errors since the driver was loaded."""
    memory_used: int = 0
    instances: tuple[tuple[str, int], ...] = ()
    """Bytes in use by MIG UUID."""


@dataclass(frozen=True)
class InstanceRef:
    """Identifies a GPU instance. The driver implementation checks all fields before it acts."""

    gpu: str
    id: int
    profile_id: int
    start: int


class Driver(Protocol):
    """The operations that the agent needs. Every method may raise DriverError."""

    def version(self) -> str:
        """Return the driver version."""
        ...

    def gpus(self) -> list[str | DriverError]:
        """Return the GPU UUIDs by index, with an error in place of a GPU that does not answer."""
        ...

    def read(self, gpu: str) -> GpuReading:
        """Read a GPU with its profiles and instances: a complete reading or an error."""
        ...

    def usage(self, gpu: str) -> GpuUsage:
        """Read temperature, errors and memory use."""
        ...

    def events(self) -> list[tuple[str, int]]:
        """Return the XID errors since the last call as (GPU, number); an unknown GPU is empty."""
        ...

    def processes(self, gpu: str) -> list[int]:
        """Return the ids of the processes that use the GPU."""
        ...

    def create_gpu_instance(self, gpu: str, profile_id: int, start: int, size: int) -> None:
        """Create a GPU instance at exactly this placement."""
        ...

    def create_compute_instance(self, target: InstanceRef) -> None:
        """Create a compute instance that spans the whole GPU instance."""
        ...

    def destroy_compute_instance(self, target: InstanceRef, compute: ComputeReading) -> None:
        """Destroy a compute instance, after a check that both ids still mean the same instances."""
        ...

    def destroy_gpu_instance(self, target: InstanceRef) -> None:
        """Destroy a GPU instance, after a check that the id still means the same instance."""
        ...

    def enable_mig(self, gpu: str) -> None:
        """Enable MIG mode; raise if it does not take effect at once."""
        ...

    def reopen(self) -> None:
        """Reinitialize the driver library after the driver was unavailable."""
        ...

    def close(self) -> None:
        """Shut down the driver library; instances stay."""
        ...
