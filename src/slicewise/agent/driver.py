"""What the agent needs of a GPU driver: what it reads, what it asks for, and how it is refused.

`nvml.Nvml` is the real one. A GPU is named by its UUID, and an instance by its place: the ids of
GPU instances are given out again, so an id alone never says which instance is meant.
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

_NAMES = {
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

_SENTENCES = {
    2: "the driver does not accept what was asked for",
    3: "the driver does not support this here",
    4: "it is not permitted: run the agent as root",
    6: "it is not there",
    9: "the NVIDIA driver is not loaded",
    10: "the driver did not answer in time",
    12: "libnvidia-ml.so.1 is not installed: there is no NVIDIA driver here",
    13: "this version of the driver does not have this function",
    15: "the GPU is lost: it has fallen off the bus or cannot be reached",
    16: "the GPU needs a reset before it can be used again",
    17: "the operating system refused",
    18: "the driver and its library are of different versions, as after an upgrade",
    19: "it is in use",
    20: "the driver is out of memory",
    23: "what is left of the GPU is not enough for it",
    28: "the GPU is not there",
    29: "the GPU is not in a state for it",
    999: "the driver reports an unknown error",
}


class DriverError(SlicewiseError):
    """A call the driver refused: its code, NVML's name of it, and a sentence for people."""

    def __init__(self, code: int, call: str, sentence: str = "") -> None:
        self.code = code
        self.name = _NAMES.get(code, f"code {code}")
        self.call = call
        self.sentence = sentence or _SENTENCES.get(code, "the driver refused")
        super().__init__(f"{self.sentence} (NVML {self.name}, {call})")


@dataclass(frozen=True)
class ProfileReading:
    """A kind of GPU instance as the driver offers it."""

    id: int
    """The id nvidia-smi prints; instances refer to it."""
    name: str
    size: int
    """Memory slices of its window."""
    compute: int
    memory_mib: int
    maximum: int
    """How many an empty GPU can hold."""
    starts: tuple[int, ...]
    free: int | None = None
    """How many more fit now; None where the driver does not say, as with MIG off."""


@dataclass(frozen=True)
class ComputeReading:
    """A compute instance, and the MIG device that programs see."""

    id: int
    uuid: str


@dataclass(frozen=True)
class InstanceReading:
    """A GPU instance that exists."""

    id: int
    profile_id: int
    profile: str
    """Its profile's name, or nothing where the driver's own list does not have it."""
    start: int
    size: int
    compute: tuple[ComputeReading, ...] = ()

    @property
    def uuid(self) -> str:
        """What programs call it; nothing while it has no compute instance."""
        return self.compute[0].uuid if self.compute else ""

    def overlaps(self, start: int, size: int) -> bool:
        """Whether it takes any of these slices."""
        return self.start < start + size and start < self.start + self.size


@dataclass(frozen=True)
class GpuReading:
    """One GPU as it is now."""

    uuid: str
    index: int
    name: str
    memory_mib: int
    minor: int | None = None
    """The number of its device file."""
    pci_device: str = ""
    """Its PCI device id, as 0x2335; nothing where the driver does not say."""
    mig: bool | None = None
    """Whether MIG mode is on; None where the GPU does not have it."""
    pending: bool | None = None
    """What MIG mode will be after a reset."""
    profiles: tuple[ProfileReading, ...] = ()
    instances: tuple[InstanceReading, ...] = ()

    def profile(self, name: str) -> ProfileReading | None:
        """What it offers under that name."""
        return next((p for p in self.profiles if p.name == name), None)

    def at(self, profile: str, start: int) -> InstanceReading | None:
        """The instance of that profile at that start."""
        return next((i for i in self.instances if (i.profile, i.start) == (profile, start)), None)


@dataclass(frozen=True)
class Usage:
    """How a GPU does; None is what the driver does not tell."""

    temperature: int | None = None
    uncorrected: int | None = None
    """Uncorrected ECC errors since the driver was loaded."""
    memory_used: int = 0
    instances: tuple[tuple[str, int], ...] = ()
    """Bytes in use by MIG UUID."""


@dataclass(frozen=True)
class At:
    """One GPU instance beyond doubt: its id, and what must still be true of it."""

    gpu: str
    id: int
    profile_id: int
    start: int


class Driver(Protocol):
    """What is asked of a driver. Every call may raise DriverError."""

    def version(self) -> str:
        """The driver's version."""
        ...

    def gpus(self) -> list[str | DriverError]:
        """The UUIDs by index; an error for one that does not answer."""
        ...

    def read(self, gpu: str) -> GpuReading:
        """One GPU with its profiles and instances; all of it or an error, never a part."""
        ...

    def usage(self, gpu: str) -> Usage:
        """Temperature, errors and memory in use."""
        ...

    def events(self) -> list[tuple[str, int]]:
        """The XID errors since last asked: GPU and number; nothing for a GPU no longer known."""
        ...

    def processes(self, gpu: str) -> list[int]:
        """The processes that use the GPU."""
        ...

    def create_gpu_instance(self, gpu: str, profile_id: int, start: int, size: int) -> None:
        """A GPU instance at exactly that place."""
        ...

    def create_compute_instance(self, at: At) -> None:
        """A compute instance over all of that GPU instance."""
        ...

    def destroy_compute_instance(self, at: At, compute: ComputeReading) -> None:
        """Destroy exactly that compute instance of exactly that GPU instance."""
        ...

    def destroy_gpu_instance(self, at: At) -> None:
        """Destroy exactly that GPU instance."""
        ...

    def enable_mig(self, gpu: str) -> None:
        """Switch MIG mode on; an error where it does not take effect at once."""
        ...

    def reopen(self) -> None:
        """Begin anew with the driver, after it went away."""
        ...

    def close(self) -> None:
        """Let go of the driver; what exists stays."""
        ...
