"""The entries of the journal about reclaimed slices."""

from __future__ import annotations

from slicewise.journal.records import Entry, Record, Seconds, TenantRef


class GpuRef(Record, frozen=True):
    """A GPU of a node."""

    node: str
    gpu: int
    """The GPU's index on its node."""


class Reclaiming(Entry, frozen=True, tag="reclaiming"):
    """An allocation got notice that its slices are reclaimed, or the notice was withdrawn."""

    allocation: str
    tenant: TenantRef
    at: Seconds | None
    """When it ends; None if the notice was withdrawn."""
    on: GpuRef | None = None
    """The GPU where they are reclaimed."""


class HeldBack(Entry, frozen=True, tag="held-back"):
    """A reclaimed allocation in the queue is held back, or its hold has ended."""

    allocation: str
    tenant: TenantRef
    until: Seconds | None
    """None if it may be placed from now on."""
