"""The entries of the journal about reserved windows."""

from __future__ import annotations

from slicewise.journal.records import Entry, Record, Seconds, TenantRef, Want


class WindowRecord(Record, frozen=True):
    """A window that is reserved: a placement on a GPU."""

    node: str
    gpu: int
    """The GPU's index on its node."""
    profile: str
    start: int
    opens: Seconds | None = None
    """When the last instance in it ends; None if that is unknown."""
    claimed: bool = False
    """Whether the tenant claimed its guarantee, so that instances in the window end for it."""


class Reserved(Entry, frozen=True, tag="reserved"):
    """The reserved windows of a tenant's queued requests for the same instances changed."""

    tenant: TenantRef
    want: Want
    count: int
    windows: tuple[WindowRecord, ...]
    """All of them now, the first to open first."""
