"""Tenants in entries that tests write by hand."""

from __future__ import annotations

from slicewise.journal.entries import TenantRef


def ref(name: str) -> TenantRef:
    """Return a reference to a tenant that has its name as its id."""
    return TenantRef(name, name)
