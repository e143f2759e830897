"""The entries about leases: one was extended, or will end soon.

The end itself is an `Ended` entry with `Cause.LEASE`.
"""

from __future__ import annotations

from slicewise.journal.records import Entry, Seconds, TenantRef


class LeaseExtended(Entry, frozen=True, tag="lease-extended"):
    """The lease of an allocation was extended: it began again with this entry."""

    allocation: str
    tenant: TenantRef
    lease: Seconds
    """Its length from now on."""
    ends: Seconds


class LeaseEnding(Entry, frozen=True, tag="lease-ending"):
    """The lease of an allocation ends soon, unless it is extended."""

    allocation: str
    tenant: TenantRef
    ends: Seconds
