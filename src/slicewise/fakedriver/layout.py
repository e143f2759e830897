"""The layout of a machine's state file: the ctypes counterpart of ``nvml/state.h``.

Both must describe the same bytes. The driver rejects a file of another size, and tests compare
every structure.
"""

from __future__ import annotations

from ctypes import Structure, c_char, c_uint32, c_uint64

MAX_GPUS = 16
MAX_SLICES = 16
MAX_PROFILES = 24
MAX_BUDGETS = 8
MAX_COMPUTE_PROFILES = 8
MAX_FAULTS = 64
MAX_FUNCTIONS = 128
MAX_EVENTS = 64
NAME_SIZE = 96
UUID_SIZE = 48

MAGIC = int.from_bytes(b"fakeNVML", "little")
ANY = 0xFFFFFFFF
"""Matches any function or GPU; in an event: no instance."""
FOREVER = (1 << 64) - 1

_Slices = c_uint32 * MAX_SLICES


class ComputeProfile(Structure):
    """A compute instance profile within a GPU instance profile."""

    _fields_ = (
        ("name", c_char * NAME_SIZE),
        ("number", c_uint32),
        ("id", c_uint32),
        ("slices", c_uint32),
        ("instances", c_uint32),
        ("multiprocessors", c_uint32),
        ("start_count", c_uint32),
        ("starts", _Slices),
    )


class GpuProfile(Structure):
    """A GPU instance profile."""

    _fields_ = (
        ("name", c_char * NAME_SIZE),
        ("memory_mib", c_uint64),
        ("number", c_uint32),
        ("id", c_uint32),
        ("size", c_uint32),
        ("compute", c_uint32),
        ("instances", c_uint32),
        ("multiprocessors", c_uint32),
        ("copy_engines", c_uint32),
        ("decoders", c_uint32),
        ("encoders", c_uint32),
        ("jpeg_engines", c_uint32),
        ("ofa_engines", c_uint32),
        ("capabilities", c_uint32),
        ("uses", c_uint32 * MAX_BUDGETS),
        ("start_count", c_uint32),
        ("starts", _Slices),
        ("preferred", _Slices),
        ("instance_ids", _Slices * 2),
        ("compute_profile_count", c_uint32),
        ("compute_profiles", ComputeProfile * MAX_COMPUTE_PROFILES),
    )


class GpuFacts(Structure):
    """The constant data of a GPU."""

    _fields_ = (
        ("uuid", c_char * UUID_SIZE),
        ("serial", c_char * 32),
        ("minor", c_uint32),
        ("domain", c_uint32),
        ("bus", c_uint32),
        ("device", c_uint32),
        ("pci_device_id", c_uint32),
        ("pci_subsystem_id", c_uint32),
        ("mirrored", c_uint32),
        ("unused", c_uint32),
    )


class GpuInstance(Structure):
    """A slot for a GPU instance; empty if its serial is 0."""

    _fields_ = (
        ("serial", c_uint64),
        ("profile", c_uint32),
        ("start", c_uint32),
        ("id", c_uint32),
        ("busy", c_uint32),
    )


class ComputeInstance(Structure):
    """A slot for a compute instance, which is a MIG device; empty if its serial is 0."""

    _fields_ = (
        ("uuid", c_char * UUID_SIZE),
        ("serial", c_uint64),
        ("parent", c_uint64),
        ("memory_used", c_uint64),
        ("profile", c_uint32),
        ("start", c_uint32),
        ("id", c_uint32),
        ("unused", c_uint32),
    )


class Gpu(Structure):
    """The variable state of a GPU."""

    _fields_ = (
        ("lost", c_uint32),
        ("removed", c_uint32),
        ("mig", c_uint32),
        ("mig_pending", c_uint32),
        ("temperature", c_uint32),
        ("unused", c_uint32),
        ("memory_used", c_uint64),
        ("ecc", (c_uint64 * 2) * 2),
        ("instances", GpuInstance * MAX_SLICES),
        ("computes", ComputeInstance * MAX_SLICES),
    )


class Event(Structure):
    """An error event of a GPU."""

    _fields_ = (
        ("type", c_uint64),
        ("data", c_uint64),
        ("gpu", c_uint32),
        ("gpu_instance", c_uint32),
        ("compute_instance", c_uint32),
        ("unused", c_uint32),
    )


class Image(Structure):
    """The variable state of the machine. The file holds two images; one of them is active."""

    _fields_ = (
        ("next_serial", c_uint64),
        ("event_count", c_uint64),
        ("boot_id", c_char * UUID_SIZE),
        ("gpus", Gpu * MAX_GPUS),
        ("events", Event * MAX_EVENTS),
    )


class Fault(Structure):
    """An armed fault."""

    _fields_ = (
        ("armed", c_uint32),
        ("kind", c_uint32),
        ("function", c_uint32),
        ("gpu", c_uint32),
        ("value", c_uint32),
        ("unused", c_uint32),
        ("after", c_uint64),
        ("times", c_uint64),
        ("matched", c_uint64),
    )


class File(Structure):
    """The complete state file."""

    _fields_ = (
        ("magic", c_uint64),
        ("digest", c_uint64),
        ("size", c_uint64),
        ("active", c_uint32),
        ("gpu_count", c_uint32),
        ("driver_version", c_char * NAME_SIZE),
        ("nvml_version", c_char * NAME_SIZE),
        ("name", c_char * NAME_SIZE),
        ("seed", c_uint64),
        ("memory_mib", c_uint64),
        ("memory_reserved", c_uint64),
        ("cuda_version", c_uint32),
        ("architecture", c_uint32),
        ("capability_major", c_uint32),
        ("capability_minor", c_uint32),
        ("mode_needs_reset", c_uint32),
        ("mig_devices", c_uint32),
        ("budget_count", c_uint32),
        ("profile_count", c_uint32),
        ("budgets", c_uint32 * MAX_BUDGETS),
        ("profiles", GpuProfile * MAX_PROFILES),
        ("facts", GpuFacts * MAX_GPUS),
        ("calls", c_uint64 * MAX_FUNCTIONS),
        ("faults", Fault * MAX_FAULTS),
        ("images", Image * 2),
    )
