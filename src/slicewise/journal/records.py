"""Base types of the journal: immutable values, encoded without their default values."""

from __future__ import annotations

import msgspec

Seconds = float
"""A Unix time, or a duration."""


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """A value in an entry.

    Records are many and never part of a reference cycle, so the garbage collector skips them.
    """


class TenantRef(Record, frozen=True):
    """A tenant, as records and entries refer to it.

    The id identifies the tenant. A name can be used again once its tenant is removed, an id cannot.
    The name is stored beside the id to show it in the history of a tenant that was removed.
    """

    id: str
    name: str


class QuotaRecord(Record, frozen=True):
    """The terms of a tenant: its limits, where None is no limit, and its share."""

    memory_slices: int | None = None
    compute_slices: int | None = None
    instances: int | None = None
    requests_per_second: float | None = None
    max_priority: int = 0
    """Priorities up to this one count against other tenants; all order its own requests."""
    weight: float = 1.0
    """Its share when several tenants wait, relative to theirs."""
    guarantee: int = 0
    """Memory slices within which its requests come before those of tenants beyond theirs."""
    default_lease_seconds: Seconds | None = None
    """The lease of a request that asks for none."""
    max_lease_seconds: Seconds | None = None
    """The longest lease. If it is set, every allocation has a lease."""


class Want(Record, frozen=True):
    """The resources requested: a profile by name, or a need; on the given models or on any."""

    profile: str | None = None
    compute: int | None = None
    memory_gb: float | None = None
    models: tuple[str, ...] = ()


class Entry(Record, frozen=True, tag_field="kind"):
    """One fact in the journal."""
