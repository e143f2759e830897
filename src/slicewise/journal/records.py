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


class Entry(Record, frozen=True, tag_field="kind"):
    """One fact in the journal."""
