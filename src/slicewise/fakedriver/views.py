"""What a machine shows of itself: its GPUs, and the instances on them, as they are now."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GpuView:
    """One GPU as it is now."""

    index: int
    """Its place in the machine, which NVML's index equals while no GPU is removed."""
    uuid: str
    mig: bool
    mig_pending: bool
    lost: bool
    removed: bool
    temperature: int


@dataclass(frozen=True)
class ComputeView:
    """A compute instance: a MIG device."""

    id: int
    uuid: str
    profile: str
    start: int
    slices: int
    memory_used: int


@dataclass(frozen=True)
class InstanceView:
    """A GPU instance and the compute instances in it."""

    gpu: int
    gpu_uuid: str
    profile: str
    profile_id: int
    start: int
    size: int
    id: int
    busy: int
    """The process that uses it, or 0."""
    computes: tuple[ComputeView, ...]
